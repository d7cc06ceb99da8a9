"""What several test modules need, handed to them as fixtures: they cannot import one another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorplay as tp

from gradscaler.tensorplay import GradScaler

tp.set_num_threads(1)  # the tensors of these tests are too small to share out

INF = float("inf")
SHAPES = [(2, 3), (4,), ()]
MATRICES = [(2, 3), (4, 2), (3, 3)]  # Muon takes nothing else
OPTIONS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.01},
    "Adadelta": {"weight_decay": 0.01},
    "Adamax": {},
    "ASGD": {"t0": 2, "lambd": 0.01},
    "Adafactor": {"weight_decay": 0.01},
    "NAdam": {},
    "RAdam": {"lr": 0.01},
    "Rprop": {},
    "Muon": {},
}
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


@dataclass(frozen=True)
class Kind:
    """A way to run one of TensorPlay's optimizers, and the shapes of parameters it can take."""

    optimizer: Any
    options: dict[str, Any]
    shapes: list[tuple[int, ...]]

    def __call__(self, parameters):
        return self.optimizer(parameters, **self.options)


KINDS = {
    f"{way}-{name}": Kind(getattr(tp.optim, name), {**options, **WAYS[way]}, SHAPES)
    for name, options in OPTIONS.items()
    for way in WAYS
    if name != "Muon" and (way != "fused" or name in FUSED)
}
KINDS["Muon"] = Kind(tp.optim.Muon, OPTIONS["Muon"], MATRICES)


def _exact(value):
    """Something that compares equal if and only if two values are the same to the bit."""
    if isinstance(value, tp.Tensor):
        value = value.detach()
        return (str(value.dtype), tuple(value.shape), repr(value.tolist()))
    if isinstance(value, Mapping):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(item) for item in value]
    return repr(value)


def _stepped(optimizer):
    """All that a step may change in an optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {"parameters": _exact(parameters), "state": _exact(optimizer.state_dict())}


def _everything(scaler, *optimizers):
    """All that a call which raises must leave alone."""
    records = {
        key: (record["stage"], _exact(record["found_inf_per_device"]))
        for key, record in scaler._per_optimizer_states.items()
    }
    gradients = [
        _exact(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    stepped = [_stepped(optimizer) for optimizer in optimizers]
    return _exact(scaler.state_dict()), records, gradients, stepped


def _randn(seed, *shapes):
    """Standard normal float32 tensors, without touching TensorPlay's own random numbers."""
    generator = np.random.default_rng(seed)
    return [
        tp.tensor(generator.standard_normal(shape).astype(np.float32), dtype=tp.float32)
        for shape in shapes
    ]


def _backward(scaler, parameters, gradients):
    """A backward pass whose unscaled gradients are ``gradients``; None for a parameter left out."""
    used = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    scaler.scale(sum((p * g).sum() for p, g in used)).backward()


@pytest.fixture(scope="session")
def exact():
    return _exact


@pytest.fixture(scope="session")
def stepped():
    return _stepped


@pytest.fixture(scope="session")
def everything():
    return _everything


@pytest.fixture(scope="session")
def randn():
    return _randn


@pytest.fixture(scope="session")
def backward():
    return _backward


@pytest.fixture(scope="session")
def kinds():
    return KINDS


@pytest.fixture(scope="session", params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def parameters():
    return [tp.nn.Parameter(value) for value in _randn(0, (2, 3), (4,))]


@pytest.fixture
def finite():
    """Gradients of those parameters, finite at any scale up to 2**120."""
    return _randn(1, (2, 3), (4,))


@pytest.fixture
def overflowed(finite):
    """The same, with an inf in the last."""
    return [*finite[:-1], tp.full((4,), INF)]


@pytest.fixture
def scaler():
    return GradScaler(init_scale=1024.0)
