"""The suite's fixtures: data, scalers, and the kinds that tests run for."""

import os

import numpy as np
import pytest

from tests.support.chosen import cover_values
from tests.support.eager import library
from tests.support.eager.base import SHAPES, normal

if os.environ.get("GRADSCALER_DEVICE"):
    from tests.support import device

ON_DEVICE = bool(os.environ.get("GRADSCALER_DEVICE"))
FLOAT64 = "a device sums the squares of a 2-norm in float64, so its last bit differs"
NOT_ON_DEVICE = {  # each begins the names of tests, and says why the device of the tests skips them
    "test_norm_and_step_are_the_framework_s": FLOAT64,
    "test_several_iterations_are_the_framework_s": FLOAT64,
    "test_minimize_clips_too": FLOAT64,
    "test_a_step_that_raised_is_clipped": FLOAT64,
    "test_all_parameter_groups_count": FLOAT64,
    "test_a_scale_at_which_squares_of_gradients_underflow": FLOAT64,
    "test_a_second_clip_of_a_norm_that_overflowed": FLOAT64,
    "test_a_finite_norm_is_no_error": FLOAT64,
    "test_clipping_in_the_closure_reaches": FLOAT64,
    "test_on_the_host_only": "it is about the host",
    "test_values_may_be_tensors_of_one_element_or_numpy": "NumPy cannot read a device",
    "test_a_gradient_too_small_for_fp16_comes_through": "it has no autocast",
    "test_overridden_names_are_called": "it expects the CPU's name",
}

if ON_DEVICE:
    device.load()
    library.framework.set_default_device(device.NAME)


def pytest_collection_modifyitems(items):
    if library.name != "torch":  # with PyTorch, the same engine runs with each pair of values
        cover_values(items, __file__)
    for item in items if ON_DEVICE else ():
        for name, reason in NOT_ON_DEVICE.items():
            if item.name.startswith(name):
                item.add_marker(pytest.mark.skip(reason=reason))


# PyTorch's `locate` and loops have tests of their own.
collect_ignore = {"torch": ["seams"], "tensorplay": [], "paddle": ["torch_like"]}[library.name]


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
    """The same gradients, with an inf in the last one."""
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
    """The argument ``fused`` of ``library.sgd`` and ``library.adamw``."""
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
