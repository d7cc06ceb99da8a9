"""The script for many devices trains as on one, and its devices have one loss scale."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

if os.environ.get("KERAS_BACKEND") != "tensorflow":
    pytest.skip("of Keras 3 on TensorFlow", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "examples" / "keras_mirrored.py"


def run(devices):
    """The numbers of the last row that the script prints, and the scale on each device."""
    command = [sys.executable, SCRIPT, "--epochs", "7", "--devices", str(devices)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode < 0:  # a signal: TensorFlow 2.21 crashed so in one of many runs
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    result.check_returncode()
    _, row, last = result.stdout.splitlines()
    scales = last.removeprefix("scale on each device:").split()
    return [float(value.rstrip("%")) for value in row.split()], [float(scale) for scale in scales]


@pytest.mark.rare("tests/keras_like/test_tensorflow.py trains under a strategy, and compares")
def test_two_devices_train_as_one_does():
    (row, scales), (expected, _) = run(2), run(1)
    assert np.allclose(row, expected, rtol=1e-3)
    assert scales == [2.0**21] * 2
    assert row[-2:] == [2.0**21, 21]
