"""DeepSpeed's loss scalers beside its own, whose module runs here without its package.

Stand-ins replace the module's imports from the package; the rule is not among them.
"""

import copy
import importlib.metadata
import importlib.util
import inspect
import logging
import pickle
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscaler.torch import deepspeed as gradscalers
from gradscaler.torch.deepspeed import DynamicLossScaler, LossScaler, LossScalerBase
from tests.support.chosen import examples

STAND_INS = {
    "deepspeed": {"comm": SimpleNamespace(get_rank=lambda: 1)},
    "deepspeed.utils": {"logger": None, "log_dist": lambda *args, **kwargs: None},
    "deepspeed.runtime": {},
    "deepspeed.runtime.config_utils": {"DeepSpeedConfigObject": object},
    "deepspeed.runtime.utils": {"has_inf_or_nan": None},
}
RULE = {
    "init_scale": 8.0,
    "scale_window": 2,
    "min_scale": 1.0,
    "delayed_shift": 2,
    "consecutive_hysteresis": False,
}


@pytest.fixture(scope="module")
def deepspeed():
    try:
        package = importlib.metadata.distribution("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("deepspeed is not installed")
    path = package.locate_file("deepspeed/runtime/fp16/loss_scaler.py")
    spec = importlib.util.spec_from_file_location("deepspeeds_own", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, members in STAND_INS.items():
            stand_in = ModuleType(name)
            vars(stand_in).update(members)
            patch.setitem(sys.modules, name, stand_in)
        spec.loader.exec_module(module)
    return module


@st.composite
def rules(draw):
    min_scale, init_scale = sorted(draw(st.tuples(scales, scales)))
    return {
        "init_scale": init_scale,
        "scale_window": draw(st.integers(1, 5)),
        "min_scale": min_scale,
        "delayed_shift": draw(st.integers(1, 4)),
        "consecutive_hysteresis": draw(st.booleans()),
        "raise_error_at_min_scale": draw(st.booleans()),
    }


few = st.integers(0, 6).map(lambda exponent: 2.0**exponent)  # backoffs reach the floor
scales = st.one_of(few, st.floats(2.0**-20, 2.0**40, width=32))
runs = st.tuples(st.sampled_from(".x"), st.integers(1, 12)).map(lambda run: run[0] * run[1])
traces = st.lists(runs, max_size=6).map("".join)


def visited(scaler, trace):
    """The scales after each step of a trace, in which "x" is a non-finite step."""
    scales = []
    for step in trace:
        scaler.update_scale(step == "x")
        scales.append(scaler.loss_scale)
    return scales


def step_together(scalers, overflow):
    """One step of each; all raise, or none does, and their attributes are equal."""
    raised = []
    for scaler in scalers:
        before = dict(vars(scaler))
        try:
            assert scaler.update_scale(overflow) is None
        except Exception as error:
            assert vars(scaler) == before
            raised.append(str(error)[:37])
    assert raised in ([], ["Current loss scale already at minimum"] * len(scalers))
    assert all(vars(scaler) == vars(scalers[0]) for scaler in scalers)
    return bool(raised)


@settings(max_examples=examples(300))
@given(rule=rules(), trace=traces)
def test_every_step_leaves_the_attributes_of_deepspeed_s_own_scaler(deepspeed, rule, trace):
    ours, theirs = DynamicLossScaler(**rule), deepspeed.DynamicLossScaler(**rule)
    assert vars(ours) == vars(theirs)
    for step in trace:
        step_together([ours, theirs], step == "x")
        assert ours.loss_scale == theirs.loss_scale


@given(rule=rules(), before=traces, after=traces)
def test_the_attributes_move_a_run_to_the_other_class(deepspeed, rule, before, after):
    saved, whole = DynamicLossScaler(**rule), deepspeed.DynamicLossScaler(**rule)
    for step in before:
        step_together([saved, whole], step == "x")
    ours, theirs = DynamicLossScaler(**RULE), deepspeed.DynamicLossScaler(**RULE)
    vars(ours).update(vars(whole))
    vars(theirs).update(vars(saved))
    for step in after:
        step_together([ours, theirs, whole], step == "x")


def test_a_scale_and_a_factor_that_were_set_are_used_from_then_on(deepspeed):
    scalers = DynamicLossScaler(**RULE), deepspeed.DynamicLossScaler(**RULE)
    for trace, changes in [
        ("x.", {"cur_scale": 2.0**20, "scale_factor": 4.0}),
        ("xx....", {"scale_window": 1, "min_scale": 2.0**18}),
        ("..xxx", {"raise_error_at_min_scale": False, "consecutive_hysteresis": True}),
        ("x.xxx..", {"cur_scale": 4.0}),  # below the floor
        ("xx", {}),
    ]:
        for step in trace:
            step_together(scalers, step == "x")
        for scaler in scalers:
            vars(scaler).update(changes)
    assert scalers[0].loss_scale == 2.0**18


@pytest.mark.parametrize("name", ["LossScalerBase", "LossScaler", "DynamicLossScaler"])
def test_methods_and_arguments_are_deepspeed_s(deepspeed, name):
    ours, theirs = getattr(gradscalers, name), getattr(deepspeed, name)
    for method, function in inspect.getmembers(theirs, inspect.isfunction):
        expected = inspect.signature(function).parameters.values()
        given = inspect.signature(getattr(ours, method)).parameters.values()
        assert [(p.name, p.default) for p in given] == [(p.name, p.default) for p in expected]


def test_a_fixed_scale_has_deepspeed_s_attributes_and_never_moves(deepspeed):
    for arguments in [(), (128.0,)]:
        ours, theirs = LossScaler(*arguments), deepspeed.LossScaler(*arguments)
        ours.update_scale(False)
        assert vars(ours) == vars(theirs)
        assert ours.has_overflow([]) is theirs.has_overflow([]) is False


def test_the_scale_first_doubles_a_step_late_and_halves_at_the_second_overflow():
    scaler = DynamicLossScaler(**RULE)
    assert visited(scaler, "..x..xxx...") == [
        8.0, 8.0, 8.0, 8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 2.0
    ]  # fmt: skip
    assert visited(scaler, "....xx") == [2.0, 4.0, 4.0, 8.0, 8.0, 4.0]
    assert (scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis) == (17, 16, 1)


def test_a_window_of_one_waits_one_step_after_an_overflow_all_the_same():
    scaler = DynamicLossScaler(**RULE | {"scale_window": 1, "delayed_shift": 1})
    assert visited(scaler, "..x..") == [8.0, 16.0, 8.0, 8.0, 16.0]
    scaler.scale_factor = 4.0
    assert visited(scaler, ".x") == [64.0, 16.0]


def test_with_consecutive_hysteresis_only_overflows_in_a_row_halve_the_scale():
    scaler = DynamicLossScaler(**RULE | {"consecutive_hysteresis": True, "scale_window": 100})
    assert visited(scaler, "x.x.xxx") == [8.0, 8.0, 8.0, 8.0, 8.0, 4.0, 2.0]


def test_an_overflow_at_the_floor_raises_and_changes_nothing():
    scaler = DynamicLossScaler(**RULE | {"init_scale": 1.0, "delayed_shift": 1})
    scaler.update_scale(False)
    before = dict(vars(scaler))
    with pytest.raises(RuntimeError, match=r"already at minimum: min_scale is 1\.0, .* overflow"):
        scaler.update_scale(True)
    assert vars(scaler) == before


def test_an_overflow_at_the_floor_is_tolerated_where_that_is_asked_for():
    rule = RULE | {"init_scale": 1.0, "delayed_shift": 1, "raise_error_at_min_scale": False}
    assert visited(DynamicLossScaler(**rule), "xx") == [1.0, 1.0]


def test_a_floor_that_float32_rounds_is_a_floor():
    rule = RULE | {"min_scale": 0.1, "init_scale": 0.2, "delayed_shift": 1}
    scaler = DynamicLossScaler(**rule)
    scaler.update_scale(True)
    assert scaler.loss_scale == np.float32(0.1)
    with pytest.raises(RuntimeError, match="already at minimum"):
        scaler.update_scale(True)


def test_growth_past_the_largest_float32_is_left_out():
    scaler = DynamicLossScaler(**RULE | {"init_scale": 2.0**127, "scale_window": 1})
    assert visited(scaler, "...") == [2.0**127] * 3


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("init_scale", 0.5, ValueError),  # below the floor
        ("init_scale", float("nan"), ValueError),
        ("scale_window", 0, ValueError),
        ("min_scale", 0.0, ValueError),
        ("delayed_shift", 0, ValueError),
        ("consecutive_hysteresis", 2, TypeError),
    ],
)
def test_a_bad_argument_is_refused_by_name(name, value, error):
    with pytest.raises(error, match=rf"^{name} must"):
        DynamicLossScaler(**RULE | {name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("cur_scale", 0.0), ("scale_factor", 1.0), ("scale_window", 0)]
)
def test_an_attribute_set_to_what_cannot_work_is_refused_by_name_at_the_next_step(name, value):
    scaler = DynamicLossScaler(**RULE)
    setattr(scaler, name, value)
    before = dict(vars(scaler))
    with pytest.raises(ValueError, match=rf"^{name} must"):
        scaler.update_scale(True)
    assert vars(scaler) == before


def test_a_fixed_scale_that_cannot_work_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^scale must be positive and finite"):
        LossScaler(0)


@pytest.mark.parametrize("scaler", [LossScaler(8), DynamicLossScaler(**RULE)], ids=repr)
def test_the_backward_pass_is_that_of_the_scaled_loss(scaler):
    parameter = torch.ones(2, dtype=torch.float16, requires_grad=True)
    loss = (parameter * 3).sum()
    scaled = scaler.scale_loss(loss)
    assert (scaled.item(), scaled.dtype) == (48.0, torch.float16)
    scaler.backward(loss, retain_graph=True)
    scaler.backward(loss)
    assert parameter.grad.tolist() == [48.0, 48.0]
    with pytest.raises(RuntimeError, match="second time"):
        scaler.backward(loss)
    (grad,) = scaler.scale_gradient(None, (torch.ones(2),), None)
    assert grad.tolist() == [8.0, 8.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 0.0])
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo])
def test_a_single_element_that_is_not_finite_is_an_overflow(dtype, value, layout):
    gradients = [None, torch.empty(0), torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype)]
    gradients[-1][1, 2] = value
    gradients[-1] = gradients[-1] if layout is torch.strided else gradients[-1].to_sparse()
    parameters = [torch.zeros(()), torch.zeros(0), torch.zeros(3, 4, dtype=dtype)]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    scaler = DynamicLossScaler(**RULE)
    for has_overflow in (scaler.has_overflow, scaler.has_overflow_serial):
        assert has_overflow(iter(parameters)) is (value != 0.0)


FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]


@pytest.mark.parametrize("dtype", [*FLOAT8, torch.complex64], ids=str)
def test_a_dtype_without_minimum_and_maximum_is_checked(dtype):
    for value in (1.0, float("nan"), float("inf")):
        gradient = torch.tensor([1.0, value, 2.0]).to(dtype)
        wide = gradient.to(torch.complex64 if dtype.is_complex else torch.float32)
        found = DynamicLossScaler._has_inf_or_nan(gradient)
        assert (found.dtype, found.shape) == (torch.bool, ())
        assert found.item() is not bool(torch.isfinite(wide).all())


def test_an_imaginary_part_that_is_not_finite_is_an_overflow():
    gradient = torch.tensor([complex(1.0, float("inf"))])
    for each in (gradient, gradient.conj()):
        assert DynamicLossScaler._has_inf_or_nan(each)


def test_without_gradients_there_is_no_overflow():
    assert DynamicLossScaler(**RULE).has_overflow([torch.zeros(2)]) is False


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
@pytest.mark.parametrize("trace", ["", "x..x", "x..xx....x"])
def test_a_copy_goes_on_as_the_original_does(copied, trace):
    scaler = DynamicLossScaler(**RULE)
    visited(scaler, trace)
    other = copied(scaler)
    assert visited(other, "x...x") == visited(scaler, "x...x")
    assert vars(other) == vars(scaler)
    assert repr(other) == repr(scaler)
    assert "cur_scale=" in repr(scaler)


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_the_first_process_logs_each_overflow(caplog, monkeypatch, rank):
    if rank is not None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    caplog.set_level(logging.INFO, "gradscaler.torch.deepspeed")
    visited(DynamicLossScaler(**RULE | {"delayed_shift": 1}), ".x.")
    LossScaler(8).update_scale(False)
    LossScaler(8).update_scale(True)
    logged = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert (
        logged
        == [
            (logging.INFO, "non-finite gradients: loss scale 8, now 4"),
            (logging.WARNING, "non-finite gradients: the step is skipped at a fixed loss scale"),
        ][: 2 if rank != 1 else 0]
    )


def test_all_are_scalers():
    assert isinstance(LossScaler(), LossScalerBase)
    assert isinstance(DynamicLossScaler(**RULE), LossScalerBase)
