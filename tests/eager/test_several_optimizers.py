"""Several optimizers after one loss, with an update() after each: all step as without a scaler."""

import gc
import itertools
import weakref

import numpy as np
import pytest

from gradscaler import AmaxScale, CallOrderError, DynamicScale
from tests.support.eager import library
from tests.support.eager.base import normal

SCALE = 1024.0
PADDLE = library.name == "paddle"


class Training:
    """One loss of three parameters, each with an optimizer, and the same without a scaler.

    Attributes:
        state_of: the parameters and the optimizer's state, by the optimizer's number.
    """

    def __init__(self, make_optimizer=library.sgd, **options):
        rule = {} if "policy" in options else {"init_scale": SCALE, "growth_interval": 1}
        self.scaler = library.scaler(**(rule | options))
        self.parameters = library.parameters((3,), (3,), (3,))
        self.gradients = normal(5, (3,), (3,), (3,))
        self.optimizers = [make_optimizer([parameter]) for parameter in self.parameters]
        self._plain = library.parameters((3,), (3,), (3,))
        self._plain_optimizers = [make_optimizer([parameter]) for parameter in self._plain]

    def backward(self, overflows=()):
        """One backward pass, in which the gradients of these optimizers overflow."""
        for optimizer in self.optimizers:
            library.clear_gradients(optimizer)
        values = [
            np.full_like(gradient, np.inf) if i in overflows else gradient
            for i, gradient in enumerate(self.gradients)
        ]
        library.backward(self.scaler, self.parameters, values)

    def expect_a_step(self, *numbers):
        """Take these optimizers' steps without a scaler, and compare all parameters."""
        library.set_gradients(self._plain, self.gradients)
        for number in numbers:
            self._plain_optimizers[number].step()
        for ours, theirs in zip(self.parameters, self._plain, strict=True):
            np.testing.assert_allclose(library.numpy(ours), library.numpy(theirs), rtol=1e-6)

    def scales_used(self):
        return [float(self.scaler.last_step(each).scale) for each in self.optimizers]


def step(scaler, optimizer):
    scaler.step(optimizer)


def unscale_and_step(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def clip_and_step(scaler, optimizer):
    scaler.clip_grad_norm_(optimizer, 1e6)
    scaler.step(optimizer)


def clip_another_norm_and_step(scaler, optimizer):
    scaler.clip_grad_norm_(optimizer, 1e6, 1.0)
    scaler.step(optimizer)


ways = pytest.mark.parametrize(
    "take_step", [step, unscale_and_step, clip_and_step, clip_another_norm_and_step]
)


@ways
def test_after_growth_each_is_unscaled_by_the_scale_of_the_loss(take_step, place, make_optimizer):
    training = Training(make_optimizer)
    for _ in range(2):
        scale = library.scale_of(training.scaler)
        training.backward()
        for optimizer in training.optimizers:
            take_step(training.scaler, optimizer)
            training.scaler.update()
        assert library.scale_of(training.scaler) > scale
        training.expect_a_step(0, 1, 2)
        assert training.scales_used() == [scale] * 3


@ways
def test_after_a_backoff_each_is_unscaled_by_the_scale_of_the_loss(take_step, place):
    training = Training(growth_interval=100)
    training.backward(overflows=[0])
    for optimizer in training.optimizers:
        take_step(training.scaler, optimizer)
        training.scaler.update()
    assert library.scale_of(training.scaler) == SCALE / 2
    training.expect_a_step(1, 2)
    assert training.scales_used() == [SCALE] * 3


@pytest.mark.skipif(PADDLE, reason="its update() takes no scale")
@ways
def test_after_a_scale_of_the_user_s_each_is_unscaled_by_the_scale_of_the_loss(take_step, place):
    training = Training()
    training.backward()
    for optimizer in training.optimizers:
        take_step(training.scaler, optimizer)
        training.scaler.update(8.0)
    training.expect_a_step(0, 1, 2)


def test_an_update_that_moved_nothing_comes_first(place):
    training = Training(growth_interval=2)
    training.backward()
    for optimizer in training.optimizers:
        training.scaler.step(optimizer)
        training.scaler.update()
    training.expect_a_step(0, 1, 2)


def test_with_a_policy_of_the_largest_gradient_too(place):
    training = Training(policy=AmaxScale(SCALE, growth_interval=1))
    training.backward()
    for optimizer in training.optimizers:
        training.scaler.step(optimizer)
        training.scaler.update()
    training.expect_a_step(0, 1, 2)


# Checked before the update.


def unscale(scaler, optimizer):
    scaler.unscale_(optimizer)


def clip(scaler, optimizer):
    scaler.clip_grad_norm_(optimizer, 1e6)


def clip_another_norm(scaler, optimizer):
    scaler.clip_grad_norm_(optimizer, 1e6, 1.0)


def clip_and_unscale(scaler, optimizer):
    scaler.clip_grad_norm_(optimizer, 1e6)
    scaler.unscale_(optimizer)


checks = pytest.mark.parametrize("check", [unscale, clip, clip_another_norm, clip_and_unscale])


@checks
def test_gradients_that_were_checked_before_an_update_are_divided_once(
    check, place, make_optimizer
):
    training = Training(make_optimizer)
    for _ in range(2):
        training.backward()
        for optimizer in training.optimizers:
            check(training.scaler, optimizer)
        for optimizer in training.optimizers:
            training.scaler.step(optimizer)
            training.scaler.update()
        training.expect_a_step(0, 1, 2)


@checks
@pytest.mark.parametrize("ill", range(3))
def test_an_overflow_that_was_found_before_an_update_counts_once_and_skips_its_step(
    check, ill, place
):
    training = Training(growth_interval=100)
    training.backward(overflows=[ill])
    for optimizer in training.optimizers:
        check(training.scaler, optimizer)
    for optimizer in training.optimizers:
        training.scaler.step(optimizer)
        training.scaler.update()
        assert library.scale_of(training.scaler) == SCALE / 2
    training.expect_a_step(*({0, 1, 2} - {ill}))
    assert training.scaler.last_step(training.optimizers[ill]).reason == "overflow"


@checks
def test_clipping_after_the_update_clips_the_unscaled_gradients(check):
    training = Training()
    training.backward()
    first, second, _ = training.optimizers
    check(training.scaler, second)
    training.scaler.step(first)
    training.scaler.update()
    norm = training.scaler.clip_grad_norm_(second, 0.01)
    assert norm.item() == pytest.approx(np.linalg.norm(training.gradients[1]), rel=1e-6)
    training.scaler.step(second)
    clipped = library.numpy(training.parameters[1].grad)
    assert np.linalg.norm(clipped) == pytest.approx(0.01, rel=1e-3)


def test_unscaling_once_more_after_the_update_is_refused_and_changes_nothing():
    training = Training()
    training.backward()
    first, second, _ = training.optimizers
    training.scaler.unscale_(second)
    training.scaler.step(first)
    training.scaler.update()
    before = library.everything(training.scaler, second)
    with pytest.raises(CallOrderError, match="already been called"):
        training.scaler.unscale_(second)
    assert library.everything(training.scaler, second) == before
    training.scaler.step(second)
    training.expect_a_step(0, 1)


@checks
def test_a_step_that_is_left_out_is_forgotten_once_another_loss_is_scaled(check, place):
    training = Training()
    for _ in range(2):
        training.backward()
        check(training.scaler, training.optimizers[0])
        training.scaler.step(training.optimizers[1])
        training.scaler.update()
        training.expect_a_step(1)
    training.backward()
    for optimizer in training.optimizers:
        check(training.scaler, optimizer)
        training.scaler.step(optimizer)
    training.scaler.update()
    training.expect_a_step(0, 1, 2)


@checks
def test_a_loop_over_attempts_begins_with_a_loss_of_its_own(check, place):
    training = Training()
    training.backward()
    first, second, _ = training.optimizers
    check(training.scaler, first)
    training.scaler.step(second)
    training.scaler.update()
    training.expect_a_step(1)
    for _ in training.scaler.attempts(first):
        training.backward()
    training.scaler.step(first)
    training.expect_a_step(0)


@checks
def test_a_closure_begins_with_a_loss_of_its_own(check, place):
    training = Training()
    training.backward()
    first, second, _ = training.optimizers
    check(training.scaler, first)
    training.scaler.step(second)
    training.scaler.update()
    training.scaler.step(first, training.backward)
    training.expect_a_step(0, 1)


# Scales of their own.


@pytest.mark.parametrize("overflowing", [(), (0,), (1,), (0, 1)])
def test_loops_over_attempts_keep_the_scales_they_backed_off_to(overflowing, place):
    policy = DynamicScale(SCALE, growth_factor=4.0, growth_interval=1)
    training = Training(policy=policy)
    for number in range(2):
        for attempt in training.scaler.attempts(training.optimizers[number]):
            ill = number in overflowing and attempt == 0
            gradient = np.full(3, np.inf, np.float32) if ill else training.gradients[number]
            parameter = training.parameters[number]
            library.clear_gradients(training.optimizers[number])
            library.backward(training.scaler, [parameter], [gradient])
    for optimizer in training.optimizers[:2]:
        training.scaler.step(optimizer)
        training.scaler.update()
    training.expect_a_step(0, 1)


@pytest.mark.parametrize("too_high", [False, True])
def test_a_closure_between_has_a_scale_of_its_own(too_high, place):
    training = Training()
    first, second, third = training.optimizers
    evaluations = itertools.count()

    def closure():
        library.clear_gradients(second)
        ill = too_high and next(evaluations) == 0
        gradient = np.full(3, np.inf, np.float32) if ill else training.gradients[1]
        library.backward(training.scaler, training.parameters[1:2], [gradient])

    one_and_three = training.parameters[::2], training.gradients[::2]
    library.backward(training.scaler, *one_and_three)
    training.scaler.step(first)
    training.scaler.update()
    training.scaler.step(second, closure)
    training.scaler.update()
    training.scaler.step(third)
    training.expect_a_step(0, 1, 2)
    assert training.scales_used()[::2] == [SCALE] * 2


# Where no loss was scaled.


def test_gradients_that_the_user_scales_by_hand_are_unscaled_by_the_scale_in_force(place):
    training = Training()
    training.scaler.scale(library.tensor([1.0]))
    for _ in range(3):
        scale = np.float32(library.scale_of(training.scaler))
        by_hand = [gradient * scale for gradient in training.gradients]
        library.set_gradients(training.parameters, by_hand)
        for optimizer in training.optimizers:
            training.scaler.step(optimizer)
        training.scaler.update()
        training.expect_a_step(0, 1, 2)


@checks
def test_so_are_those_of_an_optimizer_that_was_checked_before_an_update(check, place):
    training = Training()
    training.backward()
    first, second, _ = training.optimizers
    check(training.scaler, second)
    for optimizer in (first, second):
        training.scaler.step(optimizer)
        training.scaler.update()
    by_hand = training.gradients[1] * np.float32(library.scale_of(training.scaler))
    library.set_gradients(training.parameters[1:2], [by_hand])
    training.scaler.step(second)
    training.expect_a_step(0, 1, 1)


def test_a_loss_that_is_never_followed_by_another_remembers_each_optimizer_once():
    training = Training()
    training.backward()
    for _ in range(50):
        for optimizer in training.optimizers:
            training.scaler.step(optimizer)
        training.scaler.update()
    assert len(training.scaler._iteration.loss._stepped) == 3


def test_another_optimizer_at_the_address_of_one_that_is_gone_counts_as_another():
    training = Training()
    training.optimizers.clear()
    training.backward()
    for parameter in training.parameters:
        training.scaler.step(library.sgd([parameter]))
        training.scaler.update()
        gc.collect()
    training.expect_a_step(0, 1, 2)


def test_no_optimizer_outlives_the_next_loss():
    training = Training()
    training.backward()
    training.scaler.unscale_(training.optimizers[0])
    training.scaler.update()
    gone = weakref.ref(training.optimizers.pop(0))
    training.scaler.scale(library.tensor([1.0]))
    gc.collect()
    assert gone() is None
