"""Which scale gradients are unscaled by, and what counts as one iteration."""

import copy
import itertools
import logging
from unittest.mock import Mock

import numpy as np
import paddle
import pytest

from gradscaler.paddle import GradScaler
from tests.support.eager import library

SCALE = 1024.0


def step(scaler, optimizer):
    scaler.step(optimizer)


def unscale_and_step(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def clip_and_step(scaler, optimizer):
    norm = scaler.clip_grad_norm_(optimizer, float("inf"))
    scaler.step(optimizer)
    return norm.item()


# The scale of the last loss.


@pytest.mark.parametrize("replaced", [False, True], ids=["own _unscale", "_unscale replaced"])
@pytest.mark.parametrize(
    "change",
    [
        lambda scaler: scaler.set_init_loss_scaling(8.0),
        lambda scaler: setattr(scaler, "_scale", paddle.to_tensor([8.0])),
        lambda scaler: scaler.load_state_dict(GradScaler(init_loss_scaling=8.0).state_dict()),
    ],
    ids=["set_init_loss_scaling", "_scale", "load_state_dict"],
)
@pytest.mark.parametrize("take_step", [step, unscale_and_step, clip_and_step])
def test_gradients_are_unscaled_by_the_scale_of_their_loss(
    take_step, change, replaced, finite, replace_unscale
):
    parameters = library.parameters()
    optimizer, scaler = library.sgd(parameters), GradScaler(init_loss_scaling=SCALE)
    optimizer.step = Mock()  # leaves the gradients to be looked at
    if replaced:
        replace_unscale(scaler)
    library.backward(scaler, parameters, finite)
    change(scaler)
    norm = take_step(scaler, optimizer)
    assert library.exact([p.grad for p in parameters]) == library.exact(
        list(map(paddle.to_tensor, finite))
    )
    if norm is not None:
        exact = np.sqrt(sum((gradient.astype(float) ** 2).sum() for gradient in finite))
        assert norm == pytest.approx(exact, rel=1e-6)
    assert scaler.last_step(optimizer).scale == SCALE
    assert scaler.get_scale() == scaler._scale.item() == 8.0
    assert scaler.scale(paddle.ones([1])).item() == 8.0


@pytest.mark.parametrize("replaced", [False, True], ids=["own _unscale", "_unscale replaced"])
@pytest.mark.parametrize("call", ["step", "minimize"])
def test_observers_are_told_the_scale_of_the_loss(
    call, replaced, parameters, finite, replace_unscale
):
    scaler, optimizer, seen = GradScaler(init_loss_scaling=SCALE), library.sgd(parameters), Mock()
    if replaced:
        replace_unscale(scaler)
    scaler.add_observer(seen)
    loss = library.backward(scaler, parameters, finite)
    scaler.set_init_loss_scaling(8.0)
    getattr(scaler, call)(optimizer, *([loss] if call == "minimize" else []))
    seen.stepping.assert_called_once_with(optimizer, SCALE)
    seen.unscaling.assert_called_once_with(optimizer, SCALE)


def test_a_closure_s_loss_has_a_scale_of_its_own(finite):
    first, second = library.parameters(), library.parameters()
    waits, takes_closure = library.sgd(first), library.sgd(second)
    scaler = GradScaler(init_loss_scaling=SCALE)
    library.backward(scaler, first, finite)
    scaler.set_init_loss_scaling(8.0)
    scaler.step(takes_closure, lambda: library.backward(scaler, second, finite))
    scaler.step(waits)
    assert scaler.last_step(takes_closure).scale == 8.0
    assert scaler.last_step(waits).scale == SCALE
    assert library.exact(first) == library.exact(second)


# Several optimizers after one loss.


class SeveralOptimizers:
    """A loss of several parameters, each with an optimizer of its own, as in PaddleClas."""

    def __init__(self, scaler, count=2):
        self.scaler = scaler
        self.parameters = library.parameters(*[[3]] * count)
        self.optimizers = [library.adamw([parameter]) for parameter in self.parameters]

    def backward(self, overflows):
        for optimizer in self.optimizers:
            optimizer.clear_grad()
        values = [np.full(3, np.inf if bad else 1.5, np.float32) for bad in overflows]
        self.loss = library.backward(self.scaler, self.parameters, values)

    def state(self):
        return library.exact([self.parameters, self.scaler.state_dict()])


def make(**rule):
    counts = {"incr_every_n_steps": 1, "decr_every_n_nan_or_inf": 1, **rule}
    return GradScaler(init_loss_scaling=SCALE, **counts)


def step_and_update(training, optimizer):
    training.scaler.step(optimizer)
    training.scaler.update()


def minimize_each(training, optimizer):
    training.scaler.minimize(optimizer, training.loss)


@pytest.mark.parametrize("replaced", [False, True], ids=["own _unscale", "_unscale replaced"])
@pytest.mark.parametrize("end", [minimize_each, step_and_update])
@pytest.mark.parametrize("incr_every_n_steps", [1, 2])
@pytest.mark.parametrize("decr_every_n_nan_or_inf", [1, 2])
def test_each_with_its_update_goes_as_all_with_one(
    incr_every_n_steps, decr_every_n_nan_or_inf, end, replaced, replace_unscale
):
    rule = {
        "incr_every_n_steps": incr_every_n_steps,
        "decr_every_n_nan_or_inf": decr_every_n_nan_or_inf,
    }
    each, together = (SeveralOptimizers(make(**rule), count=3) for _ in range(2))
    if replaced:
        replace_unscale(each.scaler)
    for overflows in itertools.product([False, True], repeat=3):
        for training in (each, together):
            training.backward(overflows)
        for optimizer in each.optimizers:
            end(each, optimizer)
        for optimizer in together.optimizers:
            together.scaler.step(optimizer)
        together.scaler.update()
        assert each.state() == together.state()


def test_paddle_divides_the_second_s_gradients_by_the_new_scale(native):
    """And counts two steps."""
    moved = []
    for scaler in (native(init_loss_scaling=SCALE, incr_every_n_steps=1), make()):
        parameters = library.parameters([3], [3])
        before = parameters[1].numpy()
        loss = library.backward(scaler, parameters, [np.ones(3, np.float32)] * 2)
        for parameter in parameters:
            scaler.minimize(library.sgd([parameter], lr=1.0), loss)
        moved.append((before - parameters[1].numpy()).mean())
        moved.append(scaler.state_dict()["scale"].item())
    assert moved == pytest.approx([0.5, 4 * SCALE, 1.0, 2 * SCALE])


def test_an_optimizer_s_second_step_after_one_loss_begins_an_iteration():
    training = SeveralOptimizers(make())
    training.backward([False, False])
    scales = []
    for optimizer in training.optimizers * 2:
        minimize_each(training, optimizer)
        scales.append(training.scaler.get_scale() / SCALE)
    assert scales == [2.0, 2.0, 4.0, 4.0]


def test_each_loss_begins_an_iteration():
    """Two optimizers in turn, as for the two parts of a GAN."""
    training = SeveralOptimizers(make())
    for number, optimizer in enumerate(training.optimizers, start=1):
        training.backward([False, False])
        step_and_update(training, optimizer)
        assert training.scaler.get_scale() == SCALE * 2**number


def test_without_a_scaled_loss_each_update_is_an_iteration():
    training = SeveralOptimizers(make())
    for number, optimizer in enumerate(training.optimizers, start=1):
        library.set_gradients(training.parameters, [np.ones(3, np.float32)] * 2)
        step_and_update(training, optimizer)
        assert training.scaler.get_scale() == SCALE * 2**number


def test_a_scale_that_is_set_between_two_optimizers_is_where_the_second_s_update_begins():
    training = SeveralOptimizers(make())
    training.backward([False, False])
    first, second = training.optimizers
    minimize_each(training, first)
    training.scaler.set_init_loss_scaling(8.0)
    minimize_each(training, second)
    assert training.scaler.last_step(second).scale == SCALE
    assert training.scaler.get_scale() == 16.0


def test_an_error_between_two_optimizers_changes_nothing():
    training = SeveralOptimizers(make())
    training.backward([True, False])
    first, second = training.optimizers
    minimize_each(training, first)
    before = training.state()
    with pytest.raises(RuntimeError, match="No inf checks were recorded"):
        training.scaler.update()
    assert training.state() == before
    step_and_update(training, second)
    assert training.scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize(
    ("overflows", "messages"),
    [
        ([True, False], ["loss scale 1024, now 512"]),
        ([True, True], ["loss scale 1024, now 512"]),
        ([False, True], ["loss scale 2048, now 512"]),
    ],
)
def test_a_backoff_is_logged_once(overflows, messages, caplog):
    training = SeveralOptimizers(make())
    training.backward(overflows)
    with caplog.at_level(logging.DEBUG, "gradscaler"):
        for optimizer in training.optimizers:
            minimize_each(training, optimizer)
    logged = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert logged == messages


def test_a_copy_between_two_optimizers_knows_nothing_of_the_loss():
    training = SeveralOptimizers(make())
    training.backward([False, False])
    minimize_each(training, training.optimizers[0])
    training.scaler = copy.deepcopy(training.scaler)
    minimize_each(training, training.optimizers[1])
    assert training.scaler.last_step(training.optimizers[1]).scale == 2 * SCALE
    assert training.scaler.get_scale() == 4 * SCALE
