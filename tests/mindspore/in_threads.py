"""Threads that train at the same time in PyNative mode, each with a scaler of its own."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from mindspore import Tensor

from gradscaler.mindspore import DynamicLossScaler, all_finite, amax

GRADIENTS = {letter: Tensor([3.0, float(letter)]) for letter in ("1", "inf")}


def train(scaler, trace):
    """What each step computes. The threads read no tensor, which MindSpore itself cannot do."""
    results = []
    for letter in trace:
        scaled = scaler.scale(GRADIENTS[letter])
        (unscaled,) = scaler.unscale((scaled,))
        finite = all_finite((unscaled,))
        scaler.adjust(finite)
        results.append((scaled, unscaled, finite, amax((GRADIENTS["1"],))))
    return results


if __name__ == "__main__":
    traces = json.loads(sys.argv[1])
    scalers = [DynamicLossScaler(1024.0, 2, 3) for _ in traces]
    with ThreadPoolExecutor(len(traces)) as pool:
        rows = list(pool.map(train, scalers, traces))
    print(json.dumps([[[t.asnumpy().tolist() for t in step] for step in row] for row in rows]))
