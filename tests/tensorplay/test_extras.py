"""Beyond TensorPlay's scaler: true skips, last_step, minimize, policies, bounds of the scale."""

import copy
import math

import pytest
import tensorplay as tp

from gradscaler import DynamicScale, FixedScale, StepOutcome
from gradscaler.tensorplay import GradScaler

INF = math.inf
LARGEST = float.fromhex("0x1.fffffep+127")  # of float32


@pytest.fixture
def train(backward, randn):
    """Steps of one optimizer, by gradients that overflow where a step says so."""

    def train(scaler, optimizer, parameters, overflows, finish=None):
        for turn, overflow in enumerate(overflows):
            optimizer.zero_grad()
            gradients = randn(turn + 1, *[tuple(parameter.shape) for parameter in parameters])
            if overflow:
                gradients[-1].view(-1)[0] = overflow
            backward(scaler, parameters, gradients)
            if finish:
                finish()
            else:
                scaler.step(optimizer)
                scaler.update()

    return train


# A skipped step.


@pytest.mark.parametrize("bad", [INF, -INF, math.nan])
def test_a_first_step_that_is_skipped_leaves_everything_as_it_was(kind, bad, randn, stepped, train):
    parameters = [tp.nn.Parameter(value) for value in randn(0, *kind.shapes)]
    optimizer = kind(parameters)
    before = stepped(optimizer)
    train(GradScaler(), optimizer, parameters, [bad])
    assert stepped(optimizer) == before


def test_steps_that_are_skipped_might_as_well_not_have_been(kind, randn, stepped, train):
    after = []
    for overflows in ([None, None], [INF, None, math.nan, -INF, None]):
        parameters = [tp.nn.Parameter(value) for value in randn(0, *kind.shapes)]
        optimizer, scaler = kind(parameters), GradScaler(policy=FixedScale(8.0))
        for overflow in overflows:
            train(scaler, optimizer, parameters, [overflow])  # the same gradients each time
        after.append(stepped(optimizer))
    assert after[0] == after[1]


def test_unscaling_before_a_step_changes_nothing_of_it(kind, randn, backward, stepped):
    after = []
    for explicit in (False, True):
        parameters = [tp.nn.Parameter(value) for value in randn(0, *kind.shapes)]
        optimizer, scaler = kind(parameters), GradScaler()
        backward(scaler, parameters, randn(1, *kind.shapes))
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        after.append(stepped(optimizer))
    assert after[0] == after[1]


@pytest.mark.parametrize("overflowed", ["first", "second"])
def test_an_overflow_skips_its_own_optimizer_alone(overflowed, parameters):
    optimizers = {
        name: tp.optim.SGD([parameter], lr=1.0)
        for name, parameter in zip(("first", "second"), parameters, strict=True)
    }
    scaler = GradScaler()
    factor = [INF if name == overflowed else 1.0 for name in optimizers]
    scaler.scale(sum((p * f).sum() for p, f in zip(parameters, factor, strict=True))).backward()
    for optimizer in optimizers.values():
        scaler.unscale_(optimizer)  # of both, before either steps
    for optimizer in optimizers.values():
        scaler.step(optimizer)
    assert [name for name, o in optimizers.items() if scaler.last_step(o).skipped] == [overflowed]


def test_any_optimizer_s_overflow_backs_the_scale_off(parameters):
    optimizers = [tp.optim.SGD([parameter]) for parameter in parameters]
    scaler = GradScaler(init_scale=8.0)
    scaler.scale((parameters[0] * INF).sum() + parameters[1].sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_gradients_are_unscaled_by_the_scale_of_their_backward_pass(parameters):
    """The trap of a scale that moves before gradients are unscaled: they are halved in growing."""
    optimizer, scaler = tp.optim.SGD(parameters, lr=1.0), GradScaler(growth_interval=1)
    before = parameters[0].tolist()
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(sum(parameter.sum() for parameter in parameters)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**19
    moved = tp.tensor(before) - parameters[0]
    assert moved.flatten().tolist() == pytest.approx([3.0] * 6)


# last_step.


@pytest.fixture(params=["loop-SGD", "fused-SGD", "fused-Adagrad", "fused-AdamW"])
def optimizer(request, kinds, parameters):
    return kinds[request.param](parameters)


def test_last_step_tells_of_a_step_that_was_taken(scaler, optimizer, parameters, train):
    train(scaler, optimizer, parameters, [INF, None])
    outcome = scaler.last_step(optimizer)
    assert (outcome.applied, outcome.skipped, outcome.found_inf) == (True, False, False)
    assert (outcome.reason, outcome.scale) == ("finite", 512.0)


def test_last_step_tells_of_a_step_that_was_skipped(scaler, optimizer, parameters, train):
    train(scaler, optimizer, parameters, [None, INF])
    outcome = scaler.last_step(optimizer)
    assert (outcome.applied, outcome.skipped, outcome.found_inf) == (False, True, True)
    assert (outcome.reason, outcome.scale) == ("overflow", 1024.0)


def test_last_step_says_whether_parameters_moved(scaler, optimizer, parameters, train, exact):
    for overflow in (None, INF, None, math.nan, None):
        before = exact(parameters)
        train(scaler, optimizer, parameters, [overflow])
        assert scaler.last_step(optimizer).applied == (exact(parameters) != before)


def test_an_outcome_stays_what_it_was(scaler, optimizer, parameters, train):
    train(scaler, optimizer, parameters, [INF])
    outcome = scaler.last_step(optimizer)
    train(scaler, optimizer, parameters, [None, None])
    assert (outcome.reason, outcome.scale) == ("overflow", 1024.0)


def test_last_step_is_each_optimizer_s_own(scaler, parameters):
    fine, overflowed = (tp.optim.SGD([parameter]) for parameter in parameters)
    scaler.scale(parameters[0].sum() + (parameters[1] * INF).sum()).backward()
    scaler.step(fine)
    scaler.step(overflowed)
    assert scaler.last_step(fine).applied
    assert scaler.last_step(overflowed).skipped


def test_disabled_last_step_says_so(parameters):
    optimizer, scaler = tp.optim.SGD(parameters), GradScaler(enabled=False)
    scaler.step(optimizer)
    outcome = scaler.last_step(optimizer)
    assert isinstance(outcome, StepOutcome)
    assert (outcome.applied, outcome.reason, outcome.scale) == (True, "disabled", 1.0)


def test_a_schedule_can_count_applied_steps_alone(parameters, train):
    optimizer, scaler = tp.optim.SGD(parameters, lr=1.0), GradScaler()
    scheduler = tp.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    def finish():
        scaler.step(optimizer)
        scaler.update()
        if scaler.last_step(optimizer).applied:
            scheduler.step()

    train(scaler, optimizer, parameters, [INF, None, INF, None], finish)
    assert optimizer.param_groups[0]["lr"] == 0.25


# minimize.


@pytest.mark.parametrize("overflow", [None, INF])
@pytest.mark.parametrize("arguments", [(), (tp.ones(()),)], ids=["alone", "with the scaled loss"])
def test_minimize_is_a_step_and_an_update(overflow, arguments, parameters, train, stepped):
    twins = copy.deepcopy(parameters)
    optimizer, twin_optimizer = tp.optim.Adam(parameters), tp.optim.Adam(twins)
    scaler, twin = GradScaler(growth_interval=1), GradScaler(growth_interval=1)
    train(scaler, optimizer, parameters, [overflow], lambda: scaler.minimize(optimizer, *arguments))
    train(twin, twin_optimizer, twins, [overflow])
    assert stepped(optimizer) == stepped(twin_optimizer)
    assert scaler.state_dict() == twin.state_dict()


def test_minimize_returns_what_the_optimizer_s_step_returns(scaler, parameters, train):
    optimizer, returned = tp.optim.SGD(parameters), []
    optimizer.step = lambda: "stepped"
    train(
        scaler,
        optimizer,
        parameters,
        [None, INF],
        lambda: returned.append(scaler.minimize(optimizer)),
    )
    assert returned == ["stepped", None]


# policy=.


def test_a_fixed_scale_never_moves_and_still_skips(parameters, train, exact):
    optimizer, scaler = tp.optim.SGD(parameters), GradScaler(policy=FixedScale(8.0))
    before = exact(parameters)
    train(scaler, optimizer, parameters, [INF, math.nan])
    assert exact(parameters) == before
    train(scaler, optimizer, parameters, [None] * 3)
    assert exact(parameters) != before
    assert scaler.get_scale() == 8.0


def test_a_policy_moves_the_scale_by_its_own_rule(parameters, train):
    policy = DynamicScale(init_scale=8.0, growth_interval=2, hysteresis=2, min_scale=4.0)
    optimizer, scaler, scales = tp.optim.SGD(parameters), GradScaler(policy=policy), []
    for overflow in (INF, INF, INF, INF, None, None):
        train(scaler, optimizer, parameters, [overflow])
        scales.append(scaler.get_scale())
    assert scales == [8.0, 4.0, 4.0, 4.0, 4.0, 8.0]


def test_the_preset_of_tensorplay_is_the_default(parameters, train):
    by_preset, by_default = GradScaler(policy=DynamicScale.tensorplay()), GradScaler()
    for scaler in (by_preset, by_default):
        train(scaler, tp.optim.SGD(parameters), parameters, [INF, None, None])
    assert by_preset.state_dict() == by_default.state_dict()


@pytest.mark.parametrize(
    "policy",
    [
        FixedScale(8.0),
        DynamicScale(init_scale=8.0, hysteresis=3, growth_interval=5),
        DynamicScale(init_scale=8.0, min_scale=2.0, max_scale=16.0, growth_interval=1),
    ],
    ids=["fixed", "hysteresis", "bounds"],
)
@pytest.mark.parametrize("overflows", [[INF], [INF, INF], [None, INF, None]], ids=str)
def test_a_saved_policy_goes_on_where_it_was(policy, overflows, parameters, train):
    optimizer = tp.optim.SGD(parameters)
    scaler, resumed = GradScaler(policy=policy), GradScaler(policy=policy)
    train(scaler, optimizer, parameters, overflows)
    resumed.load_state_dict(scaler.state_dict())
    for each in (scaler, resumed):
        train(each, optimizer, parameters, [INF, None, INF, INF, INF])
    assert resumed.state_dict() == scaler.state_dict()


def test_the_scale_does_not_grow_to_inf(parameters):
    """TensorPlay's own does, and is of no use from then on."""
    scaler = GradScaler(init_scale=2.0**126, growth_interval=1)
    zero = [tp.zeros(tuple(parameter.shape)) for parameter in parameters]
    for _ in range(4):
        scaler.scale(tp.ones(()))
        for parameter, gradient in zip(parameters, zero, strict=True):
            parameter.grad = gradient.clone()
        scaler.step(tp.optim.SGD(parameters))
        scaler.update()
    assert scaler.get_scale() == 2.0**127 < LARGEST


def test_the_scale_does_not_sink_to_zero(parameters, train):
    """TensorPlay's own does, and then divides by it."""
    scaler = GradScaler(init_scale=2.0**-124)
    train(scaler, tp.optim.SGD(parameters), parameters, [INF] * 4)
    assert scaler.get_scale() == 2.0**-126
    assert math.isfinite(1 / scaler.get_scale())
