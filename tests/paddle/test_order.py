"""Orders of calls that Paddle allows and PyTorch does not."""

from unittest.mock import Mock

import pytest

from gradscaler import CallOrderError
from gradscaler.paddle import GradScaler
from tests.support.eager import library


def test_gradients_may_come_from_elsewhere_than_a_scaled_loss_as_with_paddle(native, finite):
    finals = []
    for kind in (GradScaler, native):
        parameters = library.parameters()
        optimizer = library.sgd(parameters)
        scaler = kind(init_loss_scaling=1024.0)
        library.set_gradients(parameters, [gradient * 1024.0 for gradient in finite])
        scaler.step(optimizer)
        scaler.update()
        finals.append(library.exact(parameters))
    assert finals[0] == finals[1]


def test_paddle_counts_an_update_without_a_check(native, finite):
    scaler, parameters = native(init_loss_scaling=1024.0), library.parameters()
    scaler.update()
    assert scaler._incr_count == 1
    scaler.minimize(library.sgd(parameters), library.backward(scaler, parameters, finite))
    assert scaler._incr_count == 2
    scaler.update()
    assert scaler._incr_count == 3


def test_gradscaler_refuses_an_update_without_a_check(finite):
    scaler, parameters = GradScaler(init_loss_scaling=1024.0), library.parameters()
    with pytest.raises(CallOrderError):
        scaler.update()
    scaler.minimize(library.sgd(parameters), library.backward(scaler, parameters, finite))
    assert scaler._incr_count == 1
    with pytest.raises(CallOrderError):
        scaler.update()
    assert scaler._incr_count == 1


def test_unscaling_is_announced_where_a_subclass_unscales_by_itself(backward, finite):
    class Own(GradScaler):
        def _unscale(self, optimizer):
            super()._unscale(optimizer)

    parameters, scaler, seen = library.parameters(), Own(init_loss_scaling=1024.0), Mock()
    scaler.add_observer(seen)
    backward(scaler, parameters, finite)
    scaler.step(library.sgd(parameters))
    assert seen.unscaling.called


@pytest.mark.parametrize("unscale", [False, True], ids=["step alone", "unscale_ and step"])
@pytest.mark.parametrize("update", [False, True], ids=["no update", "update"])
def test_with_a_fixed_scale_update_may_be_left_out(unscale, update, native, backward, finite):
    """Nothing moves in update(), so Paddle's loops leave it out, or call it, or both."""
    finals = []
    for kind in (GradScaler, native):
        parameters = library.parameters()
        optimizer = library.adamw(parameters)
        scaler = kind(init_loss_scaling=1024.0, use_dynamic_loss_scaling=False)
        for _ in range(3):
            optimizer.clear_grad()
            backward(scaler, parameters, finite)
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            if update:
                scaler.update()
        finals.append(library.exact(parameters))
    assert finals[0] == finals[1]
