"""step(optimizer, closure): each evaluation is unscaled, repeated on overflow, or rolled back."""

from collections.abc import Container

import numpy as np
import pytest

from gradscaler import CallOrderError, DynamicScale, FixedScale
from tests.support.eager import library
from tests.support.eager.regression import Regression

# Paddle's LBFGS makes a tensor of a tensor, and Paddle warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")

ALL = range(1, 1000)  # evaluations
HYSTERESIS = [
    {"policy": DynamicScale(1024.0, hysteresis=hysteresis, hysteresis_reset=reset)}
    for hysteresis in (1, 2, 3)
    for reset in ("finite_step", "finite_step_only", "growth")
]
CANNOT_BACK_OFF = {
    "fixed": {"policy": FixedScale(1024.0)},
    "at its floor": {"policy": DynamicScale(init_scale=1024.0, min_scale=1024.0)},
}
if library.name == "paddle":
    HYSTERESIS.append({"init_scale": 1024.0, "hysteresis": 3})
    CANNOT_BACK_OFF["not dynamic"] = {"init_scale": 1024.0, "use_dynamic_loss_scaling": False}
# Optimizers by name, and an evaluation that each of them makes in a step.
EVALUATIONS = [
    (name, evaluation)
    for name in library.closure_optimizers
    for evaluation in ((1, 2, 3) if "LBFGS" in name else (1, 2) if "two" in name else (1,))
]


class ByClosure(Regression):
    """A regression in one batch, stepped by closures; ``make`` makes or names the optimizer."""

    def __init__(self, make="SGD", half=False):
        super().__init__(library.closure_optimizers.get(make, make), half, batches=1)
        self.losses = []  # one an evaluation

    def loss(self, batch=0):
        self.losses.append(super().loss(batch))
        return self.losses[-1]

    def closure(self, scaler, overflows: Container = (), returned="loss", then=lambda: None):
        """A closure whose gradients overflow at some evaluations, and which calls ``then`` last."""

        def closure():
            library.clear_gradients(self.optimizer)
            loss = self.loss()
            scaled = scaler.scale(loss)
            scaled.backward()
            self.scales.append(scaled.item() / loss.item())
            if len(self.losses) in overflows:
                library.set_gradients([self.model[0].bias], [np.full(3, np.inf, np.float32)])
            then()
            return {"loss": loss, "scaled": scaled}[returned]

        return closure

    def step(self, scaler, overflows=(), **options):
        return scaler.step(self.optimizer, self.closure(scaler, overflows, **options))

    def step_and_update(self, scaler, overflows=(), **options):
        result = self.step(scaler, overflows, **options)
        scaler.update()
        return result

    def unscaled_step(self, then=lambda: None):
        def closure():
            library.clear_gradients(self.optimizer)
            loss = self.loss()
            loss.backward()
            then()
            return loss

        return self.optimizer.step(closure)

    def kept(self):
        return library.kept(self.optimizer)

    def stepped(self):
        return library.stepped(self.optimizer)


# Evaluations that stay finite.


@pytest.mark.parametrize("returned", ["loss", "scaled"])
def test_parameters_gradients_and_losses_are_those_of_the_unscaled_optimizer(
    make_closure_optimizer, returned
):
    scaler = library.scaler(init_scale=2.0**20)
    ours, plain = ByClosure(make_closure_optimizer), ByClosure(make_closure_optimizer)
    for _ in range(4):
        loss = ours.step_and_update(scaler, returned=returned)
        assert library.exact(loss) == library.exact(plain.unscaled_step())
        assert ours.stepped() == plain.stepped()
    assert library.exact(ours.losses) == library.exact(plain.losses)


def test_the_line_search_evaluates_more_often_than_it_iterates():
    """So the tests above cover evaluations at points that the optimizer then gives up."""
    problem = ByClosure("LBFGS with line search")
    problem.unscaled_step()
    assert len(problem.losses) > 5  # iterations


def test_a_closure_may_be_given_by_name(scaler):
    by_name, by_position = ByClosure(), ByClosure()
    scaler.step(by_name.optimizer, closure=by_name.closure(scaler))
    scaler.update()
    by_position.step(scaler)
    assert by_name.stepped() == by_position.stepped()


@pytest.mark.parametrize(
    ("make", "arguments", "named"),
    [(library.sgd, (None,), {}), (library.adamw, (), {"closure": None})],
    ids=["by position", "by name"],
)
def test_a_closure_of_none_is_no_closure(make, arguments, named, finite):
    ends = []
    for each_arguments, each_named in ((arguments, named), ((), {})):
        scaler, parameters = library.scaler(), library.parameters()
        optimizer = make(parameters)
        library.backward(scaler, parameters, finite)
        assert scaler.step(optimizer, *each_arguments, **each_named) is None
        assert scaler.last_step(optimizer).applied
        ends.append(library.stepped(optimizer))
    assert ends[0] == ends[1]


def test_lbfgs_itself_asks_for_a_closure_where_none_is_given(scaler, parameters, finite):
    optimizer = library.closure_optimizers["LBFGS"](parameters)
    library.backward(scaler, parameters, finite)
    with pytest.raises(TypeError, match="closure"):
        scaler.step(optimizer)


def test_further_arguments_reach_the_optimizer(scaler):
    problem, noted = ByClosure(), []
    problem.optimizer.step = lambda closure, *args, **kwargs: noted.append((args, kwargs))
    scaler.step(problem.optimizer, problem.closure(scaler), 1, two=2)
    assert noted == [((1,), {"two": 2})]


def test_a_step_with_a_closure_counts_as_one_finite_step(scaler):
    problem = ByClosure("LBFGS")
    problem.step_and_update(scaler)
    assert len(problem.losses) > 1
    assert library.finite_steps_of(scaler) == 1
    assert scaler.last_step(problem.optimizer).applied


def test_a_closure_runs_with_gradients_enabled(scaler):
    problem, plain = ByClosure(), ByClosure()
    with library.framework.no_grad():
        problem.step(scaler)
    plain.unscaled_step()
    assert scaler.last_step(problem.optimizer).applied
    assert problem.stepped() == plain.stepped()


def test_disabled_a_closure_is_the_optimizer_s_own():
    problem, plain = ByClosure("LBFGS"), ByClosure("LBFGS")
    problem.step(library.scaler(enabled=False))
    plain.unscaled_step()
    assert problem.stepped() == plain.stepped()


# Overflow that a lower scale cures.


def test_an_overflow_is_repeated_at_lower_scales_and_the_batch_is_not_lost(make_closure_optimizer):
    scaler = library.scaler(init_scale=2.0**24)
    ours, plain = (ByClosure(make_closure_optimizer, half=True) for _ in range(2))
    ours.step(scaler)
    plain.unscaled_step()
    outcome = scaler.last_step(ours.optimizer)
    assert outcome.applied
    assert ours.scales[0] == 2.0**24
    assert ours.scales == sorted(ours.scales, reverse=True)
    assert outcome.scale == ours.scales[-1] < 2.0**17
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        np.testing.assert_allclose(library.numpy(mine), library.numpy(theirs), 1e-2, 1e-3)


@pytest.mark.parametrize("options", HYSTERESIS, ids=str)
def test_each_repetition_backs_off_once_whatever_the_hysteresis(options):
    problem, plain, scaler = ByClosure(), ByClosure(), library.scaler(**options)
    problem.step_and_update(scaler, overflows={1, 2})
    plain.unscaled_step()
    assert problem.scales == [1024.0, 512.0, 256.0]
    assert library.scale_of(scaler) == scaler.last_step(problem.optimizer).scale == 256.0
    assert problem.stepped() == plain.stepped()


def test_from_update_on_the_scale_that_worked_is_the_scale(place):
    problem, scaler = ByClosure(half=True), library.scaler(init_scale=2.0**24)
    problem.step(scaler)
    assert library.scale_of(scaler) == 2.0**24
    scaler.update()
    scale = scaler.last_step(problem.optimizer).scale
    assert library.scale_of(scaler) == scale == problem.scales[-1] < 2.0**24


def test_the_overflow_forgets_the_finite_steps_before_it_and_the_step_counts_as_finite(scaler):
    problem = ByClosure()
    scaler.load_state_dict({**scaler.state_dict(), library.state_keys["finite_steps"]: 100})
    problem.step_and_update(scaler, overflows={1})
    assert library.finite_steps_of(scaler) == 1


def load_scale(scaler, value):
    scaler.load_state_dict({**scaler.state_dict(), library.state_keys["scale"]: value})


def update_and_load_scale(scaler, value):
    scaler.update()
    load_scale(scaler, value)


def set_scale_and_update(scaler, value):
    library.set_scale(scaler, value)
    if library.name == "paddle":  # the others set it in update()
        scaler.update()


def load_scale_and_update(scaler, value):
    load_scale(scaler, value)
    scaler.update()


def assign_scale_and_update(scaler, value):
    scaler._scale = library.tensor(value)
    scaler.update()


@pytest.mark.parametrize(
    "set_scale",
    [update_and_load_scale, set_scale_and_update, load_scale_and_update, assign_scale_and_update],
)
def test_a_scale_that_is_set_after_a_backoff_is_the_scale(set_scale, scaler):
    problem = ByClosure()
    problem.step(scaler, overflows={1, 2})
    set_scale(scaler, 4.0)
    problem.scales.clear()
    problem.step_and_update(scaler)
    assert problem.scales == [library.scale_of(scaler)] == [4.0]


def test_an_overflow_in_a_later_evaluation_is_repeated_too(scaler):
    problem, plain = ByClosure("LBFGS"), ByClosure("LBFGS")
    problem.step(scaler, overflows={3})
    plain.unscaled_step()
    assert problem.scales[:5] == [1024.0, 1024.0, 1024.0, 512.0, 512.0]
    assert len(problem.losses) == len(plain.losses) + 1
    assert problem.stepped() == plain.stepped()


def test_gradients_that_overflowed_do_not_reach_the_repetition():
    """A closure that does not clear gradients adds to those that are there."""
    (parameter,) = library.make_parameters(np.ones(1, np.float32))
    scaler = library.scaler(init_scale=2.0**17)

    def closure():
        loss = library.through_float16(parameter).sum()
        scaler.scale(loss).backward()
        return loss

    scaler.step(library.sgd([parameter], lr=1.0), closure)
    assert parameter.item() == 0.0


class SharpnessAware:
    """An optimizer that moves the parameters along the gradients and then evaluates again (SAM)."""

    def __init__(self, base):
        self.base = base

    def __getattr__(self, name):
        return getattr(self.base, name)

    def step(self, closure):
        parameters = library.owned(self.base)
        with library.framework.no_grad():
            moves = [parameter.grad * 0.5 for parameter in parameters]
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.add_(move)
        loss = closure()
        with library.framework.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.add_(-move)
        self.base.step()
        return loss


def test_an_optimizer_that_moves_the_parameters_is_handed_an_evaluation_there():
    ours, plain = ByClosure(), ByClosure()
    for problem in (ours, plain):
        problem.optimizer = SharpnessAware(problem.optimizer)
    scaler = library.scaler(init_scale=1024.0)
    for _ in range(3):
        loss = ours.step_and_update(scaler)
        library.clear_gradients(plain.optimizer)
        plain.loss().backward()
        assert library.exact(loss) == library.exact(plain.unscaled_step())
        assert library.exact(list(ours.model.parameters())) == library.exact(
            list(plain.model.parameters())
        )
    assert len(ours.losses) == len(plain.losses) == 6


# Overflow that no scale cures.


@pytest.mark.parametrize("steps", [1, 2])
def test_what_no_scale_cures_backs_off_once_a_step(steps):
    problem, scaler = ByClosure(), library.scaler(init_scale=65536.0)
    for _ in range(steps):
        problem.step_and_update(scaler, overflows=ALL)
        problem.losses.clear()
    assert library.scale_of(scaler) == 65536.0 / 2**steps


@pytest.mark.parametrize(
    ("in_constructor", "in_call"), [(3, None), (9, 3), (0, 3), (5, 1), (0, None)]
)
def test_max_retries_bounds_the_repetitions(in_constructor, in_call):
    problem, scaler = ByClosure(), library.scaler(max_retries=in_constructor)
    given = {} if in_call is None else {"max_retries": in_call}
    closure = problem.closure(scaler, overflows=ALL)
    assert scaler.step(problem.optimizer, closure, **given) is None
    assert len(problem.losses) == 1 + given.get("max_retries", in_constructor)
    assert scaler.last_step(problem.optimizer).reason == "retries_exhausted"


@pytest.mark.parametrize(("bad", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_a_bad_max_retries_is_refused_before_anything_is_done(bad, error, scaler):
    problem = ByClosure()
    before = library.everything(scaler, problem.optimizer)
    with pytest.raises(error, match="max_retries"):
        scaler.step(problem.optimizer, problem.closure(scaler), max_retries=bad)
    assert library.everything(scaler, problem.optimizer) == before
    assert problem.losses == []


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(("name", "evaluation"), EVALUATIONS)
def test_a_skip_leaves_no_trace_but_the_lower_scale(name, evaluation, steps_before):
    problem, plain = ByClosure(name), ByClosure(name)
    scaler = library.scaler(init_scale=1024.0, max_retries=2)
    for _ in range(steps_before):
        problem.step_and_update(scaler)
        plain.unscaled_step()
    before = problem.kept()
    problem.losses.clear()
    assert problem.step_and_update(scaler, overflows=range(evaluation, 1000)) is None
    assert len(problem.losses) == evaluation + 2
    assert problem.kept() == before
    outcome = scaler.last_step(problem.optimizer)
    assert (outcome.skipped, outcome.reason) == (True, "retries_exhausted")
    assert problem.scales[-3:] == [1024.0, 512.0, 256.0]
    assert (outcome.scale, library.scale_of(scaler)) == (256.0, 512.0)
    for _ in range(2):
        problem.step_and_update(scaler)
        plain.unscaled_step()
        assert problem.stepped() == plain.stepped()


@pytest.mark.parametrize("options", CANNOT_BACK_OFF.values(), ids=list(CANNOT_BACK_OFF))
def test_a_scale_that_cannot_back_off_is_not_tried_twice(options):
    problem, scaler = ByClosure(), library.scaler(**options)
    problem.step_and_update(scaler, overflows={1})
    assert scaler.last_step(problem.optimizer).reason == "retries_exhausted"
    assert problem.scales == [1024.0]
    problem.step_and_update(scaler)
    assert problem.scales == [1024.0, 1024.0]
    assert library.scale_of(scaler) == 1024.0


# Closures that misbehave.


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize(("name", "evaluation"), EVALUATIONS)
def test_a_closure_that_raises_leaves_all_as_before_and_the_step_can_be_taken(
    name, evaluation, place, steps_before, scaler
):
    problem, plain = ByClosure(name), ByClosure(name)
    for _ in range(steps_before):
        problem.step_and_update(scaler)
        plain.unscaled_step()
    before = problem.kept(), library.everything(scaler)
    fine = problem.closure(scaler)
    problem.losses.clear()

    def raising():
        if place == "before" and len(problem.losses) + 1 == evaluation:
            raise ZeroDivisionError
        loss = fine()
        if len(problem.losses) == evaluation:
            raise ZeroDivisionError
        return loss

    with pytest.raises(ZeroDivisionError):
        scaler.step(problem.optimizer, raising)
    assert (problem.kept(), library.everything(scaler)) == before
    scaler.step(problem.optimizer, fine)
    plain.unscaled_step()
    assert scaler.last_step(problem.optimizer).applied
    assert problem.stepped() == plain.stepped()


def test_a_backoff_in_a_closure_that_then_raises_is_forgotten(scaler):
    problem = ByClosure()
    overflowing = problem.closure(scaler, overflows=ALL)
    with pytest.raises(ZeroDivisionError):
        scaler.step(problem.optimizer, lambda: 1 / 0 if len(problem.losses) == 2 else overflowing())
    problem.step_and_update(scaler)
    assert problem.scales == [1024.0, 512.0, 1024.0]
    assert library.scale_of(scaler) == 1024.0


def test_a_closure_that_raises_leaves_the_scale_that_worked_for_another(scaler):
    first, second = ByClosure(), ByClosure()
    first.step(scaler, overflows={1, 2})
    with pytest.raises(ZeroDivisionError):
        second.step(scaler, then=lambda: 1 / 0)
    second.step(scaler)
    assert second.scales == [256.0, 256.0]


def test_after_a_closure_that_raised_gradients_can_be_unscaled_by_hand(scaler):
    problem = ByClosure()

    def unscale_and_raise():
        scaler.unscale_(problem.optimizer)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        problem.step(scaler, then=unscale_and_raise)
    problem.closure(scaler)()
    scaler.unscale_(problem.optimizer)  # not "already called"


def test_gradients_unscaled_before_a_closure_that_raises_count_as_unscaled(
    scaler, parameters, finite
):
    optimizer = library.sgd(parameters)
    library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer, lambda: 1 / 0)
    scaler.step(optimizer)
    for parameter, gradient in zip(parameters, finite, strict=True):
        np.testing.assert_array_equal(library.numpy(parameter.grad), gradient)


@pytest.mark.parametrize("backward", [False, True])
def test_a_closure_that_never_scales_is_an_error(backward, scaler):
    problem = ByClosure()
    problem.step_and_update(scaler)
    before = problem.kept()

    def closure():
        loss = problem.loss()
        if backward:
            loss.backward()
        return loss

    with pytest.raises(CallOrderError, match=r"scaler\.scale\(loss\)\.backward\(\)"):
        scaler.step(problem.optimizer, closure)
    assert problem.kept() == before


def test_a_closure_that_makes_no_gradients_is_stepped_over(scaler):
    problem = ByClosure("LBFGS")
    before = problem.stepped()
    assert scaler.step(problem.optimizer, lambda: scaler.scale(problem.loss())) is None
    scaler.update()
    assert problem.stepped() == before
    assert scaler.last_step(problem.optimizer).reason == "no_gradients"
    assert library.finite_steps_of(scaler) == 0


# Calls inside the closure.


@pytest.mark.parametrize("name", ["SGD", "LBFGS"])
def test_gradients_may_be_unscaled_and_clipped_by_hand_in_the_closure(name, scaler):
    problem, plain = ByClosure(name), ByClosure(name)
    norms = {problem: [], plain: []}

    def clip(each):
        norm = library.framework.nn.utils.clip_grad_norm_(list(each.model.parameters()), 0.5)
        norms[each].append(library.exact(norm))

    def unscale_and_clip():
        scaler.unscale_(problem.optimizer)
        clip(problem)

    problem.step(scaler, then=unscale_and_clip)
    plain.unscaled_step(then=lambda: clip(plain))
    assert norms[problem] == norms[plain]
    assert problem.stepped() == plain.stepped()


@pytest.mark.parametrize("name", ["SGD", "LBFGS"])
def test_clipping_in_the_closure_reaches_every_evaluation(name, scaler):
    scaled, by_one, plain, unclipped = (ByClosure(name) for _ in range(4))
    one, disabled = library.scaler(policy=FixedScale(1.0)), library.scaler(enabled=False)
    scaled.step(scaler, then=lambda: scaler.clip_grad_norm_(scaled.optimizer, 0.5))
    by_one.step(one, then=lambda: one.clip_grad_norm_(by_one.optimizer, 0.5))
    plain.unscaled_step(then=lambda: disabled.clip_grad_norm_(plain.optimizer, 0.5))
    unclipped.unscaled_step()
    assert scaled.stepped() == by_one.stepped()
    # A disabled scaler clips by the framework's own kernel, whose norm may differ in the last bit.
    # LBFGS enlarges that up to a thousand times.
    for mine, theirs, without in zip(*map(weights, (scaled, plain, unclipped)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0.02)
        assert not np.allclose(theirs, without, rtol=0.5)


def weights(problem):
    return [library.numpy(parameter) for parameter in problem.model.parameters()]


def test_unscaling_inside_uses_the_scale_of_that_evaluation(scaler):
    problem, plain, norms = ByClosure(), ByClosure(), []

    def measure():
        norms.append(scaler.clip_grad_norm_(problem.optimizer, np.inf).item())

    problem.step(scaler, overflows={1}, then=measure)
    plain.unscaled_step()
    gradients = [library.numpy(p.grad).ravel() for p in plain.model.parameters()]
    assert norms == [np.inf, pytest.approx(np.linalg.norm(np.concatenate(gradients)))]


# Two optimizers.


class Two:
    """An optimizer that steps with a closure that backs off, and one that steps without."""

    def __init__(self):
        self.parameters = library.make_parameters(*np.ones((2, 1), np.float32))
        self.with_closure, self.without = (library.sgd([p], lr=1.0) for p in self.parameters)
        self.scaler = library.scaler(init_scale=2.0**20)

    def closure(self):
        library.clear_gradients(self.with_closure)
        loss = library.through_float16(self.parameters[0]) * 0.5
        self.scaler.scale(loss).backward()
        return loss

    def call(self, name):
        if name == "backward":
            self.scaler.scale(self.parameters[1] * 0.25).backward()
        elif name == "overflow":
            self.scaler.scale(self.parameters[1] * np.inf).backward()
        elif name == "unscale":
            self.scaler.unscale_(self.without)
        elif name == "closure":
            self.scaler.step(self.with_closure, self.closure)
        else:
            self.scaler.step(self.without)


@pytest.mark.parametrize(
    "calls",
    [
        "backward unscale closure step",
        "backward closure unscale step",
        "backward closure step",
        "closure backward step",
        "backward step closure",
        "closure backward unscale step",
    ],
)
def test_the_other_optimizer_is_unscaled_by_the_scale_of_its_own_backward_pass(calls):
    two = Two()
    for call in calls.split():
        two.call(call)
    two.scaler.update()
    assert two.scaler.last_step(two.with_closure).scale == 2.0**16
    assert two.scaler.last_step(two.without).scale == 2.0**20
    assert [parameter.item() for parameter in two.parameters] == [0.5, 0.75]
    assert library.scale_of(two.scaler) == 2.0**16


def test_the_other_optimizer_s_overflow_backs_off_further():
    two = Two()
    for call in ("overflow", "closure", "step"):
        two.call(call)
    two.scaler.update()
    assert two.scaler.last_step(two.with_closure).applied
    assert two.scaler.last_step(two.without).skipped
    assert library.scale_of(two.scaler) == 2.0**15


def test_a_second_closure_starts_at_the_scale_that_worked_for_the_first(scaler):
    first, second = ByClosure(), ByClosure()
    first.step(scaler, overflows={1, 2})
    second.step(scaler)
    assert second.scales == [256.0]
