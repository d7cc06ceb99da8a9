"""Scalers in threads of one process, which MindSpore's executor alone does not bear."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

WORKER = Path(__file__).parent / "in_threads.py"


def expected(trace):
    """Each step of a scaler with a window of 3, by the rule: scaled, unscaled, finite, amax."""
    scale, streak = 1024.0, 0
    for letter in trace:
        other = float(letter)
        yield [[3.0 * scale, other * scale], [3.0, other], letter == "1", 3.0]
        streak = streak + 1 if letter == "1" else 0
        if streak == 3:
            scale, streak = scale * 2.0, 0
        elif not streak:
            scale = max(scale / 2.0, 1.0)


def test_scalers_of_four_threads_do_not_disturb_one_another():
    generator = np.random.default_rng(0)
    traces = generator.choice(["1", "inf"], (4, 20), p=[0.6, 0.4]).tolist()
    command = [sys.executable, WORKER, json.dumps(traces)]
    # In a process of its own, because without turns MindSpore may abort.
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-2000:]
    rows = json.loads(process.stdout.splitlines()[-1])
    assert rows == [list(expected(trace)) for trace in traces]
