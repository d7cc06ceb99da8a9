"""Fixtures of several test modules, which cannot import one another."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorplay as tp

from gradscaler.tensorplay import GradScaler
from tests.support.eager import library

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


def _randn(seed, *shapes):
    """Standard normal float32 tensors, without touching TensorPlay's own random numbers."""
    generator = np.random.default_rng(seed)
    return [
        tp.tensor(generator.standard_normal(shape).astype(np.float32), dtype=tp.float32)
        for shape in shapes
    ]


@pytest.fixture(scope="session")
def exact():
    return library.exact


@pytest.fixture(scope="session")
def randn():
    return _randn


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
def scaler():
    return GradScaler(init_scale=1024.0)
