import copy
import dataclasses
import math
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscaler import FixedScale, ScaleState

SMALLEST_NORMAL = 2.0**-126
LARGEST = (2.0 - 2.0**-23) * 2.0**127

HUGE = pytest.param(10**400, id="10**400")  # no float can hold it

valid_scales = st.floats(SMALLEST_NORMAL, LARGEST)


@settings(deadline=None)
@given(valid_scales, st.lists(st.booleans()))
def test_the_scale_never_moves(scale, trace):
    policy = FixedScale(scale)
    state = policy.init()
    for found_inf in trace:
        state = policy.update(state, found_inf)
    assert state == policy.init()


def test_update_hands_back_any_librarys_state_as_it_is():
    state = ScaleState(object(), object(), object())
    assert FixedScale(128.0).update(state, object(), where=None) is state


@settings(deadline=None)
@given(valid_scales)
def test_the_scale_is_rounded_to_float32(scale):
    (rounded,) = struct.unpack("<f", struct.pack("<f", scale))
    assert float(FixedScale(scale).init().scale) == rounded


@settings(deadline=None)
@given(valid_scales)
def test_the_reciprocal_of_the_scale_is_finite_and_not_zero(scale):
    assert 0 < np.float32(1) / FixedScale(scale).init().scale < math.inf


def test_the_first_state_is_a_float32_and_two_zeros():
    state = FixedScale(128).init()
    assert state == ScaleState(128.0, 0, 0)
    assert type(state.scale) is np.float32


def test_the_scale_has_no_default():
    with pytest.raises(TypeError, match="scale"):
        FixedScale()


@pytest.mark.parametrize(
    "value", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, 1e39, 1e-39, 1e-50, HUGE]
)
def test_a_scale_that_float32_cannot_hold_as_a_normal_number_is_a_value_error(value):
    with pytest.raises(ValueError, match=r"^scale\b") as caught:
        FixedScale(value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [True, np.True_, None, "128", 1j, [128.0], np.ones(1)])
def test_a_scale_that_is_no_number_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"^scale\b") as caught:
        FixedScale(value)
    assert repr(value) in str(caught.value)


def test_the_scale_cannot_be_assigned():
    with pytest.raises(dataclasses.FrozenInstanceError, match="scale"):
        FixedScale(128.0).scale = 64.0


def test_an_integer_and_a_float_of_one_value_make_equal_policies_that_hash_alike():
    assert len({FixedScale(128), FixedScale(128.0), FixedScale(np.float32(128))}) == 1


def test_policies_of_different_scales_are_unequal():
    assert FixedScale(128.0) != FixedScale(64.0)


def test_the_repr_is_the_call_that_makes_the_policy():
    assert repr(FixedScale(128)) == "FixedScale(scale=128.0)"


@settings(deadline=None)
@given(valid_scales)
def test_evaluating_the_repr_gives_an_equal_policy(scale):
    assert eval(repr(FixedScale(scale))) == FixedScale(scale)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_gives_an_equal_policy(protocol):
    assert pickle.loads(pickle.dumps(FixedScale(128.0), protocol)) == FixedScale(128.0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_are_equal(copied):
    assert copied(FixedScale(128.0)) == FixedScale(128.0)
