"""The managers beside MindSpore's, and their intended differences."""

import copy
import inspect
import pickle

import mindspore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradscaler.mindspore as ours
from gradscaler import DynamicScale
from tests.support.chosen import examples

TRACES = st.lists(st.booleans(), max_size=60)
STATE = ("loss_scale", "cur_iter", "last_overflow_iter", "bad_step", "bad_step_max")
RULE = ("scale_window", "scale_factor", "increase_ratio", "decrease_ratio")


def seen(manager):
    return {name: getattr(manager, name) for name in (*STATE, *RULE)}


@pytest.mark.parametrize(
    "name",
    ["DynamicLossScaleManager", "DynamicLossScaleUpdateCell", "DynamicLossScaler"],
)
def test_each_has_the_defaults_of_the_preset_so_that_a_policy_may_stand_beside_them(name):
    own, preset = (
        [each.default for each in inspect.signature(of).parameters.values()][:3]
        for of in (getattr(ours, name), DynamicScale.mindspore)
    )
    assert own == preset


def check_alike(one, other, overflows):
    """Both go through the same states."""
    assert seen(one) == seen(other)
    for overflow in overflows:
        assert one.update_loss_scale(overflow) is other.update_loss_scale(overflow) is None
        assert seen(one) == seen(other)
        assert one.get_loss_scale() == other.get_loss_scale()


def after(manager, overflows):
    """The manager, moved on by these steps."""
    for overflow in overflows:
        manager.update_loss_scale(overflow)
    return manager


@given(
    overflows=TRACES,
    init_loss_scale=st.sampled_from([1, 1.0, 3.0, 2**24, 2.0**100]),
    scale_factor=st.sampled_from([2, 4, 2.0]),
    scale_window=st.integers(1, 5),
)
@settings(max_examples=examples(300))
def test_the_dynamic_manager_goes_through_every_trace_as_mindspores_does(
    overflows, init_loss_scale, scale_factor, scale_window
):
    """As long as neither of our bounds, 1 and the largest float32, limits the scale."""
    arguments = (init_loss_scale, scale_factor, scale_window)
    manager = ours.DynamicLossScaleManager(*arguments)
    native = mindspore.amp.DynamicLossScaleManager(*arguments)
    for overflow in overflows:
        if native.loss_scale * scale_factor > 2.0**127:
            break
        check_alike(manager, native, [overflow])


@given(overflows=TRACES, changes=st.lists(st.integers(1, 6), min_size=60, max_size=60))
@settings(max_examples=examples(100))
def test_a_window_changed_on_the_way_counts_as_mindspores_does(overflows, changes):
    manager = ours.DynamicLossScaleManager(2**10, 2, 3)
    native = mindspore.amp.DynamicLossScaleManager(2**10, 2, 3)
    for overflow, window in zip(overflows, changes, strict=False):
        manager.scale_window = native.scale_window = window
        check_alike(manager, native, [overflow])


@pytest.mark.parametrize(
    ("assigned", "scales"),
    [
        ({"increase_ratio": 4, "decrease_ratio": 0.125}, [64, 256.0, 32.0]),
        ({"scale_factor": 8}, [64, 512.0, 64.0]),
        ({"loss_scale": 16}, [16, 32.0, 16.0]),
    ],
)
def test_scale_ratios_and_factor_can_be_set_between_steps(assigned, scales):
    manager = ours.DynamicLossScaleManager(64.0, 2, 1)
    for name, value in assigned.items():
        setattr(manager, name, value)
        assert getattr(manager, name) == value
    assert manager.decrease_ratio == (0.5 if "loss_scale" in assigned else 0.125)
    assert scales_of(manager, [False, True]) == scales


def scales_of(manager, overflows):
    """Its loss scale before and after each step."""
    scales = [manager.get_loss_scale()]
    for overflow in overflows:
        scales.append(after(manager, [overflow]).get_loss_scale())
        assert type(manager.get_loss_scale()) is float
        assert manager.loss_scale == manager.get_loss_scale()
    return scales


@pytest.mark.parametrize(
    ("init_loss_scale", "overflow", "bound"), [(3.0, True, 1.0), (2.0**126, False, 2.0**127)]
)
def test_the_scale_stays_between_1_and_what_float32_holds(init_loss_scale, overflow, bound):
    manager = ours.DynamicLossScaleManager(init_loss_scale, 2, 1)
    assert scales_of(manager, [overflow] * 5)[2:] == [bound] * 4


@pytest.mark.parametrize(
    "overflow", [True, np.bool_(True), mindspore.Tensor(True), mindspore.Tensor([True])]
)
def test_an_overflow_may_be_any_kind_of_flag(overflow):
    manager = after(ours.DynamicLossScaleManager(64.0), [overflow])
    assert (manager.loss_scale, manager.bad_step) == (32.0, 1)


@pytest.mark.parametrize("module", [ours, mindspore.amp])
def test_more_than_1000_overflows_in_a_row_are_an_error_as_in_mindspore(module):
    manager = after(module.DynamicLossScaleManager(), [True] * 1000)
    with pytest.raises(RuntimeError, match=r"ontinuous overflow.*1001"):
        manager.update_loss_scale(True)


@pytest.mark.parametrize("limit", [2, 1000])
def test_overflows_past_bad_step_max_are_an_error_and_change_nothing(limit):
    manager = ours.DynamicLossScaleManager()
    manager.bad_step_max = limit
    before = vars(after(manager, [True] * limit)).copy()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{limit + 1} steps in a row"):
            manager.update_loss_scale(True)
        assert vars(manager) == before
    assert after(manager, [False]).bad_step == 0


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@given(first=TRACES, then=TRACES)
@settings(max_examples=examples(50))
def test_a_copy_goes_on_where_the_manager_was(twin, first, then):
    policy = DynamicScale(64.0, growth_interval=3, hysteresis=2, min_scale=1.0)
    manager = after(ours.DynamicLossScaleManager(policy=policy), first)
    check_alike(manager, twin(manager), then)


@given(overflows=TRACES)
@settings(max_examples=examples(50))
def test_the_attributes_are_all_that_a_checkpoint_needs(overflows):
    manager, restored = (ours.DynamicLossScaleManager(2**10, 2, 3) for _ in range(2))
    after(manager, overflows)
    for name in STATE:
        setattr(restored, name, getattr(manager, name))
    check_alike(manager, restored, [False, False, True, False, False, False, False])


def test_window_and_ratios_are_those_of_the_policy():
    policy = DynamicScale(64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    manager = ours.DynamicLossScaleManager(policy=policy)
    assert (manager.scale_window, manager.increase_ratio, manager.decrease_ratio) == (2, 4.0, 0.25)


@pytest.mark.parametrize("arguments", [(), (128.0, True), (1, False), (1024, True)])
def test_the_fixed_manager_is_as_mindspores(arguments):
    manager = ours.FixedLossScaleManager(*arguments)
    native = mindspore.amp.FixedLossScaleManager(*arguments)
    assert vars(manager) == vars(native)
    assert manager.get_drop_overflow_update() is native.get_drop_overflow_update()
    assert manager.update_loss_scale(True) is None
    assert manager.get_loss_scale() == native.get_loss_scale()


def test_the_fixed_manager_has_an_update_cell_if_it_drops_updates():
    cell = ours.FixedLossScaleManager(256.0).get_update_cell()
    assert isinstance(cell, ours.FixedLossScaleUpdateCell)
    assert cell.get_loss_scale() == 256.0
    assert ours.FixedLossScaleManager(256.0, False).get_update_cell() is None


def test_the_dynamic_manager_always_drops_updates():
    assert ours.DynamicLossScaleManager().get_drop_overflow_update() is True


def test_the_update_cell_starts_from_the_scale_that_the_manager_has():
    cell = after(ours.DynamicLossScaleManager(2**10, 4, 7), [True]).get_update_cell()
    assert isinstance(cell, ours.DynamicLossScaleUpdateCell)
    assert cell.get_loss_scale() == 2**8
    assert (cell.scale_factor.asnumpy(), cell.scale_window.asnumpy()) == (4, 7)


def test_mindspore_accepts_a_custom_manager(line):
    class Custom(ours.LossScaleManager):
        def get_loss_scale(self):
            return 8.0

    network = line()
    optimizer = mindspore.nn.SGD(network.trainable_params())
    step = mindspore.amp.build_train_network(network, optimizer, loss_scale_manager=Custom())
    assert step.sens == 8.0
