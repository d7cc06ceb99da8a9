"""Megatron's loss scalers beside its own, whose module runs here with its tensors on the CPU."""

import copy
import importlib.metadata
import importlib.util
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradscaler import DynamicScale
from gradscaler.torch.megatron import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler

ATTRIBUTES = ["min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis"]


@pytest.fixture(scope="module")
def megatron():
    try:
        package = importlib.metadata.distribution("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("megatron-core is not installed")
    path = package.locate_file("megatron/core/optimizer/grad_scaler.py")
    spec = importlib.util.spec_from_file_location("megatrons_own", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torch = SimpleNamespace(
        tensor=lambda values, dtype, device: torch.tensor(values, dtype=dtype),
        float=torch.float,
        max=torch.max,
        cuda=SimpleNamespace(current_device=lambda: "cpu"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cuda", torch.Tensor.to)
        yield module


@st.composite
def rules(draw):
    """Megatron's six arguments, from which 24 steps cannot reach inf."""
    min_scale, initial_scale = sorted(draw(st.tuples(scales, scales)))
    return {
        "initial_scale": initial_scale,
        "min_scale": min_scale,
        "growth_factor": draw(st.floats(1.0, 8.0, width=32, exclude_min=True)),
        "backoff_factor": draw(st.floats(0.125, 1.0, width=32, exclude_max=True)),
        "growth_interval": draw(st.integers(1, 5)),
        "hysteresis": draw(st.integers(1, 4)),
    }


scales = st.floats(2.0**-20, 2.0**40, width=32)
traces = st.lists(st.booleans(), max_size=24)
RULE = {
    "initial_scale": 8.0,
    "min_scale": 1.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 3,
    "hysteresis": 2,
}


def tensor(value):
    """How Megatron holds a number on its device."""
    return {"values": [value], "dtype": torch.float32}


def seen(scaler, *names):
    """All that can be read off a scaler, tensors by their values and dtype."""
    values = {name: getattr(scaler, name) for name in ("scale", "inv_scale", "_scale", *names)}
    values |= scaler.state_dict()
    return {
        name: {"values": value.tolist(), "dtype": value.dtype}
        if isinstance(value, torch.Tensor)
        else value
        for name, value in values.items()
    }


def visited(scaler, trace):
    """The scales after each step of a trace, in which "x" is a non-finite step."""
    scales = []
    for step in trace:
        scaler.update(step == "x")
        scales.append(scaler.scale.item())
    return scales


@given(rule=rules(), trace=traces)
def test_every_step_leaves_what_megatron_s_own_scaler_has(megatron, rule, trace):
    ours, theirs = DynamicGradScaler(**rule), megatron.DynamicGradScaler(**rule)
    names = (*ATTRIBUTES, "_growth_tracker", "_hysteresis_tracker")
    assert seen(ours, *names) == seen(theirs, *names)
    for found_inf in trace:
        assert ours.update(found_inf) is theirs.update(found_inf) is None
        assert seen(ours, *names) == seen(theirs, *names)


@given(rule=rules(), before=traces, after=traces.map(lambda trace: trace[:8]))
def test_a_state_dict_moves_a_run_to_the_other_class(megatron, rule, before, after):
    saved, whole = DynamicGradScaler(**rule), megatron.DynamicGradScaler(**rule)
    for found_inf in before[:16]:
        saved.update(found_inf)
        whole.update(found_inf)
    ours, theirs = DynamicGradScaler(**rule), megatron.DynamicGradScaler(**rule)
    ours.load_state_dict(whole.state_dict())
    theirs.load_state_dict(saved.state_dict())
    assert list(saved.state_dict()) == list(whole.state_dict())
    for found_inf in after:
        for scaler in (ours, theirs, whole):
            scaler.update(found_inf)
        assert seen(ours) == seen(theirs) == seen(whole)


def test_a_constant_scale_has_megatron_s_properties_and_state(megatron):
    ours, theirs = ConstantGradScaler(initial_scale=3), megatron.ConstantGradScaler(initial_scale=3)
    for scaler in (ours, theirs):
        scaler.update(True)
        scaler.load_state_dict({"scale": torch.ones(1)})
    assert seen(ours) == seen(theirs)
    assert ours.state_dict() == {}


BAD = [
    ("initial_scale", 0.0),
    ("initial_scale", -1.0),
    ("min_scale", 0.0),
    ("min_scale", 16.0),  # above the initial scale
    ("growth_factor", 1.0),
    ("backoff_factor", 1.0),
    ("backoff_factor", 0.0),
    ("growth_interval", 0),
    ("hysteresis", 0),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_an_argument_that_megatron_asserts_against_is_refused_by_name(megatron, name, value):
    with pytest.raises(AssertionError):
        megatron.DynamicGradScaler(**RULE | {name: value})
    with pytest.raises(AssertionError, match=name if value != 16.0 else "initial_scale"):
        DynamicGradScaler(**RULE | {name: value})


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e-40])
def test_a_scale_without_a_finite_reciprocal_is_refused_by_name(value):
    with pytest.raises(ValueError, match="initial_scale must"):
        ConstantGradScaler(value)


def test_the_scale_backs_off_at_the_second_overflow_since_it_grew():
    assert visited(DynamicGradScaler(**RULE), "x.xx...xx.xxxx") == [
        8.0, 8.0, 4.0, 2.0, 2.0, 2.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0
    ]  # fmt: skip


def test_the_scale_is_the_preset_s_on_every_step():
    scaler, policy = DynamicGradScaler(**RULE), DynamicScale.megatron(**RULE)
    state = policy.init()
    for step in "x...x.x.xxx......x.xx....":
        state = policy.update(state, step == "x")
        assert visited(scaler, step) == [state.scale]


def test_growth_past_the_largest_float32_is_left_out():
    scaler = DynamicGradScaler(**RULE | {"initial_scale": 2.0**127, "growth_interval": 1})
    assert visited(scaler, "..") == [2.0**127] * 2
    assert visited(scaler, "x.x") == [2.0**127, 2.0**127, 2.0**126]  # it did not grow


def test_lowering_the_interval_below_the_tracker_does_not_freeze_growth():
    scaler = DynamicGradScaler(**RULE)
    visited(scaler, "..")
    scaler.growth_interval = 1
    assert visited(scaler, "..") == [16.0, 32.0]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_can_be_set_as_on_megatron_s_scaler_but_not_to_what_cannot_work(name):
    scaler = DynamicGradScaler(**RULE)
    other = {"growth_interval": 7, "hysteresis": 5, "backoff_factor": torch.tensor([0.25])}
    value = other.get(name, 3.0)
    setattr(scaler, name, value)
    assert getattr(scaler, name) == value
    with pytest.raises(ValueError, match=rf"^{name} must"):
        setattr(scaler, name, -1)
    assert getattr(scaler, name) == value


def test_a_set_parameter_is_the_one_that_moves_the_scale():
    scaler = DynamicGradScaler(**RULE | {"hysteresis": 1})
    scaler.backoff_factor = 0.25
    scaler.growth_interval, scaler.growth_factor = 1, torch.tensor([8.0])
    assert visited(scaler, "x.") == [2.0, 16.0]


def test_a_scale_handed_out_earlier_does_not_change_when_the_scale_moves():
    scaler = DynamicGradScaler(**RULE)
    scale, saved = scaler.scale, scaler.state_dict()
    assert visited(scaler, "xx")[-1] == 4.0
    assert scale.item() == saved["scale"].item() == 8.0


def test_the_scale_lives_on_the_accelerator_and_no_step_reads_it_back(monkeypatch):
    meta = torch.device("meta")  # whose tensors have no values to read
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: meta)
    scaler = DynamicGradScaler(**RULE)
    for found_inf in [False, False, False, True, True]:
        scaler.update(found_inf)
    assert scaler.scale.device == scaler.inv_scale.device == scaler.growth_factor.device == meta
    assert "scale=8.0, growth_tracker=0, hysteresis_tracker=0" in repr(scaler)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_goes_on_as_the_original_does(copied):
    scaler = DynamicGradScaler(**RULE)
    visited(scaler, "x..")
    other = copied(scaler)
    assert visited(other, "x.x...") == visited(scaler, "x.x...")
    assert seen(other, *ATTRIBUTES) == seen(scaler, *ATTRIBUTES)
    assert seen(copied(ConstantGradScaler(4.0)))["scale"] == tensor(4.0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scale": torch.zeros(1)}, ValueError, "scale must be positive"),
        ({"scale": torch.ones(2)}, ValueError, "scale must be one number"),
        ({"scale": "8"}, TypeError, "scale must be a number"),
        ({"growth_tracker": -1}, ValueError, "growth_tracker must be at least 0"),
        ({"hysteresis_tracker": 1.5}, TypeError, "hysteresis_tracker must be an integer"),
        ({"hysteresis_tracker": 2**31}, ValueError, "hysteresis_tracker must be at most"),
    ],
)
def test_a_bad_state_dict_is_refused_by_the_key_s_name_and_changes_nothing(change, error, message):
    scaler = DynamicGradScaler(**RULE)
    visited(scaler, "x.")
    before = seen(scaler)
    good = {"scale": torch.tensor([2.0]), "growth_tracker": 2, "hysteresis_tracker": 1}
    with pytest.raises(error, match=message):
        scaler.load_state_dict(good | change)
    assert seen(scaler) == before
    scaler.load_state_dict(good)
    assert visited(scaler, ".") == [4.0]


def test_the_empty_state_dict_of_a_constant_scale_is_refused():
    with pytest.raises(KeyError, match=r"missing .*: scale, growth_tracker, .*; it holds nothing"):
        DynamicGradScaler(**RULE).load_state_dict(ConstantGradScaler(8.0).state_dict())


def test_both_are_scalers_and_the_base_cannot_be_made():
    assert isinstance(DynamicGradScaler(**RULE), MegatronGradScaler)
    assert isinstance(ConstantGradScaler(8.0), MegatronGradScaler)
    with pytest.raises(TypeError, match="abstract"):
        MegatronGradScaler(8.0)
