"""State dicts of every format, read, written and converted, without any framework."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscaler import DynamicScale, FixedScale, ScaleState
from gradscaler.checkpoint import FORMATS, convert, detect, read, write

TORCH = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 200,
    "_growth_tracker": 7,
}
# The same rule at the same point: written by hand, from what each framework saves.
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
FLOOR_OF_ONE = ("keras", "tf_keras", "mindspore")
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


def same(left, right):
    return [(k, np.asarray(v).dtype, np.asarray(v).tolist()) for k, v in left.items()] == [
        (k, np.asarray(v).dtype, np.asarray(v).tolist()) for k, v in right.items()
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read(name):
    policy, state = read(SAVED[name])
    assert policy == policy_for(name)
    assert state == ScaleState(1024.0, 7, 0)
    assert type(state.scale) is np.float32
    assert detect(SAVED[name]) == ("torch" if name == "tensorplay" else name)


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_written_with_its_keys_order_and_types(name):
    assert same(write(policy_for(name), ScaleState(1024.0, 7, 0), name), SAVED[name])


@pytest.mark.parametrize("name", STATIC)
def test_a_fixed_scale_is_read_and_written(name):
    policy, state = read(STATIC[name])
    assert policy == FixedScale(1024.0)
    assert state.scale == 1024.0
    again = write(policy, policy.init(), name)
    assert read(again) == (policy, policy.init())
    assert detect(again) == name


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_every_format_converts_to_every_other(source, target):
    saved = SAVED[source]
    loses_floor = source in FLOOR_OF_ONE and target not in (*FLOOR_OF_ONE, "jmp", "flax")
    gains_floor = source not in FLOOR_OF_ONE and target in FLOOR_OF_ONE
    if loses_floor or gains_floor:
        with pytest.raises(ValueError, match=f"{target}'s format has no place for min_scale="):
            convert(saved, target)
        with pytest.warns(UserWarning, match=f"{target}'s format has no place for min_scale="):
            converted = convert(saved, target, lossy=True)
    else:
        converted = convert(saved, to=target)
        assert read(converted) == read(saved)
    assert converted.keys() == SAVED[target].keys()


LOST = [
    (DynamicScale(hysteresis=2), "torch", "hysteresis=2"),
    (DynamicScale(hysteresis=2, hysteresis_reset="growth"), "paddle", "hysteresis_reset='growth'"),
    (DynamicScale(max_scale=2.0**20), "torch", "max_scale=1048576.0"),
    (DynamicScale(growth_factor=3.0, min_scale=1.0), "keras", "growth_factor=3.0"),
    (DynamicScale(backoff_factor=0.25), "jmp", "backoff_factor=0.25"),
    (DynamicScale(backoff_factor=0.25, min_scale=1.0), "mindspore", "backoff_factor=0.25"),
    (DynamicScale(growth_interval=1), "flax", "growth_interval=1"),
    (FixedScale(8.0), "flax", "a FixedScale"),
]


@pytest.mark.parametrize(("policy", "to", "named"), LOST)
def test_what_a_format_cannot_hold_is_named(policy, to, named):
    message = f"{to}'s format has no place for .*{re.escape(named)}"
    with pytest.raises(ValueError, match=message):
        write(policy, policy.init(), to)
    with pytest.warns(UserWarning, match=message):
        state_dict = write(policy, policy.init(), to, lossy=True)
    assert detect(state_dict) == to


def test_a_count_towards_a_hysteresis_is_named():
    policy = DynamicScale.paddle()
    with pytest.raises(ValueError, match=r"hysteresis=2, nonfinite_steps=1; lossy"):
        write(policy, policy.init()._replace(nonfinite_steps=1), "torch")


@pytest.mark.parametrize("key", ["_nonfinite_steps", "nonfinite_counter", "bad_steps"])
def test_a_count_towards_a_hysteresis_that_the_dict_does_not_describe_is_refused(key):
    name = {"_nonfinite_steps": "torch", "nonfinite_counter": "keras", "bad_steps": "tf_keras"}[key]
    with pytest.raises(ValueError, match=f"{key} belongs to a rule with a hysteresis"):
        read({**SAVED[name], key: 0})


def test_what_means_nothing_to_a_rule_is_not_lost():
    apex = DynamicScale.apex()
    assert detect(write(apex, apex.init(), "torch")) == "torch"
    fixed = {**STATIC["torch"], "_growth_tracker": 7}
    assert convert(fixed, "torch") == {
        **STATIC["torch"],
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }


@pytest.mark.parametrize("name", FORMATS)
def test_a_count_past_32_bits_is_refused_and_one_past_the_interval_is_kept(name):
    policy = policy_for(name)
    with pytest.raises(ValueError, match="finite_steps must be at most"):
        write(policy, ScaleState(1024.0, 2**31, 0), name)
    state = ScaleState(np.float32(1024), 5000, 0)
    assert read(write(policy, state, name))[1] == state


def test_mindspore_s_step_number_is_bounded_too():
    with pytest.raises(ValueError, match="current_iterator_step must be at most"):
        write(policy_for("mindspore"), ScaleState(1024.0, 2**31 - 1, 0), "mindspore")


def test_other_keys_are_not_looked_at():
    assert read({**TORCH, "other": np.ones(3)}) == read(TORCH)


def test_a_scale_below_the_floor_of_a_format_is_refused_even_if_lossy():
    policy = DynamicScale(init_scale=0.5)
    with pytest.raises(ValueError, match="keras's format cannot hold this: initial_scale must lie"):
        write(policy, policy.init(), "keras", lossy=True)


# A run that moves.


@st.composite
def journeys(draw):
    """A rule that every format but Keras', MindSpore's and flax's always holds, and a trace."""
    factor = draw(st.sampled_from([2.0, 4.0]))
    interval = draw(st.integers(1, 5))
    floor = draw(st.sampled_from([1.0, 2.0**-126]))
    policy = DynamicScale(
        init_scale=draw(st.sampled_from([1.0, 2.0**16, 2.0**126, 3.0])),
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=interval,
        min_scale=floor,
    )
    stages = st.tuples(st.sampled_from(FORMATS), st.lists(st.booleans(), max_size=8))
    return policy, draw(st.lists(stages, min_size=2, max_size=6))


@settings(max_examples=300, deadline=None)
@given(journeys())
def test_a_run_that_moves_continues_with_the_scales_of_one_that_stays(journey):
    policy, stages = journey
    moved_policy, moved = policy, policy.init()
    stayed = policy.init()
    for name, found_infs in stages:
        try:
            state_dict = write(moved_policy, moved, name)
        except ValueError:  # this one cannot hold the rule: it does not move there
            continue
        moved_policy, moved = read(state_dict)
        for found_inf in found_infs:
            moved = moved_policy.update(moved, found_inf)
            stayed = policy.update(stayed, found_inf)
            assert moved == stayed


@settings(max_examples=200, deadline=None)
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
        ({}, ValueError, "empty"),
        ([1], TypeError, "must be a dict, got list"),
        ({"model": 1, "optimizer": 2}, ValueError, "in no format that is known: model, optimizer"),
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
        ({**SAVED["keras"], "dynamic_scale": 0.5}, ValueError, "dynamic_scale must lie"),
        (
            {**SAVED["mindspore"], "last_overflow_iterator_step": 8},
            ValueError,
            "last_overflow_iterator_step must be below current_iterator_step, got 8 and 8",
        ),
        ({**SAVED["jmp"], "factor": 1}, ValueError, "factor must be > 1.0"),
        ({**SAVED["flax"], "minimum_scale": -1.0}, ValueError, "minimum_scale must be positive"),
        ({"dynamic": True, "initial_scale": 8.0}, ValueError, "current_loss_scale, good_steps"),
    ],
)
def test_what_is_no_state_dict_is_refused(state_dict, error, message):
    with pytest.raises(error, match=message):
        read(state_dict)


@pytest.mark.parametrize("name", FORMATS)
def test_a_missing_key_is_named(name):
    for key in SAVED[name]:
        rest = {k: v for k, v in SAVED[name].items() if k != key}
        with pytest.raises(ValueError, match=rf"missing from the state dict.*{key}"):
            read(rest)


def test_an_unknown_format_or_rule_is_refused():
    policy = DynamicScale()
    with pytest.raises(ValueError, match="there is no format 'caffe'; there are torch, "):
        write(policy, policy.init(), "caffe")
    with pytest.raises(TypeError, match="policy must be"):
        write("dynamic", policy.init(), "torch")
