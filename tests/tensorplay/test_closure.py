"""A step with a closure: each evaluation unscaled, repeated on overflow, undone if it must be."""

import pytest
import tensorplay as tp

from gradscaler import CallOrderError, DynamicScale, FixedScale
from gradscaler.tensorplay import GradScaler

INF = float("inf")
OPTIMIZERS = {
    "SGD": (tp.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "fused SGD": (tp.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": (tp.optim.Adam, {"lr": 0.1}),
    "Adagrad": (tp.optim.Adagrad, {"lr": 0.1}),
    "LBFGS": (tp.optim.LBFGS, {"lr": 0.5, "max_iter": 5}),
    "LBFGS with line search": (
        tp.optim.LBFGS,
        {"lr": 8.0, "max_iter": 5, "line_search_fn": "strong_wolfe"},
    ),
}


def make(name):
    optimizer, options = OPTIMIZERS[name]
    return lambda parameters: optimizer(parameters, **options)


@pytest.fixture(params=OPTIMIZERS)
def kind(request):
    return make(request.param)


class Problem:
    """A small regression in float32, its gradients cast to ``dtype`` on their way back."""

    def __init__(self, kind, dtype=tp.float32):
        tp.manual_seed(0)
        self.model = tp.nn.Sequential(tp.nn.Linear(4, 3), tp.nn.Tanh(), tp.nn.Linear(3, 1))
        self.inputs, self.targets = tp.randn((8, 4)), tp.randn((8, 1))
        self.dtype = dtype
        self.optimizer = kind(list(self.model.parameters()))
        self.losses = []  # one an evaluation
        self.scales = []

    def loss(self):
        outputs = self.model(self.inputs).to(self.dtype).float()
        self.losses.append((outputs - self.targets).pow(2).sum())
        return self.losses[-1]

    def closure(self, scaler, returned="loss", overflow_from=None, overflow_to=INF):
        """A closure for ``scaler``; gradients overflow in evaluations from one to another."""

        def closure():
            self.optimizer.zero_grad()
            loss = self.loss()
            scaled = scaler.scale(loss)
            scaled.backward()
            self.scales.append(scaled.item() / loss.item())
            if overflow_from is not None and overflow_from <= len(self.losses) < overflow_to:
                self.model[0].bias.grad[0] = INF
            return {"loss": loss, "scaled": scaled}[returned]

        return closure

    def unscaled_step(self):
        def closure():
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return self.optimizer.step(closure)


@pytest.mark.parametrize("returned", ["loss", "scaled"])
def test_parameters_and_losses_are_those_of_the_unscaled_optimizer(kind, returned, stepped, exact):
    scaler = GradScaler(init_scale=2.0**20)
    ours, plain = Problem(kind), Problem(kind)
    for _ in range(4):
        loss = scaler.step(ours.optimizer, ours.closure(scaler, returned))
        scaler.update()
        assert exact(loss) == exact(plain.unscaled_step())
        assert stepped(ours.optimizer) == stepped(plain.optimizer)
    assert exact(ours.losses) == exact(plain.losses)


def test_the_line_search_evaluates_more_often_than_it_iterates():
    """So that the cases above cover evaluations at points that are then given up."""
    problem = Problem(make("LBFGS with line search"))
    problem.unscaled_step()
    state = next(iter(problem.optimizer.state.values()))
    assert state["func_evals"] > state["n_iter"] > 1


def test_a_closure_may_be_given_by_name(stepped):
    by_name, by_position = Problem(make("Adam")), Problem(make("Adam"))
    scaler = GradScaler()
    scaler.step(by_name.optimizer, closure=by_name.closure(scaler))
    scaler.update()
    scaler.step(by_position.optimizer, by_position.closure(scaler))
    assert stepped(by_name.optimizer) == stepped(by_position.optimizer)


@pytest.mark.parametrize(
    ("arguments", "named"), [((None,), {}), ((), {"closure": None})], ids=["by position", "by name"]
)
def test_a_closure_of_none_is_no_closure(arguments, named, backward, parameters, finite):
    optimizer, scaler = tp.optim.SGD(parameters, lr=1.0), GradScaler()
    before = [(p - g).tolist() for p, g in zip(parameters, finite, strict=True)]
    backward(scaler, parameters, finite)
    assert scaler.step(optimizer, *arguments, **named) is None
    assert [parameter.tolist() for parameter in parameters] == before


def test_lbfgs_without_a_closure_is_told_so_by_tensorplay(backward, parameters, finite):
    scaler = GradScaler()
    backward(scaler, parameters, finite)
    with pytest.raises(TypeError, match="closure"):
        scaler.step(tp.optim.LBFGS(parameters))


def test_a_step_with_a_closure_counts_as_one_finite_step():
    problem, scaler = Problem(make("LBFGS")), GradScaler()
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    assert len(problem.losses) > 1
    assert scaler.state_dict()["_growth_tracker"] == 1
    assert scaler.last_step(problem.optimizer).applied


def test_gradients_are_left_unscaled(exact):
    problem, plain, scaler = Problem(make("SGD")), Problem(make("SGD")), GradScaler()
    scaler.step(problem.optimizer, problem.closure(scaler))
    plain.unscaled_step()
    mine, theirs = ([p.grad for p in each.model.parameters()] for each in (problem, plain))
    assert exact(mine) == exact(theirs)


# Overflow that a lower scale mends.


def test_an_overflow_is_repeated_at_lower_scales_and_the_batch_is_not_lost(kind):
    ours, plain = Problem(kind, tp.float16), Problem(kind, tp.float16)
    scaler = GradScaler(init_scale=2.0**24)
    scaler.step(ours.optimizer, ours.closure(scaler))
    plain.unscaled_step()
    assert scaler.last_step(ours.optimizer).applied
    assert scaler.last_step(ours.optimizer).scale == ours.scales[-1] < 2.0**17
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert tp.allclose(mine, theirs, rtol=1e-2, atol=1e-3)


def test_each_repetition_backs_off_once():
    problem, scaler = Problem(make("SGD")), GradScaler(init_scale=1024.0)
    scaler.step(problem.optimizer, problem.closure(scaler, overflow_from=1, overflow_to=3))
    assert problem.scales == [1024.0, 512.0, 256.0]


def test_the_scale_that_worked_is_kept_and_the_step_counts_as_finite():
    problem, scaler = Problem(make("SGD"), tp.float16), GradScaler(init_scale=2.0**24)
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    assert scaler.get_scale() == problem.scales[-1] < 2.0**24
    assert scaler.state_dict()["_growth_tracker"] == 1


def test_an_overflow_in_a_later_evaluation_is_repeated_too(stepped):
    problem, plain = Problem(make("LBFGS")), Problem(make("LBFGS"))
    scaler = GradScaler(init_scale=1024.0)
    scaler.step(problem.optimizer, problem.closure(scaler, overflow_from=3, overflow_to=4))
    plain.unscaled_step()
    assert problem.scales[:5] == [1024.0, 1024.0, 1024.0, 512.0, 512.0]
    assert stepped(problem.optimizer) == stepped(plain.optimizer)


def test_gradients_that_overflowed_do_not_reach_the_repetition():
    """A closure that leaves the zeroing to the loop accumulates into what it finds."""
    parameter = tp.nn.Parameter(tp.ones(()))
    scaler = GradScaler(init_scale=2.0**17)

    def closure():
        loss = parameter.half().float()
        scaler.scale(loss).backward()
        return loss

    scaler.step(tp.optim.SGD([parameter], lr=1.0), closure)
    assert parameter.item() == 0.0


def test_hysteresis_does_not_hold_a_repetition_back():
    problem = Problem(make("SGD"), tp.float16)
    scaler = GradScaler(policy=DynamicScale(init_scale=2.0**20, hysteresis=3))
    scaler.step(problem.optimizer, problem.closure(scaler))
    assert problem.scales[:3] == [2.0**20, 2.0**19, 2.0**18]
    assert scaler.last_step(problem.optimizer).applied


def test_the_other_optimizer_is_unscaled_by_its_own_backward_pass_s_scale():
    mended, other = tp.nn.Parameter(tp.ones(())), tp.nn.Parameter(tp.ones(()))
    with_closure, without = tp.optim.SGD([mended], lr=1.0), tp.optim.SGD([other], lr=1.0)
    scaler = GradScaler(init_scale=2.0**20)

    def closure():
        with_closure.zero_grad()
        loss = mended.half().float() * 0.5
        scaler.scale(loss).backward()
        return loss

    scaler.scale(other * 0.25).backward()
    scaler.step(with_closure, closure)
    scaler.step(without)
    scaler.update()
    assert (mended.item(), other.item()) == (0.5, 0.75)
    assert scaler.get_scale() == scaler.last_step(with_closure).scale == 2.0**16


def test_a_scale_set_by_hand_goes_before_the_one_that_a_closure_backed_off_to():
    problem, scaler = Problem(make("SGD")), GradScaler(init_scale=1024.0)
    scaler.step(problem.optimizer, problem.closure(scaler, overflow_from=1, overflow_to=3))
    scaler.update(64.0)
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    assert problem.scales[-1] == scaler.get_scale() == 64.0


# Overflow that no scale mends.


def test_after_the_last_retry_parameters_and_optimizer_state_are_as_before(kind, stepped):
    problem, scaler = Problem(kind), GradScaler(init_scale=1024.0, max_retries=2)
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    before = stepped(problem.optimizer)
    problem.losses.clear()
    overflowing = problem.closure(scaler, overflow_from=1)
    assert scaler.step(problem.optimizer, overflowing) is None
    assert stepped(problem.optimizer) == before
    assert scaler.last_step(problem.optimizer).reason == "retries_exhausted"
    assert len(problem.losses) == 3


@pytest.mark.parametrize("name", ["LBFGS", "LBFGS with line search"])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("evaluation", [2, 3])
def test_a_step_that_overflows_for_good_midway_is_rolled_back(
    name, steps_before, evaluation, stepped
):
    problem, scaler = Problem(make(name)), GradScaler(init_scale=1024.0, max_retries=1)
    for _ in range(steps_before):
        scaler.step(problem.optimizer, problem.closure(scaler))
        scaler.update()
    before = stepped(problem.optimizer)
    problem.losses.clear()
    scaler.step(problem.optimizer, problem.closure(scaler, overflow_from=evaluation))
    assert len(problem.losses) == evaluation + 1
    assert scaler.last_step(problem.optimizer).skipped
    assert stepped(problem.optimizer) == before


def test_after_a_rollback_training_goes_on_as_if_nothing_had_happened(kind, stepped):
    disturbed, undisturbed = Problem(kind), Problem(kind)
    for problem in (disturbed, undisturbed):
        scaler = GradScaler(init_scale=1024.0, max_retries=0)
        for turn in range(4):
            if turn == 2 and problem is disturbed:
                midway = 2 if isinstance(problem.optimizer, tp.optim.LBFGS) else 1
                overflow_from = len(problem.losses) + midway
                scaler.step(problem.optimizer, problem.closure(scaler, overflow_from=overflow_from))
                assert scaler.last_step(problem.optimizer).skipped
                scaler.update()
            scaler.step(problem.optimizer, problem.closure(scaler))
            scaler.update()
    assert stepped(disturbed.optimizer) == stepped(undisturbed.optimizer)


def test_each_failed_retry_and_the_skip_back_the_scale_off():
    problem, scaler = Problem(make("SGD")), GradScaler(init_scale=1024.0, max_retries=2)
    scaler.step(problem.optimizer, problem.closure(scaler, overflow_from=1))
    scaler.update()
    assert problem.scales == [1024.0, 512.0, 256.0]
    assert scaler.get_scale() == 128.0


def test_max_retries_of_a_call_goes_before_the_scaler_s():
    problem, scaler = Problem(make("SGD")), GradScaler(max_retries=5)
    scaler.step(problem.optimizer, problem.closure(scaler, overflow_from=1), max_retries=1)
    assert len(problem.losses) == 2


def test_a_fixed_scale_is_not_retried():
    problem, scaler = Problem(make("SGD")), GradScaler(policy=FixedScale(8.0))
    scaler.step(problem.optimizer, problem.closure(scaler, overflow_from=1))
    scaler.update()
    assert problem.scales == [8.0]
    assert scaler.get_scale() == 8.0


# What a closure may do besides.


def test_a_closure_that_raises_leaves_all_as_it_was(kind, stepped):
    problem, scaler = Problem(kind), GradScaler()
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    before, state = stepped(problem.optimizer), scaler.state_dict()
    with pytest.raises(ZeroDivisionError):
        scaler.step(problem.optimizer, lambda: 1 / 0)
    assert (stepped(problem.optimizer), scaler.state_dict()) == (before, state)
    scaler.step(problem.optimizer, problem.closure(scaler))
    assert scaler.last_step(problem.optimizer).applied


def test_a_closure_that_raises_in_a_repetition_leaves_the_scale_as_it_was():
    problem, scaler = Problem(make("SGD")), GradScaler(init_scale=1024.0)
    overflowing = problem.closure(scaler, overflow_from=1, overflow_to=2)
    with pytest.raises(ZeroDivisionError):
        scaler.step(problem.optimizer, lambda: 1 / 0 if problem.losses else overflowing())
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    assert problem.scales == [1024.0, 1024.0]
    assert scaler.get_scale() == 1024.0


def test_a_closure_that_raises_midway_is_rolled_back(stepped):
    problem, scaler = Problem(make("LBFGS")), GradScaler()
    fine, before = problem.closure(scaler), stepped(problem.optimizer)

    def closure():
        if len(problem.losses) == 2:
            raise ZeroDivisionError
        return fine()

    with pytest.raises(ZeroDivisionError):
        scaler.step(problem.optimizer, closure)
    assert stepped(problem.optimizer) == before


def test_a_closure_that_scales_no_loss_is_an_error(stepped):
    problem, scaler = Problem(make("SGD")), GradScaler()
    before = stepped(problem.optimizer)
    with pytest.raises(CallOrderError, match=r"scaler\.scale\(loss\)"):
        scaler.step(problem.optimizer, problem.loss)
    assert stepped(problem.optimizer) == before


def test_clipping_inside_clips_each_evaluation(stepped):
    problem, plain, scaler = Problem(make("LBFGS")), Problem(make("LBFGS")), GradScaler()
    fine = problem.closure(scaler)

    def closure():
        loss = fine()
        scaler.clip_grad_norm_(problem.optimizer, 0.5)
        return loss

    def plain_closure():
        plain.optimizer.zero_grad()
        loss = plain.loss()
        loss.backward()
        tp.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
        return loss

    scaler.step(problem.optimizer, closure)
    plain.optimizer.step(plain_closure)
    assert stepped(problem.optimizer) == stepped(plain.optimizer)


def test_the_gradient_is_on_in_a_closure_even_under_no_grad(stepped):
    problem, plain, scaler = Problem(make("SGD")), Problem(make("SGD")), GradScaler()
    with tp.no_grad():
        scaler.step(problem.optimizer, problem.closure(scaler))
    plain.unscaled_step()
    assert stepped(problem.optimizer) == stepped(plain.optimizer)
