"""The parameters of all classes: what they refuse, what can be set, and what they are to Python."""

import math
import re

import mindspore
import pytest
from mindspore import amp, nn

import gradscaler.mindspore as ours
from gradscaler import DynamicScale, FixedScale, ParameterError

INF = float("inf")
# The class, MindSpore's own, and what both call the loss scale.
DYNAMIC = {
    "manager": (
        ours.DynamicLossScaleManager,
        amp.DynamicLossScaleManager,
        "init_loss_scale",
    ),
    "cell": (
        ours.DynamicLossScaleUpdateCell,
        nn.DynamicLossScaleUpdateCell,
        "loss_scale_value",
    ),
    "scaler": (ours.DynamicLossScaler, amp.DynamicLossScaler, "scale_value"),
}
FIXED = [
    (ours.FixedLossScaleManager, "loss_scale"),
    (ours.FixedLossScaleUpdateCell, "loss_scale_value"),
    (ours.StaticLossScaler, "scale_value"),
]
BAD_SCALES = [
    (0.5, ValueError),
    (0, ValueError),
    (-1, ValueError),
    (math.nan, ValueError),
    (INF, ValueError),
    (1e39, ValueError),
    ("1", TypeError),
    (True, TypeError),
]
BAD = [
    *(("loss_scale", value, error) for value, error in BAD_SCALES),
    ("scale_factor", 1, ValueError),
    ("scale_factor", 0.5, ValueError),
    ("scale_factor", 0, ValueError),
    ("scale_factor", -2, ValueError),
    ("scale_factor", INF, ValueError),
    ("scale_factor", "2", TypeError),
    ("scale_factor", None, TypeError),
    ("scale_window", 0, ValueError),
    ("scale_window", -1, ValueError),
    ("scale_window", 2.5, TypeError),
    ("scale_window", True, TypeError),
]


def arguments(parameter, value):
    return {"loss_scale": 64, "scale_factor": 2, "scale_window": 3, parameter: value}.values()


@pytest.mark.parametrize(("cls", "name"), [(mine, name) for mine, _, name in DYNAMIC.values()])
@pytest.mark.parametrize(("parameter", "value", "error"), BAD)
def test_a_bad_parameter_is_named_with_its_value(cls, name, parameter, value, error):
    named = name if parameter == "loss_scale" else parameter
    with pytest.raises(error, match=rf"^{named} must .*{re.escape(str(value))}"):
        cls(*arguments(parameter, value))


@pytest.mark.parametrize(("cls", "name"), FIXED)
@pytest.mark.parametrize(("value", "error"), BAD_SCALES)
def test_a_bad_fixed_scale_is_named_with_its_value(cls, name, value, error):
    with pytest.raises(error, match=rf"^{name} must .*{re.escape(str(value))}"):
        cls(value)


def raised_by(function, *args):
    try:
        function(*args)
    except Exception as error:
        return type(error)
    return None  # it takes what it cannot work with


# MindSpore's scaler takes only integers as factors.
@pytest.mark.parametrize(
    ("which", "same", "different"), [("manager", 12, []), ("scaler", 13, [0.5, INF])]
)
def test_mindspore_raises_the_same_types_for_what_it_refuses(which, same, different):
    raised = [(raised_by(DYNAMIC[which][1], *arguments(*bad[:2])), bad) for bad in BAD]
    refused = [(error is bad[2], bad[1]) for error, bad in raised if error]
    assert [value for alike, value in refused if not alike] == different
    assert len(refused) == same + len(different)


@pytest.mark.parametrize(("cls", "native", "name"), DYNAMIC.values(), ids=DYNAMIC)
def test_a_policy_is_refused_beside_parameters_and_if_it_never_moves(cls, native, name):
    with pytest.raises(ParameterError, match=f"leave out {name}, scale_factor, scale_window"):
        cls(2**10, policy=DynamicScale())
    fixed = "FixedLossScaleManager, FixedLossScaleUpdateCell or StaticLossScaler"
    message = rf"policy must be a DynamicScale \(for a scale that never moves, use {fixed}\), got"
    for policy in (FixedScale(2.0), DynamicScale, 1024.0):
        with pytest.raises(TypeError, match=message):
            cls(policy=policy)


WINDOWS_AND_FACTORS = [
    ("scale_window", 0, ValueError),
    ("scale_window", 1.5, TypeError),
    ("scale_factor", 1, ValueError),
    ("scale_factor", 0, ValueError),
    ("scale_factor", 0.5, ValueError),
]
RATIOS_AND_SCALES = [
    ("increase_ratio", 1.0, ValueError),
    ("decrease_ratio", 1.0, ValueError),
    ("decrease_ratio", 0.0, ValueError),
    *(("loss_scale", value, ValueError) for value in (0, -1.0, math.nan, INF, 0.5)),
]


@pytest.mark.parametrize(
    ("cls", "name", "value", "error"),
    [
        *((ours.DynamicLossScaler, *bad) for bad in WINDOWS_AND_FACTORS),
        *((ours.DynamicLossScaleManager, *bad) for bad in WINDOWS_AND_FACTORS + RATIOS_AND_SCALES),
    ],
)
def test_a_bad_value_is_not_set(cls, name, value, error):
    instance = cls()
    before = vars(instance).copy()
    with pytest.raises(error, match=rf"^{name} must .*{value}"):
        setattr(instance, name, value)
    assert vars(instance) == before


@pytest.mark.parametrize(
    ("instance", "bases"),
    [
        (ours.FixedLossScaleManager(), (amp.FixedLossScaleManager, amp.LossScaleManager)),
        (ours.DynamicLossScaleManager(), (amp.DynamicLossScaleManager, amp.LossScaleManager)),
        (ours.FixedLossScaleUpdateCell(2), (nn.FixedLossScaleUpdateCell,)),
        (ours.DynamicLossScaleUpdateCell(), (nn.DynamicLossScaleUpdateCell,)),
        (ours.StaticLossScaler(2), (amp.StaticLossScaler, amp.LossScaler)),
        (ours.DynamicLossScaler(2, 2, 2), (amp.DynamicLossScaler, amp.LossScaler)),
    ],
)
def test_mindspore_finds_instances_of_its_own_classes(instance, bases):
    assert all(isinstance(instance, base) for base in bases)


def test_the_base_classes_are_mindspores():
    assert ours.LossScaler is amp.LossScaler
    assert ours.LossScaleManager is amp.LossScaleManager is mindspore.train.LossScaleManager


def test_the_repr_shows_scale_counts_and_policy():
    manager, scaler = ours.DynamicLossScaleManager(8), ours.DynamicLossScaler(8, 2, 10)
    manager.update_loss_scale(True)
    text = "DynamicLossScaleManager(loss_scale=4.0, cur_iter=2, last_overflow_iter=1, policy=Dyn"
    assert repr(manager).startswith(text)
    assert repr(scaler).startswith("DynamicLossScaler(scale_value=8.0, counter=0, policy=Dyn")
