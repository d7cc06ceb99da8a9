"""step(optimizer, closure): evaluations are unscaled, repeated on overflow, undone if need be."""

import paddle
import pytest
from paddle.utils import unique_name

from gradscaler import CallOrderError, DynamicScale, FixedScale
from gradscaler.paddle import GradScaler

# Paddle's LBFGS makes a tensor of a tensor, and Paddle warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")

INF = float("inf")
LARGEST_HALF = 65504.0


class Twice(paddle.optimizer.Adam):
    """Adam, stepped at two evaluations of a closure; of Paddle's own, LBFGS alone takes one."""

    def step(self, closure):
        loss = closure()
        super().step()
        closure()
        super().step()
        return loss


class TwiceMultiTensor(Twice):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, use_multi_tensor=True, **kwargs)
        self.__class__ = type("Adam", (TwiceMultiTensor,), {})  # Paddle goes by the name


OPTIMIZERS = {
    "LBFGS": (paddle.optimizer.LBFGS, {"learning_rate": 0.5, "max_iter": 5}),
    "LBFGS with line search": (
        paddle.optimizer.LBFGS,
        {"max_iter": 5, "line_search_fn": "strong_wolfe"},
    ),
    "Adam at two evaluations": (Twice, {"learning_rate": 0.1}),
    "multi-tensor Adam at two evaluations": (TwiceMultiTensor, {"learning_rate": 0.1}),
}


@pytest.fixture(params=OPTIMIZERS)
def kind(request):
    return request.param


class Problem:
    """A small regression, whose gradients overflow above 65504 if ``half``, as in fp16."""

    def __init__(self, kind="LBFGS", half=False):
        with unique_name.guard():
            paddle.seed(0)
            self.model = paddle.nn.Sequential(
                paddle.nn.Linear(4, 3), paddle.nn.Tanh(), paddle.nn.Linear(3, 1)
            )
            self.inputs, self.targets = paddle.randn([8, 4]), paddle.randn([8, 1])
            optimizer, options = OPTIMIZERS[kind]
            self.optimizer = optimizer(parameters=self.model.parameters(), **options)
        self.half = half
        self.losses = []  # one an evaluation
        self.scales = []

    def loss(self):
        self.losses.append((self.model(self.inputs) - self.targets).square().sum())
        return self.losses[-1]

    def closure(self, scaler, returned="loss", overflow=lambda evaluation: False):
        """A closure for ``scaler``; its gradients overflow at the evaluations it is told."""

        def closure():
            self.optimizer.clear_grad()
            loss = self.loss()
            scaled = scaler.scale(loss)
            scaled.backward()
            self.scales.append((scaled / loss).item())
            bias = self.model[0].bias
            if self.half and bias.grad.abs().max().item() > LARGEST_HALF:
                bias.grad = paddle.full_like(bias, INF)
            if overflow(len(self.losses)):
                bias.grad = paddle.full_like(bias, INF)
            return {"loss": loss, "scaled": scaled}[returned]

        return closure

    def unscaled_step(self):
        def closure():
            self.optimizer.clear_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return self.optimizer.step(closure)


@pytest.fixture
def without_gradients(stepped):
    return lambda optimizer: {
        name: value for name, value in stepped(optimizer).items() if name != "gradients"
    }


# Evaluations that stay finite.


@pytest.mark.parametrize("returned", ["loss", "scaled"])
def test_the_parameters_and_losses_are_those_of_the_unscaled_optimizer(
    kind, returned, stepped, exact
):
    scaler = GradScaler(init_loss_scaling=2.0**20)
    ours, plain = Problem(kind), Problem(kind)
    for _ in range(3):
        loss = scaler.step(ours.optimizer, ours.closure(scaler, returned))
        scaler.update()
        assert exact(loss) == exact(plain.unscaled_step())
        assert stepped(ours.optimizer) == stepped(plain.optimizer)
    assert exact(ours.losses) == exact(plain.losses)


def test_a_closure_may_be_given_by_name(stepped):
    by_name, by_position = Problem(), Problem()
    scaler = GradScaler()
    scaler.step(by_name.optimizer, closure=by_name.closure(scaler))
    scaler.update()
    scaler.step(by_position.optimizer, by_position.closure(scaler))
    assert stepped(by_name.optimizer) == stepped(by_position.optimizer)


def test_a_closure_of_none_is_no_closure(scaler, backward, parameters, finite):
    optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
    backward(scaler, parameters, finite)
    scaler.step(optimizer, closure=None)
    assert scaler.last_step(optimizer).applied


def test_a_step_with_a_closure_counts_as_one_finite_step():
    problem, scaler = Problem(), GradScaler()
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    assert len(problem.losses) > 1
    assert scaler.state_dict()["incr_count"] == 1
    assert scaler.last_step(problem.optimizer).applied


def test_a_closure_runs_with_gradients_enabled(stepped):
    problem, plain, scaler = Problem(), Problem(), GradScaler()
    with paddle.no_grad():
        scaler.step(problem.optimizer, problem.closure(scaler))
    plain.unscaled_step()
    assert stepped(problem.optimizer) == stepped(plain.optimizer)


def test_disabled_a_closure_is_the_optimizer_s_own(stepped):
    problem, plain, scaler = Problem(), Problem(), GradScaler(enable=False)
    scaler.step(problem.optimizer, problem.closure(scaler))
    plain.unscaled_step()
    assert stepped(problem.optimizer) == stepped(plain.optimizer)


# Overflow that a lower scale mends.


def test_an_overflow_is_repeated_at_lower_scales_and_the_batch_is_not_lost(kind, stepped):
    scaler = GradScaler(init_loss_scaling=2.0**24)
    ours, plain = Problem(kind, half=True), Problem(kind)
    scaler.step(ours.optimizer, ours.closure(scaler))
    outcome = scaler.last_step(ours.optimizer)
    assert outcome.applied
    assert ours.scales[0] == 2.0**24
    assert ours.scales == sorted(ours.scales, reverse=True)
    assert outcome.scale == ours.scales[-1] < 2.0**17
    plain.unscaled_step()
    assert stepped(ours.optimizer) == stepped(plain.optimizer)


def test_each_repetition_backs_off_once_whatever_the_hysteresis():
    problem = Problem()
    scaler = GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=3)
    scaler.step(problem.optimizer, problem.closure(scaler, overflow=lambda n: n <= 2))
    assert problem.scales[:4] == [1024.0, 512.0, 256.0, 256.0]


def test_the_scale_that_worked_is_kept_from_update_on_and_the_step_counts_as_finite():
    problem = Problem(half=True)
    scaler = GradScaler(init_loss_scaling=2.0**24)
    scaler.step(problem.optimizer, problem.closure(scaler))
    assert scaler.state_dict()["scale"] == [2.0**24]
    scaler.update()
    assert scaler.state_dict()["scale"] == [problem.scales[-1]]
    assert scaler.state_dict()["incr_count"] == 1


def test_an_overflow_in_a_later_evaluation_is_repeated_too(stepped):
    problem, plain = Problem(), Problem()
    scaler = GradScaler(init_loss_scaling=1024.0)
    scaler.step(problem.optimizer, problem.closure(scaler, overflow=lambda n: n == 3))
    plain.unscaled_step()
    assert problem.scales[:5] == [1024.0, 1024.0, 1024.0, 512.0, 512.0]
    assert len(problem.losses) == len(plain.losses) + 1
    assert stepped(problem.optimizer) == stepped(plain.optimizer)


def test_gradients_that_overflowed_do_not_reach_the_repetition(make):
    """A closure that leaves the clearing to the loop accumulates into what it finds."""
    (parameter,) = make([1])
    optimizer = Twice(0.1, parameters=[parameter])
    scaler = GradScaler(init_loss_scaling=2.0**17)
    evaluations = []

    def closure():
        evaluations.append(1)
        loss = parameter.sum()
        scaler.scale(loss).backward()
        if len(evaluations) == 1:
            parameter.grad = paddle.full_like(parameter, INF)
        return loss

    scaler.step(optimizer, closure)
    assert scaler.last_step(optimizer).applied
    assert len(evaluations) == 3


# Overflow that no scale mends.


@pytest.mark.parametrize(("in_constructor", "in_call"), [(3, None), (9, 3), (0, 3)])
def test_max_retries_bounds_the_repetitions(in_constructor, in_call):
    problem = Problem()
    scaler = GradScaler(max_retries=in_constructor)
    given = {} if in_call is None else {"max_retries": in_call}
    closure = problem.closure(scaler, overflow=lambda evaluation: True)
    assert scaler.step(problem.optimizer, closure, **given) is None
    assert len(problem.losses) == 1 + 3


@pytest.mark.parametrize("trained", [False, True], ids=["at once", "after a step"])
@pytest.mark.parametrize("evaluation", [1, 2])
def test_a_skip_leaves_parameters_and_optimizer_bit_for_bit(
    kind, evaluation, trained, without_gradients
):
    problem, scaler = Problem(kind), GradScaler()
    if trained:
        scaler.step(problem.optimizer, problem.closure(scaler))
        scaler.update()
        problem.losses.clear()
    before = without_gradients(problem.optimizer)
    closure = problem.closure(scaler, overflow=lambda n: n >= evaluation)
    assert scaler.step(problem.optimizer, closure) is None
    assert len(problem.losses) > evaluation
    assert without_gradients(problem.optimizer) == before
    outcome = scaler.last_step(problem.optimizer)
    assert (outcome.skipped, outcome.reason) == (True, "retries_exhausted")


@pytest.mark.parametrize("trained", [False, True], ids=["at once", "after a step"])
def test_after_a_skip_the_optimizer_goes_on_as_if_it_had_not_been(kind, trained, stepped):
    problem, plain = Problem(kind), Problem(kind)
    scaler = GradScaler()
    for overflow_from in ([99] if trained else []) + [2, 99, 99]:
        problem.losses.clear()
        closure = problem.closure(scaler, overflow=lambda n, start=overflow_from: n >= start)
        scaler.step(problem.optimizer, closure)
        scaler.update()
    for _ in range(3 if trained else 2):
        plain.unscaled_step()
    assert stepped(problem.optimizer) == stepped(plain.optimizer)


def test_a_rolled_back_optimizer_s_state_dict_has_the_keys_it_had():
    """By them a checkpoint is loaded."""
    problem, scaler = Problem("Adam at two evaluations"), GradScaler()
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    before = list(problem.optimizer.state_dict())
    problem.losses.clear()
    scaler.step(problem.optimizer, problem.closure(scaler, overflow=lambda n: n >= 2))
    assert scaler.last_step(problem.optimizer).skipped
    assert list(problem.optimizer.state_dict()) == before


def test_after_a_skip_the_scale_has_backed_off_as_after_as_many_overflows():
    problem = Problem()
    scaler = GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1, max_retries=2)
    scaler.step(problem.optimizer, problem.closure(scaler, overflow=lambda evaluation: True))
    scaler.update()
    assert problem.scales == [1024.0, 512.0, 256.0]
    assert scaler.state_dict()["scale"] == [128.0]


FIXED = {
    "use_dynamic_loss_scaling=False": {
        "init_loss_scaling": 1024.0,
        "use_dynamic_loss_scaling": False,
    },
    "FixedScale": {"policy": FixedScale(1024.0)},
    "at its floor": {"policy": DynamicScale(init_scale=1024.0, min_scale=1024.0)},
}


@pytest.mark.parametrize("options", FIXED.values(), ids=list(FIXED))
def test_a_scale_that_cannot_back_off_is_not_tried_twice(options):
    problem, scaler = Problem(), GradScaler(**options)
    scaler.step(problem.optimizer, problem.closure(scaler, overflow=lambda evaluation: True))
    scaler.update()
    assert problem.scales == [1024.0]
    assert scaler.last_step(problem.optimizer).reason == "retries_exhausted"


@pytest.mark.parametrize("options", list(FIXED.values())[:2], ids=list(FIXED)[:2])
def test_a_fixed_scale_never_moves_in_a_closure(options):
    problem, scaler = Problem(), GradScaler(**options)
    for overflow_at in (1, None):
        problem.losses.clear()
        closure = problem.closure(scaler, overflow=lambda n, at=overflow_at: n == at)
        scaler.step(problem.optimizer, closure)
        scaler.update()
    assert set(problem.scales) == {1024.0}


# Errors.


@pytest.mark.parametrize("evaluation", [1, 2])
def test_a_closure_that_raises_leaves_all_as_before(
    kind, evaluation, without_gradients, everything
):
    problem, scaler = Problem(kind), GradScaler()
    before = without_gradients(problem.optimizer), everything(scaler)
    fine = problem.closure(scaler)

    def closure():
        if len(problem.losses) + 1 == evaluation:
            raise ZeroDivisionError
        return fine()

    with pytest.raises(ZeroDivisionError):
        scaler.step(problem.optimizer, closure)
    assert (without_gradients(problem.optimizer), everything(scaler)) == before


def test_after_a_closure_raised_the_step_can_be_taken(kind, stepped):
    problem, plain, scaler = Problem(kind), Problem(kind), GradScaler()
    fine = problem.closure(scaler)

    def closure():
        if len(problem.losses) == 1:
            raise ZeroDivisionError
        return fine()

    with pytest.raises(ZeroDivisionError):
        scaler.step(problem.optimizer, closure)
    scaler.step(problem.optimizer, fine)
    plain.unscaled_step()
    assert stepped(problem.optimizer) == stepped(plain.optimizer)


def test_a_closure_that_never_scales_is_an_error(without_gradients):
    problem, scaler = Problem(), GradScaler()
    before = without_gradients(problem.optimizer)

    def closure():
        loss = problem.loss()
        loss.backward()
        return loss

    with pytest.raises(CallOrderError, match="scale"):
        scaler.step(problem.optimizer, closure)
    assert without_gradients(problem.optimizer) == before


def test_a_closure_that_makes_no_gradients_is_stepped_over(without_gradients):
    problem, scaler = Problem(), GradScaler()
    before = without_gradients(problem.optimizer)
    scaler.step(problem.optimizer, lambda: scaler.scale(paddle.ones([])))
    assert scaler.last_step(problem.optimizer).reason == "no_gradients"
    assert without_gradients(problem.optimizer) == before


def test_without_a_closure_lbfgs_says_itself_that_it_wants_one(
    scaler, backward, parameters, finite
):
    optimizer = paddle.optimizer.LBFGS(parameters=parameters)
    backward(scaler, parameters, finite)
    with pytest.raises(TypeError, match="closure"):
        scaler.step(optimizer)


# Inside the closure.


def test_gradients_may_be_unscaled_inside_the_closure(stepped):
    problem, plain, scaler = Problem(), Problem(), GradScaler()
    fine = problem.closure(scaler)

    def closure():
        loss = fine()
        scaler.unscale_(problem.optimizer)
        return loss

    scaler.step(problem.optimizer, closure)
    plain.unscaled_step()
    assert stepped(problem.optimizer) == stepped(plain.optimizer)


def test_clipping_inside_the_closure_reaches_every_evaluation():
    problem, scaler = Problem(), GradScaler()
    fine = problem.closure(scaler)

    def closure():
        loss = fine()
        scaler.clip_grad_norm_(problem.optimizer, 0.01)
        return loss

    seen = []
    gather = problem.optimizer._gather_flat_grad

    def gathering():
        flat = gather()
        seen.append(flat.norm().item())
        return flat

    problem.optimizer._gather_flat_grad = gathering
    scaler.step(problem.optimizer, closure)
    assert len(seen) == len(problem.losses) > 2
    assert max(seen) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("by_name", [False, True], ids=["its own", "replaced"])
def test_a_repetition_is_unscaled_by_its_own_scale(by_name, replace_unscale, stepped):
    """Also where Fleet has put an _unscale of its own, which divides by ``scaler._scale``."""
    problem, plain = Problem(), Problem()
    scaler = GradScaler(init_loss_scaling=1024.0)
    if by_name:
        replace_unscale(scaler)
    scaler.step(problem.optimizer, problem.closure(scaler, overflow=lambda n: n == 1))
    plain.unscaled_step()
    assert problem.scales[:2] == [1024.0, 512.0]
    assert scaler.last_step(problem.optimizer).scale == 512.0
    assert stepped(problem.optimizer) == stepped(plain.optimizer)


def test_another_optimizer_is_unscaled_by_the_scale_of_its_own_backward_pass(make, exact):
    """The closure's backoff waits for update()."""
    problem = Problem()
    (parameter,) = make([2])
    start = parameter.numpy()
    other = paddle.optimizer.SGD(1.0, parameters=[parameter])
    scaler = GradScaler(init_loss_scaling=1024.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(problem.optimizer, problem.closure(scaler, overflow=lambda n: n == 1))
    scaler.step(other)
    scaler.update()
    assert exact(parameter) == exact(paddle.to_tensor(start - 1.0))
    assert scaler.state_dict()["scale"] == [512.0]
