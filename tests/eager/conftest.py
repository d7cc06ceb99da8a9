"""What the suite's tests are handed: data, scalers, and the kinds that they run for."""

import numpy as np
import pytest

from tests.support.eager import library
from tests.support.eager.base import SHAPES, normal

collect_ignore = [] if library.name in ("torch", "tensorplay") else ["torch_like"]


@pytest.fixture
def parameters():
    """Two parameters, the same each time."""
    return library.parameters()


@pytest.fixture
def finite():
    """Gradients of those parameters, finite at any scale up to 2**120."""
    return normal(1, *SHAPES)


@pytest.fixture
def overflowed(finite):
    """The same, with an inf in the last."""
    return [*finite[:-1], np.full_like(finite[-1], np.inf)]


@pytest.fixture
def scaler():
    return library.scaler(init_scale=1024.0)


@pytest.fixture
def native(monkeypatch):
    """Makes the framework's own scaler, of the parameters that ``library.scaler`` takes."""
    return library.native(monkeypatch)


@pytest.fixture(params=library.fused, ids=lambda fused: "fused" if fused else "unfused")
def fused(request):
    """For ``library.sgd`` and ``library.adamw``."""
    return request.param


@pytest.fixture(params=library.optimizers)
def make_optimizer(request):
    """Makes an optimizer of parameters, of each kind in turn."""
    return library.optimizers[request.param]


@pytest.fixture(params=library.closure_optimizers)
def make_closure_optimizer(request):
    """Makes an optimizer whose step takes a closure, of each kind in turn."""
    return library.closure_optimizers[request.param]


@pytest.fixture(params=library.places)
def place(request, monkeypatch):
    """Runs a test in the code for the host, and again in that for accelerators."""
    if request.param == "accelerator":
        library.on_accelerator(monkeypatch)
    return request.param
