"""Keras' own tests of sparse gradients, with our class in its place."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from tests.support.keras_like import BACKEND

SWAP = """
import keras.src.optimizers as optimizers
import keras.src.optimizers.loss_scale_optimizer as module
from gradscaler.keras import LossScaleOptimizer

made = []

class Counted(LossScaleOptimizer):
    def __init__(self, *args, **kwargs):
        made.append(self)
        super().__init__(*args, **kwargs)

optimizers.LossScaleOptimizer = module.LossScaleOptimizer = Counted

def pytest_sessionfinish(session):
    print("made", len(made))
"""


@pytest.mark.skipif(BACKEND == "torch", reason="Keras tests sparse gradients on the others")
def test_keras_tests_of_sparse_gradients_pass_with_our_class(tmp_path):
    (tmp_path / "swap.py").write_text(SWAP)
    suite = Path(keras.__file__).parent / "src/optimizers/optimizer_sparse_test.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "swap", "-p", "no:cacheprovider"]
    command += ["-p", "no:xdist", "--rootdir", tmp_path, "-k", "loss_scale_optimizer"]
    found = subprocess.run(
        [*command, suite],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert "2 passed" in found.stdout, found.stdout + found.stderr
    assert "made 3" in found.stdout
