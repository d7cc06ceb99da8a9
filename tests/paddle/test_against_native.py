"""gradscaler and paddle.amp.GradScaler through the same traces, bit for bit after every step."""

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import paddle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paddle.utils import unique_name

from gradscaler.paddle import GradScaler
from tests.support.chosen import examples
from tests.support.eager import library
from tests.support.eager.traces import SHAPES, Turn, loss, turns

KINDS = {
    "SGD": partial(paddle.optimizer.SGD, 0.1, weight_decay=0.01),
    "Momentum": partial(paddle.optimizer.Momentum, 0.1, use_nesterov=True),
    "Adam": partial(paddle.optimizer.Adam, 0.01, amsgrad=True),
    "AdamW": partial(paddle.optimizer.AdamW, 0.01, apply_decay_param_fun=lambda name: "1" in name),
    "Adamax": partial(paddle.optimizer.Adamax, 0.01),
    "Adagrad": partial(paddle.optimizer.Adagrad, 0.1),
    "Adadelta": partial(paddle.optimizer.Adadelta, 0.1),
    "RMSProp": partial(paddle.optimizer.RMSProp, 0.01, momentum=0.9, centered=True),
    "Lamb": partial(paddle.optimizer.Lamb, 0.01),
    "NAdam": partial(paddle.optimizer.NAdam, 0.01),
    "RAdam": partial(paddle.optimizer.RAdam, 0.01),
    "Rprop": partial(paddle.optimizer.Rprop, 0.01),
    "ASGD": partial(paddle.optimizer.ASGD, 0.1, batch_num=2),
    "multi-tensor Momentum": partial(paddle.optimizer.Momentum, 0.1, use_multi_tensor=True),
    "multi-tensor Adam": partial(paddle.optimizer.Adam, 0.01, use_multi_tensor=True),
}
CLIPS = {
    "by global norm": paddle.nn.ClipGradByGlobalNorm(0.5),
    "by norm": paddle.nn.ClipGradByNorm(0.5),
    "by value": paddle.nn.ClipGradByValue(0.5),
}
SCHEDULES = {
    "ExponentialDecay": partial(paddle.optimizer.lr.ExponentialDecay, 0.1, 0.5),
    "LinearWarmup": partial(paddle.optimizer.lr.LinearWarmup, 0.1, 3, 0.0, 0.1),
    "CosineAnnealingDecay": partial(paddle.optimizer.lr.CosineAnnealingDecay, 0.1, 4),
}


@dataclass(frozen=True)
class PaddleTurn(Turn):
    minimize: bool
    set_to_zero: bool  # how gradients are cleared before


RULES = st.fixed_dictionaries(
    {
        "init_loss_scaling": st.sampled_from([2.0**15, 1024, 1.0, 0.1, 3.0]),
        "incr_ratio": st.sampled_from([2.0, 4.0, 1.1]),
        "decr_ratio": st.sampled_from([0.5, 0.8]),
        "incr_every_n_steps": st.integers(1, 3),
        "decr_every_n_nan_or_inf": st.integers(1, 3),
        "use_dynamic_loss_scaling": st.sampled_from([True, True, False]),
    }
)
TURNS = turns(PaddleTurn, minimize=st.booleans(), set_to_zero=st.booleans())
COMPLETE_TURNS = TURNS.map(lambda turn: replace(turn, left_out=None))
on_the_stand_in = settings(
    max_examples=examples(12),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class PaddleSide:
    """One of the two scalers, with parameters and an optimizer of its own."""

    def __init__(self, scaler, kind, groups=False):
        self.scaler = scaler
        self.parameters = library.parameters(*SHAPES)
        self.groups = groups
        with unique_name.guard():  # the optimizer's state goes by names
            first, *rest = self.parameters
            self.optimizer = kind(
                parameters=[
                    {"params": [first], "learning_rate": 0.5},
                    {"params": rest, "weight_decay": 0.01},
                ]
                if groups
                else self.parameters
            )

    def iterate(self, turn):
        self.optimizer.clear_grad(turn.set_to_zero)
        for part in range(turn.passes):
            scaled = self.scaler.scale(loss(self.parameters, turn, part))
            scaled.backward()
        if turn.unscale:
            self.scaler.unscale_(self.optimizer)
        if turn.minimize and not self.groups:  # Paddle's own minimize knows no groups
            return self.minimize(scaled)
        self.step()
        return self.scaler.update()

    def step(self):
        self.scaler.step(self.optimizer)

    def minimize(self, scaled):
        operators, pairs = self.scaler.minimize(self.optimizer, scaled)
        return operators, [(parameter.name, self.seen(gradient)) for parameter, gradient in pairs]

    def seen(self, gradient):
        """A gradient; None after a skip, when Paddle's kernel may leave anything there."""
        return None if self.scaler._cache_found_inf else gradient

    def tensors(self):
        """The optimizer's state, none of which is of LBFGS."""
        return {k: item for k, item in library.state(self.optimizer).items() if k != "LBFGS"}

    def everything(self):
        scaler = self.scaler
        return library.exact(
            {
                "parameters": self.parameters,
                "gradients": [self.seen(parameter.grad) for parameter in self.parameters],
                "scaler": scaler.state_dict(),
                "tensors": [scaler._scale, scaler._found_inf],
                "counts": [scaler._incr_count, scaler._decr_count],
                "found": bool(scaler._cache_found_inf),
                "rate": self.optimizer.get_lr(),
                "records": len(scaler._optimizer_states),
            }
        )


class NativePaddleSide(PaddleSide):
    """Paddle's side, without the changes that its optimizers make in a skipped step.

    They make missing accumulators, which is harmless and recorded in ``made_by_a_skip``. Adamax
    also moves its beta1_pow, which is undone.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.made_by_a_skip = set()

    def step(self):
        self.undo_a_skip(super().step)

    def minimize(self, scaled):
        return self.undo_a_skip(super().minimize, scaled)

    def undo_a_skip(self, call, *args):
        before = {key: item.clone() for key, item in self.tensors().items()}
        result = call(*args)
        if self.scaler._cache_found_inf:
            self.made_by_a_skip |= self.tensors().keys() - before.keys()
            if isinstance(self.optimizer, paddle.optimizer.Adamax):
                for key, item in self.tensors().items():
                    if "beta1_pow_acc" in key:
                        item.set_value(before.get(key, paddle.full(item.shape, 0.9, item.dtype)))
        return result


def compare(ours, native):
    """Assert that everything is equal, except accumulators that Paddle makes in a skip."""
    assert ours.everything() == native.everything()
    mine, theirs = ours.tensors(), native.tensors()
    assert theirs.keys() - mine.keys() <= native.made_by_a_skip
    assert library.exact(mine) == library.exact({key: theirs[key] for key in mine})


def run(kind, rule, trace, native, groups=False, after=lambda side: None):
    ours = PaddleSide(GradScaler(**rule), kind, groups)
    theirs = NativePaddleSide(native(**rule), kind, groups)
    for turn in trace:
        assert library.exact(ours.iterate(turn)) == library.exact(theirs.iterate(turn))
        for side in (ours, theirs):
            after(side)
        compare(ours, theirs)


@on_the_stand_in
@given(rule=RULES, trace=st.lists(TURNS, min_size=1, max_size=8))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "multi" not in kind])
def test_one_optimizer_goes_as_with_paddle(kind, rule, trace, native):
    run(KINDS[kind], rule, trace, native)


@on_the_stand_in
@given(rule=RULES, trace=st.lists(COMPLETE_TURNS, min_size=1, max_size=8))
@pytest.mark.parametrize("groups", [False, True], ids=["plain", "groups"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "multi" in kind])
def test_a_multi_tensor_optimizer_goes_as_with_paddle(kind, groups, rule, trace, native):
    run(KINDS[kind], rule, trace, native, groups)


@on_the_stand_in
@given(rule=RULES, trace=st.lists(TURNS, min_size=1, max_size=6))
@pytest.mark.parametrize("kind", ["SGD", "Momentum", "AdamW", "Adamax", "Lamb", "Rprop"])
def test_parameter_groups_go_as_with_paddle(kind, rule, trace, native):
    run(KINDS[kind], rule, trace, native, groups=True)


@on_the_stand_in
@given(rule=RULES, trace=st.lists(TURNS, min_size=1, max_size=6))
@pytest.mark.parametrize("groups", [False, True], ids=["plain", "groups"])
@pytest.mark.parametrize("clip", CLIPS)
def test_the_optimizer_s_grad_clip_sees_unscaled_gradients_as_with_paddle(
    clip, groups, rule, trace, native
):
    kind = partial(paddle.optimizer.Momentum, 0.1, grad_clip=CLIPS[clip])
    run(kind, rule, trace, native, groups)


@on_the_stand_in
@given(rule=RULES, trace=st.lists(TURNS, min_size=1, max_size=6))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_learning_rate_schedule_goes_as_with_paddle(schedule, rule, trace, native):
    def kind(parameters):
        return paddle.optimizer.Adam(SCHEDULES[schedule](), parameters=parameters)

    def advance(side):
        side.optimizer._learning_rate.step()

    run(kind, rule, trace, native, after=advance)


@on_the_stand_in
@given(
    rule=RULES,
    trace=st.lists(TURNS, min_size=2, max_size=6),
    exchange=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_state_dicts_exchanged_on_the_way_change_nothing(rule, trace, exchange, native):
    ours = PaddleSide(GradScaler(**rule), KINDS["Adam"])
    theirs = NativePaddleSide(native(**rule), KINDS["Adam"])
    for turn, exchanged in zip(trace, exchange, strict=False):
        assert library.exact(ours.iterate(turn)) == library.exact(theirs.iterate(turn))
        if exchanged:
            mine, native_state = ours.scaler.state_dict(), theirs.scaler.state_dict()
            ours.scaler.load_state_dict(native_state)
            theirs.scaler.load_state_dict(mine)
        compare(ours, theirs)


@on_the_stand_in
@given(
    rule=RULES,
    trace=st.lists(TURNS, min_size=2, max_size=6),
    changes=st.lists(
        st.sampled_from(
            [
                None,
                ("set_incr_ratio", 1.5),
                ("set_decr_ratio", 0.25),
                ("set_incr_every_n_steps", 7),  # above any count: Paddle compares with ==
                ("set_decr_every_n_nan_or_inf", 4),
                ("set_init_loss_scaling", 96.0),
            ]
        ),
        min_size=6,
        max_size=6,
    ),
)
def test_setters_called_on_the_way_act_as_paddle_s(rule, trace, changes, native):
    ours = PaddleSide(GradScaler(**rule), KINDS["SGD"])
    theirs = NativePaddleSide(native(**rule), KINDS["SGD"])
    for turn, change in zip(trace, changes, strict=False):
        for side in (ours, theirs):
            if change:
                getattr(side.scaler, change[0])(change[1])
            side.iterate(turn)
        compare(ours, theirs)


# Faults of Paddle's scaler that gradscaler does not have.


def finite_turn(seed=0, **options):
    options = {"overflow": None, "where": 0, "left_out": None, "passes": 1, **options}
    return PaddleTurn(seed, unscale=False, minimize=False, set_to_zero=False, **options)


def overflow_turn(seed=0):
    return finite_turn(seed, overflow=math.inf)


@pytest.mark.parametrize("groups", [False, True], ids=["plain", "groups"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_leaves_the_optimizer_as_it_was(kind, groups):
    ours = PaddleSide(GradScaler(), KINDS[kind], groups)
    for turn in (overflow_turn(), finite_turn(), overflow_turn()):
        before = library.exact(ours.parameters), library.exact(ours.optimizer.state_dict())
        ours.iterate(turn)
        after = library.exact(ours.parameters), library.exact(ours.optimizer.state_dict())
        assert (after == before) is ours.scaler.last_step(ours.optimizer).skipped


def test_paddle_s_skip_makes_accumulators_and_gradscaler_s_does_not(native):
    ours = PaddleSide(GradScaler(), KINDS["Adam"])
    theirs = PaddleSide(native(), KINDS["Adam"])
    for side in (ours, theirs):
        side.iterate(overflow_turn())
    assert theirs.optimizer.state_dict()
    assert ours.optimizer.state_dict() == {}


def test_paddle_s_skip_moves_adamax_and_gradscaler_s_does_not(native):
    ours = PaddleSide(GradScaler(), KINDS["Adamax"])
    theirs = PaddleSide(native(), KINDS["Adamax"])
    for side, moves in ((ours, False), (theirs, True)):
        side.iterate(finite_turn())
        before = library.exact(side.tensors())
        side.iterate(overflow_turn())
        assert (library.exact(side.tensors()) != before) is moves


def test_lowering_the_interval_below_the_count_freezes_paddle_s_scale_alone(native):
    scales = []
    for side in (
        PaddleSide(GradScaler(init_loss_scaling=8.0), KINDS["SGD"]),
        PaddleSide(native(init_loss_scaling=8.0), KINDS["SGD"]),
    ):
        for _ in range(3):
            side.iterate(finite_turn())
        side.scaler.set_incr_every_n_steps(2)
        side.iterate(finite_turn())
        scales.append(side.scaler._scale.item())
    assert scales == [16.0, 8.0]


def test_paddle_s_scale_grows_to_inf_and_gradscaler_s_stays_finite(native):
    scales = []
    for kind in (GradScaler, native):
        side = PaddleSide(kind(init_loss_scaling=2.0**127, incr_every_n_steps=1), KINDS["SGD"])
        for parameter in side.parameters:
            parameter.grad = paddle.zeros_like(parameter)
        side.step()
        side.scaler.update()
        scales.append(side.scaler._scale.item())
    assert scales == [2.0**127, math.inf]


def test_paddle_s_scale_sinks_to_zero_and_gradscaler_s_stops_at_its_floor(native):
    scales = []
    for kind in (GradScaler, native):
        scaler = kind(init_loss_scaling=2.0**-125, decr_ratio=2.0**-30, decr_every_n_nan_or_inf=1)
        side = PaddleSide(scaler, KINDS["SGD"])
        for _ in range(3):
            side.iterate(overflow_turn())
        scales.append(scaler._scale.item())
    assert scales == [2.0**-126, 0.0]


def test_paddle_counts_an_iteration_without_gradients_and_gradscaler_does_not(native):
    counts = []
    for kind in (GradScaler, native):
        side = PaddleSide(kind(), KINDS["SGD"])
        side.scaler.scale(paddle.ones([]))
        side.step()
        side.scaler.update()
        counts.append(side.scaler._incr_count)
    assert counts == [0, 1]


def test_paddle_leaves_float64_gradients_scaled_and_gradscaler_does_not(native):
    moved = []
    for kind in (GradScaler, native):
        parameter = paddle.zeros([2], "float64")
        parameter.stop_gradient = False
        optimizer = paddle.optimizer.SGD(1.0, parameters=[parameter])
        scaler = kind(init_loss_scaling=1024.0)
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        moved.append(parameter.tolist())
    assert moved == [[-1.0, -1.0], [-1024.0, -1024.0]]


def unscale_two_and_step_both(scaler, gradients):
    """Unscale both optimizers, then step both: their steps, one for each."""
    parameters = library.parameters()
    start = [parameter.numpy() for parameter in parameters]
    optimizers = [library.sgd([parameter], lr=1.0) for parameter in parameters]
    library.backward(scaler, parameters, gradients)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return [old - p.numpy() for old, p in zip(start, parameters, strict=True)]


@pytest.mark.parametrize("overflow", [0, 1])
def test_paddle_decides_both_steps_by_the_gradients_it_unscaled_last(overflow, native, finite):
    finite[overflow] = finite[overflow] * float("inf")
    steps = unscale_two_and_step_both(native(init_loss_scaling=1024.0), finite)
    assert [bool(step.any()) for step in steps] == [overflow == 0] * 2


def test_paddle_forgets_the_first_overflow_when_the_second_step_is_finite(native, finite):
    parameters, scaler = library.parameters(), native(init_loss_scaling=1024.0)
    library.backward(scaler, parameters, [finite[0] * float("inf"), finite[1]])
    for parameter in parameters:
        scaler.step(library.sgd([parameter]))
    scaler.update()
    assert library.scale_of(scaler) == 1024.0


def test_paddle_with_a_fixed_scale_divides_the_second_optimizer_s_gradients_twice(native, finite):
    scaler = native(init_loss_scaling=1024.0, use_dynamic_loss_scaling=False)
    steps = unscale_two_and_step_both(scaler, finite)
    np.testing.assert_allclose(steps[1], finite[1] / 1024.0, atol=1e-6)


def test_the_stand_in_is_paddle_s_own_and_overflow_makes_it_print(native):
    side = PaddleSide(native(init_loss_scaling=8.0), KINDS["SGD"])
    side.iterate(overflow_turn())
    assert type(side.scaler) is paddle.amp.GradScaler
    assert "Found inf or nan, current scale is: 8.0" in native.printed.getvalue()
