"""The managers beside MindSpore's, and where they mean to differ."""

import contextlib
import copy
import pickle
import re

import mindspore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradscaler.mindspore as ours
from gradscaler import DynamicScale, FixedScale, ParameterError

TRACES = st.lists(st.booleans(), max_size=60)
STATE = ("loss_scale", "cur_iter", "last_overflow_iter", "bad_step", "bad_step_max")
RULE = ("scale_window", "scale_factor", "increase_ratio", "decrease_ratio")


def seen(manager):
    return {name: getattr(manager, name) for name in (*STATE, *RULE)}


@given(
    overflows=TRACES,
    init_loss_scale=st.sampled_from([1, 1.0, 3.0, 2**24, 2.0**100]),
    scale_factor=st.sampled_from([2, 4, 2.0]),
    scale_window=st.integers(1, 5),
)
@settings(max_examples=300, deadline=None)
def test_the_dynamic_manager_goes_through_every_trace_as_mindspores_does(
    overflows, init_loss_scale, scale_factor, scale_window
):
    """Where neither bound of ours, 1 and the largest float32, comes in the way of growth."""
    arguments = (init_loss_scale, scale_factor, scale_window)
    manager = ours.DynamicLossScaleManager(*arguments)
    native = mindspore.amp.DynamicLossScaleManager(*arguments)
    assert seen(manager) == seen(native)
    for overflow in overflows:
        if native.loss_scale * scale_factor > 2.0**127:
            break
        assert manager.update_loss_scale(overflow) is native.update_loss_scale(overflow) is None
        assert seen(manager) == seen(native)
        assert manager.get_loss_scale() == native.get_loss_scale()


@given(overflows=TRACES, changes=st.lists(st.integers(1, 6), min_size=60, max_size=60))
@settings(max_examples=100, deadline=None)
def test_a_window_changed_on_the_way_counts_as_mindspores_does(overflows, changes):
    manager = ours.DynamicLossScaleManager(2**10, 2, 3)
    native = mindspore.amp.DynamicLossScaleManager(2**10, 2, 3)
    for overflow, window in zip(overflows, changes, strict=False):
        manager.scale_window = native.scale_window = window
        manager.update_loss_scale(overflow)
        native.update_loss_scale(overflow)
        assert seen(manager) == seen(native)


def test_ratios_set_on_the_way_are_used():
    manager = ours.DynamicLossScaleManager(64.0, 2, 1)
    manager.increase_ratio = 4
    manager.decrease_ratio = 0.125
    manager.update_loss_scale(False)
    assert manager.loss_scale == 256.0
    manager.update_loss_scale(True)
    assert manager.loss_scale == 32.0


def test_a_scale_factor_set_on_the_way_is_used_both_ways():
    manager = ours.DynamicLossScaleManager(64.0, 2, 1)
    manager.scale_factor = 8
    assert (manager.increase_ratio, manager.decrease_ratio) == (8, 0.125)


def test_the_loss_scale_can_be_set():
    manager = ours.DynamicLossScaleManager(64.0, 2, 1)
    manager.loss_scale = 16
    assert manager.get_loss_scale() == 16
    manager.update_loss_scale(False)
    assert manager.get_loss_scale() == 32.0


def test_the_scale_is_a_python_float_after_a_step():
    manager = ours.DynamicLossScaleManager()
    manager.update_loss_scale(True)
    assert type(manager.get_loss_scale()) is float


def test_the_scale_does_not_fall_below_1():
    manager = ours.DynamicLossScaleManager(3.0, 2, 1)
    for _ in range(5):
        manager.update_loss_scale(True)
    assert manager.loss_scale == 1.0


def test_the_scale_does_not_grow_past_what_float32_holds():
    manager = ours.DynamicLossScaleManager(2.0**126, 2, 1)
    for _ in range(3):
        manager.update_loss_scale(False)
    assert manager.loss_scale == 2.0**127


@pytest.mark.parametrize(
    "overflow", [True, np.bool_(True), mindspore.Tensor(True), mindspore.Tensor([True])]
)
def test_an_overflow_may_be_any_kind_of_flag(overflow):
    manager = ours.DynamicLossScaleManager(64.0)
    manager.update_loss_scale(overflow)
    assert (manager.loss_scale, manager.bad_step) == (32.0, 1)


def message_of_overflow(manager, after):
    """What the manager raises at an overflow after so many in a row, at which it did not raise."""
    for _ in range(after):
        manager.update_loss_scale(True)
    with pytest.raises(RuntimeError) as raised:
        manager.update_loss_scale(True)
    return str(raised.value)


def test_more_than_1000_overflows_in_a_row_are_an_error_as_they_are_in_mindspore():
    message = message_of_overflow(ours.DynamicLossScaleManager(), 1000)
    native_message = message_of_overflow(mindspore.amp.DynamicLossScaleManager(), 1000)
    for part in ("ontinuous overflow", "1001"):
        assert part in message
        assert part in native_message


def test_that_error_changes_nothing():
    manager = ours.DynamicLossScaleManager()
    message_of_overflow(manager, 1000)
    before = vars(manager).copy()
    with pytest.raises(RuntimeError, match="1001 steps in a row"):
        manager.update_loss_scale(True)
    assert vars(manager) == before
    manager.update_loss_scale(False)
    assert manager.bad_step == 0


def test_how_many_overflows_in_a_row_are_allowed_can_be_set():
    manager = ours.DynamicLossScaleManager()
    manager.bad_step_max = 2
    assert "3 steps in a row" in message_of_overflow(manager, 2)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@given(before=TRACES, after=TRACES)
@settings(max_examples=50, deadline=None)
def test_a_copy_goes_on_where_the_manager_was(twin, before, after):
    policy = DynamicScale(64.0, growth_interval=3, hysteresis=2, min_scale=1.0)
    manager = ours.DynamicLossScaleManager(policy=policy)
    for overflow in before:
        manager.update_loss_scale(overflow)
    copied = twin(manager)
    for overflow in after:
        manager.update_loss_scale(overflow)
        copied.update_loss_scale(overflow)
        assert seen(copied) == seen(manager)


@given(overflows=TRACES)
@settings(max_examples=50, deadline=None)
def test_the_attributes_are_all_there_is_to_a_checkpoint(overflows):
    manager, restored = (ours.DynamicLossScaleManager(2**10, 2, 3) for _ in range(2))
    for overflow in overflows:
        manager.update_loss_scale(overflow)
    for name in STATE:
        setattr(restored, name, getattr(manager, name))
    for overflow in [False, False, True, False, False, False, False]:
        manager.update_loss_scale(overflow)
        restored.update_loss_scale(overflow)
        assert seen(restored) == seen(manager)


def test_a_policy_decides_how_the_scale_moves():
    policy = DynamicScale(
        64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2, hysteresis=2
    )
    manager = ours.DynamicLossScaleManager(policy=policy)
    state = policy.init()
    for overflow in [True, True, False, True, False, False, False, True, True, True]:
        manager.update_loss_scale(overflow)
        state = policy.update(state, overflow)
        assert manager.loss_scale == state.scale
    assert (manager.scale_window, manager.increase_ratio, manager.decrease_ratio) == (2, 4.0, 0.25)


def test_a_policy_beside_parameters_is_refused():
    with pytest.raises(ParameterError, match="leave out init_loss_scale, scale_factor"):
        ours.DynamicLossScaleManager(2**10, policy=DynamicScale())


def test_a_policy_that_never_moves_is_sent_elsewhere():
    with pytest.raises(TypeError, match="FixedLossScaleManager"):
        ours.DynamicLossScaleManager(policy=FixedScale(2.0))


BAD = [
    ({"init_loss_scale": 0.5}, ValueError),
    ({"init_loss_scale": -1}, ValueError),
    ({"init_loss_scale": float("nan")}, ValueError),
    ({"init_loss_scale": 1e39}, ValueError),
    ({"init_loss_scale": "1"}, TypeError),
    ({"init_loss_scale": True}, TypeError),
    ({"scale_factor": 1}, ValueError),
    ({"scale_factor": 0.5}, ValueError),
    ({"scale_factor": 0}, ValueError),
    ({"scale_factor": -2}, ValueError),
    ({"scale_factor": float("inf")}, ValueError),
    ({"scale_factor": "2"}, TypeError),
    ({"scale_window": 0}, ValueError),
    ({"scale_window": -1}, ValueError),
    ({"scale_window": 2.5}, TypeError),
    ({"scale_window": True}, TypeError),
]


@pytest.mark.parametrize(("parameter", "error"), BAD)
def test_a_bad_parameter_is_named(parameter, error):
    ((name, value),) = parameter.items()
    with pytest.raises(error, match=rf"{name} must .*{re.escape(str(value))}"):
        ours.DynamicLossScaleManager(**parameter)


def test_what_mindspore_refuses_is_refused_with_the_same_type():
    compared = 0
    for parameter, error in BAD:
        with contextlib.suppress(Exception):  # what it takes, and cannot work with
            mindspore.amp.DynamicLossScaleManager(**parameter)
            continue
        compared += 1
        with pytest.raises(error):
            mindspore.amp.DynamicLossScaleManager(**parameter)
    assert compared == 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale_window", 0),
        ("increase_ratio", 1.0),
        ("decrease_ratio", 1.0),
        ("decrease_ratio", 0.0),
        ("scale_factor", 0.5),
    ],
)
def test_a_bad_value_set_on_the_way_is_refused_and_changes_nothing(name, value):
    manager = ours.DynamicLossScaleManager()
    before = seen(manager)
    with pytest.raises(ValueError, match=rf"must .*{value}"):
        setattr(manager, name, value)
    assert seen(manager) == before


@pytest.mark.parametrize(("loss_scale", "drop"), [(128.0, True), (1, False), (1024, True)])
def test_the_fixed_manager_is_as_mindspores(loss_scale, drop):
    manager = ours.FixedLossScaleManager(loss_scale, drop)
    native = mindspore.amp.FixedLossScaleManager(loss_scale, drop)
    assert manager.get_loss_scale() == native.get_loss_scale() == loss_scale
    assert manager.get_drop_overflow_update() is native.get_drop_overflow_update() is drop
    assert manager.update_loss_scale(True) is None
    assert manager.get_loss_scale() == loss_scale


def test_the_fixed_managers_defaults_are_mindspores():
    manager, native = ours.FixedLossScaleManager(), mindspore.amp.FixedLossScaleManager()
    assert vars(manager) == vars(native)


def test_the_fixed_manager_has_an_update_cell_if_it_drops_updates():
    cell = ours.FixedLossScaleManager(256.0).get_update_cell()
    assert isinstance(cell, ours.FixedLossScaleUpdateCell)
    assert cell.get_loss_scale() == 256.0
    assert ours.FixedLossScaleManager(256.0, False).get_update_cell() is None


@pytest.mark.parametrize(
    ("value", "error"),
    [(0.5, ValueError), (0, ValueError), (float("nan"), ValueError), ("1", TypeError)],
)
def test_a_fixed_scale_that_cannot_be_is_refused(value, error):
    with pytest.raises(error, match=r"loss_scale must"):
        ours.FixedLossScaleManager(value)
    with pytest.raises(error, match=r"loss_scale_value must"):
        ours.FixedLossScaleUpdateCell(value)


def test_the_dynamic_manager_always_drops_updates():
    assert ours.DynamicLossScaleManager().get_drop_overflow_update() is True


def test_the_update_cell_starts_from_the_scale_that_the_manager_has():
    manager = ours.DynamicLossScaleManager(2**10, 4, 7)
    manager.update_loss_scale(True)
    cell = manager.get_update_cell()
    assert isinstance(cell, ours.DynamicLossScaleUpdateCell)
    assert cell.get_loss_scale() == 2**8
    assert (cell.scale_factor.asnumpy(), cell.scale_window.asnumpy()) == (4, 7)


@pytest.mark.parametrize(
    ("mine", "native"),
    [
        (ours.FixedLossScaleManager(), mindspore.amp.FixedLossScaleManager),
        (ours.DynamicLossScaleManager(), mindspore.amp.DynamicLossScaleManager),
    ],
)
def test_the_managers_are_mindspores_to_isinstance(mine, native):
    assert isinstance(mine, native)
    assert isinstance(mine, ours.LossScaleManager)
    assert isinstance(mine, mindspore.train.LossScaleManager)


def test_a_manager_of_ones_own_is_accepted_by_mindspore(line):
    class Own(ours.LossScaleManager):
        def get_loss_scale(self):
            return 8.0

    network = line()
    optimizer = mindspore.nn.SGD(network.trainable_params())
    step = mindspore.amp.build_train_network(network, optimizer, loss_scale_manager=Own())
    assert step.sens == 8.0


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), 0.5])
def test_a_scale_that_cannot_be_is_not_set(scale):
    manager = ours.DynamicLossScaleManager()
    with pytest.raises(ValueError, match=r"^loss_scale must"):
        manager.loss_scale = scale
    with pytest.raises(ValueError, match=r"^scale_factor must"):
        manager.scale_factor = 0
    assert manager.get_loss_scale() == 2**24
    manager.loss_scale = 8
    assert manager.get_loss_scale() == 8


def test_the_repr_shows_scale_counts_and_policy():
    manager = ours.DynamicLossScaleManager(init_loss_scale=8)
    manager.update_loss_scale(True)
    text = "DynamicLossScaleManager(loss_scale=4.0, cur_iter=2, last_overflow_iter=1, policy=Dyn"
    assert repr(manager).startswith(text)
