"""Faults of existing scalers that ours does not have."""

import copy
import pickle

import numpy as np
import pytest

from gradscaler import DynamicScale
from tests.support.eager import library


@pytest.fixture
def iterate(parameters):
    """Take an iteration with these gradients."""

    def iterate(scaler, gradients):
        optimizer = library.sgd(parameters)
        library.clear_gradients(optimizer)
        library.backward(scaler, parameters, gradients)
        scaler.step(optimizer)
        scaler.update()

    return iterate


def test_gradients_are_not_unscaled_by_the_scale_that_comes_next(iterate, parameters, finite):
    """A scale that grows before gradients are unscaled halves them."""
    scaler = library.scaler(growth_interval=1)
    for _ in range(3):
        iterate(scaler, finite)
        gradients = [library.numpy(parameter.grad) for parameter in parameters]
        assert library.exact(gradients) == library.exact([g.astype(float) for g in finite])
    assert library.scale_of(scaler) == 2.0**19


@pytest.mark.parametrize("by", ["setter", "private name", "state dict"])
def test_lowering_the_interval_below_the_counter_does_not_freeze_growth(by, iterate, finite):
    """A counter compared with == never meets an interval that it has passed."""
    scaler = library.scaler(init_scale=1024.0, growth_interval=100)
    for _ in range(5):
        iterate(scaler, finite)
    name = library.spelling["growth_interval"]
    if by == "setter":
        getattr(scaler, f"set_{name}")(3)
    elif by == "private name":
        setattr(scaler, f"_{name}", 3)
    else:
        key = library.state_keys["growth_interval"]
        scaler.load_state_dict({**scaler.state_dict(), key: 3})
    iterate(scaler, finite)
    assert library.scale_of(scaler) == 2048.0


def test_growth_stops_short_of_inf(place, iterate, finite):
    """2**127 doubled is inf, which no backoff lowers."""
    scaler = library.scaler(init_scale=2.0**126, growth_interval=1)
    for _ in range(4):
        iterate(scaler, [2.0**-10 * gradient for gradient in finite])
    assert library.scale_of(scaler) == 2.0**127


def test_backing_off_stops_short_of_zero(place, iterate, overflowed):
    """A scale of 1e-312 has been reported, whose reciprocal is inf."""
    scaler = library.scaler(init_scale=2.0**-120)
    for _ in range(10):
        iterate(scaler, overflowed)
    assert library.scale_of(scaler) == 2.0**-126


def test_at_the_smallest_scale_finite_gradients_are_still_unscaled(iterate, parameters, finite):
    iterate(library.scaler(init_scale=2.0**-126), [np.full_like(g, 2.0**120) for g in finite])
    assert all((library.numpy(parameter.grad) == 2.0**120).all() for parameter in parameters)


@pytest.mark.parametrize("ill", range(3))
def test_an_overflow_in_one_gradient_leaves_none_scaled(ill, scaler):
    """TensorPlay's own scaler stops unscaling at the first inf."""
    parameters, gradients = library.parameters((2,), (2,), (2,)), np.ones((3, 2), np.float32)
    gradients[ill][0] = np.inf
    library.backward(scaler, parameters, gradients)
    scaler.unscale_(library.sgd(parameters))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        np.testing.assert_array_equal(library.numpy(parameter.grad), gradient)


@pytest.mark.parametrize(
    "through",
    [
        copy.deepcopy,
        lambda scaler: pickle.loads(pickle.dumps(scaler)),
        lambda scaler: scaler.load_state_dict(scaler.state_dict()) or scaler,
    ],
    ids=["deepcopy", "pickle", "state dict"],
)
def test_the_floor_survives_a_checkpoint(through, iterate, overflowed):
    """A floor that a checkpoint does not save is lost."""
    scaler = through(library.scaler(policy=DynamicScale(init_scale=8.0, min_scale=4.0)))
    for _ in range(3):
        iterate(scaler, overflowed)
    assert library.scale_of(scaler) == 4.0
