"""Beyond TensorPlay's scaler: skips of every kind of optimizer, minimize, policies."""

import copy
import math

import pytest
import tensorplay as tp

from gradscaler import DynamicScale, FixedScale
from gradscaler.tensorplay import GradScaler
from tests.support.eager import library
from tests.support.eager.base import normal

INF = math.inf


def train(scaler, optimizer, parameters, overflows, finish=None):
    """Steps of one optimizer, by gradients that overflow where a step says so."""
    for turn, overflow in enumerate(overflows):
        optimizer.zero_grad()
        gradients = normal(turn + 1, *[tuple(parameter.shape) for parameter in parameters])
        if overflow:
            gradients[-1].flat[0] = overflow
        library.backward(scaler, parameters, gradients)
        if finish:
            finish()
        else:
            scaler.step(optimizer)
            scaler.update()


# A skipped step.


@pytest.mark.parametrize("bad", [INF, -INF, math.nan])
def test_a_first_step_that_is_skipped_leaves_everything_as_it_was(kind, bad):
    parameters = library.parameters(*kind.shapes)
    optimizer = kind(parameters)
    before = library.kept(optimizer)
    train(GradScaler(), optimizer, parameters, [bad])
    assert library.kept(optimizer) == before


def test_steps_that_are_skipped_might_as_well_not_have_been(kind):
    after = []
    for overflows in ([None, None], [INF, None, math.nan, -INF, None]):
        parameters = library.parameters(*kind.shapes)
        optimizer, scaler = kind(parameters), GradScaler(policy=FixedScale(8.0))
        for overflow in overflows:
            train(scaler, optimizer, parameters, [overflow])  # the same gradients each time
        after.append(library.kept(optimizer))
    assert after[0] == after[1]


def test_unscaling_before_a_step_changes_nothing_of_it(kind):
    after = []
    for explicit in (False, True):
        parameters = library.parameters(*kind.shapes)
        optimizer, scaler = kind(parameters), GradScaler()
        library.backward(scaler, parameters, normal(1, *kind.shapes))
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        after.append(library.kept(optimizer))
    assert after[0] == after[1]


def test_a_schedule_can_count_applied_steps_alone(parameters):
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
def test_minimize_is_a_step_and_an_update(overflow, arguments, parameters):
    twins = copy.deepcopy(parameters)
    optimizer, twin_optimizer = tp.optim.Adam(parameters), tp.optim.Adam(twins)
    scaler, twin = GradScaler(growth_interval=1), GradScaler(growth_interval=1)
    train(scaler, optimizer, parameters, [overflow], lambda: scaler.minimize(optimizer, *arguments))
    train(twin, twin_optimizer, twins, [overflow])
    assert library.kept(optimizer) == library.kept(twin_optimizer)
    assert scaler.state_dict() == twin.state_dict()


def test_minimize_returns_what_the_optimizer_s_step_returns(scaler, parameters):
    optimizer, returned = tp.optim.SGD(parameters), []
    optimizer.step = lambda: "stepped"

    def finish():
        returned.append(scaler.minimize(optimizer))

    train(scaler, optimizer, parameters, [None, INF], finish)
    assert returned == ["stepped", None]


# policy=.


def test_a_fixed_scale_never_moves_and_still_skips(parameters):
    optimizer, scaler = tp.optim.SGD(parameters), GradScaler(policy=FixedScale(8.0))
    before = library.exact(parameters)
    train(scaler, optimizer, parameters, [INF, math.nan])
    assert library.exact(parameters) == before
    train(scaler, optimizer, parameters, [None] * 3)
    assert library.exact(parameters) != before
    assert scaler.get_scale() == 8.0


def test_a_policy_moves_the_scale_by_its_own_rule(parameters):
    policy = DynamicScale(init_scale=8.0, growth_interval=2, hysteresis=2, min_scale=4.0)
    optimizer, scaler, scales = tp.optim.SGD(parameters), GradScaler(policy=policy), []
    for overflow in (INF, INF, INF, INF, None, None):
        train(scaler, optimizer, parameters, [overflow])
        scales.append(scaler.get_scale())
    assert scales == [8.0, 4.0, 4.0, 4.0, 4.0, 8.0]


def test_the_preset_of_tensorplay_is_the_default(parameters):
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
def test_a_saved_policy_goes_on_where_it_was(policy, overflows, parameters):
    optimizer = tp.optim.SGD(parameters)
    scaler, resumed = GradScaler(policy=policy), GradScaler(policy=policy)
    train(scaler, optimizer, parameters, overflows)
    resumed.load_state_dict(scaler.state_dict())
    for each in (scaler, resumed):
        train(each, optimizer, parameters, [INF, None, INF, INF, INF])
    assert resumed.state_dict() == scaler.state_dict()
