"""Records ``traces.json``: ``python -m tests.conformance.record``."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np


def steps(generator: random.Random, count: int, chance: float, optimizers: int = 1) -> list[str]:
    """Steps that overflow at random."""
    return [
        "".join("!" if generator.random() < chance else "." for _ in range(optimizers))
        for _ in range(count)
    ]


def mixed(generator: random.Random, count: int, events: list[str]) -> list[str]:
    """Steps, and now and then another event."""
    mixture = steps(generator, count, 0.2)
    for place in sorted(generator.sample(range(count), count // 5), reverse=True):
        mixture.insert(place, generator.choice(events))
    return mixture


def record() -> dict[str, list[str]]:
    """The traces, by name; the same at every call."""
    generator = random.Random(0)
    scales = [f"scale {2.0**power}" for power in (0, 5, 20)] + ["scale 3.0"]
    return {
        "growth": ["."] * 30,
        "overflow at every scale": ["!"] * 140 + ["."] * 10,
        "at random": steps(generator, 120, 0.2),
        "several optimizers": steps(generator, 40, 0.12, optimizers=3),
        "scale set by hand": mixed(generator, 50, scales),
        "interval raised": [*["."] * 9, "interval 7", *steps(generator, 40, 0.07)],
        "interval lowered": ["interval 9", *["."] * 6, "interval 2", *["."] * 9, "!", *["."] * 9],
        "resumed": mixed(generator, 50, ["resume"]),
        "resumed between overflows": ["!", "resume", "!", ".", "!", "resume", ".", "!", "!"],
        "towards the largest": ["scale 4.2535295865117308e+37", *["."] * 40, "!", *["."] * 12],
        "everything": mixed(generator, 80, [*scales, "interval 3", "interval 9", "resume"]),
    }


def train(steps: int, rate: float) -> list[float]:
    """The scales of the run in ``replay.py``, in NumPy, and its own backward pass."""
    from tests.conformance.replay import TRAINING, network

    net = network()
    hidden, output = net.hidden.copy(), net.output.copy()
    state, scales, margins = TRAINING.init(), [], []
    for _ in range(steps):
        values = np.tanh(net.inputs @ hidden)
        error = values @ output - net.targets
        above = state.scale * np.float32(2 / len(error)) * error
        grads = net.inputs.T @ (above @ output.T * (1 - values**2)), values.T @ above
        largest = max(float(abs(grad).max()) for grad in grads)
        margins.append(abs(largest / 65520 - 1))  # where float16 rounds to inf
        with np.errstate(over="ignore"):
            grads = [grad.astype(np.float16).astype(np.float32) for grad in grads]
        found_inf = not all(np.isfinite(grad).all() for grad in grads)
        if not found_inf:
            hidden -= np.float32(rate) * (grads[0] / state.scale)
            output -= np.float32(rate) * (grads[1] / state.scale)
        state = TRAINING.update(state, found_inf)
        scales.append(float(state.scale))
    assert min(margins) > 1e-3, f"too close to call: {min(margins)}"
    assert len(set(scales)) > 5
    return scales


if __name__ == "__main__":
    path = Path(__file__).parent / "traces.json"
    path.write_text(json.dumps({"traces": record(), "scales": []}))
    from tests.conformance.replay import RATE, STEPS

    traces = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in record().items())
    scales = json.dumps(train(STEPS, RATE))
    path.write_text(f'{{\n  "traces": {{\n{traces}\n  }},\n  "scales": {scales}\n}}\n')
