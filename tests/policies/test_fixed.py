"""FixedScale, whose scale never moves."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscaler import DynamicScale, FixedScale, ScaleState
from gradscaler.policies import counts_nonfinite_steps, first_scale

SMALLEST_NORMAL = 2.0**-126
LARGEST = (2.0 - 2.0**-23) * 2.0**127

valid_scales = st.floats(SMALLEST_NORMAL, LARGEST)


@given(valid_scales, st.lists(st.booleans()))
def test_the_scale_never_moves(scale, trace):
    policy = FixedScale(scale)
    state = policy.init()
    for found_inf in trace:
        state = policy.update(state, found_inf)
    assert state == policy.init()


def test_update_returns_any_librarys_state_unchanged():
    state = ScaleState(object(), object(), object())
    assert FixedScale(128.0).update(state, object(), where=None) is state


@given(valid_scales)
def test_the_scale_is_rounded_to_float32(scale):
    (rounded,) = struct.unpack("<f", struct.pack("<f", scale))
    assert float(FixedScale(scale).init().scale) == rounded


@given(valid_scales)
def test_the_reciprocal_of_the_scale_is_finite_and_not_zero(scale):
    assert 0 < np.float32(1) / FixedScale(scale).init().scale < math.inf


def test_the_first_state_is_a_float32_and_two_zeros():
    state = FixedScale(128).init()
    assert state == ScaleState(128.0, 0, 0)
    assert type(state.scale) is np.float32


class Own:
    """A policy of the user's, without a hysteresis."""


@pytest.mark.parametrize(
    ("policy", "counts"),
    [
        (FixedScale(8), False),
        (DynamicScale(hysteresis=1), False),
        (DynamicScale(hysteresis=2), True),
        (Own(), True),
    ],
    ids=["fixed", "none", "two", "own"],
)
def test_steps_that_fail_are_counted_for_a_policy_that_may_use_their_number(policy, counts):
    assert counts_nonfinite_steps(policy) is counts


@pytest.mark.parametrize("policy", [FixedScale(0.1), DynamicScale(init_scale=0.1)])
def test_the_first_scale_is_as_it_was_given(policy):
    assert first_scale(policy) == 0.1


def test_the_scale_has_no_default():
    with pytest.raises(TypeError, match="scale"):
        FixedScale()


BAD = {
    ValueError: (0, 0.0, -1.0, math.nan, math.inf, -math.inf, 1e39, 1e-39, 1e-50, 10**400),
    TypeError: (True, np.True_, None, "128", 1j, [128.0], np.ones(1)),
}


@pytest.mark.parametrize(
    ("error", "value"),
    [(error, value) for error, values in BAD.items() for value in values],
    ids=lambda part: f"{part!r:.20}",
)
def test_a_scale_that_float32_cannot_hold_as_a_normal_number_is_an_error(error, value):
    with pytest.raises(error, match=r"^scale\b") as caught:
        FixedScale(value)
    assert repr(value) in str(caught.value)
