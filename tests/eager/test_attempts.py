"""scaler.attempts(optimizer): a loop whose body is repeated while its gradients overflow."""

import copy

import numpy as np
import pytest

from gradscaler import CallOrderError, DynamicScale, FixedScale
from gradscaler.diagnose import Monitor, read_run
from tests.support.eager import library
from tests.support.eager.base import normal
from tests.support.eager.regression import Regression
from tests.support.ranks import seed_frameworks

INF = np.inf
nn = library.framework.nn


# The steps after a loop.


def test_a_body_whose_gradients_are_finite_runs_once_and_changes_nothing(make_optimizer, place):
    ours, plain = Regression(make_optimizer), Regression(make_optimizer)
    scaler, other = library.scaler(init_scale=1024.0), library.scaler(init_scale=1024.0)
    for _ in range(3):
        library.clear_gradients(ours.optimizer)
        for batch in range(3):
            for _ in scaler.attempts(ours.optimizer):
                ours.backward(scaler, batch)
        scaler.step(ours.optimizer)
        scaler.update()

        library.clear_gradients(plain.optimizer)
        for batch in range(3):
            plain.backward(other, batch)
        other.step(plain.optimizer)
        other.update()

        assert library.stepped(ours.optimizer) == library.stepped(plain.optimizer)
    assert ours.scales == plain.scales == [1024.0] * 9
    assert library.exact(scaler.state_dict()) == library.exact(other.state_dict())


@pytest.mark.parametrize(
    ("bad", "overflows", "scales"),
    [
        (0, 1, [1024.0, 512.0, 512.0, 512.0]),
        (0, 2, [1024.0, 512.0, 256.0, 256.0, 256.0]),
        (0, 5, [1024.0, 512.0, 256.0, 128.0, 64.0, 32.0, 32.0, 32.0]),
        (1, 1, [1024.0, 1024.0, 512.0, 512.0]),
        (1, 2, [1024.0, 1024.0, 512.0, 256.0, 256.0]),
        (1, 5, [1024.0, 1024.0, 512.0, 256.0, 128.0, 64.0, 32.0, 32.0]),
        (2, 1, [1024.0, 1024.0, 1024.0, 512.0]),
        (2, 2, [1024.0, 1024.0, 1024.0, 512.0, 256.0]),
        (2, 5, [1024.0, 1024.0, 1024.0, 512.0, 256.0, 128.0, 64.0, 32.0]),
    ],
)
def test_an_overflow_repeats_its_batch_alone_and_no_contribution_is_lost(
    make_optimizer, bad, overflows, scales, place
):
    ours, plain = Regression(make_optimizer), Regression(make_optimizer)
    scaler = library.scaler(init_scale=1024.0)
    library.clear_gradients(ours.optimizer)
    for batch in range(3):
        for attempt in scaler.attempts(ours.optimizer):
            ours.backward(scaler, batch, overflows=batch == bad and attempt < overflows)
    scaler.step(ours.optimizer)
    scaler.update()
    plain.step_without_a_scaler()
    assert ours.scales == scales
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)
    outcome = scaler.last_step(ours.optimizer)
    assert (outcome.applied, outcome.scale) == (True, scales[-1])
    assert scaler.history == (outcome,)


@pytest.mark.parametrize("start", [2.0**20, 2.0**24])
def test_half_precision_that_overflows_ends_as_if_the_scale_had_been_right_from_the_start(
    make_optimizer, start, place
):
    ours, plain = Regression(make_optimizer, half=True), Regression(make_optimizer, half=True)
    scaler = library.scaler(init_scale=start)
    for _ in range(3):
        library.clear_gradients(ours.optimizer)
        for batch in range(3):
            for _ in scaler.attempts(ours.optimizer):
                ours.backward(scaler, batch)
        scaler.step(ours.optimizer)
        scaler.update()
    right = library.scale_of(scaler)
    assert ours.scales[0] == start > right

    other = library.scaler(init_scale=right)
    for _ in range(3):
        library.clear_gradients(plain.optimizer)
        for batch in range(3):
            plain.backward(other, batch)
        other.step(plain.optimizer)
        other.update()
    assert set(plain.scales) == {right}
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


def test_gradients_from_before_the_loop_are_kept_to_the_bit(scaler):
    ours, plain = Regression(batches=2), Regression(batches=2)
    ours.backward(scaler, 0)
    before = ours.gradients()
    for attempt in scaler.attempts(ours.optimizer):
        if attempt < 3:
            expected = [gradient / 2**attempt for gradient in before]
            assert library.exact(ours.gradients()) == library.exact(expected)
        ours.backward(scaler, 1, overflows=attempt < 3)
    scaler.unscale_(ours.optimizer)
    plain.step_without_a_scaler()
    assert library.exact(ours.gradients()) == library.exact(plain.gradients())


def test_a_parameter_without_a_gradient_has_none_in_a_repetition(scaler, parameters, finite):
    optimizer = library.sgd(parameters)
    for attempt in scaler.attempts(optimizer):
        assert [parameter.grad for parameter in parameters] == [None, None]
        library.backward(scaler, parameters, [None, finite[1] * (INF if attempt < 2 else 1.0)])
    scaler.step(optimizer)
    assert parameters[0].grad is None
    assert library.exact(library.numpy(parameters[1].grad)) == library.exact(
        finite[1].astype(np.float64)
    )


def test_gradients_stay_in_their_tensors(scaler):
    """Others may hold them, as DDP's buckets do."""
    if library.name == "tensorplay":
        pytest.skip("TensorPlay's backward pass makes new ones")
    regression = Regression()
    regression.backward(scaler, 0)
    held = [parameter.grad for parameter in regression.parameters]
    for attempt in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 1, overflows=attempt < 2)
    for gradient, parameter in zip(held, regression.parameters, strict=True):
        assert gradient.data_ptr() == parameter.grad.data_ptr()


# Paddle cannot add float16 on the CPU.
@pytest.mark.parametrize("batches", [1] if library.name == "paddle" else [1, 2, 3])
def test_float16_gradients_are_repeated_too(batches):
    ends, attempts = [], []
    for start in (2.0**20, 2.0**12):
        (parameter,) = library.make_parameters(library.tensor(np.ones(4), "float16"))
        optimizer = library.sgd([parameter])
        scaler = library.scaler(init_scale=start, **library.with_float16)
        for gradient in normal(3, *[(4,)] * batches):
            for attempt in scaler.attempts(optimizer):
                attempts.append(attempt)
                product = library.through_float16(parameter) * library.tensor(gradient)
                scaler.scale(product.sum()).backward()
        assert parameter.grad.dtype == parameter.dtype
        scaler.unscale_(optimizer)
        ends.append(library.exact(parameter.grad))
    assert max(attempts) > 3
    assert attempts[-batches:] == [0] * batches
    assert ends[0] == ends[1]


# Where the scale goes.


@pytest.mark.parametrize(
    ("interval", "overflows", "scale", "finite_steps"),
    [
        (1, 0, 2048.0, 0),
        (1, 1, 1024.0, 0),
        (1, 3, 256.0, 0),
        (2, 0, 1024.0, 1),
        (2, 1, 512.0, 1),
        (2, 3, 128.0, 1),
        (2000, 0, 1024.0, 1),
        (2000, 1, 512.0, 1),
        (2000, 3, 128.0, 1),
    ],
)
def test_the_scale_ends_as_after_so_many_nonfinite_steps_and_a_finite_one(
    interval, overflows, scale, finite_steps
):
    regression = Regression()
    scaler = library.scaler(policy=DynamicScale(1024.0, growth_interval=interval))
    for batch in range(3):
        for attempt in scaler.attempts(regression.optimizer):
            regression.backward(scaler, batch, overflows=batch == 1 and attempt < overflows)
    scaler.step(regression.optimizer)
    scaler.update()
    assert library.scale_of(scaler) == scale
    assert library.finite_steps_of(scaler) == finite_steps


@pytest.mark.parametrize("hysteresis", [2, 3])
def test_each_repetition_backs_off_once_whatever_the_hysteresis(hysteresis):
    regression = Regression()
    scaler = library.scaler(policy=DynamicScale(1024.0, hysteresis=hysteresis))
    for attempt in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 0, overflows=attempt < 2)
    for _ in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 1)
    for attempt in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 2, overflows=attempt < 1)
    scaler.step(regression.optimizer)
    scaler.update()
    assert regression.scales == [1024.0, 512.0, 256.0, 256.0, 256.0, 128.0]
    assert library.scale_of(scaler) == 128.0


def test_until_update_the_scaler_keeps_its_scale(scaler, place):
    regression = Regression()
    for attempt in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 0, overflows=attempt < 1)
    assert library.scale_of(scaler) == 1024.0
    scaler.step(regression.optimizer)
    assert library.scale_of(scaler) == 1024.0
    scaler.update()
    assert library.scale_of(scaler) == 512.0
    for _ in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 1)
    assert regression.scales == [1024.0, 512.0, 512.0]


def test_a_scale_that_is_loaded_between_batches_is_used_from_there_on(scaler):
    ours, plain = Regression(batches=2), Regression(batches=2)
    for attempt in scaler.attempts(ours.optimizer):
        ours.backward(scaler, 0, overflows=attempt < 3)
    scaler.load_state_dict({**scaler.state_dict(), library.state_keys["scale"]: 4096.0})
    for _ in scaler.attempts(ours.optimizer):
        ours.backward(scaler, 1)
    scaler.step(ours.optimizer)
    plain.step_without_a_scaler()
    assert ours.scales == [1024.0, 512.0, 256.0, 128.0, 4096.0]
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


# Between the loop and step.


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
@pytest.mark.parametrize(("bad", "overflows"), [(0, 0), (0, 1), (2, 2)])
def test_clipping_comes_after_the_loop(make_optimizer, bad, overflows, norm_type):
    ours, plain = Regression(make_optimizer), Regression(make_optimizer)
    scaler = library.scaler(init_scale=1024.0)
    for batch in range(3):
        for attempt in scaler.attempts(ours.optimizer):
            ours.backward(scaler, batch, overflows=batch == bad and attempt < overflows)
    norm = scaler.clip_grad_norm_(ours.optimizer, 0.5, norm_type)
    scaler.step(ours.optimizer)

    true_norms = []
    clip = library.framework.nn.utils.clip_grad_norm_
    plain.step_without_a_scaler(lambda: true_norms.append(clip(plain.parameters, 0.5, norm_type)))
    assert norm.item() == pytest.approx(true_norms[0].item(), rel=1e-6)
    for mine, theirs in zip(ours.parameters, plain.parameters, strict=True):
        np.testing.assert_allclose(library.numpy(mine), library.numpy(theirs), 1e-5, 1e-7)


def test_gradients_unscaled_after_the_loop_are_the_true_ones(make_optimizer):
    ours, plain = Regression(make_optimizer), Regression(make_optimizer)
    scaler = library.scaler(init_scale=1024.0)
    for batch in range(3):
        for attempt in scaler.attempts(ours.optimizer):
            ours.backward(scaler, batch, overflows=batch == 1 and attempt < 1)
    scaler.unscale_(ours.optimizer)
    halves = [gradient * 0.5 for gradient in ours.gradients()]
    library.set_gradients(ours.parameters, halves)
    scaler.step(ours.optimizer)

    def halve():
        true_halves = [gradient * 0.5 for gradient in plain.gradients()]
        library.set_gradients(plain.parameters, true_halves)

    plain.step_without_a_scaler(halve)
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


# Several losses and several optimizers. Weights start at 1.0, and the learning rate is 1.


@pytest.fixture
def weights():
    """Two parameters of one element, 1.0."""
    return library.make_parameters(*np.ones((2, 1), np.float32))


@pytest.fixture
def optimizers(weights):
    """An optimizer for each weight, which subtracts the true gradient."""
    return [library.sgd([weight], lr=1.0) for weight in weights]


def values(weights):
    return [weight.item() for weight in weights]


@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_in_one_of_two_optimizers_repeats_both(scaler, weights, optimizers, bad):
    attempts = []
    for attempt in scaler.attempts(*optimizers):
        attempts.append(attempt)
        factors = [1.0, 1.0]
        factors[bad] = INF if attempt < 2 else 1.0
        scaler.scale(weights[0] * 0.5 * factors[0]).backward()
        scaler.scale(weights[1] * 0.25 * factors[1]).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert attempts == [0, 1, 2]
    assert values(weights) == [0.5, 0.75]
    assert [scaler.last_step(optimizer).scale for optimizer in optimizers] == [256.0, 256.0]
    assert library.scale_of(scaler) == 256.0


@pytest.mark.parametrize("steps_between", [False, True])
@pytest.mark.parametrize(
    ("bad_first", "bad_second", "first_scale", "second_scale"),
    [(1, 0, 512.0, 512.0), (0, 1, 1024.0, 512.0), (2, 1, 256.0, 128.0)],
)
def test_loops_of_different_optimizers_keep_different_scales(
    scaler, weights, optimizers, bad_first, bad_second, first_scale, second_scale, steps_between
):
    first, second = optimizers
    for attempt in scaler.attempts(first):
        scaler.scale(weights[0] * (INF if attempt < bad_first else 0.5)).backward()
    if steps_between:
        scaler.step(first)
    for attempt in scaler.attempts(second):
        scaler.scale(weights[1] * (INF if attempt < bad_second else 0.25)).backward()
    if not steps_between:
        scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert values(weights) == [0.5, 0.75]
    assert scaler.last_step(first).scale == first_scale
    assert scaler.last_step(second).scale == second_scale
    assert library.scale_of(scaler) == second_scale


def test_a_loop_after_another_optimizer_s_backoff_brings_its_own_gradients_along(
    scaler, weights, optimizers
):
    first, second = optimizers
    for _ in scaler.attempts(first):
        scaler.scale(weights[0] * 0.5).backward()
    for attempt in scaler.attempts(second):
        scaler.scale(weights[1] * (INF if attempt < 2 else 0.25)).backward()
    for _ in scaler.attempts(first):
        scaler.scale(weights[0] * 0.5).backward()
    scaler.step(first)
    scaler.step(second)
    assert values(weights) == [0.0, 0.75]
    assert scaler.last_step(first).scale == 256.0


def test_gradients_of_an_optimizer_without_a_loop_keep_the_scaler_s_scale(
    scaler, weights, optimizers
):
    first, second = optimizers
    scaler.scale(weights[1] * 0.25).backward()
    for attempt in scaler.attempts(first):
        scaler.scale(weights[0] * (INF if attempt < 2 else 0.5)).backward()
    scaler.step(first)
    scaler.step(second)
    assert values(weights) == [0.5, 0.75]
    assert scaler.last_step(second).scale == 1024.0


def test_an_optimizer_named_twice_is_one(scaler):
    ours, plain = Regression(), Regression()
    for batch in range(3):
        for attempt in scaler.attempts(ours.optimizer, ours.optimizer):
            ours.backward(scaler, batch, overflows=attempt < 2)
    scaler.step(ours.optimizer)
    plain.step_without_a_scaler()
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


def test_a_closure_after_a_loop_starts_at_the_scale_that_worked(scaler, weights):
    first = library.sgd([weights[0]], lr=1.0)
    second = library.closure_optimizers["SGD"]([weights[1]])
    for attempt in scaler.attempts(first):
        scaler.scale(weights[0] * (INF if attempt < 2 else 0.5)).backward()
    scaled_losses = []

    def closure():
        library.clear_gradients(second)
        scaled = scaler.scale(weights[1] * 0.25)
        scaled.backward()
        scaled_losses.append(scaled.item())
        return scaled

    scaler.step(second, closure)
    scaler.step(first)
    scaler.update()
    assert scaled_losses == [0.25 * 256.0]
    assert weights[0].item() == 0.5
    assert library.scale_of(scaler) == 256.0


# Overflow that no scale cures.


@pytest.mark.parametrize(
    ("bad", "scales"),
    [
        (0, [1024.0, 512.0, 256.0, 128.0, 1024.0, 1024.0]),
        (1, [1024.0, 1024.0, 512.0, 256.0, 128.0, 1024.0]),
        (2, [1024.0, 1024.0, 1024.0, 512.0, 256.0, 128.0]),
    ],
)
def test_what_no_scale_cures_skips_the_step_and_backs_off_once(make_optimizer, bad, scales, place):
    ours, plain = Regression(make_optimizer), Regression(make_optimizer)
    scaler = library.scaler(init_scale=1024.0, max_retries=3)
    for bad_in_this_step in (None, bad, None):  # the second step is skipped
        before = library.kept(ours.optimizer)
        ours.scales.clear()
        library.clear_gradients(ours.optimizer)
        for batch in range(3):
            for _ in scaler.attempts(ours.optimizer):
                ours.backward(scaler, batch, overflows=batch == bad_in_this_step)
        scaler.step(ours.optimizer)
        scaler.update()
        outcome = scaler.last_step(ours.optimizer)
        if bad_in_this_step is None:
            assert outcome.applied
            plain.step_without_a_scaler()
        else:
            assert ours.scales == scales
            assert library.kept(ours.optimizer) == before
            assert (outcome.skipped, outcome.reason) == (True, "retries_exhausted")
            assert library.scale_of(scaler) == 512.0
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


def test_an_optimizer_whose_gradients_stay_finite_steps_though_the_other_s_never_are(
    scaler, weights, optimizers
):
    for _ in scaler.attempts(*optimizers):
        scaler.scale(weights[0] * 0.5).backward()
        scaler.scale(weights[1] * INF).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert values(weights) == [0.5, 1.0]
    reasons = [scaler.last_step(optimizer).reason for optimizer in optimizers]
    assert reasons == ["finite", "retries_exhausted"]
    assert library.scale_of(scaler) == 512.0


def test_gradients_that_were_not_finite_before_are_not_repeated(scaler):
    regression = Regression()
    regression.backward(scaler, 0, overflows=True)
    for batch in (1, 2):
        for _ in scaler.attempts(regression.optimizer):
            regression.backward(scaler, batch)
    assert regression.scales == [1024.0] * 3
    scaler.step(regression.optimizer)
    scaler.update()
    assert scaler.last_step(regression.optimizer).reason == "retries_exhausted"
    assert library.scale_of(scaler) == 512.0


def test_gradients_cleared_after_retries_were_exhausted_start_again(scaler):
    ours, plain = Regression(), Regression()
    for _ in scaler.attempts(ours.optimizer, max_retries=2):
        ours.backward(scaler, 0, overflows=True)
    library.clear_gradients(ours.optimizer)
    for batch in range(3):
        for _ in scaler.attempts(ours.optimizer):
            ours.backward(scaler, batch)
    scaler.step(ours.optimizer)
    plain.step_without_a_scaler()
    assert scaler.last_step(ours.optimizer).reason == "finite"
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


@pytest.mark.parametrize(
    ("in_constructor", "in_call", "bodies"), [(3, None, 4), (9, 3, 4), (0, 2, 3), (5, 0, 1)]
)
def test_max_retries_bounds_the_repetitions(in_constructor, in_call, bodies):
    regression, scaler = Regression(), library.scaler(max_retries=in_constructor)
    for _ in scaler.attempts(regression.optimizer, max_retries=in_call):
        regression.backward(scaler, 0, overflows=True)
    assert len(regression.scales) == bodies


@pytest.mark.parametrize(
    "policy", [FixedScale(1024.0), DynamicScale(1024.0, min_scale=1024.0)], ids=["fixed", "floor"]
)
def test_a_scale_that_cannot_back_off_is_not_tried_twice(policy):
    regression, scaler = Regression(), library.scaler(policy=policy)
    for _ in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 0, overflows=True)
    scaler.step(regression.optimizer)
    scaler.update()
    assert regression.scales == [1024.0]
    assert scaler.last_step(regression.optimizer).reason == "retries_exhausted"

    library.clear_gradients(regression.optimizer)
    for _ in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 0)
    scaler.step(regression.optimizer)
    scaler.update()
    assert scaler.last_step(regression.optimizer).applied


# Leaving the loop.


@pytest.mark.parametrize(("overflows", "scale"), [(0, 1024.0), (2, 256.0)])
def test_break_leaves_the_gradients_and_step_divides_them_by_their_scale(scaler, overflows, scale):
    ours, plain = Regression(batches=1), Regression(batches=1)
    for attempt in scaler.attempts(ours.optimizer):
        ours.backward(scaler, 0, overflows=attempt < overflows)
        if attempt == overflows:
            break
    scaler.step(ours.optimizer)
    scaler.update()
    plain.step_without_a_scaler()
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)
    assert library.scale_of(scaler) == scale


def test_break_on_an_overflow_leaves_it_to_step(scaler):
    regression = Regression()
    before = library.kept(regression.optimizer)
    for _ in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 0, overflows=True)
        break
    scaler.step(regression.optimizer)
    scaler.update()
    assert scaler.last_step(regression.optimizer).reason == "overflow"
    assert library.kept(regression.optimizer) == before
    assert library.scale_of(scaler) == 512.0


def test_retries_that_another_loop_used_up_are_not_the_reason_of_its_skip(scaler):
    regression = Regression()
    for _ in scaler.attempts(regression.optimizer, max_retries=2):
        regression.backward(scaler, 0, overflows=True)
    library.clear_gradients(regression.optimizer)
    for _ in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 0, overflows=True)
        break
    scaler.step(regression.optimizer)
    assert scaler.last_step(regression.optimizer).reason == "overflow"


def test_a_bad_batch_after_a_loop_that_was_left_early_counts_one_overflow(scaler):
    regression = Regression()
    for attempt in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 0, overflows=attempt < 1)
        if attempt == 1:
            break
    for _ in scaler.attempts(regression.optimizer, max_retries=1):
        regression.backward(scaler, 1, overflows=True)
    scaler.step(regression.optimizer)
    scaler.update()
    assert not scaler.last_step(regression.optimizer).applied
    assert library.scale_of(scaler) == 512.0  # not that of the first loop, backed off


@pytest.mark.parametrize("at", [0, 1, 2])
def test_after_an_exception_the_gradients_can_be_cleared_and_made_again(scaler, at):
    ours, plain = Regression(), Regression()

    def raising():
        for attempt in scaler.attempts(ours.optimizer):
            ours.backward(scaler, 0, overflows=attempt < at)
            if attempt == at:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raising()
    ours.scales.clear()
    library.clear_gradients(ours.optimizer)
    for batch in range(3):
        for _ in scaler.attempts(ours.optimizer):
            ours.backward(scaler, batch)
    scaler.step(ours.optimizer)
    plain.step_without_a_scaler()
    assert ours.scales == [1024.0] * 3  # it starts over
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


def test_a_loop_that_is_left_open_is_refused_until_it_is_closed(scaler):
    regression = Regression()
    loop = scaler.attempts(regression.optimizer)
    for _ in loop:
        regression.backward(scaler, 0)
        break
    with pytest.raises(CallOrderError, match="in a loop over attempts"):
        scaler.step(regression.optimizer)
    loop.close()
    scaler.step(regression.optimizer)
    assert scaler.last_step(regression.optimizer).applied


# The state that a repetition puts back.


def test_a_repetition_draws_the_same_dropout_mask(scaler):
    ours, plain = Regression(), Regression()
    ours.before = plain.before = nn.Dropout(0.5)
    seed_frameworks()
    for _ in range(2):
        library.clear_gradients(ours.optimizer)
        for batch, overflows in enumerate((1, 2, 0)):
            for attempt in scaler.attempts(ours.optimizer):
                ours.backward(scaler, batch, overflows=attempt < overflows)
        scaler.step(ours.optimizer)
        scaler.update()
    seed_frameworks()
    for _ in range(2):
        plain.step_without_a_scaler()
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


def statistics(layer):
    """Paddle keeps them as parameters that are not trained."""
    frozen = [
        each for each in layer.parameters() if library.name == "paddle" and each.stop_gradient
    ]
    return [*layer.buffers(), *frozen]


@pytest.mark.filterwarnings("ignore:When training, we now always track:UserWarning")  # Paddle's
def test_buffers_are_put_back_and_so_batch_statistics_count_each_batch_once(scaler):
    norm = nn.BatchNorm1D if library.name == "paddle" else nn.BatchNorm1d
    ours, plain = Regression(), Regression()
    ours.before, plain.before = norm(4), norm(4)
    for _ in range(2):
        library.clear_gradients(ours.optimizer)
        for batch, overflows in enumerate((1, 2, 0)):
            for attempt in scaler.attempts(ours.optimizer, buffers=statistics(ours.before)):
                ours.backward(scaler, batch, overflows=attempt < overflows)
        scaler.step(ours.optimizer)
        scaler.update()
        plain.step_without_a_scaler()
    assert len(statistics(ours.before)) >= 2
    assert library.exact(statistics(ours.before)) == library.exact(statistics(plain.before))
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


# A disabled scaler, and calls that are refused.


def test_disabled_the_body_runs_once(parameters, finite):
    scaler = library.scaler(enabled=False)
    attempts = []
    for attempt in scaler.attempts(library.sgd(parameters)):
        attempts.append(attempt)
        library.backward(scaler, parameters, [gradient * INF for gradient in finite])
    assert attempts == [0]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((), {}, TypeError, "optimizers"),
        (([],), {}, TypeError, "got list"),
        (("optimizer", 3), {}, TypeError, "got int"),
        (("optimizer",), {"max_retries": -1}, ValueError, "max_retries"),
        (("optimizer",), {"max_retries": 1.5}, TypeError, "max_retries"),
        (("optimizer",), {"buffers": [1.0]}, TypeError, r"model\.buffers\(\), got float"),
    ],
)
def test_a_bad_argument_is_named_and_changes_nothing(scaler, arguments, options, error, match):
    regression = Regression()
    regression.backward(scaler, 0)
    before = library.everything(scaler, regression.optimizer)
    given = [regression.optimizer if each == "optimizer" else each for each in arguments]
    with pytest.raises(error, match=match):
        scaler.attempts(*given, **options)
    assert library.everything(scaler, regression.optimizer) == before
    scaler.step(regression.optimizer)


CALLS = {
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "clip_grad_norm_": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0),
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "update": lambda scaler, optimizer: scaler.update(),
    "attempts": lambda scaler, optimizer: scaler.attempts(optimizer),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_the_loop_is_refused_and_the_loop_goes_on(scaler, call):
    ours, plain = Regression(), Regression()
    for batch in range(3):
        for attempt in scaler.attempts(ours.optimizer):
            ours.backward(scaler, batch, overflows=attempt < 1)
            before = library.everything(scaler, ours.optimizer)
            with pytest.raises(CallOrderError, match=rf"^{call}\(\) .*in a loop over attempts"):
                CALLS[call](scaler, ours.optimizer)
            assert library.everything(scaler, ours.optimizer) == before
    scaler.step(ours.optimizer)
    plain.step_without_a_scaler()
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        ("unscale_", r"after unscale_\(\) or clip_grad_norm_"),
        ("clip_grad_norm_", r"after unscale_\(\) or clip_grad_norm_"),
        ("step", r"after step\(\): call update\(\)"),
    ],
)
def test_a_loop_may_not_follow_what_ends_accumulation(scaler, call, match):
    regression = Regression()
    for _ in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 0)
    CALLS[call](scaler, regression.optimizer)
    before = library.everything(scaler, regression.optimizer)
    with pytest.raises(CallOrderError, match=match):
        scaler.attempts(regression.optimizer)
    assert library.everything(scaler, regression.optimizer) == before


def test_a_loop_in_a_closure_is_refused(scaler):
    regression = Regression(library.closure_optimizers["SGD"])

    def closure():
        with pytest.raises(CallOrderError, match="in a closure"):
            scaler.attempts(regression.optimizer)
        library.clear_gradients(regression.optimizer)
        regression.backward(scaler, 0)

    scaler.step(regression.optimizer, closure)
    assert scaler.last_step(regression.optimizer).applied


def test_a_body_that_scales_no_loss_is_an_error(scaler):
    regression = Regression()
    loop = scaler.attempts(regression.optimizer)
    next(loop)
    regression.loss(0).backward()
    with pytest.raises(CallOrderError, match=r"scaled no loss: call scaler\.scale\(loss\)"):
        next(loop)
    library.clear_gradients(regression.optimizer)
    for _ in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 0)
    scaler.step(regression.optimizer)
    assert scaler.last_step(regression.optimizer).applied


def test_a_body_that_makes_no_gradients_is_an_error(scaler):
    regression = Regression()
    loop = scaler.attempts(regression.optimizer)
    next(loop)
    scaler.scale(regression.loss(0))
    with pytest.raises(CallOrderError, match="left no gradients"):
        next(loop)
    for _ in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 0)
    scaler.step(regression.optimizer)
    assert scaler.last_step(regression.optimizer).applied


@pytest.mark.parametrize("overflows", [0, 1])
def test_a_loss_outside_after_a_loop_is_refused_whether_the_loop_repeated_or_not(scaler, overflows):
    regression = Regression()
    for attempt in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 0, overflows=attempt < overflows)
    with pytest.raises(CallOrderError, match="loop of its own"):
        regression.backward(scaler, 1)
    scaler.step(regression.optimizer)
    regression.backward(scaler, 1)
    scaler.update()
    regression.backward(scaler, 1)


def test_a_loss_outside_is_refused_until_each_optimizer_of_a_loop_has_stepped(
    scaler, weights, optimizers
):
    first, second = optimizers
    for _ in scaler.attempts(first):
        scaler.scale(weights[0] * 0.5).backward()
    for _ in scaler.attempts(second):
        scaler.scale(weights[1] * 0.25).backward()
    scaler.step(second)
    with pytest.raises(CallOrderError, match="loop of its own"):
        scaler.scale(weights[1] * 0.25)
    scaler.step(first)
    scaler.scale(weights[1] * 0.25)


def test_after_update_a_loss_may_be_outside_though_no_step_was_taken(scaler):
    regression = Regression()
    for _ in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 0)
    scaler.unscale_(regression.optimizer)
    scaler.update()
    library.clear_gradients(regression.optimizer)
    regression.backward(scaler, 0)
    scaler.step(regression.optimizer)
    assert scaler.last_step(regression.optimizer).applied


def test_a_scaler_cannot_be_copied_between_a_loop_and_update(scaler):
    regression = Regression()
    for attempt in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 0, overflows=attempt < 1)
    with pytest.raises(CallOrderError, match=r"call update\(\) first"):
        copy.deepcopy(scaler)
    scaler.step(regression.optimizer)
    scaler.update()
    copy.deepcopy(scaler)


# Observers.


class Observer:
    """Records the calls that it is told of."""

    def __init__(self):
        self.heard = []

    def scaled(self, outputs):
        self.heard.append("scaled")

    def unscaling(self, optimizer, scale):
        self.heard.append(("unscaling", float(scale)))

    def stepping(self, optimizer, scale):
        self.heard.append(("stepping", float(scale)))

    def stepped(self, optimizer, outcome):
        self.heard.append(("stepped", outcome.scale))

    def updating(self):
        self.heard.append("updating")

    def updated(self):
        self.heard.append("updated")


def test_observers_hear_of_one_step_at_the_scale_that_worked(scaler):
    regression, observer = Regression(), Observer()
    scaler.add_observer(observer)
    for attempt in scaler.attempts(regression.optimizer):
        regression.backward(scaler, 0, overflows=attempt < 1)
    scaler.step(regression.optimizer)
    scaler.update()
    assert observer.heard == [
        "scaled",
        "scaled",
        ("stepping", 512.0),
        ("unscaling", 512.0),
        ("stepped", 512.0),
        "updating",
        "updated",
    ]


def test_a_monitor_measures_the_true_gradients_of_the_scale_that_worked(scaler, tmp_path):
    ours, plain = Regression(), Regression()
    with Monitor(scaler, every=1, path=tmp_path / "run.jsonl"):
        for batch in range(3):
            for attempt in scaler.attempts(ours.optimizer):
                ours.backward(scaler, batch, overflows=batch == 1 and attempt < 2)
        scaler.step(ours.optimizer)
        scaler.update()
    plain.step_without_a_scaler()
    run = read_run(tmp_path / "run.jsonl")
    (sample,) = run.samples
    true = np.concatenate([gradient.ravel() for gradient in plain.gradients()])
    assert sample.norm == pytest.approx(np.linalg.norm(true), rel=1e-5)
    assert (sample.scale, run.num_steps, run.skipped) == (256.0, 1, ())
