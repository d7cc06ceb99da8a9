"""State dicts of every format, read, written and converted, without any framework."""

import dataclasses
import math
import re
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscaler import AmaxScale, AmaxState, DynamicScale, FixedScale, ScaleState
from gradscaler._formats.layouts import OF_OWN_STATE, own_state_of, policies_with_own_state
from gradscaler.checkpoint import FORMATS, convert, detect, read, write
from gradscaler.policies import OwnPolicy
from tests.support.chosen import examples
from tests.support.own_policy import Proven

TORCH = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 200,
    "_growth_tracker": 7,
}
# One rule in one state in every format, written by hand as each framework saves it.
SAVED = {
    "torch": TORCH,
    "tensorplay": TORCH,
    "paddle": {
        "scale": np.array([1024.0], dtype=np.float32),
        "incr_ratio": 2.0,
        "decr_ratio": 0.5,
        "incr_every_n_steps": 200,
        "decr_every_n_nan_or_inf": 1,
        "incr_count": 7,
        "decr_count": 0,
        "use_dynamic_loss_scaling": True,
    },
    "keras": {
        "dynamic_scale": np.float32(1024),
        "step_counter": np.int32(7),
        "initial_scale": 1024.0,
        "dynamic_growth_steps": 200,
    },
    "tf_keras": {
        "current_loss_scale": np.float32(1024),
        "good_steps": np.int64(7),
        "initial_scale": 1024.0,
        "dynamic_growth_steps": 200,
    },
    "mindspore": {
        "scale_sense": np.float32(1024),
        "current_iterator_step": np.int32(8),
        "last_overflow_iterator_step": np.int32(0),
        "scale_factor": 2.0,
        "scale_window": 200,
    },
    "jmp": {
        "loss_scale": np.float32(1024),
        "counter": np.int32(7),
        "period": 200,
        "factor": 2.0,
        "min_loss_scale": np.float32(2.0**-126),
    },
    "flax": {
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 199,
        "fin_steps": np.int32(7),
        "scale": np.float32(1024),
        "minimum_scale": 2.0**-126,
    },
}
FLOOR_OF_ONE = ("tf_keras", "mindspore")
OWN_FLOOR = ("jmp", "flax")
# The state of each framework's own scaler with its defaults.
TORCH_DEFAULT = {**TORCH, "scale": 65536.0, "growth_interval": 2000, "_growth_tracker": 0}
KERAS_DEFAULT = {"initial_scale": 32768.0, "dynamic_growth_steps": 2000}
DEFAULTS = {
    "torch": TORCH_DEFAULT,
    "tensorplay": TORCH_DEFAULT,
    "paddle": {
        **SAVED["paddle"],
        "scale": np.array([65536.0], dtype=np.float32),
        "incr_every_n_steps": 2000,
        "incr_count": 0,
    },
    "keras": {
        "dynamic_scale": np.float32(32768), "step_counter": np.int64(0), **KERAS_DEFAULT
    },
    "tf_keras": {
        "current_loss_scale": np.float32(32768),
        "good_steps": np.int64(0),
        "dynamic": True,
        **KERAS_DEFAULT,
    },
    "mindspore": {
        **SAVED["mindspore"],
        "scale_sense": np.float32(2**24),
        "current_iterator_step": np.int32(1),
        "scale_window": 2000,
    },
    "jmp": {
        "loss_scale": np.float32(32768),
        "counter": np.int32(0),
        "period": 2000,
        "factor": 2,
        "min_loss_scale": np.float32(1),
    },
    "flax": {
        **SAVED["flax"],
        "growth_interval": 2000,
        "fin_steps": 0,
        "scale": 65536.0,
        "minimum_scale": np.finfo(np.float32).tiny,
    },
}  # fmt: skip
PRESETS = {name: getattr(DynamicScale, name)() for name in FORMATS}
STATIC = {
    "torch": {**TORCH, "growth_factor": 1.0, "backoff_factor": 1.0},
    "paddle": {**SAVED["paddle"], "use_dynamic_loss_scaling": False},
    "keras": {
        "dynamic_scale": np.float32(1024),
        "step_counter": np.int32(0),
        "dynamic": False,
        "initial_scale": 1024.0,
    },
    "tf_keras": {"dynamic": False, "initial_scale": 1024.0},
    "mindspore": {"scale_sense": np.float32(1024)},
    "jmp": {"loss_scale": np.float32(1024)},
}


def policy_for(name):
    floor = 1.0 if name in FLOOR_OF_ONE else 2.0**-126
    return DynamicScale(init_scale=1024.0, growth_interval=200, min_scale=floor)


def exact(state_dict):
    """The keys in their order, and the values with their types."""
    return [(k, np.asarray(v).dtype, np.asarray(v).tolist()) for k, v in state_dict.items()]


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read(name):
    policy, state = read(SAVED[name])
    assert policy == policy_for(name)
    assert state == ScaleState(1024.0, 7, 0)
    assert type(state.scale) is np.float32
    assert detect(SAVED[name]) == ("torch" if name == "tensorplay" else name)


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_written_with_its_keys_order_and_types(name):
    written = write(policy_for(name), ScaleState(1024.0, 7, 0), name)
    assert exact(written) == exact(SAVED[name])


@pytest.mark.parametrize("name", STATIC)
def test_a_fixed_scale_is_read_and_written(name):
    policy, state = read(STATIC[name])
    assert policy == FixedScale(1024.0)
    assert state.scale == 1024.0
    again = write(policy, policy.init(), name)
    assert read(again) == (policy, policy.init())
    assert detect(again) == name


def in_format(policy, name):
    """A rule with the default floor and hysteresis, unless the format holds or implies others."""
    floor = 1.0 if name in FLOOR_OF_ONE else 2.0**-126
    return dataclasses.replace(
        policy,
        min_scale=policy.min_scale if name in OWN_FLOOR else floor,
        hysteresis=policy.hysteresis if name == "paddle" else 1,
    )


def without_start(policy):
    return dataclasses.replace(policy, init_scale=policy.max_scale)


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("of", ["state", "framework", "preset"])
def test_between_default_rules_every_format_converts_to_every_other(source, target, of):
    preset = PRESETS[source]
    saved = write(preset, preset.init()._replace(finite_steps=7), source)
    saved = {"state": SAVED[source], "framework": DEFAULTS[source], "preset": saved}[of]
    policy, state = read(saved)
    converted = convert(saved, target)
    assert exact(converted) == exact(write(policy, state, target))
    assert converted.keys() == SAVED[target].keys()
    read_policy, read_state = read(converted)
    assert read_state == state
    assert without_start(read_policy) == without_start(in_format(policy, target))


def test_the_defaults_are_those_of_the_presets_but_for_paddle_s_release():
    for name, policy in PRESETS.items():
        if name != "paddle":
            assert read(DEFAULTS[name]) == (policy, policy.init())


OFF = "backs off at every overflow"
LOST = [
    (DynamicScale(hysteresis=3), "torch", f"a hysteresis of 3 (torch's scaler {OFF})"),
    (
        DynamicScale.megatron(),
        "torch",
        f"a hysteresis of 2 that only growth resets (torch's scaler {OFF})",
    ),
    (
        DynamicScale.apex(hysteresis=2),
        "paddle",
        "a hysteresis of 2 that backing off does not reset (paddle's scaler resets it at a finite "
        "step and at a backoff)",
    ),
    (DynamicScale(max_scale=2.0**20), "torch", "a ceiling of 1048576.0 (torch's scaler has none)"),
    (
        DynamicScale(growth_tiers=((1.0, 100),)),
        "torch",
        "a growth by tiers of ((1.0, 100),) (torch's scaler has none)",
    ),
    (DynamicScale(min_scale=16.0), "torch", "a floor of 16.0 (torch's scaler has no floor)"),
    (DynamicScale(min_scale=16.0), "keras", "a floor of 16.0 (keras's scaler has no floor)"),
    (
        DynamicScale.jmp(min_loss_scale=2.0),
        "tf_keras",
        "a floor of 2.0 (tf_keras's scaler has a floor of 1.0)",
    ),
    (DynamicScale(growth_factor=4.0), "keras", "a growth factor of 4.0 (keras's scaler has 2.0)"),
    (DynamicScale(growth_factor=4.0), "jmp", "a backoff factor of 0.5 (jmp's scaler has 0.25)"),
    (DynamicScale(backoff_factor=0.25), "jmp", "a backoff factor of 0.25 (jmp's scaler has 0.5)"),
    (DynamicScale(growth_interval=1), "flax", "a growth interval of 1 (flax's scaler has 2)"),
    (FixedScale(8.0), "flax", "a scale that does not move"),
    (
        DynamicScale(growth_factor=4.0, max_scale=2.0**20),
        "tf_keras",
        "a growth factor of 4.0 (tf_keras's scaler has 2.0) and a ceiling of 1048576.0 (tf_keras's "
        "scaler has none)",
    ),
]


@pytest.mark.parametrize(("policy", "to", "named"), LOST)
def test_what_a_format_cannot_hold_is_named(policy, to, named):
    message = f"{to}'s format has no place for {named}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}; lossy=True leaves that out$"):
        write(policy, policy.init(), to)
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        state_dict = write(policy, policy.init(), to, lossy=True)
    assert detect(state_dict) == to


def test_the_warning_of_a_loss_is_at_the_caller_s_line():
    policy = DynamicScale(max_scale=2.0**20, hysteresis=3)
    with pytest.warns(UserWarning, match="a ceiling") as written:
        saved = write(policy, policy.init(), "paddle", lossy=True)
    with pytest.warns(UserWarning, match="a hysteresis") as converted:
        convert(saved, "torch", lossy=True)
    assert [warning.filename for warning in (*written, *converted)] == [__file__, __file__]


def test_a_count_towards_paddle_s_own_hysteresis_goes_with_it():
    policy = DynamicScale.paddle()
    state = policy.init()._replace(nonfinite_steps=1)
    assert read(write(policy, state, "torch"))[1] == policy.init()
    assert read(write(policy, state, "paddle"))[1] == state


@pytest.mark.parametrize(
    ("name", "key"),
    [("torch", "_nonfinite_steps"), ("keras", "nonfinite_counter"), ("tf_keras", "bad_steps")],
)
def test_a_count_towards_a_hysteresis_that_the_dict_does_not_describe_is_refused(name, key):
    with pytest.raises(ValueError, match=f"{key} belongs to a rule with a hysteresis"):
        read({**SAVED[name], key: 0})


def test_torch_s_count_may_also_be_of_a_policy_of_one_s_own_and_no_other_format_s():
    with pytest.raises(ValueError, match=r"or to a policy of your own.* a DynamicScale in place"):
        convert({**TORCH, "_nonfinite_steps": 0, "_survived": 0.0}, "paddle")
    with pytest.raises(ValueError, match=r"hysteresis, which .* takes the rule itself$"):
        convert({**SAVED["keras"], "nonfinite_counter": 0}, "paddle")


def test_what_means_nothing_to_a_rule_is_not_lost():
    apex = DynamicScale.apex()
    assert detect(write(apex, apex.init(), "torch")) == "torch"
    rounded = DynamicScale(min_scale=0.1)  # jmp's floor is a float32
    assert detect(write(rounded, rounded.init(), "jmp")) == "jmp"
    fixed = {**STATIC["torch"], "_growth_tracker": 7}
    start = {"growth_interval": 2000, "_growth_tracker": 0}
    assert convert(fixed, "torch") == {**STATIC["torch"], **start}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("torch", "_peak"), ("paddle", "_peak"), ("keras", "peak"), ("tf_keras", "peak")),
        *(("torch", "_reach"), ("paddle", "_reach"), ("keras", "reach"), ("tf_keras", "reach")),
        *(("mindspore", "peak"), ("mindspore", "reach")),
    ],
)
def test_a_peak_or_reach_in_a_dict_that_does_not_describe_its_rule_is_refused(name, key):
    with pytest.raises(ValueError, match=f"{key} belongs to an AmaxScale"):
        read({**SAVED[name], key: 0.5})


@pytest.mark.parametrize("name", ["torch", "tensorplay", "paddle"])
def test_a_field_of_a_policy_of_one_s_own_is_refused(name):
    with pytest.raises(ValueError, match="_barred belongs to a policy of your own"):
        convert({**SAVED[name], "_barred": 1024.0}, "jmp")


# The keys that gradscaler's adapters add to a dict for an AmaxScale.
OF_AMAX = {
    "torch": {"_nonfinite_steps": 3, "_peak": 0.5, "_reach": 256.0},
    "paddle": {"decr_count": 3, "_peak": 0.5, "_reach": 256.0},
    "keras": {"nonfinite_counter": 3, "peak": 0.5, "reach": 256.0},
    "tf_keras": {"bad_steps": 3, "peak": 0.5, "reach": 256.0},
    "mindspore": {"nonfinite_steps": 3, "peak": 0.5, "reach": 256.0},
}


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", OF_AMAX)
def test_a_lossy_conversion_of_an_amax_scale_s_dict_keeps_scale_and_count(name, to):
    saved = {**SAVED[name], **OF_AMAX[name]}
    lost = rf"{to}'s format has no place for an AmaxScale's peak and reach \(.* size of gradients\)"
    with pytest.raises(ValueError, match=rf"^{lost}; lossy=True leaves that out$"):
        convert(saved, to)
    with pytest.warns(UserWarning, match=rf"^{lost}$") as warned:
        converted = convert(saved, to, lossy=True)
    assert [warning.filename for warning in warned] == [__file__]
    assert exact(converted) == exact(convert(SAVED[name], to))


def test_each_field_of_a_package_policy_s_own_state_is_known_by_its_policy():
    kinds = get_args(OwnPolicy)
    made = [kind(1.0) for kind in kinds]
    own = {type(policy).__name__: policy.init()._fields[3:] for policy in made}
    fields = {field: name for name, names in own.items() for field in names}
    known = {key: type(policy).__name__ for key, policy in OF_OWN_STATE.items()}
    assert known == {f"{prefix}{field}": fields[field] for field in fields for prefix in ("_", "")}
    found = policies_with_own_state((*kinds, Proven))
    assert [type(found[field]) for field in ("peak", "proven")] == [AmaxScale, Proven]
    assert own_state_of(found["proven"], "torch") == "a Proven's proven"


@pytest.mark.parametrize("name", ["torch", "paddle"])
def test_a_package_policy_with_a_state_of_its_own_converts_if_lossy(name, monkeypatch):
    monkeypatch.setitem(OF_OWN_STATE, "_proven", Proven())  # as if it were of the package
    saved = {**SAVED[name], "_proven": 24.0}
    lost = "flax's format has no place for a Proven's proven"
    with pytest.raises(ValueError, match=f"^{lost}; lossy=True leaves that out$"):
        convert(saved, "flax")
    with pytest.warns(UserWarning, match=f"^{lost}$"):
        converted = convert(saved, "flax", lossy=True)
    assert exact(converted) == exact(convert(SAVED[name], "flax"))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_says_that_it_has_no_place_for_a_peak(name):
    floor = policy_for(name).min_scale
    policy = AmaxScale(init_scale=1024.0, growth_interval=200, min_scale=floor)
    state = AmaxState(np.float32(2048), 7, 3, np.float32(0.5), np.float32(256))
    with pytest.raises(ValueError, match=f"{name}'s format has no place for an AmaxScale's peak"):
        write(policy, state, name)
    with pytest.warns(UserWarning, match="an AmaxScale's peak and reach"):
        written = write(policy, state, name, lossy=True)
    plain = DynamicScale(init_scale=1024.0, growth_interval=200, min_scale=floor)
    assert exact(written) == exact(write(plain, ScaleState(np.float32(2048), 7, 0), name))


@pytest.mark.parametrize("name", FORMATS)
def test_a_count_past_32_bits_is_refused_and_one_past_the_interval_is_kept(name):
    policy = policy_for(name)
    with pytest.raises(ValueError, match="finite_steps must be at most"):
        write(policy, ScaleState(1024.0, 2**31, 0), name)
    state = ScaleState(np.float32(1024), 5000, 0)
    assert read(write(policy, state, name))[1] == state
    if name == "mindspore":  # it writes the number of the next step
        with pytest.raises(ValueError, match="current_iterator_step must be at most"):
            write(policy, ScaleState(1024.0, 2**31 - 1, 0), name)


def test_other_keys_are_ignored():
    assert read({**TORCH, "other": np.ones(3)}) == read(TORCH)


@pytest.mark.parametrize("name", FLOOR_OF_ONE)
def test_a_scale_below_the_floor_of_a_format_is_refused_even_if_lossy(name):
    saved = {**TORCH, "scale": 2.0**-10}
    scale = next(key for key, value in SAVED[name].items() if isinstance(value, np.float32))
    with pytest.raises(ValueError, match=f"{name}'s format cannot hold this: {scale} must lie"):
        convert(saved, name, lossy=True)


@pytest.mark.parametrize("name", FLOOR_OF_ONE)
def test_a_scale_above_the_floor_of_a_format_may_have_started_below_it(name):
    state = ScaleState(np.float32(1024), 7, 0)
    assert read(write(DynamicScale(init_scale=0.5), state, name))[1] == state


# A run that moves.


@st.composite
def journeys(draw):
    """A rule, and a trace with the formats that the run passes through."""
    factor = draw(st.sampled_from([2.0, 2.0, 4.0]))
    policy = DynamicScale(
        init_scale=draw(st.sampled_from([16.0, 2.0**16, 2.0**126, 48.0])),
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=draw(st.integers(1, 5)),
        hysteresis=draw(st.sampled_from([1, 2, 2, 3])),
        min_scale=draw(st.sampled_from([1.0, 2.0**-126, 16.0])),
    )
    stages = st.tuples(st.sampled_from(FORMATS), st.lists(st.booleans(), max_size=8))
    return policy, draw(st.lists(stages, min_size=2, max_size=6))


def has_place(name, policy, state):
    """Whether a format holds a rule of :func:`journeys`, if conventions need not be kept."""
    return not (
        (policy.growth_factor != 2 and name in ("keras", "tf_keras"))
        or (policy.growth_interval == 1 and name == "flax")
        or (policy.hysteresis == 3 and name != "paddle")
        or (policy.min_scale == 16 and name not in OWN_FLOOR)
        or (state.scale < 1 and name in FLOOR_OF_ONE)
    )


@settings(max_examples=examples(300))
@given(journeys())
def test_a_run_that_moves_continues_by_its_rule_with_the_conventions_of_where_it_is(journey):
    policy, stages = journey
    moved_policy, moved = policy, policy.init()
    expected = policy.init()
    for name, found_infs in stages:
        if not has_place(name, policy, expected):
            with pytest.raises(ValueError, match=f"^{name}'s format "):
                write(moved_policy, moved, name)
            continue
        moved_policy, moved = read(write(moved_policy, moved, name))
        policy = in_format(dataclasses.replace(policy, init_scale=2.0**126), name)
        if policy.hysteresis == 1:
            expected = expected._replace(nonfinite_steps=0)
        assert moved == expected
        for found_inf in found_infs:
            moved = moved_policy.update(moved, found_inf)
            expected = policy.update(expected, found_inf)
            assert moved == expected


@settings(max_examples=examples(200))
@given(
    policy=st.builds(
        DynamicScale,
        init_scale=st.floats(2.0**-20, 2.0**40, width=32),
        growth_factor=st.floats(1.125, 64.0),
        backoff_factor=st.floats(0.0625, 0.875),
        growth_interval=st.integers(1, 2**40),
        hysteresis=st.integers(1, 9),
    ),
    counts=st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 8)),
)
def test_paddle_s_format_holds_its_whole_rule_and_state(policy, counts):
    state = ScaleState(np.float32(policy.init_scale), *counts)
    read_policy, read_state = read(write(policy, state, "paddle"))
    assert read_state == state
    assert dataclasses.replace(read_policy, init_scale=policy.init_scale) == policy


# Bad input.


@pytest.mark.parametrize(
    ("state_dict", "error", "message"),
    [
        ({}, ValueError, "empty.* Construct the next scaler with the scale to start from"),
        ({"model": {"w": 1}, "scaler": {}}, ValueError, r"model, scaler\. scaler is empty, like"),
        ({"x" * 1000: 1, "y": 2}, ValueError, f"do not match any known format: {'x' * 80}, y$"),
        ([1], TypeError, "must be a dict, got list"),
        (
            {"model": 1, "optimizer": 2},
            ValueError,
            "do not match any known format: model, optimizer",
        ),
        ({**TORCH, "_growth_tracker": -1}, ValueError, "_growth_tracker must be at least 0"),
        ({**TORCH, "scale": "big"}, TypeError, "scale must be a number"),
        ({**TORCH, "scale": 0.0}, ValueError, "scale must be positive"),
        ({**TORCH, "scale": float("nan")}, ValueError, "scale must be positive and finite"),
        ({**TORCH, "growth_interval": 1.5}, TypeError, "growth_interval must be an integer"),
        ({**TORCH, "scale": np.ones(2)}, ValueError, "scale must be one number"),
        ({**SAVED["paddle"], "incr_ratio": 1.0}, ValueError, "incr_ratio must be > 1.0"),
        (
            {**SAVED["paddle"], "use_dynamic_loss_scaling": 1},
            TypeError,
            "use_dynamic_loss_scaling must be a bool",
        ),
        (
            {**SAVED["tf_keras"], "current_loss_scale": 0.5},
            ValueError,
            "current_loss_scale must lie",
        ),
        (
            {**SAVED["mindspore"], "last_overflow_iterator_step": 8},
            ValueError,
            "last_overflow_iterator_step must be below current_iterator_step, got 8 and 8",
        ),
        ({"scale_sense": 0.5}, ValueError, "scale_sense must lie between 1.0 and"),
        ({**SAVED["jmp"], "factor": 1}, ValueError, "factor must be > 1.0"),
        ({**SAVED["flax"], "minimum_scale": -1.0}, ValueError, "minimum_scale must be positive"),
        ({"dynamic": True, "initial_scale": 8.0}, ValueError, "current_loss_scale, good_steps"),
    ],
)
def test_a_bad_state_dict_is_refused(state_dict, error, message):
    with pytest.raises(error, match=message):
        read(state_dict)


@pytest.mark.parametrize("name", FORMATS)
def test_a_missing_key_is_named(name):
    for key in SAVED[name]:
        rest = {other: value for other, value in SAVED[name].items() if other != key}
        with pytest.raises(ValueError, match=rf"missing from the state dict.*{key}"):
            read(rest)


@pytest.mark.parametrize("scale", [1e39, 1e-46, 1e-40, np.float64(1e300), 0.0, math.nan])
@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_that_float32_cannot_hold_is_not_written(name, scale):
    with pytest.raises(ValueError, match="scale must"):
        write(policy_for(name), ScaleState(scale, 0, 0), name)


def test_an_unknown_format_or_rule_is_refused():
    policy = DynamicScale()
    with pytest.raises(ValueError, match="unknown format 'caffe'; the formats are torch, "):
        write(policy, policy.init(), "caffe")
    with pytest.raises(TypeError, match="policy must be"):
        write("dynamic", policy.init(), "torch")
