"""Keras' own tests of its wrapper and of sparse gradients, with our class in its place."""

import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from tests.support.keras_like import BACKEND

SWAP = """
import functools

import keras.src.optimizers as optimizers
import keras.src.optimizers.loss_scale_optimizer as module
from gradscaler.keras import LossScaleOptimizer

made = []
construct = LossScaleOptimizer.__init__

@functools.wraps(construct)
def counted(self, *args, **kwargs):
    made.append(self)
    construct(self, *args, **kwargs)

LossScaleOptimizer.__init__ = counted
optimizers.LossScaleOptimizer = module.LossScaleOptimizer = LossScaleOptimizer

def pytest_sessionfinish(session):
    print("made", len(made))
"""
UNSCALED = "upscaling or iterations_update"  # Keras' tests with gradients that nobody scaled
PASSED = re.compile(r"^\d+ passed", re.MULTILINE)  # failures would be named first
WARNS = "-W", "ignore:The loss was never scaled"


def run(tmp_path, suite, *options):
    """Keras' tests in a file; as in this project, warnings are errors."""
    (tmp_path / "swap.py").write_text(SWAP)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "swap", "-p", "no:cacheprovider"]
    command += ["-p", "no:xdist", "--rootdir", tmp_path, "-W", "error::UserWarning", *options]
    found = subprocess.run(
        [*command, Path(keras.__file__).parent / "src/optimizers" / suite],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    return found.stdout + found.stderr


def test_keras_tests_of_its_wrapper_pass_with_our_class_without_a_warning(tmp_path):
    """Those that scale their gradients do so by hand, by the initial scale."""
    found = run(tmp_path, "loss_scale_optimizer_test.py", "-k", f"not ({UNSCALED})")
    assert PASSED.search(found), found
    assert "made 0" not in found


def test_keras_tests_of_unscaled_gradients_pass_with_our_class_and_its_warning(tmp_path):
    """Keras' own configuration ignores every UserWarning."""
    found = run(tmp_path, "loss_scale_optimizer_test.py", *WARNS, "-k", UNSCALED)
    assert PASSED.search(found), found


@pytest.mark.skipif(BACKEND == "torch", reason="Keras tests sparse gradients on the others")
def test_keras_tests_of_sparse_gradients_pass_with_our_class(tmp_path):
    found = run(tmp_path, "optimizer_sparse_test.py", *WARNS, "-k", "loss_scale_optimizer")
    assert "2 passed" in found, found
    assert "made 3" in found
