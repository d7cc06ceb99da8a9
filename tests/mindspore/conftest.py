"""Fixtures of several test modules, which cannot import one another."""

import contextlib
import os
from pathlib import Path
from unittest import mock

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset

from tests.support.chosen import cover_values

INF = float("inf")
MODES = {"pynative": mindspore.PYNATIVE_MODE, "graph": mindspore.GRAPH_MODE}
OPTIMIZERS = {
    "Momentum": lambda parameters: nn.Momentum(
        parameters, nn.ExponentialDecayLR(0.1, decay_rate=0.9, decay_steps=2), momentum=0.9
    ),
    "Adam": lambda parameters: nn.Adam(parameters, learning_rate=0.1, use_amsgrad=False),
    "AdamWeightDecay": lambda parameters: nn.AdamWeightDecay(
        parameters, learning_rate=0.1, weight_decay=0.1
    ),
}


def pytest_collection_modifyitems(items):
    """Each mode and each optimizer runs the same code of ours; pairs of them find nothing more."""
    cover_values(items, __file__)


class Line(nn.Cell):
    """The mean of ``x @ weight + bias``: the gradients are those of a line, times the inputs."""

    def __init__(self, dtype=mindspore.float32):
        super().__init__()
        values = np.random.default_rng(0).standard_normal((4, 2))
        self.weight = Parameter(Tensor(values[:3], dtype), name="weight")
        self.bias = Parameter(Tensor(values[3], dtype), name="bias")

    def construct(self, x):
        return (ops.matmul(x, self.weight) + self.bias).mean()


def _inputs(seed, overflow=None):
    """Inputs of the line; ``overflow`` among them gives a gradient with an Inf or a NaN."""
    values = np.random.default_rng(seed).standard_normal((4, 3)).astype(np.float32)
    if overflow is not None:
        values[1, 2] = overflow
    return Tensor(values)


class Layer(nn.Cell):
    """Two layers and a batch norm, with the same weights every time."""

    def __init__(self):
        super().__init__()
        generator = np.random.default_rng(0)

        def dense(inputs, outputs):
            weight = generator.standard_normal((outputs, inputs)).astype(np.float32)
            return nn.Dense(inputs, outputs, Tensor(weight), "zeros")

        self.first, self.norm, self.second = dense(3, 4), nn.BatchNorm1d(4), dense(4, 2)

    def construct(self, x):
        return self.second(self.norm(self.first(x)))


def _arrays(seed, overflow=None):
    generator = np.random.default_rng(seed)
    data = generator.standard_normal((4, 3)).astype(np.float32)
    if overflow is not None:
        data[0, 0] = overflow
    return data, generator.standard_normal((4, 2)).astype(np.float32)


def _batch(seed, overflow=None):
    return map(Tensor, _arrays(seed, overflow))


def _dataset(*overflows):
    """One batch of data and labels for each; not None is among the data."""
    batches = [_arrays(seed, overflow) for seed, overflow in enumerate(overflows)]
    data, labels = (np.concatenate(column) for column in zip(*batches, strict=True))
    return NumpySlicesDataset((data, labels), ["data", "label"], shuffle=False).batch(4)


def _bits(cell):
    """Every parameter of a cell, the optimizer's and the scale's included, to the bit."""
    return {
        parameter.name: (str(parameter.dtype), parameter.shape, parameter.asnumpy().tobytes())
        for parameter in cell.get_parameters()
    }


@pytest.fixture(scope="session", autouse=True)
def _what_mindspore_writes_goes_to_a_folder_of_its_own(tmp_path_factory):
    """Networks that it rewrites, and graphs that do not compile."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("mindspore"))
    yield
    os.chdir(before)


@pytest.fixture(params=MODES)
def mode(request):
    mindspore.set_context(mode=MODES[request.param])
    return request.param


@pytest.fixture(params=OPTIMIZERS)
def make_optimizer(request):
    return OPTIMIZERS[request.param]


@pytest.fixture(scope="session")
def line():
    return Line


@pytest.fixture(scope="session")
def inputs():
    return _inputs


@pytest.fixture(scope="session")
def layer():
    return Layer


@pytest.fixture(scope="session")
def batch():
    return _batch


@pytest.fixture(scope="session")
def dataset():
    return _dataset


@pytest.fixture(scope="session")
def bits():
    return _bits


@contextlib.contextmanager
def _count_compilations():
    """A list that grows by one with everything that MindSpore compiles meanwhile."""
    compiled = []
    checks = "mindspore.graph.api._check_recompile"  # called before each compilation, cached aside
    with mock.patch(checks, lambda *arguments: compiled.append(arguments[-1])):
        yield compiled


@pytest.fixture(scope="session")
def count_compilations():
    def compiled_once(x):
        return x + 1

    with _count_compilations() as compiled:
        mindspore.jit(compiled_once)(Tensor(1.0))
    assert compiled  # else MindSpore has renamed the function, and no count means anything
    return _count_compilations
