"""scaler.attempts(optimizer): a loop whose body is repeated while its gradients overflow."""

import copy

import numpy as np
import pytest

from gradscaler import CallOrderError, DynamicScale, FixedScale, ScaleState
from gradscaler.diagnose import Monitor, read_run
from tests.support.eager import library
from tests.support.eager.base import normal

ALL = range(1000)
nn = library.framework.nn


class Problem:
    """A small regression in micro-batches; each body's scale is in ``scales``."""

    def __init__(self, make="SGD", half=False, micro_batches=3):
        self.model = library.model()
        self.parameters = list(self.model.parameters())
        make = library.optimizers.get(make, make)
        self.optimizer = make(self.parameters)
        inputs, targets = normal(2, (micro_batches, 8, 4), (micro_batches, 8, 1))
        self.batch = [
            tuple(map(library.tensor, pair)) for pair in zip(inputs, targets, strict=True)
        ]
        self.half = half
        self.scales = []

    def loss(self, micro_batch):
        inputs, targets = micro_batch
        outputs = self.model(inputs)
        if self.half:
            outputs = library.through_float16(outputs)
        return ((outputs - targets) ** 2).sum()

    def backward(self, scaler, micro_batch, overflow=False):
        loss = self.loss(micro_batch)
        scaled = scaler.scale(loss)
        self.scales.append(scaled.item() / loss.item())
        (scaled * np.inf if overflow else scaled).backward()

    def accumulate(self, scaler, overflows=(), **options):
        """All micro-batches in loops; ``overflows`` are pairs of micro-batch and attempt."""
        library.clear_gradients(self.optimizer)
        for i, micro_batch in enumerate(self.batch):
            for attempt in scaler.attempts(self.optimizer, **options):
                self.backward(scaler, micro_batch, (i, attempt) in overflows)

    def iterate(self, scaler, overflows=(), **options):
        self.accumulate(scaler, overflows, **options)
        scaler.step(self.optimizer)
        scaler.update()

    def iterate_plainly(self, scaler, clip=lambda: None):
        """Without loops."""
        library.clear_gradients(self.optimizer)
        for micro_batch in self.batch:
            self.backward(scaler, micro_batch)
        clip()
        scaler.step(self.optimizer)
        scaler.update()

    def gradients(self):
        return [library.numpy(parameter.grad) for parameter in self.parameters]

    def stepped(self):
        return library.stepped(self.optimizer)


def unscaled():
    """Does nothing but step: what a loop without a scaler does."""
    return library.scaler(enabled=False)


def moved_by(policy, trace):
    """A policy's state after a trace of found_inf flags."""
    state = policy.init()
    for found_inf in trace:
        state = policy.update(state, found_inf)
    return state


# What a loop comes to.


def test_a_body_whose_gradients_are_finite_runs_once_and_changes_nothing(make_optimizer, place):
    ours, plain = Problem(make_optimizer), Problem(make_optimizer)
    scaler, other = library.scaler(init_scale=1024.0), library.scaler(init_scale=1024.0)
    for _ in range(3):
        ours.iterate(scaler)
        plain.iterate_plainly(other)
        assert ours.stepped() == plain.stepped()
    assert ours.scales == plain.scales == [1024.0] * 9
    assert library.exact(scaler.state_dict()) == library.exact(other.state_dict())


@pytest.mark.parametrize("overflows", [1, 2, 5])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_overflow_repeats_its_micro_batch_alone_and_no_contribution_is_lost(
    make_optimizer, bad, overflows, place
):
    ours, plain = Problem(make_optimizer), Problem(make_optimizer)
    scaler = library.scaler(init_scale=1024.0)
    ours.iterate(scaler, {(bad, attempt) for attempt in range(overflows)})
    plain.iterate_plainly(unscaled())
    lowered = [1024.0 / 2**n for n in range(1, overflows + 1)]
    assert ours.scales == [1024.0] * (bad + 1) + lowered + lowered[-1:] * (2 - bad)
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)
    outcome = scaler.last_step(ours.optimizer)
    assert (outcome.applied, outcome.scale) == (True, lowered[-1])
    assert scaler.history == (outcome,)


@pytest.mark.parametrize("start", [2.0**20, 2.0**24])
def test_half_precision_that_overflows_ends_as_if_the_scale_had_been_right_from_the_start(
    make_optimizer, start, place
):
    ours, plain = Problem(make_optimizer, half=True), Problem(make_optimizer, half=True)
    scaler = library.scaler(init_scale=start)
    for _ in range(3):
        ours.iterate(scaler)
    right = library.scale_of(scaler)
    assert ours.scales[0] == start > right
    other = library.scaler(init_scale=right)
    for _ in range(3):
        plain.iterate_plainly(other)
    assert set(plain.scales) == {right}
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


def test_gradients_from_before_the_loop_are_kept_to_the_bit(scaler):
    problem = Problem()
    problem.backward(scaler, problem.batch[0])
    before = problem.gradients()
    for attempt in scaler.attempts(problem.optimizer):
        if attempt < 3:
            expected = [gradient / 2**attempt for gradient in before]
            assert library.exact(problem.gradients()) == library.exact(expected)
        problem.backward(scaler, problem.batch[1], attempt < 3)
    problem.scales.clear()
    scaler.unscale_(problem.optimizer)
    other = Problem()
    for micro_batch in other.batch[:2]:
        other.backward(unscaled(), micro_batch)
    assert library.exact(problem.gradients()) == library.exact(other.gradients())


def test_gradients_that_were_not_there_are_not_there_in_a_repetition(scaler, parameters, finite):
    optimizer = library.sgd(parameters)
    for attempt in scaler.attempts(optimizer):
        assert [parameter.grad for parameter in parameters] == [None, None]
        library.backward(scaler, parameters, [None, finite[1] * (np.inf if attempt < 2 else 1.0)])
    scaler.step(optimizer)
    assert parameters[0].grad is None
    assert library.exact(library.numpy(parameters[1].grad)) == library.exact(
        finite[1].astype(np.float64)
    )


def test_gradients_stay_in_their_tensors(scaler):
    """Others may hold them, as DDP's buckets do."""
    if library.name == "tensorplay":
        pytest.skip("TensorPlay's backward pass makes new ones")
    problem = Problem()
    problem.backward(scaler, problem.batch[0])
    held = [parameter.grad for parameter in problem.parameters]
    problem.scales.clear()
    for attempt in scaler.attempts(problem.optimizer):
        problem.backward(scaler, problem.batch[1], attempt < 2)
    for gradient, parameter in zip(held, problem.parameters, strict=True):
        assert gradient.data_ptr() == parameter.grad.data_ptr()


# Paddle cannot add float16 on the CPU.
@pytest.mark.parametrize("micro_batches", [1] if library.name == "paddle" else [1, 2, 3])
def test_float16_gradients_are_repeated_too(micro_batches):
    ends, attempts = [], []
    for start in (2.0**20, 2.0**12):
        (parameter,) = library.make_parameters(library.tensor(np.ones(4), "float16"))
        optimizer = library.sgd([parameter])
        scaler = library.scaler(init_scale=start, **library.with_float16)
        for gradient in normal(3, *[(4,)] * micro_batches):
            for attempt in scaler.attempts(optimizer):
                attempts.append(attempt)
                product = library.through_float16(parameter) * library.tensor(gradient)
                scaler.scale(product.sum()).backward()
        assert parameter.grad.dtype == parameter.dtype
        scaler.unscale_(optimizer)
        ends.append(library.exact(parameter.grad))
    assert max(attempts) > 3
    assert attempts[-micro_batches:] == [0] * micro_batches
    assert ends[0] == ends[1]


# Where the scale goes.


@pytest.mark.parametrize("overflows", [0, 1, 3])
@pytest.mark.parametrize("interval", [1, 2, 2000])
def test_the_scale_ends_as_after_so_many_nonfinite_steps_and_a_finite_one(overflows, interval):
    policy = DynamicScale(1024.0, growth_interval=interval)
    problem, scaler = Problem(), library.scaler(policy=policy)
    problem.iterate(scaler, {(1, attempt) for attempt in range(overflows)})
    expected = moved_by(policy, [True] * overflows + [False])
    assert library.scale_of(scaler) == expected.scale
    assert library.finite_steps_of(scaler) == expected.finite_steps


@pytest.mark.parametrize("hysteresis", [2, 3])
def test_each_repetition_backs_off_once_whatever_the_hysteresis(hysteresis):
    policy = DynamicScale(1024.0, hysteresis=hysteresis)
    problem, scaler = Problem(), library.scaler(policy=policy)
    problem.iterate(scaler, {(0, 0), (0, 1), (2, 0)})
    assert problem.scales == [1024.0, 512.0, 256.0, 256.0, 256.0, 128.0]
    assert library.scale_of(scaler) == 128.0


def test_until_update_the_scaler_keeps_its_scale(scaler, place):
    problem = Problem()
    problem.accumulate(scaler, {(1, 0)})
    assert library.scale_of(scaler) == 1024.0
    scaler.step(problem.optimizer)
    assert library.scale_of(scaler) == 1024.0
    scaler.update()
    assert library.scale_of(scaler) == 512.0
    problem.scales.clear()
    problem.iterate(scaler)
    assert problem.scales == [512.0] * 3


def test_a_scale_that_is_loaded_between_micro_batches_is_used_from_there_on(scaler):
    ours, plain = Problem(micro_batches=2), Problem(micro_batches=2)
    for attempt in scaler.attempts(ours.optimizer):
        ours.backward(scaler, ours.batch[0], attempt < 3)
    scaler.load_state_dict({**scaler.state_dict(), library.state_keys["scale"]: 4096.0})
    for _ in scaler.attempts(ours.optimizer):
        ours.backward(scaler, ours.batch[1])
    scaler.step(ours.optimizer)
    plain.iterate_plainly(unscaled())
    assert ours.scales[-1] == 4096.0
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


# Between the loop and step.


@pytest.mark.parametrize("norm_type", [2.0, 1.0, np.inf])
@pytest.mark.parametrize("bad", [set(), {(0, 0)}, {(2, 0), (2, 1)}])
def test_clipping_comes_after_the_loop(make_optimizer, bad, norm_type):
    ours, plain = Problem(make_optimizer), Problem(make_optimizer)
    scaler, disabled = library.scaler(init_scale=1024.0), unscaled()
    ours.accumulate(scaler, bad)
    norm = scaler.clip_grad_norm_(ours.optimizer, 0.5, norm_type)
    scaler.step(ours.optimizer)
    norms = []

    def clip():
        norms.append(disabled.clip_grad_norm_(plain.optimizer, 0.5, norm_type).item())

    plain.iterate_plainly(disabled, clip)
    assert norm.item() == pytest.approx(norms[0], rel=1e-6)
    for mine, theirs in zip(ours.parameters, plain.parameters, strict=True):
        np.testing.assert_allclose(library.numpy(mine), library.numpy(theirs), 1e-5, 1e-7)


def test_gradients_unscaled_after_the_loop_are_the_true_ones(make_optimizer):
    ours, plain = Problem(make_optimizer), Problem(make_optimizer)
    scaler = library.scaler(init_scale=1024.0)
    ours.accumulate(scaler, {(1, 0)})
    scaler.unscale_(ours.optimizer)

    def halve(problem):
        gradients = [gradient * 0.5 for gradient in problem.gradients()]
        library.set_gradients(problem.parameters, gradients)

    halve(ours)
    scaler.step(ours.optimizer)
    plain.iterate_plainly(unscaled(), lambda: halve(plain))
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


# Several losses and several optimizers.


class Two:
    """Two parameters of an optimizer each; the true gradients are 0.5 and 0.25."""

    def __init__(self):
        self.parameters = library.make_parameters(*np.ones((2, 1), np.float32))
        self.first, self.second = (library.sgd([each], lr=1.0) for each in self.parameters)
        self.scaler = library.scaler(init_scale=1024.0)

    def backward(self, *factors):
        for factor, parameter, share in zip(factors, self.parameters, (0.5, 0.25), strict=False):
            if factor is not None:
                self.scaler.scale(parameter * share * factor).backward()

    def finish(self):
        for optimizer in (self.first, self.second):
            self.scaler.step(optimizer)
        self.scaler.update()
        return [parameter.item() for parameter in self.parameters]


@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_in_one_of_two_optimizers_repeats_both(bad):
    two, attempts = Two(), []
    for attempt in two.scaler.attempts(two.first, two.second):
        attempts.append(attempt)
        factors = [1.0, 1.0]
        factors[bad] = np.inf if attempt < 2 else 1.0
        two.backward(*factors)
    assert attempts == [0, 1, 2]
    assert two.finish() == [0.5, 0.75]
    assert two.scaler.last_step(two.first).scale == two.scaler.last_step(two.second).scale == 256.0
    assert library.scale_of(two.scaler) == 256.0


@pytest.mark.parametrize("steps_between", [False, True])
@pytest.mark.parametrize(("bad_first", "bad_second"), [(1, 0), (0, 1), (2, 1)])
def test_loops_of_different_optimizers_keep_different_scales(bad_first, bad_second, steps_between):
    two = Two()
    for attempt in two.scaler.attempts(two.first):
        two.backward(np.inf if attempt < bad_first else 1.0)
    if steps_between:
        two.scaler.step(two.first)
    for attempt in two.scaler.attempts(two.second):
        two.backward(None, np.inf if attempt < bad_second else 1.0)
    if not steps_between:
        two.scaler.step(two.first)
    two.scaler.step(two.second)
    two.scaler.update()
    assert [parameter.item() for parameter in two.parameters] == [0.5, 0.75]
    assert two.scaler.last_step(two.first).scale == 1024.0 / 2**bad_first
    assert two.scaler.last_step(two.second).scale == 1024.0 / 2 ** (bad_first + bad_second)
    assert library.scale_of(two.scaler) == 1024.0 / 2 ** (bad_first + bad_second)


def test_a_loop_after_another_optimizer_s_backoff_brings_its_own_gradients_along():
    two = Two()
    for _ in two.scaler.attempts(two.first):
        two.backward(1.0)
    for attempt in two.scaler.attempts(two.second):
        two.backward(None, np.inf if attempt < 2 else 1.0)
    for _ in two.scaler.attempts(two.first):
        two.backward(1.0)
    assert two.finish() == [0.0, 0.75]
    assert two.scaler.last_step(two.first).scale == 256.0


def test_gradients_of_an_optimizer_without_a_loop_keep_the_scaler_s_scale():
    two = Two()
    two.backward(None, 1.0)
    for attempt in two.scaler.attempts(two.first):
        two.backward(np.inf if attempt < 2 else 1.0)
    assert two.finish() == [0.5, 0.75]
    assert two.scaler.last_step(two.second).scale == 1024.0


def test_an_optimizer_named_twice_is_one(scaler):
    ours, plain = Problem(), Problem()
    for micro_batch in ours.batch:
        for attempt in scaler.attempts(ours.optimizer, ours.optimizer):
            ours.backward(scaler, micro_batch, attempt < 2)
    scaler.step(ours.optimizer)
    plain.iterate_plainly(unscaled())
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


def test_a_closure_after_a_loop_starts_at_the_scale_that_worked():
    two, scales = Two(), []
    for attempt in two.scaler.attempts(two.first):
        two.backward(np.inf if attempt < 2 else 1.0)

    def closure():
        library.clear_gradients(two.second)
        scaled = two.scaler.scale(two.parameters[1] * 0.25)
        scaled.backward()
        scales.append(scaled.item() / 0.25)
        return scaled

    second = library.closure_optimizers["SGD"]([two.parameters[1]])
    two.second = second
    two.scaler.step(second, closure)
    two.scaler.step(two.first)
    two.scaler.update()
    assert scales == [256.0]
    assert two.parameters[0].item() == 0.5
    assert library.scale_of(two.scaler) == 256.0


# Overflow that no scale cures.


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_what_no_scale_cures_skips_the_step_and_backs_off_once(make_optimizer, bad, place):
    problem = Problem(make_optimizer)
    scaler = library.scaler(init_scale=1024.0, max_retries=3)
    problem.iterate(scaler)
    before = library.kept(problem.optimizer)
    problem.scales.clear()
    problem.iterate(scaler, {(bad, attempt) for attempt in ALL})
    assert problem.scales == [1024.0] * (bad + 1) + [512.0, 256.0, 128.0] + [1024.0] * (2 - bad)
    assert library.kept(problem.optimizer) == before
    outcome = scaler.last_step(problem.optimizer)
    assert (outcome.skipped, outcome.reason) == (True, "retries_exhausted")
    assert library.scale_of(scaler) == 512.0
    plain = Problem(make_optimizer)
    for _ in range(2):
        plain.iterate_plainly(unscaled())
    problem.iterate(scaler)
    assert scaler.last_step(problem.optimizer).applied
    assert library.kept(problem.optimizer) == library.kept(plain.optimizer)


def test_an_optimizer_whose_gradients_stay_finite_steps_though_the_other_s_never_are():
    two = Two()
    for _ in two.scaler.attempts(two.first, two.second):
        two.backward(1.0, np.inf)
    assert two.finish() == [0.5, 1.0]
    reasons = [two.scaler.last_step(each).reason for each in (two.first, two.second)]
    assert reasons == ["finite", "retries_exhausted"]
    assert library.scale_of(two.scaler) == 512.0


def test_gradients_that_were_not_finite_before_are_not_repeated(scaler):
    problem = Problem()
    problem.backward(scaler, problem.batch[0], overflow=True)
    for micro_batch in problem.batch[1:]:
        for _ in scaler.attempts(problem.optimizer):
            problem.backward(scaler, micro_batch)
    assert problem.scales == [1024.0] * 3
    scaler.step(problem.optimizer)
    scaler.update()
    assert scaler.last_step(problem.optimizer).reason == "retries_exhausted"
    assert library.scale_of(scaler) == 512.0


def test_gradients_cleared_after_retries_were_exhausted_start_again(scaler):
    ours, plain = Problem(), Problem()
    ours.accumulate(scaler, {(2, attempt) for attempt in ALL}, max_retries=2)
    ours.accumulate(scaler)
    scaler.step(ours.optimizer)
    plain.iterate_plainly(unscaled())
    assert scaler.last_step(ours.optimizer).reason == "finite"
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


@pytest.mark.parametrize(("in_constructor", "in_call"), [(3, None), (9, 3), (0, 2), (5, 0)])
def test_max_retries_bounds_the_repetitions(in_constructor, in_call):
    problem, scaler = Problem(micro_batches=1), library.scaler(max_retries=in_constructor)
    problem.accumulate(scaler, {(0, attempt) for attempt in ALL}, max_retries=in_call)
    assert len(problem.scales) == 1 + (in_constructor if in_call is None else in_call)


@pytest.mark.parametrize(
    "policy", [FixedScale(1024.0), DynamicScale(1024.0, min_scale=1024.0)], ids=["fixed", "floor"]
)
def test_a_scale_that_cannot_back_off_is_not_tried_twice(policy):
    problem, scaler = Problem(micro_batches=1), library.scaler(policy=policy)
    problem.iterate(scaler, {(0, 0)})
    assert problem.scales == [1024.0]
    assert scaler.last_step(problem.optimizer).reason == "retries_exhausted"
    problem.iterate(scaler)
    assert scaler.last_step(problem.optimizer).applied


# Leaving the loop.


@pytest.mark.parametrize("overflows", [0, 2])
def test_break_leaves_the_gradients_as_they_are_and_step_divides_them_rightly(scaler, overflows):
    ours, plain = Problem(micro_batches=1), Problem(micro_batches=1)
    for attempt in scaler.attempts(ours.optimizer):
        ours.backward(scaler, ours.batch[0], attempt < overflows)
        if attempt == overflows:
            break
    scaler.step(ours.optimizer)
    scaler.update()
    plain.iterate_plainly(unscaled())
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)
    assert library.scale_of(scaler) == 1024.0 / 2**overflows


def test_break_on_an_overflow_leaves_it_to_step(scaler):
    problem = Problem()
    before = library.kept(problem.optimizer)
    for _ in scaler.attempts(problem.optimizer):
        problem.backward(scaler, problem.batch[0], overflow=True)
        break
    scaler.step(problem.optimizer)
    scaler.update()
    assert scaler.last_step(problem.optimizer).reason == "overflow"
    assert library.kept(problem.optimizer) == before
    assert library.scale_of(scaler) == 512.0


def test_retries_that_another_loop_used_up_are_not_the_reason_of_its_skip(scaler):
    problem = Problem()
    problem.accumulate(scaler, {(2, attempt) for attempt in ALL}, max_retries=2)
    library.clear_gradients(problem.optimizer)
    for _ in scaler.attempts(problem.optimizer):
        problem.backward(scaler, problem.batch[0], overflow=True)
        break
    scaler.step(problem.optimizer)
    assert scaler.last_step(problem.optimizer).reason == "overflow"


@pytest.mark.parametrize("at", [0, 1, 2])
def test_after_an_exception_the_gradients_can_be_cleared_and_made_again(scaler, at):
    ours, plain = Problem(), Problem()

    def raising():
        for attempt in scaler.attempts(ours.optimizer):
            ours.backward(scaler, ours.batch[0], attempt < at)
            if attempt == at:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raising()
    ours.scales.clear()
    ours.iterate(scaler)
    assert ours.scales == [1024.0] * 3  # it starts over
    plain.iterate_plainly(unscaled())
    assert library.kept(ours.optimizer) == library.kept(plain.optimizer)


def test_a_loop_that_is_left_open_is_refused_until_it_is_closed(scaler):
    problem = Problem()
    loop = scaler.attempts(problem.optimizer)
    for _ in loop:
        problem.backward(scaler, problem.batch[0])
        break
    with pytest.raises(CallOrderError, match="in a loop over attempts"):
        scaler.step(problem.optimizer)
    loop.close()
    scaler.step(problem.optimizer)
    assert scaler.last_step(problem.optimizer).applied


# What a repetition puts back.


def trained(start, overflows, train, make_layer, buffers):
    """A layer before a problem's model, and its tensors and the parameters after two steps."""
    problem = Problem()
    layer = make_layer()
    linear = problem.model
    problem.model = lambda inputs: linear(layer(inputs))
    scaler = library.scaler(init_scale=start)
    getattr(library.framework, "seed" if library.name == "paddle" else "manual_seed")(3)
    for _ in range(2):
        if train == "loops":
            problem.iterate(scaler, overflows, buffers=buffers(layer))
        else:
            problem.iterate_plainly(scaler)
    return library.exact(buffers(layer)), library.kept(problem.optimizer)


def test_a_repetition_draws_the_same_dropout_mask():
    ends = [
        trained(1024.0, overflows, train, lambda: nn.Dropout(0.5), lambda layer: [])
        for overflows, train in [({(0, 0), (1, 0), (1, 1)}, "loops"), ((), "plain")]
    ]
    assert ends[0] == ends[1]


def statistics(layer):
    """Paddle keeps them as parameters that are not trained."""
    frozen = [
        each for each in layer.parameters() if library.name == "paddle" and each.stop_gradient
    ]
    return [*layer.buffers(), *frozen]


@pytest.mark.filterwarnings("ignore:When training, we now always track:UserWarning")  # Paddle's
def test_buffers_are_put_back_and_so_batch_statistics_count_each_micro_batch_once():
    make = nn.BatchNorm1D if library.name == "paddle" else nn.BatchNorm1d
    runs = [({(0, 0), (1, 0), (1, 1)}, "loops"), ((), "plain")]
    ends = [trained(1024.0, *run, lambda: make(4), statistics) for run in runs]
    assert ends[0] == ends[1]
    assert len(ends[0][0]) >= 2


# Disabled, and calls that may not come.


def test_disabled_the_body_runs_once(parameters, finite):
    scaler = unscaled()
    optimizer = library.sgd(parameters)
    attempts = []
    for attempt in scaler.attempts(optimizer):
        attempts.append(attempt)
        library.backward(scaler, parameters, [gradient * np.inf for gradient in finite])
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
    problem = Problem()
    problem.backward(scaler, problem.batch[0])
    before = library.everything(scaler, problem.optimizer)
    given = [problem.optimizer if each == "optimizer" else each for each in arguments]
    with pytest.raises(error, match=match):
        scaler.attempts(*given, **options)
    assert library.everything(scaler, problem.optimizer) == before
    scaler.step(problem.optimizer)


def refused_in_a_loop(call):
    return {
        "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
        "clip_grad_norm_": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0),
        "step": lambda scaler, optimizer: scaler.step(optimizer),
        "update": lambda scaler, optimizer: scaler.update(),
        "attempts": lambda scaler, optimizer: scaler.attempts(optimizer),
    }[call]


@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_", "step", "update", "attempts"])
def test_a_call_in_the_loop_is_refused_and_the_loop_goes_on(scaler, call):
    ours, plain = Problem(), Problem()
    for micro_batch in ours.batch:
        for attempt in scaler.attempts(ours.optimizer):
            ours.backward(scaler, micro_batch, attempt < 1)
            before = library.everything(scaler, ours.optimizer)
            with pytest.raises(CallOrderError, match=rf"^{call}\(\) .*in a loop over attempts"):
                refused_in_a_loop(call)(scaler, ours.optimizer)
            assert library.everything(scaler, ours.optimizer) == before
    scaler.step(ours.optimizer)
    plain.iterate_plainly(unscaled())
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
    problem = Problem()
    problem.accumulate(scaler)
    refused_in_a_loop(call)(scaler, problem.optimizer)
    before = library.everything(scaler, problem.optimizer)
    with pytest.raises(CallOrderError, match=match):
        scaler.attempts(problem.optimizer)
    assert library.everything(scaler, problem.optimizer) == before


def test_a_loop_in_a_closure_is_refused(scaler):
    problem = Problem(library.closure_optimizers["SGD"])

    def closure():
        with pytest.raises(CallOrderError, match="in a closure"):
            scaler.attempts(problem.optimizer)
        library.clear_gradients(problem.optimizer)
        problem.backward(scaler, problem.batch[0])

    scaler.step(problem.optimizer, closure)
    assert scaler.last_step(problem.optimizer).applied


def test_a_body_that_scales_no_loss_is_an_error(scaler):
    problem = Problem()
    loop = scaler.attempts(problem.optimizer)
    next(loop)
    problem.loss(problem.batch[0]).backward()
    with pytest.raises(CallOrderError, match=r"scaled no loss: call scaler\.scale\(loss\)"):
        next(loop)
    library.clear_gradients(problem.optimizer)
    problem.iterate(scaler)
    assert scaler.last_step(problem.optimizer).applied


def test_a_body_that_makes_no_gradients_is_an_error(scaler):
    problem = Problem()
    loop = scaler.attempts(problem.optimizer)
    next(loop)
    scaler.scale(problem.loss(problem.batch[0]))
    with pytest.raises(CallOrderError, match="left no gradients"):
        next(loop)
    problem.iterate(scaler)
    assert scaler.last_step(problem.optimizer).applied


@pytest.mark.parametrize("overflows", [0, 1])
def test_a_loss_outside_after_a_loop_is_refused_whether_the_loop_repeated_or_not(scaler, overflows):
    problem = Problem()
    for attempt in scaler.attempts(problem.optimizer):
        problem.backward(scaler, problem.batch[0], attempt < overflows)
    with pytest.raises(CallOrderError, match="loop of its own"):
        problem.backward(scaler, problem.batch[1])
    scaler.step(problem.optimizer)
    problem.backward(scaler, problem.batch[1])
    scaler.update()
    problem.backward(scaler, problem.batch[1])


def test_a_loss_outside_is_refused_until_each_optimizer_of_a_loop_has_stepped():
    two = Two()
    for _ in two.scaler.attempts(two.first):
        two.backward(1.0)
    for _ in two.scaler.attempts(two.second):
        two.backward(None, 1.0)
    two.scaler.step(two.second)
    with pytest.raises(CallOrderError, match="loop of its own"):
        two.backward(None, 1.0)
    two.scaler.step(two.first)
    two.backward(None, 1.0)


def test_after_update_a_loss_may_be_outside_though_no_step_was_taken(scaler):
    problem = Problem()
    problem.accumulate(scaler)
    scaler.unscale_(problem.optimizer)
    scaler.update()
    problem.iterate_plainly(scaler)
    assert scaler.last_step(problem.optimizer).applied


def test_a_scaler_cannot_be_copied_between_a_loop_and_update(scaler):
    problem = Problem()
    problem.accumulate(scaler, {(0, 0)})
    with pytest.raises(CallOrderError, match=r"call update\(\) first"):
        copy.deepcopy(scaler)
    scaler.step(problem.optimizer)
    scaler.update()
    copy.deepcopy(scaler)


# Observers.


class Observer:
    """Notes what it is told."""

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
    problem, observer = Problem(micro_batches=1), Observer()
    scaler.add_observer(observer)
    problem.iterate(scaler, {(0, 0)})
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
    problem, plain = Problem(), Problem()
    with Monitor(scaler, every=1, path=tmp_path / "run.jsonl"):
        problem.iterate(scaler, {(1, 0), (1, 1)})
    run = read_run(tmp_path / "run.jsonl")
    (sample,) = run.samples
    plain.iterate_plainly(unscaled())
    true = np.concatenate([gradient.ravel() for gradient in plain.gradients()])
    assert sample.norm == pytest.approx(np.linalg.norm(true), rel=1e-5)
    assert (sample.scale, run.num_steps, run.skipped) == (256.0, 1, ())


def test_states_compare_with_a_policy_that_knows_no_engine():
    """So the tests above, which go by ``moved_by``, compare with something."""
    assert moved_by(DynamicScale(1024.0), [True, False]) == ScaleState(512.0, 1, 0)
