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
import collections
import functools
import os

import keras.src.optimizers as optimizers
import keras.src.optimizers.loss_scale_optimizer as module
import pytest
from gradscaler.keras import LossScaleOptimizer

SPARSE = "OptimizerSparseTest"
# Keras' tests with gradients that nobody scaled, of which our class warns. The others scale theirs
# by hand, by the initial scale.
UNSCALED = "upscaling", "iterations_update", SPARSE
made, passed = collections.Counter(), collections.Counter()
construct = LossScaleOptimizer.__init__

@functools.wraps(construct)
def counted(self, *args, **kwargs):
    made[os.environ["PYTEST_CURRENT_TEST"].split("::")[1]] += 1
    construct(self, *args, **kwargs)

LossScaleOptimizer.__init__ = counted
optimizers.LossScaleOptimizer = module.LossScaleOptimizer = LossScaleOptimizer

def pytest_collection_modifyitems(items):
    items[:] = [each for each in items if SPARSE not in each.nodeid or "loss_scale" in each.name]
    for each in items:
        if any(name in each.nodeid for name in UNSCALED):
            allowed = pytest.mark.filterwarnings("ignore:The loss was never scaled")
            each.add_marker(allowed)

def pytest_runtest_logreport(report):
    passed[report.nodeid.split("::")[1]] += report.when == "call" and report.passed

def pytest_sessionfinish(session):
    for name in passed:
        print(f"{name}: {passed[name]} passed, {made[name]} made")
"""
SUITES = "loss_scale_optimizer_test.py", "optimizer_sparse_test.py"
PASSED = re.compile(r"^\d+ passed", re.MULTILINE)  # failures would be named first


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What Keras' tests print; as in this project, warnings are errors."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "swap.py").write_text(SWAP)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "swap", "-p", "no:cacheprovider"]
    command += ["-p", "no:xdist", "--rootdir", folder, "-W", "error::UserWarning"]
    files = [Path(keras.__file__).parent / "src/optimizers" / each for each in SUITES]
    done = subprocess.run(
        [*command, *files],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )
    return done.stdout + done.stderr


@pytest.mark.one_backend  # test_against_native.py compares with the wrapper on each
def test_keras_tests_of_its_wrapper_pass_with_our_class(found):
    assert PASSED.search(found), found
    ((passed, made),) = re.findall(r"LossScaleOptimizerTest: (\d+) passed, (\d+) made", found)
    assert int(passed) > 10
    assert int(made) >= int(passed)


@pytest.mark.one_backend
@pytest.mark.skipif(BACKEND == "torch", reason="Keras tests sparse gradients on the others")
def test_keras_tests_of_sparse_gradients_pass_with_our_class(found):
    assert "OptimizerSparseTest: 2 passed, 3 made" in found, found
