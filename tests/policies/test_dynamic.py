import copy
import dataclasses
import math
import pickle
import struct
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscaler import DynamicScale, FixedScale, ScaleState

SMALLEST_NORMAL = 2.0**-126
LARGEST = (2.0 - 2.0**-23) * 2.0**127
RESETS = ("finite_step", "finite_step_only", "growth")

FIELDS_WITH_ANOTHER_VALUE = {
    "init_scale": 2.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "hysteresis": 3,
    "hysteresis_reset": "growth",
    "min_scale": 0.5,
    "max_scale": 2.0**100,
}


def float32(value):
    """Round to float32 without NumPy, too large becoming inf."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.inf


def states(policy, trace, state=None):
    """The state after each step of a trace, in which "x" is a non-finite step."""
    state = policy.init() if state is None else state
    visited = []
    for step in trace:
        state = policy.update(state, step == "x")
        visited.append(state)
    return visited


def scales(policy, trace, state=None):
    return [float(state.scale) for state in states(policy, trace, state)]


def reference(policy, trace):
    """Scale and finite steps after each step, from the rules of Paddle, Apex and Megatron.

    Plain Python: a product of two float32 numbers is exact in a Python float, and rounded once.
    The two rules with a budget of non-finite steps count it down, as their sources do.
    """
    scale = float32(policy.init_scale)
    growth, backoff = float32(policy.growth_factor), float32(policy.backoff_factor)
    finite_steps = 0
    bad_steps = 0  # Paddle's
    budget = policy.hysteresis  # Apex's and Megatron's
    visited = []
    for step in trace:
        if step == "x":
            finite_steps = 0
            if policy.hysteresis_reset == "finite_step":
                bad_steps += 1
                back_off = bad_steps == policy.hysteresis
                if back_off:
                    bad_steps = 0
            else:
                budget -= 1
                back_off = budget <= 0
            if back_off:
                scale = max(float32(scale * backoff), float32(policy.min_scale))
        else:
            bad_steps = 0
            if policy.hysteresis_reset == "finite_step_only":
                budget = policy.hysteresis
            finite_steps += 1
            if finite_steps == policy.growth_interval:
                finite_steps = 0
                if float32(scale * growth) <= float32(policy.max_scale):
                    scale = float32(scale * growth)
                    if policy.hysteresis_reset == "growth":
                        budget = policy.hysteresis
        visited.append((scale, finite_steps))
    return visited


def floats32(low, high, **bounds):
    return st.floats(float32(low), float32(high), width=32, **bounds)


@st.composite
def policies(draw):
    bounds = floats32(SMALLEST_NORMAL, LARGEST)
    low, init, high = sorted([draw(bounds), draw(bounds), draw(bounds)])
    return DynamicScale(
        init_scale=init,
        growth_factor=draw(floats32(1.0, 2.0**40, exclude_min=True)),
        backoff_factor=draw(floats32(2.0**-40, 1.0, exclude_max=True)),
        growth_interval=draw(st.integers(1, 5)),
        hysteresis=draw(st.integers(1, 4)),
        hysteresis_reset=draw(st.sampled_from(RESETS)),
        min_scale=low,
        max_scale=high,
    )


runs = st.tuples(st.sampled_from(".x"), st.integers(1, 12)).map(lambda run: run[0] * run[1])
traces = st.lists(runs, max_size=8).map("".join)
powers_of_two = st.integers(-126, 127).map(lambda exponent: 2.0**exponent)


# The rule.


@settings(deadline=None)
@given(policies(), traces)
def test_every_step_of_every_trace_is_what_a_straight_line_reference_gives(policy, trace):
    visited = [(float(state.scale), state.finite_steps) for state in states(policy, trace)]
    assert visited == reference(policy, trace)


@settings(deadline=None)
@given(policies(), traces)
def test_the_scale_stays_finite_and_within_its_bounds(policy, trace):
    for scale in scales(policy, trace):
        assert math.isfinite(scale)
        assert policy.min_scale <= scale <= policy.max_scale


@settings(deadline=None)
@given(
    init=powers_of_two,
    growth=st.integers(1, 60).map(lambda exponent: 2.0**exponent),
    backoff=st.integers(-60, -1).map(lambda exponent: 2.0**exponent),
    ceiling=st.floats(1.0, 2.0),
    trace=traces,
)
def test_a_power_of_two_with_power_of_two_factors_stays_one(init, growth, backoff, ceiling, trace):
    max_scale = min(init * ceiling, LARGEST)
    policy = DynamicScale(init, growth, backoff, growth_interval=1, max_scale=max_scale)
    for scale in scales(policy, trace):
        assert math.frexp(scale)[0] == 0.5


@settings(deadline=None)
@given(interval=st.integers(1, 9), steps=st.integers(0, 60))
def test_finite_steps_alone_double_the_scale_once_an_interval(interval, steps):
    policy = DynamicScale(1.0, growth_interval=interval)
    assert scales(policy, "." * steps)[-1:] == [2.0 ** (steps // interval)] * (steps > 0)


def test_the_default_policy_doubles_two_to_the_16_at_the_2000th_finite_step():
    visited = scales(DynamicScale(), "." * 2000)
    assert visited == [65536.0] * 1999 + [131072.0]


def test_each_non_finite_step_halves_the_scale_by_default():
    assert scales(DynamicScale(), "xxx") == [32768.0, 16384.0, 8192.0]


def test_a_non_finite_step_makes_the_interval_start_anew():
    policy = DynamicScale(8.0, growth_interval=3)
    assert scales(policy, "..x...") == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0]


def test_growth_makes_the_interval_start_anew():
    policy = DynamicScale(8.0, growth_interval=2)
    assert scales(policy, ".....") == [8.0, 16.0, 16.0, 32.0, 32.0]


@settings(deadline=None)
@given(data=st.data(), lowered=st.integers(1, 20))
def test_lowering_the_interval_below_the_counter_grows_at_the_next_finite_step(data, lowered):
    counted = data.draw(st.integers(lowered, 40))
    state = states(DynamicScale(8.0, growth_interval=50), "." * counted)[-1]
    assert scales(DynamicScale(8.0, growth_interval=lowered), ".", state) == [16.0]


@pytest.mark.parametrize("reset", RESETS)
def test_lowering_the_hysteresis_below_the_count_backs_off_at_the_next_non_finite_step(reset):
    state = states(DynamicScale(8.0, hysteresis=9, hysteresis_reset=reset), "xxxxx")[-1]
    lowered = DynamicScale(8.0, hysteresis=2, hysteresis_reset=reset)
    assert scales(lowered, "x", state) == [4.0]


# Hysteresis.


@pytest.mark.parametrize("reset", RESETS)
@settings(deadline=None)
@given(hysteresis=st.integers(1, 9))
def test_the_scale_backs_off_at_the_non_finite_step_that_the_hysteresis_names(reset, hysteresis):
    policy = DynamicScale(16.0, hysteresis=hysteresis, hysteresis_reset=reset)
    assert scales(policy, "x" * hysteresis) == [16.0] * (hysteresis - 1) + [8.0]


def test_with_finite_step_a_finite_step_forgets_the_non_finite_ones():
    policy = DynamicScale(16.0, hysteresis=2)
    assert scales(policy, "x.x.x.") == [16.0] * 6


def test_with_finite_step_the_backoff_forgets_the_non_finite_steps_too():
    policy = DynamicScale(16.0, hysteresis=2)
    assert scales(policy, "xxxxx") == [16.0, 8.0, 8.0, 4.0, 4.0]


def test_with_finite_step_only_a_finite_step_forgets_the_non_finite_ones():
    policy = DynamicScale(16.0, hysteresis=2, hysteresis_reset="finite_step_only")
    assert scales(policy, "x.x.x.") == [16.0] * 6


def test_with_finite_step_only_every_further_non_finite_step_backs_off():
    policy = DynamicScale(16.0, hysteresis=3, hysteresis_reset="finite_step_only")
    assert scales(policy, "xxxxx") == [16.0, 16.0, 8.0, 4.0, 2.0]


def test_with_finite_step_only_a_finite_step_after_the_backoff_restores_the_tolerance():
    policy = DynamicScale(16.0, hysteresis=2, hysteresis_reset="finite_step_only")
    assert scales(policy, "xxx.xx") == [16.0, 8.0, 4.0, 4.0, 4.0, 2.0]


def test_with_growth_non_finite_steps_count_however_far_apart_they_are():
    policy = DynamicScale(16.0, growth_interval=4, hysteresis=2, hysteresis_reset="growth")
    assert scales(policy, "x...x") == [16.0, 16.0, 16.0, 16.0, 8.0]


def test_with_growth_every_further_non_finite_step_backs_off_until_the_scale_grows():
    policy = DynamicScale(16.0, growth_interval=3, hysteresis=2, hysteresis_reset="growth")
    assert scales(policy, "xx.x..x") == [16.0, 8.0, 8.0, 4.0, 4.0, 4.0, 2.0]


def test_with_growth_the_scale_growing_restores_the_tolerance():
    policy = DynamicScale(16.0, growth_interval=2, hysteresis=2, hysteresis_reset="growth")
    assert scales(policy, "xx..xx") == [16.0, 8.0, 8.0, 16.0, 16.0, 8.0]


@settings(deadline=None)
@given(trace=traces)
def test_a_hysteresis_of_one_is_the_same_under_every_reset(trace):
    visited = [
        scales(DynamicScale(growth_interval=3, hysteresis_reset=reset), trace) for reset in RESETS
    ]
    assert visited[0] == visited[1] == visited[2]


# Bounds.


def test_growth_past_max_scale_is_not_made():
    policy = DynamicScale(8.0, growth_factor=4.0, growth_interval=1, max_scale=31.0)
    assert scales(policy, "...") == [8.0, 8.0, 8.0]


def test_growth_to_max_scale_itself_is_made():
    policy = DynamicScale(8.0, growth_factor=4.0, growth_interval=1, max_scale=32.0)
    assert scales(policy, "...") == [32.0, 32.0, 32.0]


def test_growth_that_is_not_made_restarts_the_interval():
    policy = DynamicScale(8.0, growth_interval=2, max_scale=8.0)
    assert [state.finite_steps for state in states(policy, "....")] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("scale", "factor"),
    [
        (2.0**127, 2.0),
        (3.1802088091780088e38, 1.07),  # too large only by the factor that float32 rounds up
        (LARGEST, 1 + 2.0**-23),
    ],
)
def test_growth_to_inf_is_not_made_and_warns_of_nothing(scale, factor):
    policy = DynamicScale(scale, factor, growth_interval=1)
    assert scales(policy, "..") == [scale] * 2


@pytest.mark.parametrize("of_kind", [np.float32, float])
def test_the_largest_scale_backs_off_without_a_warning(of_kind):
    state = ScaleState(of_kind(2.0**127), 0, 0)
    assert scales(DynamicScale(), "x", state) == [2.0**126]


def test_backoff_stops_at_min_scale():
    policy = DynamicScale(16.0, min_scale=3.0)
    assert scales(policy, "xxxx") == [8.0, 4.0, 3.0, 3.0]


def test_the_default_floor_is_the_smallest_normal_float32():
    assert scales(DynamicScale(), "x" * 300)[-1] == SMALLEST_NORMAL


def test_the_reciprocal_of_the_scale_is_finite_at_the_default_floor():
    lowest = states(DynamicScale(), "x" * 300)[-1].scale
    assert np.isfinite(np.float32(1) / lowest)


def test_the_scale_grows_again_from_the_floor():
    policy = DynamicScale(4.0, growth_interval=1, min_scale=3.0)
    assert scales(policy, "xx.") == [3.0, 3.0, 6.0]


@settings(deadline=None)
@given(st.floats(SMALLEST_NORMAL, LARGEST))
def test_an_initial_scale_may_be_its_own_floor_and_ceiling(scale):
    policy = DynamicScale(init_scale=scale, min_scale=scale, max_scale=scale, growth_interval=1)
    assert scales(policy, "x.x") == [float32(scale)] * 3


@settings(deadline=None)
@given(st.floats(SMALLEST_NORMAL, LARGEST), st.floats(SMALLEST_NORMAL, LARGEST), traces)
def test_the_scale_stays_within_bounds_that_float32_rounds(one, other, trace):
    low, high = sorted([one, other])
    policy = DynamicScale(low, growth_interval=1, min_scale=low, max_scale=high)
    for scale in scales(policy, trace):
        assert float32(low) <= scale <= float32(high)


def test_an_interval_longer_than_a_32_bit_counter_grows_when_the_counter_is_full():
    policy = DynamicScale(8.0, growth_interval=2**40)
    state = ScaleState(np.float32(8.0), np.int32(2**31 - 2), np.int32(0))
    assert policy.update(state, False) == (16.0, 0, 0)


@settings(deadline=None)
@given(policies(), traces)
def test_numpys_error_settings_do_not_matter(policy, trace):
    with np.errstate(all="raise"):
        strict = scales(policy, trace)
    assert strict == scales(policy, trace)


def test_a_product_that_underflows_on_the_way_to_the_floor_raises_nothing():
    policy = DynamicScale(1.5 * SMALLEST_NORMAL, backoff_factor=0.3)
    with np.errstate(all="raise"):
        assert scales(policy, "x") == [SMALLEST_NORMAL]


# States.


def test_the_first_state_is_the_initial_scale_and_two_zeros():
    assert DynamicScale(init_scale=8).init() == ScaleState(8.0, 0, 0)


@settings(deadline=None)
@given(st.floats(SMALLEST_NORMAL, LARGEST))
def test_the_initial_scale_is_rounded_to_float32(scale):
    assert float(DynamicScale(init_scale=scale).init().scale) == float32(scale)


@settings(deadline=None)
@given(policies(), traces.filter(bool))
def test_a_state_on_the_host_is_a_float32_and_two_integers(policy, trace):
    state = states(policy, trace)[-1]
    assert list(map(type, state)) == [np.float32, int, int]


def test_a_scale_given_as_a_python_float_is_rounded_to_float32():
    policy = DynamicScale(hysteresis=2)
    assert float(policy.update(ScaleState(0.1, 0, 0), True).scale) == float32(0.1)


@settings(deadline=None)
@given(policies(), traces, traces)
def test_a_state_read_as_plain_python_numbers_goes_on_as_the_state_itself(policy, before, after):
    state = states(policy, "." + before)[-1]
    restored = ScaleState(float(state.scale), int(state.finite_steps), int(state.nonfinite_steps))
    assert states(policy, after, restored) == states(policy, after, state)


@settings(deadline=None)
@given(policies(), traces, st.booleans())
def test_update_is_pure(policy, trace, found_inf):
    state = states(policy, "." + trace)[-1]
    before = tuple(state)
    assert policy.update(state, found_inf) == policy.update(state, found_inf)
    assert tuple(state) == before


# Policies are values.


@pytest.mark.parametrize("field", FIELDS_WITH_ANOTHER_VALUE)
def test_a_field_cannot_be_assigned(field):
    with pytest.raises(dataclasses.FrozenInstanceError, match=field):
        setattr(DynamicScale(), field, FIELDS_WITH_ANOTHER_VALUE[field])


def test_a_field_cannot_be_deleted():
    policy = DynamicScale()
    with pytest.raises(dataclasses.FrozenInstanceError, match="init_scale"):
        del policy.init_scale


def test_updating_leaves_the_policy_as_it_was():
    policy = DynamicScale()
    policy.update(policy.init(), True)
    assert policy == DynamicScale()
    assert repr(policy) == repr(DynamicScale())


def test_integers_and_floats_of_one_value_make_equal_policies():
    assert DynamicScale(init_scale=8, growth_factor=4, min_scale=1) == DynamicScale(
        init_scale=8.0, growth_factor=4.0, min_scale=1.0
    )


@pytest.mark.parametrize("of_kind", [np.float32, np.float64, Fraction, np.int64, float, int])
def test_every_kind_of_number_makes_the_same_policy(of_kind):
    policy = DynamicScale(init_scale=of_kind(8), growth_factor=of_kind(4))
    assert (policy, repr(policy)) == (DynamicScale(8.0, 4.0), repr(DynamicScale(8.0, 4.0)))


@pytest.mark.parametrize("of_kind", [np.int32, np.uint8, np.int64])
def test_every_kind_of_integer_makes_the_same_policy(of_kind):
    policy = DynamicScale(growth_interval=of_kind(5), hysteresis=of_kind(2))
    assert repr(policy) == repr(DynamicScale(growth_interval=5, hysteresis=2))


def test_equal_policies_hash_alike():
    assert len({DynamicScale(init_scale=8), DynamicScale(init_scale=8.0)}) == 1


def test_a_policy_that_was_used_equals_one_that_was_not():
    used = DynamicScale(8.0)
    used.update(used.init(), False)
    assert (used, hash(used)) == (DynamicScale(8.0), hash(DynamicScale(8.0)))


@pytest.mark.parametrize("field", FIELDS_WITH_ANOTHER_VALUE)
def test_policies_that_differ_in_one_field_are_unequal(field):
    other = dataclasses.replace(DynamicScale(), **{field: FIELDS_WITH_ANOTHER_VALUE[field]})
    assert other != DynamicScale()


def test_a_dynamic_and_a_fixed_policy_are_unequal():
    assert DynamicScale(init_scale=8.0) != FixedScale(8.0)


def test_the_repr_is_the_call_that_makes_the_policy():
    assert repr(DynamicScale(init_scale=8, min_scale=1, max_scale=64)) == (
        "DynamicScale(init_scale=8.0, growth_factor=2.0, backoff_factor=0.5, "
        "growth_interval=2000, hysteresis=1, hysteresis_reset='finite_step', "
        "min_scale=1.0, max_scale=64.0)"
    )


@settings(deadline=None)
@given(policies())
def test_evaluating_the_repr_gives_an_equal_policy(policy):
    assert eval(repr(policy)) == policy


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_gives_an_equal_policy(protocol):
    policy = DynamicScale.megatron()
    restored = pickle.loads(pickle.dumps(policy, protocol))
    assert (restored, hash(restored)) == (policy, hash(policy))


@settings(deadline=None)
@given(policies(), traces)
def test_a_used_policy_that_was_pickled_moves_the_scale_alike(policy, trace):
    visited = scales(policy, trace)
    assert scales(pickle.loads(pickle.dumps(policy)), trace) == visited


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_are_equal(copied):
    policy = DynamicScale(8.0)
    policy.update(policy.init(), True)
    assert copied(policy) == policy


def test_a_changed_copy_of_a_used_policy_follows_its_own_parameters():
    policy = DynamicScale(8.0)
    policy.update(policy.init(), True)
    assert scales(dataclasses.replace(policy, backoff_factor=0.25), "x") == [2.0]


def test_a_changed_copy_is_checked():
    with pytest.raises(ValueError, match=r"growth_factor .* 0\.5"):
        dataclasses.replace(DynamicScale(), growth_factor=0.5)


# Bad parameters. Each error names the parameter and the value.

SCALES = ("init_scale", "min_scale", "max_scale")
FACTORS = ("growth_factor", "backoff_factor")
COUNTS = ("growth_interval", "hysteresis")
HUGE = pytest.param(10**400, id="10**400")  # no float can hold it
MINUS_HUGE = pytest.param(-(10**400), id="-10**400")


def raises_naming(error, name, value):
    with pytest.raises(error) as caught:
        DynamicScale(**{name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize(
    "value", [0, 0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 1e39, 1e-50, 1e-39, HUGE]
)
def test_a_scale_that_float32_cannot_hold_as_a_normal_number_is_a_value_error(name, value):
    raises_naming(ValueError, name, value)


@pytest.mark.parametrize(
    "value",
    [1, 1.0, 0.5, 0, -2.0, math.nan, math.inf, 1 + 1e-12, 1 + 2.0**-24, 1e39, HUGE],
)
def test_a_growth_factor_that_does_not_grow_is_a_value_error(value):
    raises_naming(ValueError, "growth_factor", value)


@pytest.mark.parametrize(
    "value", [0, 0.0, 1, 1.0, 1.5, -0.5, math.nan, math.inf, 1 - 1e-12, 1e-50, MINUS_HUGE]
)
def test_a_backoff_factor_that_is_not_between_0_and_1_is_a_value_error(value):
    raises_naming(ValueError, "backoff_factor", value)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, -(2**40)])
def test_a_count_below_one_is_a_value_error(name, value):
    raises_naming(ValueError, name, value)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [1.0, 2000.0, 1.5, math.nan, math.inf, Fraction(3)])
def test_a_count_that_is_no_integer_is_a_type_error(name, value):
    raises_naming(TypeError, name, value)
    with pytest.raises(TypeError, match=rf"\({type(value).__name__}\)$"):
        DynamicScale(**{name: value})


@pytest.mark.parametrize("name", SCALES + FACTORS + COUNTS)
@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_a_bool_where_a_number_belongs_is_a_type_error(name, value):
    raises_naming(TypeError, name, value)


@pytest.mark.parametrize("name", SCALES + FACTORS + COUNTS)
@pytest.mark.parametrize("value", [None, "2", b"2", 2j, [2.0], (2,), {}, Decimal(2), np.ones(1)])
def test_what_is_no_number_is_a_type_error(name, value):
    raises_naming(TypeError, name, value)


@pytest.mark.parametrize("value", ["never", "", "GROWTH", None, 1, True, ["growth"]])
def test_an_unknown_hysteresis_reset_is_an_error(value):
    raises_naming((ValueError, TypeError), "hysteresis_reset", value)


def test_the_error_of_an_unknown_hysteresis_reset_lists_those_that_are_known():
    with pytest.raises(ValueError, match=r"finite_step.*finite_step_only.*growth"):
        DynamicScale(hysteresis_reset="never")


def test_a_floor_above_the_ceiling_is_a_value_error_that_names_both():
    with pytest.raises(ValueError, match=r"min_scale.*max_scale.*8.*4"):
        DynamicScale(init_scale=4.0, min_scale=8.0, max_scale=4.0)


@pytest.mark.parametrize("init_scale", [0.5, 33.0])
def test_an_initial_scale_outside_its_bounds_is_a_value_error_that_names_them(init_scale):
    with pytest.raises(ValueError, match=rf"init_scale.*1\.0.*32\.0.*{init_scale}"):
        DynamicScale(init_scale, min_scale=1.0, max_scale=32.0)


def test_the_smallest_factors_that_float32_can_tell_from_one_are_accepted():
    policy = DynamicScale(1.0, 1 + 2.0**-23, 1 - 2.0**-24, growth_interval=1)
    assert scales(policy, "x.") == [1 - 2.0**-24, 1.0]


def test_the_smallest_normal_and_the_largest_float32_are_accepted():
    assert DynamicScale(SMALLEST_NORMAL).init().scale == SMALLEST_NORMAL
    assert DynamicScale(LARGEST).init().scale == LARGEST


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
    policy = DynamicScale(**given)
    for name, value in given.items():
        kept = getattr(policy, name)
        assert kept == value
        assert type(kept) is (int if name in ("growth_interval", "hysteresis") else float)


@pytest.mark.parametrize("name", ["min_scale", "max_scale"])
def test_a_bound_that_cannot_work_is_named_first(name):
    with pytest.raises(ValueError, match=f"^{name} must"):
        DynamicScale(**{name: -1.0})
