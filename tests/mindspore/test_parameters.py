"""The parameters of all classes: what they refuse, what can be set, and what they are to Python."""

import math
import re

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn

import gradscaler.mindspore as ours
from gradscaler import AmaxScale, DynamicScale, FixedScale, ParameterError

INF = float("inf")
# The class, MindSpore's own, and their name of the loss scale.
DYNAMIC = {
    "manager": (ours.DynamicLossScaleManager, amp.DynamicLossScaleManager, "init_loss_scale"),
    "cell": (ours.DynamicLossScaleUpdateCell, nn.DynamicLossScaleUpdateCell, "loss_scale_value"),
    "scaler": (ours.DynamicLossScaler, amp.DynamicLossScaler, "scale_value"),
}
FIXED = {
    ours.FixedLossScaleManager: "loss_scale",
    ours.FixedLossScaleUpdateCell: "loss_scale_value",
    ours.StaticLossScaler: "scale_value",
}


def cases(table):
    return [(name, value, error) for name, error, values in table for value in values]


BAD = cases(
    [
        ("loss_scale", ValueError, (0.5, 0, -1, math.nan, INF, 1e39)),
        ("loss_scale", TypeError, ("1", True)),
        ("scale_factor", ValueError, (1, 0.5, 0, -2, INF)),
        ("scale_factor", TypeError, ("2", None)),
        ("scale_window", ValueError, (0, -1)),
        ("scale_window", TypeError, (2.5, True)),
    ]
)
NOT_SETTABLE = cases(
    [
        ("scale_window", ValueError, (0,)),
        ("scale_window", TypeError, (1.5,)),
        ("scale_factor", ValueError, (1, 0, 0.5)),
    ]
)
NOT_SETTABLE_IN_A_MANAGER = cases(
    [
        ("increase_ratio", ValueError, (1.0,)),
        ("decrease_ratio", ValueError, (1.0, 0.0)),
        ("loss_scale", ValueError, (0, -1.0, math.nan, INF, 0.5)),
    ]
)


def arguments(parameter, value):
    return {"loss_scale": 64, "scale_factor": 2, "scale_window": 3, parameter: value}.values()


@pytest.mark.parametrize(("cls", "name"), [(mine, name) for mine, _, name in DYNAMIC.values()])
@pytest.mark.parametrize(("parameter", "value", "error"), BAD)
def test_a_bad_parameter_is_named_with_its_value(cls, name, parameter, value, error):
    named = name if parameter == "loss_scale" else parameter
    with pytest.raises(error, match=rf"^{named} must .*{re.escape(str(value))}"):
        cls(*arguments(parameter, value))


@pytest.mark.parametrize(("cls", "name"), FIXED.items())
@pytest.mark.parametrize(("value", "error"), [case[1:] for case in BAD if case[0] == "loss_scale"])
def test_a_bad_fixed_scale_is_named_with_its_value(cls, name, value, error):
    with pytest.raises(error, match=rf"^{name} must .*{re.escape(str(value))}"):
        cls(value)


def raised_by(function, *args):
    try:
        function(*args)
    except Exception as error:
        return type(error)
    return None  # it accepts values that it cannot work with


@pytest.mark.parametrize(("which", "refused"), [("manager", 15), ("scaler", 18), ("cell", 1)])
def test_what_mindspore_refuses_raises_its_types(which, refused):
    """Its scaler takes only integers as factors, and so raises TypeError for 0.5."""
    mine, native, _ = DYNAMIC[which]
    bad = [bad[:2] for bad in BAD]
    bad += [("loss_scale", Tensor([8.0, 8.0])), ("loss_scale", Tensor(0.5)), ("loss_scale", [8.0])]
    raised = [[raised_by(cls, *arguments(*case)) for cls in (mine, native)] for case in bad]
    assert sum(error is not None for _, error in raised) == refused
    assert all(issubclass(error, expected) for error, expected in raised if expected)
    assert all(error is not None for error, _ in raised)


TENSORS = {
    "scalar": lambda: Tensor(8.0),
    "one element": lambda: Tensor([8.0]),
    "int": lambda: Tensor(8),
    "float16": lambda: Tensor(8.0, mindspore.float16),
    "Parameter": lambda: Parameter(Tensor(8.0), name="scale"),
    "array": lambda: np.array([8.0]),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize(
    ("mine", "native"),
    [
        (ours.FixedLossScaleManager, amp.FixedLossScaleManager),
        (ours.FixedLossScaleUpdateCell, nn.FixedLossScaleUpdateCell),
        *(
            (mine, native)
            for mine, native, _ in DYNAMIC.values()
            if native is not amp.DynamicLossScaler
        ),
    ],
)
def test_a_tensor_as_the_scale_is_taken_where_mindspore_takes_it(mine, native, tensor):
    """The scale keeps its value if the tensor changes later."""
    others = () if "Fixed" in mine.__name__ else (2, 3)
    given = tensor()
    scale = mine(given, *others)
    assert scale.get_loss_scale() == native(tensor(), *others).get_loss_scale() == 8
    assert type(scale.get_loss_scale()) in (int, float)
    if isinstance(given, Parameter):
        given.set_data(Tensor(16.0))
    assert scale.get_loss_scale() == 8


def test_a_tensor_can_be_set_as_the_scale_of_a_manager():
    manager = ours.DynamicLossScaleManager()
    manager.loss_scale = Tensor([32.0])
    assert (manager.get_loss_scale(), type(manager.loss_scale)) == (32, float)
    for bad, error in [(Tensor([1.0, 2.0]), ValueError), (Tensor(True), TypeError)]:
        with pytest.raises(error, match="loss_scale must"):
            manager.loss_scale = bad
    assert manager.loss_scale == 32


@pytest.mark.parametrize(("cls", "native", "name"), DYNAMIC.values(), ids=DYNAMIC)
def test_a_policy_is_refused_beside_parameters_and_if_it_cannot_move_the_scale(cls, native, name):
    with pytest.raises(ParameterError, match=f"leave out {name}, scale_factor, scale_window"):
        cls(2**10, policy=DynamicScale())
    fixed = "FixedLossScaleManager, FixedLossScaleUpdateCell or StaticLossScaler"
    message = rf"policy must be a DynamicScale or an AmaxScale \(for .* never moves, use {fixed}\)"
    for policy in (FixedScale(2.0), AmaxScale, DynamicScale, 1024.0):
        with pytest.raises(TypeError, match=message):
            cls(policy=policy)


@pytest.mark.parametrize(
    ("cls", "name", "value", "error"),
    [
        *((ours.DynamicLossScaler, *bad) for bad in NOT_SETTABLE),
        *((ours.DynamicLossScaleManager, *bad) for bad in NOT_SETTABLE + NOT_SETTABLE_IN_A_MANAGER),
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
