"""Policies are values: immutable, compared by their parameters, and printed as a call."""

import copy
import dataclasses
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscaler import DynamicScale, FixedScale
from gradscaler.policies import ScaleState, leaf_dtypes

OTHERS = {
    DynamicScale(): {
        "init_scale": 2.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "hysteresis": 3,
        "hysteresis_reset": "growth",
        "min_scale": 0.5,
        "max_scale": 2.0**100,
    },
    FixedScale(128.0): {"scale": 64.0},
}
scales = st.floats(2.0**-126, (2.0 - 2.0**-23) * 2.0**127)
dynamic_policies = st.builds(
    lambda bounds, *rest: DynamicScale(bounds[1], *rest, min_scale=bounds[0], max_scale=bounds[2]),
    st.lists(scales, min_size=3, max_size=3).map(sorted),
    st.floats(1.0 + 2.0**-20, 2.0**40),
    st.floats(2.0**-40, 1.0 - 2.0**-20),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(["finite_step", "finite_step_only", "growth"]),
)
policies = st.one_of(dynamic_policies, st.builds(FixedScale, scales))

a_policy = pytest.mark.parametrize("policy", [*OTHERS, DynamicScale.megatron()], ids=repr)
a_field = pytest.mark.parametrize(
    ("policy", "field", "value"),
    [(policy, *change) for policy, changes in OTHERS.items() for change in changes.items()],
)


def moved(policy, trace="x.x..x"):
    """The scales after each step of a trace, in which "x" is a non-finite step."""
    state, visited = policy.init(), []
    for step in trace:
        state = policy.update(state, step == "x")
        visited.append(float(state.scale))
    return visited


@a_field
def test_a_field_cannot_be_assigned_or_deleted(policy, field, value):
    with pytest.raises(dataclasses.FrozenInstanceError, match=field):
        setattr(policy, field, value)
    with pytest.raises(dataclasses.FrozenInstanceError, match=field):
        delattr(policy, field)


@a_field
def test_policies_that_differ_in_one_field_are_unequal(policy, field, value):
    assert dataclasses.replace(policy, **{field: value}) != policy


def test_a_dynamic_and_a_fixed_policy_are_unequal():
    assert DynamicScale(init_scale=8.0) != FixedScale(8.0)


@a_policy
def test_a_policy_that_moved_a_scale_equals_its_unused_copy(policy):
    unused = copy.deepcopy(policy)
    moved(policy)
    assert (policy, hash(policy), repr(policy)) == (unused, hash(unused), repr(unused))


@a_policy
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_are_equal(policy, copied):
    moved(policy)
    assert copied(policy) == policy


@a_policy
def test_a_pickle_holds_only_the_parameters(policy):
    moved(policy)
    assert b"_constants" not in pickle.dumps(policy)


@a_policy
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_gives_an_equal_policy(policy, protocol):
    restored = pickle.loads(pickle.dumps(policy, protocol))
    assert (restored, hash(restored)) == (policy, hash(policy))


@given(policies, st.text(".x", max_size=40))
def test_a_used_policy_that_was_pickled_moves_the_scale_alike(policy, trace):
    visited = moved(policy, trace)
    assert moved(pickle.loads(pickle.dumps(policy)), trace) == visited


def test_a_changed_copy_of_a_used_policy_follows_its_own_parameters():
    policy = DynamicScale(8.0)
    moved(policy)
    assert moved(dataclasses.replace(policy, backoff_factor=0.25), "x") == [2.0]


def test_a_changed_copy_is_checked():
    with pytest.raises(ValueError, match=r"growth_factor .* 0\.5"):
        dataclasses.replace(DynamicScale(), growth_factor=0.5)


@pytest.mark.parametrize("of_kind", [np.float32, np.float64, Fraction, np.int64, float, int])
def test_every_kind_of_number_makes_the_same_policy(of_kind):
    policy = DynamicScale(of_kind(8), growth_factor=of_kind(4), min_scale=of_kind(1))
    plain = DynamicScale(8.0, 4.0, min_scale=1.0)
    assert (policy, hash(policy), repr(policy)) == (plain, hash(plain), repr(plain))
    assert len({FixedScale(of_kind(128)), FixedScale(128.0)}) == 1


@pytest.mark.parametrize("of_kind", [np.int32, np.uint8, np.int64])
def test_every_kind_of_integer_makes_the_same_policy(of_kind):
    policy = DynamicScale(growth_interval=of_kind(5), hysteresis=of_kind(2))
    assert repr(policy) == repr(DynamicScale(growth_interval=5, hysteresis=2))


def test_parameters_are_kept_as_python_s_own_numbers():
    given = {
        "init_scale": np.float32(8),
        "growth_factor": np.float64(4),
        "backoff_factor": np.float32(0.25),
        "growth_interval": np.int32(3),
        "hysteresis": np.int64(2),
        "min_scale": np.int32(1),
        "max_scale": np.float32(2.0**20),
    }
    kept = {name: getattr(DynamicScale(**given), name) for name in given}
    counts = ("growth_interval", "hysteresis")
    assert kept == given
    assert {name: type(value) for name, value in kept.items()} == {
        name: int if name in counts else float for name in given
    }


def test_the_repr_is_the_call_that_makes_the_policy():
    assert repr(DynamicScale(init_scale=8, min_scale=1, max_scale=64)) == (
        "DynamicScale(init_scale=8.0, growth_factor=2.0, backoff_factor=0.5, "
        "growth_interval=2000, hysteresis=1, hysteresis_reset='finite_step', "
        "min_scale=1.0, max_scale=64.0, growth_tiers=())"
    )
    assert repr(FixedScale(128)) == "FixedScale(scale=128.0)"


@given(policies)
def test_evaluating_the_repr_gives_an_equal_policy(policy):
    assert eval(repr(policy)) == policy


def test_a_number_of_a_state_is_a_float32_if_it_is_a_float_of_python_or_of_numpy():
    for value, dtype in ((0.5, np.float32), (np.float32(0.5), np.float32), (3, np.int32)):
        assert leaf_dtypes(ScaleState(1.0, 0, value)) == (np.float32, np.int32, dtype)
