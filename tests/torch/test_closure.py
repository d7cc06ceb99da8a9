"""step(optimizer, closure): each evaluation unscaled, repeated on overflow, undone at need."""

import copy

import pytest
import torch

from gradscaler import CallOrderError, DynamicScale, FixedScale
from gradscaler.torch import GradScaler

INF = float("inf")
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.5, "max_iter": 5}),
    "LBFGS with line search": (
        torch.optim.LBFGS,
        {"max_iter": 5, "line_search_fn": "strong_wolfe"},
    ),
}


@pytest.fixture(params=OPTIMIZERS)
def kind(request):
    optimizer, options = OPTIMIZERS[request.param]
    return lambda parameters: optimizer(parameters, **options)


class Problem:
    """A small regression in float32, its gradients cast to ``dtype`` on their way back."""

    def __init__(self, kind, dtype=torch.float32):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)
        )
        self.inputs, self.targets = torch.randn(8, 4), torch.randn(8, 1)
        self.dtype = dtype
        self.optimizer = kind(self.model.parameters())
        self.losses = []  # one an evaluation
        self.scales = []

    def loss(self):
        outputs = self.model(self.inputs).to(self.dtype).float()
        self.losses.append((outputs - self.targets).square().sum())
        return self.losses[-1]

    def closure(self, scaler, returned="loss", overflow_from=None):
        """A closure for ``scaler``; its gradients overflow from an evaluation on, if told so."""

        def closure():
            self.optimizer.zero_grad()
            loss = self.loss()
            scaled = scaler.scale(loss)
            scaled.backward()
            self.scales.append((scaled / loss).item())
            if overflow_from is not None and len(self.losses) >= overflow_from:
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


def test_the_parameters_and_losses_are_those_of_the_unscaled_optimizer(kind, stepped, exact):
    scaler = GradScaler(init_scale=2.0**20)
    ours, plain = Problem(kind), Problem(kind)
    for _ in range(4):
        loss = scaler.step(ours.optimizer, ours.closure(scaler))
        scaler.update()
        assert exact(loss) == exact(plain.unscaled_step())
        assert stepped(ours.optimizer) == stepped(plain.optimizer)
    assert exact(ours.losses) == exact(plain.losses)


def test_a_closure_may_return_the_scaled_loss(kind, stepped, exact):
    scaler = GradScaler(init_scale=2.0**20)
    ours, plain = Problem(kind), Problem(kind)
    for _ in range(3):
        loss = scaler.step(ours.optimizer, ours.closure(scaler, returned="scaled"))
        scaler.update()
        assert exact(loss) == exact(plain.unscaled_step())
    assert stepped(ours.optimizer) == stepped(plain.optimizer)


@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
def test_a_closure_of_none_is_no_closure(by_name, backward, parameters, finite, stepped):
    twins = copy.deepcopy(parameters)
    optimizer, twin = torch.optim.Adam(parameters), torch.optim.Adam(twins)
    for each, owned, arguments, named in (
        (optimizer, parameters, () if by_name else (None,), {"closure": None} if by_name else {}),
        (twin, twins, (), {}),
    ):
        scaler = GradScaler()
        backward(scaler, owned, finite)
        assert scaler.step(each, *arguments, **named) is None
    assert stepped(optimizer) == stepped(twin)


def test_a_closure_may_be_given_by_name(stepped):
    by_name, by_position = (Problem(torch.optim.Adam) for _ in range(2))
    scaler = GradScaler()
    scaler.step(by_name.optimizer, closure=by_name.closure(scaler))
    scaler.update()
    scaler.step(by_position.optimizer, by_position.closure(scaler))
    assert stepped(by_name.optimizer) == stepped(by_position.optimizer)


def test_a_step_with_a_closure_counts_as_one_finite_step():
    problem = Problem(OPTIMIZERS["LBFGS"][0])
    scaler = GradScaler()
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    assert len(problem.losses) > 1
    assert scaler.state_dict()["_growth_tracker"] == 1
    assert scaler.last_step(problem.optimizer).applied


def test_gradients_are_left_unscaled(exact):
    problem, plain = Problem(torch.optim.SGD), Problem(torch.optim.SGD)
    scaler = GradScaler()
    scaler.step(problem.optimizer, problem.closure(scaler))
    plain.unscaled_step()
    assert exact([p.grad for p in problem.model.parameters()]) == exact(
        [p.grad for p in plain.model.parameters()]
    )


# Overflow that a lower scale mends.


def test_an_overflow_is_repeated_at_lower_scales_and_the_batch_is_not_lost(kind, stepped):
    scaler = GradScaler(init_scale=2.0**24)
    ours, plain = Problem(kind, torch.float16), Problem(kind, torch.float16)
    scaler.step(ours.optimizer, ours.closure(scaler))
    outcome = scaler.last_step(ours.optimizer)
    assert outcome.applied
    assert ours.scales[0] == 2.0**24
    assert ours.scales == sorted(ours.scales, reverse=True)
    assert outcome.scale == ours.scales[-1] < 2.0**17
    plain.unscaled_step()
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-2, atol=1e-3)


def test_each_repetition_backs_off_once():
    problem = Problem(torch.optim.SGD)
    scaler = GradScaler(init_scale=1024.0)
    fine = problem.closure(scaler)

    def overflowing_twice():
        loss = fine()
        if len(problem.losses) <= 2:
            problem.model[0].bias.grad[0] = INF
        return loss

    scaler.step(problem.optimizer, overflowing_twice)
    assert problem.scales == [1024.0, 512.0, 256.0]


def test_the_scale_that_worked_is_kept_and_the_step_counts_as_finite():
    problem = Problem(torch.optim.SGD, torch.float16)
    scaler = GradScaler(init_scale=2.0**24)
    scaler.step(problem.optimizer, problem.closure(scaler))
    assert scaler.get_scale() == 2.0**24  # until update(), as ever
    scaler.update()
    assert scaler.get_scale() == problem.scales[-1]
    assert scaler.state_dict()["_growth_tracker"] == 1


def set_by_hand(scaler):
    scaler.update(4.0)


def loaded(scaler):
    scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
    scaler.update()


def assigned(scaler):
    scaler._scale = torch.tensor(4.0)
    scaler.update()


@pytest.mark.parametrize("way", [set_by_hand, loaded, assigned])
def test_a_scale_that_is_set_after_a_backoff_is_the_scale(way):
    problem = Problem(torch.optim.SGD, torch.float16)
    scaler = GradScaler(init_scale=2.0**24)
    scaler.step(problem.optimizer, problem.closure(scaler))
    way(scaler)
    problem.scales.clear()
    scaler.step(problem.optimizer, problem.closure(scaler))
    assert problem.scales == [scaler.get_scale()] == [4.0]


def test_an_overflow_forgets_the_finite_steps_before_it():
    problem = Problem(torch.optim.SGD, torch.float16)
    scaler = GradScaler(init_scale=2.0**24)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 100})
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    assert scaler.state_dict()["_growth_tracker"] == 1


def test_an_overflow_in_a_later_evaluation_is_repeated_too(stepped):
    kind = OPTIMIZERS["LBFGS"][0]
    problem, plain = Problem(kind), Problem(kind)
    scaler = GradScaler(init_scale=1024.0)
    fine = problem.closure(scaler)

    def overflowing_once():
        loss = fine()
        if len(problem.losses) == 3:
            problem.model[0].bias.grad[0] = INF
        return loss

    scaler.step(problem.optimizer, overflowing_once)
    plain.unscaled_step()
    assert problem.scales[:5] == [1024.0, 1024.0, 1024.0, 512.0, 512.0]
    assert len(problem.losses) == len(plain.losses) + 1
    assert stepped(problem.optimizer) == stepped(plain.optimizer)


def test_gradients_that_overflowed_do_not_reach_the_repetition():
    """A closure that leaves the zeroing to the loop accumulates into what it finds."""
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler(init_scale=2.0**17)

    def closure():
        loss = parameter.half().float()
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)
    assert parameter == 0.0


@pytest.mark.parametrize("hysteresis", [2, 3])
def test_hysteresis_does_not_hold_a_repetition_back(hysteresis):
    problem = Problem(torch.optim.SGD, torch.float16)
    scaler = GradScaler(policy=DynamicScale(init_scale=2.0**20, hysteresis=hysteresis))
    scaler.step(problem.optimizer, problem.closure(scaler))
    assert problem.scales[:3] == [2.0**20, 2.0**19, 2.0**18]
    assert scaler.last_step(problem.optimizer).applied


@pytest.mark.parametrize("reset", ["finite_step", "finite_step_only", "growth"])
def test_every_kind_of_hysteresis_backs_off_to_where_it_works(reset):
    problem = Problem(torch.optim.SGD, torch.float16)
    policy = DynamicScale(init_scale=2.0**20, hysteresis=2, hysteresis_reset=reset)
    scaler = GradScaler(policy=policy)
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    assert scaler.get_scale() == problem.scales[-1] < 2.0**17


def test_on_an_accelerator_closures_back_off_alike(off_the_host):
    problem = Problem(torch.optim.SGD, torch.float16)
    scaler = GradScaler(init_scale=2.0**20)
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    assert scaler.last_step(problem.optimizer).scale == scaler.get_scale() == problem.scales[-1]


# Overflow that no scale mends.


@pytest.mark.parametrize(("in_constructor", "in_call"), [(3, None), (9, 3), (0, 3)])
def test_max_retries_bounds_the_repetitions(in_constructor, in_call):
    problem = Problem(torch.optim.SGD)
    scaler = GradScaler(max_retries=in_constructor)
    given = {} if in_call is None else {"max_retries": in_call}
    result = scaler.step(problem.optimizer, problem.closure(scaler, overflow_from=1), **given)
    assert result is None
    assert len(problem.losses) == 1 + 3


def test_no_retries_is_one_evaluation():
    problem = Problem(torch.optim.SGD)
    scaler = GradScaler(max_retries=0)
    scaler.step(problem.optimizer, problem.closure(scaler, overflow_from=1))
    assert len(problem.losses) == 1
    assert scaler.last_step(problem.optimizer).reason == "retries_exhausted"


@pytest.mark.parametrize(("bad", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_a_bad_max_retries_is_refused_before_anything_is_done(bad, error, everything):
    problem = Problem(torch.optim.SGD)
    scaler = GradScaler()
    before = everything(scaler, problem.optimizer)
    with pytest.raises(error, match="max_retries"):
        scaler.step(problem.optimizer, problem.closure(scaler), max_retries=bad)
    assert everything(scaler, problem.optimizer) == before
    assert problem.losses == []


def without_gradients(stepped, optimizer):
    return {name: value for name, value in stepped(optimizer).items() if name != "gradients"}


@pytest.mark.parametrize("trained", [False, True], ids=["at once", "after a step"])
@pytest.mark.parametrize(
    ("name", "evaluation"),
    [*((name, 1) for name in OPTIMIZERS), ("LBFGS", 3), ("LBFGS with line search", 3)],
)
def test_a_skip_leaves_parameters_and_optimizer_bit_for_bit(name, evaluation, trained, stepped):
    optimizer, options = OPTIMIZERS[name]
    problem = Problem(lambda parameters: optimizer(parameters, **options))
    scaler = GradScaler()
    if trained:
        scaler.step(problem.optimizer, problem.closure(scaler))
        scaler.update()
        problem.losses.clear()
    before = without_gradients(stepped, problem.optimizer)
    closure = problem.closure(scaler, overflow_from=evaluation)
    assert scaler.step(problem.optimizer, closure) is None
    assert len(problem.losses) >= evaluation
    assert without_gradients(stepped, problem.optimizer) == before
    outcome = scaler.last_step(problem.optimizer)
    assert (outcome.skipped, outcome.reason) == (True, "retries_exhausted")


def test_after_a_skip_the_optimizer_goes_on_as_if_it_had_not_been(stepped):
    kind = OPTIMIZERS["LBFGS with line search"]
    problem, plain = (Problem(lambda p: kind[0](p, **kind[1])) for _ in range(2))
    scaler = GradScaler()
    for overflow_from in (None, 3, None):
        problem.losses.clear()
        scaler.step(problem.optimizer, problem.closure(scaler, overflow_from=overflow_from))
        scaler.update()
    for _ in range(2):
        plain.unscaled_step()
    assert stepped(problem.optimizer) == stepped(plain.optimizer)


class Restless(torch.optim.Optimizer):
    """Evaluates twice, and changes everything in between."""

    def __init__(self, params, adds=False):
        super().__init__(params, {"lr": 1.0, "betas": [0.5, 0.5]})
        self.adds = adds

    @torch.no_grad()
    def step(self, closure):
        for _ in range(2):
            closure()
            for group in self.param_groups:
                group["lr"] *= 0.5
                group["betas"][0] *= 0.5
                if self.adds:
                    group["added"] = True
                for parameter in group["params"]:
                    parameter.add_(1.0)
                    self.state[parameter].setdefault("history", []).append(parameter.clone())


@pytest.mark.parametrize("adds", [False, True], ids=["changes options", "adds one"])
def test_what_an_optimizer_changed_between_evaluations_is_put_back(adds, stepped):
    problem = Problem(lambda parameters: Restless(parameters, adds))
    scaler = GradScaler(max_retries=1)
    before = without_gradients(stepped, problem.optimizer)
    scaler.step(problem.optimizer, problem.closure(scaler, overflow_from=2))
    assert len(problem.losses) == 3
    assert without_gradients(stepped, problem.optimizer) == before


def test_after_a_skip_the_scale_has_backed_off_once_an_evaluation():
    problem = Problem(torch.optim.SGD)
    scaler = GradScaler(init_scale=1024.0, max_retries=2)
    scaler.step(problem.optimizer, problem.closure(scaler, overflow_from=1))
    scaler.update()
    assert problem.scales == [1024.0, 512.0, 256.0]
    assert scaler.get_scale() == 128.0
    assert scaler.last_step(problem.optimizer).scale == 256.0


@pytest.mark.parametrize(
    "policy", [FixedScale(1024.0), DynamicScale(init_scale=1024.0, min_scale=1024.0)]
)
def test_a_scale_that_cannot_back_off_is_not_tried_twice(policy):
    problem = Problem(torch.optim.SGD)
    scaler = GradScaler(policy=policy)
    scaler.step(problem.optimizer, problem.closure(scaler, overflow_from=1))
    scaler.update()
    assert problem.scales == [1024.0]
    assert scaler.last_step(problem.optimizer).reason == "retries_exhausted"
    assert scaler.get_scale() == 1024.0


# Closures that misbehave.


@pytest.mark.parametrize("evaluation", [1, 3], ids=["first", "later"])
def test_a_closure_that_raises_leaves_all_as_before(evaluation, stepped, everything):
    problem = Problem(OPTIMIZERS["LBFGS"][0])
    scaler = GradScaler()
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    problem.losses.clear()
    scaler_before = everything(scaler)
    before = without_gradients(stepped, problem.optimizer)
    fine = problem.closure(scaler)

    def raising():
        loss = fine()
        if len(problem.losses) == evaluation:
            raise ZeroDivisionError
        return loss

    with pytest.raises(ZeroDivisionError):
        scaler.step(problem.optimizer, raising)
    assert everything(scaler) == scaler_before
    assert without_gradients(stepped, problem.optimizer) == before


def test_after_a_closure_raised_the_step_can_be_taken(stepped):
    problem, plain = (Problem(torch.optim.Adam) for _ in range(2))
    scaler = GradScaler(init_scale=1024.0)
    fine = problem.closure(scaler)

    def raising():
        fine()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        scaler.step(problem.optimizer, raising)
    scaler.step(problem.optimizer, fine)
    scaler.update()
    plain.unscaled_step()
    assert stepped(problem.optimizer) == stepped(plain.optimizer)


def test_a_backoff_in_a_closure_that_raises_then_is_forgotten():
    problem = Problem(torch.optim.SGD)
    scaler = GradScaler(init_scale=1024.0)
    fine = problem.closure(scaler, overflow_from=1)

    def raising():
        if len(problem.losses) == 2:
            raise ZeroDivisionError
        return fine()

    with pytest.raises(ZeroDivisionError):
        scaler.step(problem.optimizer, raising)
    problem.losses.clear()
    scaler.step(problem.optimizer, problem.closure(scaler))
    assert problem.scales == [1024.0, 512.0, 1024.0]


def test_a_closure_that_raises_leaves_the_scale_that_worked_for_another():
    scaler = GradScaler(init_scale=2.0**20)
    first, second = Problem(torch.optim.SGD, torch.float16), Problem(torch.optim.SGD)
    scaler.step(first.optimizer, first.closure(scaler))
    fine = second.closure(scaler)

    def raising():
        if not second.losses:
            fine()
            raise ZeroDivisionError
        return fine()

    with pytest.raises(ZeroDivisionError):
        scaler.step(second.optimizer, raising)
    scaler.step(second.optimizer, raising)
    assert second.scales == [first.scales[-1]] * 2


def test_further_arguments_reach_the_optimizer():
    class Noting(torch.optim.SGD):
        def step(self, closure, *args, **kwargs):
            noted.append((args, kwargs))
            return super().step(closure)

    noted, problem, scaler = [], Problem(Noting), GradScaler()
    scaler.step(problem.optimizer, problem.closure(scaler), 1, two=2)
    assert noted == [((1,), {"two": 2})]


def test_after_a_closure_that_raised_gradients_can_be_unscaled_by_hand():
    problem, scaler = Problem(torch.optim.SGD), GradScaler()
    fine = problem.closure(scaler)

    def raising():
        fine()
        scaler.unscale_(problem.optimizer)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        scaler.step(problem.optimizer, raising)
    fine()
    scaler.unscale_(problem.optimizer)  # not "already called"


def test_gradients_unscaled_before_a_closure_that_raises_count_as_unscaled(
    backward, parameters, finite, exact
):
    optimizer = torch.optim.SGD(parameters)
    scaler = GradScaler(init_scale=1024.0)
    backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    unscaled = exact([parameter.grad for parameter in parameters])

    def raising():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer, raising)
    scaler.step(optimizer)
    assert exact([parameter.grad for parameter in parameters]) == unscaled


def test_a_closure_that_never_scales_is_an_error(stepped):
    problem = Problem(torch.optim.SGD)
    scaler = GradScaler()
    before = without_gradients(stepped, problem.optimizer)

    def forgetful():
        problem.optimizer.zero_grad()
        loss = problem.loss()
        loss.backward()
        return loss

    with pytest.raises(CallOrderError, match=r"scaler\.scale\(loss\)\.backward\(\)"):
        scaler.step(problem.optimizer, forgetful)
    assert without_gradients(stepped, problem.optimizer) == before


def test_a_closure_that_makes_no_gradients_is_stepped_over(stepped):
    problem = Problem(torch.optim.Adam)
    scaler = GradScaler()
    before = stepped(problem.optimizer)
    result = scaler.step(problem.optimizer, lambda: scaler.scale(problem.loss()))
    scaler.update()
    assert result is None
    assert stepped(problem.optimizer) == before
    assert scaler.last_step(problem.optimizer).reason == "no_gradients"
    assert scaler.state_dict()["_growth_tracker"] == 0


def test_a_closure_runs_with_gradients_enabled():
    problem = Problem(torch.optim.SGD)
    scaler = GradScaler()
    with torch.no_grad():
        scaler.step(problem.optimizer, problem.closure(scaler))
    assert scaler.last_step(problem.optimizer).applied


def test_float16_gradients_are_refused_and_nothing_is_stepped(stepped):
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter])
    scaler = GradScaler(init_scale=8.0)

    def closure():
        optimizer.zero_grad()
        loss = parameter.float().sum()
        scaler.scale(loss).backward()
        return loss

    before = without_gradients(stepped, optimizer)
    with pytest.raises(ValueError, match="float16"):
        scaler.step(optimizer, closure)
    assert without_gradients(stepped, optimizer) == before


# Calls inside the closure.


def test_gradients_may_be_unscaled_inside_the_closure(stepped):
    problem, plain = (Problem(torch.optim.Adam) for _ in range(2))
    scaler = GradScaler()
    fine = problem.closure(scaler)
    norms = []

    def closure():
        loss = fine()
        scaler.unscale_(problem.optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(problem.model.parameters(), 0.01))
        return loss

    scaler.step(problem.optimizer, closure)

    def plain_closure():
        problem_loss = plain.loss()
        problem_loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.01))
        return problem_loss

    plain.optimizer.step(plain_closure)
    assert norms[0] == norms[1]
    assert stepped(problem.optimizer) == stepped(plain.optimizer)


def test_clipping_inside_the_closure_reaches_every_evaluation(stepped):
    kind = OPTIMIZERS["LBFGS"]
    problem, plain = (Problem(lambda p: kind[0](p, **kind[1])) for _ in range(2))
    scaler = GradScaler()
    fine = problem.closure(scaler)

    def closure():
        loss = fine()
        scaler.clip_grad_norm_(problem.optimizer, 0.5)
        return loss

    def plain_closure():
        plain.optimizer.zero_grad()
        loss = plain.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
        return loss

    scaler.step(problem.optimizer, closure)
    plain.optimizer.step(plain_closure)
    assert stepped(problem.optimizer) == stepped(plain.optimizer)


def test_unscaling_inside_uses_the_scale_of_that_evaluation():
    problem = Problem(torch.optim.SGD, torch.float16)
    scaler = GradScaler(init_scale=2.0**20)
    fine = problem.closure(scaler)
    norms = []

    def closure():
        loss = fine()
        norms.append(scaler.clip_grad_norm_(problem.optimizer, INF).item())
        return loss

    scaler.step(problem.optimizer, closure)
    plain = Problem(torch.optim.SGD, torch.float16)
    plain.unscaled_step()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.model.parameters()])
    assert len(problem.scales) > 1
    assert norms[-1] == pytest.approx(norm.item(), rel=1e-2)


# Two optimizers.


class Two:
    """An optimizer that steps with a closure that backs off, and one that steps without."""

    def __init__(self):
        self.mended = torch.nn.Parameter(torch.ones(()))
        self.other = torch.nn.Parameter(torch.ones(()))
        self.with_closure = torch.optim.SGD([self.mended], lr=1.0)
        self.without = torch.optim.SGD([self.other], lr=1.0)
        self.scaler = GradScaler(init_scale=2.0**20)

    def closure(self):
        self.with_closure.zero_grad()
        loss = self.mended.half().float() * 0.5
        self.scaler.scale(loss).backward()
        return loss

    def backward(self):
        self.scaler.scale(self.other * 0.25).backward()


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
def test_the_other_optimizer_is_unscaled_by_its_own_backward_pass_s_scale(calls):
    two = Two()
    for call in calls.split():
        if call == "backward":
            two.backward()
        elif call == "unscale":
            two.scaler.unscale_(two.without)
        elif call == "closure":
            two.scaler.step(two.with_closure, two.closure)
        else:
            two.scaler.step(two.without)
    two.scaler.update()
    assert two.scaler.last_step(two.with_closure).scale == 2.0**16
    assert two.scaler.last_step(two.without).scale == 2.0**20
    assert (two.mended.item(), two.other.item()) == (0.5, 0.75)
    assert two.scaler.get_scale() == 2.0**16


def test_the_other_optimizer_s_overflow_backs_off_further():
    two = Two()
    two.scaler.scale(two.other * INF).backward()
    two.scaler.step(two.with_closure, two.closure)
    two.scaler.step(two.without)
    two.scaler.update()
    assert two.scaler.last_step(two.with_closure).applied
    assert two.scaler.last_step(two.without).skipped
    assert two.scaler.get_scale() == 2.0**15


def test_a_second_closure_starts_at_the_scale_that_worked_for_the_first():
    scaler = GradScaler(init_scale=2.0**20)
    first, second = Problem(torch.optim.SGD, torch.float16), Problem(torch.optim.SGD)
    scaler.step(first.optimizer, first.closure(scaler))
    scaler.step(second.optimizer, second.closure(scaler))
    assert second.scales == [first.scales[-1]]
