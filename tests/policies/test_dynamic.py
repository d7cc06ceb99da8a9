"""The rule of DynamicScale: every step of a trace, its bounds, its states, its parameters."""

import math
import struct
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscaler import DynamicScale, ScaleState

SMALLEST_NORMAL = 2.0**-126
LARGEST = (2.0 - 2.0**-23) * 2.0**127
RESETS = ("finite_step", "finite_step_only", "growth")


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


def reference(policy, trace):  # noqa: C901, PLR0912 # the rule, a branch for each case
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
            interval = policy.growth_interval
            for below, steps in policy.growth_tiers:
                if scale < float32(below):
                    interval = steps
                    break
            if finite_steps >= interval:
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
        growth_tiers=tuple(
            (below, draw(st.integers(1, 5))) for below in sorted(draw(st.sets(bounds, max_size=3)))
        ),
    )


runs = st.tuples(st.sampled_from(".x"), st.integers(1, 12)).map(lambda run: run[0] * run[1])
traces = st.lists(runs, max_size=8).map("".join)
powers_of_two = st.integers(-126, 127).map(lambda exponent: 2.0**exponent)


# The rule.


@given(policies(), traces)
def test_every_step_of_every_trace_is_what_a_straight_line_reference_gives(policy, trace):
    visited = [(float(state.scale), state.finite_steps) for state in states(policy, trace)]
    assert visited == reference(policy, trace)


@given(policies(), traces)
def test_the_scale_stays_finite_and_within_its_bounds(policy, trace):
    for scale in scales(policy, trace):
        assert math.isfinite(scale)
        assert policy.min_scale <= scale <= policy.max_scale


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


@given(interval=st.integers(1, 9), steps=st.integers(0, 60))
def test_finite_steps_alone_double_the_scale_once_an_interval(interval, steps):
    policy = DynamicScale(1.0, growth_interval=interval)
    assert scales(policy, "." * steps)[-1:] == [2.0 ** (steps // interval)] * (steps > 0)


ONLY = {"hysteresis": 2, "hysteresis_reset": "finite_step_only"}
GROWTH = {"hysteresis": 2, "hysteresis_reset": "growth"}
CEILING = {"growth_factor": 4.0, "growth_interval": 1}
# The parameters; the scale to start from, and after each step, finite (.) or not (x).
TRACES = {
    "each non-finite step halves the scale": ({}, "8 x4 x2 x1"),
    "a non-finite step restarts the interval": ({"growth_interval": 3}, "8 .8 .8 x4 .4 .4 .8"),
    "growth restarts the interval": ({"growth_interval": 2}, "8 .8 .16 .16 .32 .32"),
    "finite_step: a finite step forgets": ({"hysteresis": 2}, "16 x16 .16 x16 .16 x16 .16"),
    "finite_step: a backoff forgets": ({"hysteresis": 2}, "16 x16 x8 x8 x4 x4"),
    "finite_step_only: a finite step forgets": (ONLY, "16 x16 .16 x16 .16 x16 .16"),
    "finite_step_only: a backoff does not": ({**ONLY, "hysteresis": 3}, "16 x16 x16 x8 x4 x2"),
    "finite_step_only: a finite step forgets after the backoff": (ONLY, "16 x16 x8 x4 .4 x4 x2"),
    "growth: finite steps forget nothing": (
        {**GROWTH, "growth_interval": 4},
        "16 x16 .16 .16 .16 x8",
    ),
    "growth: every further non-finite step backs off": (
        {**GROWTH, "growth_interval": 3},
        "16 x16 x8 .8 x4 .4 .4 x2",
    ),
    "growth: growth forgets": ({**GROWTH, "growth_interval": 2}, "16 x16 x8 .8 .16 x16 x8"),
    "growth stops below max_scale": ({**CEILING, "max_scale": 31.0}, "8 .8 .8 .8"),
    "growth reaches max_scale itself": ({**CEILING, "max_scale": 32.0}, "8 .32 .32 .32"),
    "backoff stops at min_scale": ({"min_scale": 3.0}, "16 x8 x4 x3 x3"),
    "growth from the floor": ({"growth_interval": 1, "min_scale": 3.0}, "4 x3 x3 .6"),
}


@pytest.mark.parametrize(("parameters", "trace"), TRACES.values(), ids=TRACES)
def test_the_scale_moves_as_the_parameters_say(parameters, trace):
    start, *steps = trace.split()
    policy = DynamicScale(float(start), **parameters)
    assert scales(policy, [step[0] for step in steps]) == [float(step[1:]) for step in steps]


def test_the_default_policy_doubles_two_to_the_16_at_the_2000th_finite_step():
    visited = scales(DynamicScale(), "." * 2000)
    assert visited == [65536.0] * 1999 + [131072.0]


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
@given(hysteresis=st.integers(1, 9))
def test_the_scale_backs_off_at_the_non_finite_step_that_the_hysteresis_names(reset, hysteresis):
    policy = DynamicScale(16.0, hysteresis=hysteresis, hysteresis_reset=reset)
    assert scales(policy, "x" * hysteresis) == [16.0] * (hysteresis - 1) + [8.0]


@given(trace=traces)
def test_a_hysteresis_of_one_is_the_same_under_every_reset(trace):
    visited = [
        scales(DynamicScale(growth_interval=3, hysteresis_reset=reset), trace) for reset in RESETS
    ]
    assert visited[0] == visited[1] == visited[2]


# Bounds.


def test_growth_past_max_scale_restarts_the_interval():
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
def test_the_scale_does_not_grow_to_inf_and_nothing_warns(scale, factor):
    policy = DynamicScale(scale, factor, growth_interval=1)
    assert scales(policy, "..") == [scale] * 2


@pytest.mark.parametrize("of_kind", [np.float32, float])
def test_the_largest_scale_backs_off_without_a_warning(of_kind):
    state = ScaleState(of_kind(2.0**127), 0, 0)
    assert scales(DynamicScale(), "x", state) == [2.0**126]


def test_the_default_floor_is_the_smallest_normal_float32_whose_reciprocal_is_finite():
    lowest = states(DynamicScale(), "x" * 300)[-1].scale
    assert lowest == SMALLEST_NORMAL
    assert np.isfinite(np.float32(1) / lowest)


@given(st.floats(SMALLEST_NORMAL, LARGEST))
def test_an_initial_scale_may_be_its_own_floor_and_ceiling(scale):
    policy = DynamicScale(init_scale=scale, min_scale=scale, max_scale=scale, growth_interval=1)
    assert scales(policy, "x.x") == [float32(scale)] * 3


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


@given(st.floats(SMALLEST_NORMAL, LARGEST))
def test_the_initial_scale_is_rounded_to_float32(scale):
    assert float(DynamicScale(init_scale=scale).init().scale) == float32(scale)


@given(policies(), traces.filter(bool))
def test_a_state_on_the_host_is_a_float32_and_two_integers(policy, trace):
    state = states(policy, trace)[-1]
    assert list(map(type, state)) == [np.float32, int, int]


def test_a_scale_given_as_a_python_float_is_rounded_to_float32():
    policy = DynamicScale(hysteresis=2)
    assert float(policy.update(ScaleState(0.1, 0, 0), True).scale) == float32(0.1)


@given(policies(), traces, traces)
def test_a_state_read_as_plain_python_numbers_goes_on_as_the_state_itself(policy, before, after):
    state = states(policy, "." + before)[-1]
    restored = ScaleState(float(state.scale), int(state.finite_steps), int(state.nonfinite_steps))
    assert states(policy, after, restored) == states(policy, after, state)


@given(policies(), traces, st.booleans())
def test_update_is_pure(policy, trace, found_inf):
    state = states(policy, "." + trace)[-1]
    before = tuple(state)
    assert policy.update(state, found_inf) == policy.update(state, found_inf)
    assert tuple(state) == before


# Bad parameters. Each error names the parameter and the value.

SCALES = ("init_scale", "min_scale", "max_scale")
COUNTS = ("growth_interval", "hysteresis")
NUMBERS = (*SCALES, "growth_factor", "backoff_factor", *COUNTS)
HUGE = 10**400  # no float can hold it
NOT_SCALES = (0, 0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 1e39, 1e-50, 1e-39, HUGE)
NOT_GROWTH = (1, 1.0, 0.5, 0, -2.0, math.nan, math.inf, 1 + 1e-12, 1 + 2.0**-24, 1e39, HUGE)
NOT_BACKOFF = (0, 0.0, 1, 1.0, 1.5, -0.5, math.nan, math.inf, 1 - 1e-12, 1e-50, -HUGE)
NOT_NUMBERS = (None, "2", b"2", 2j, [2.0], (2,), {}, Decimal(2), np.ones(1))
BOOLS = (True, False, np.True_, np.False_)
NOT_INTEGERS = (1.0, 2000.0, 1.5, math.nan, math.inf, Fraction(3))
BAD = {
    **{(name, ValueError): NOT_SCALES for name in SCALES},
    ("growth_factor", ValueError): NOT_GROWTH,
    ("backoff_factor", ValueError): NOT_BACKOFF,
    **{(name, ValueError): (0, -1, -(2**40)) for name in COUNTS},
    **{(name, TypeError): BOOLS + NOT_NUMBERS for name in NUMBERS},
    **{(name, TypeError): BOOLS + NOT_NUMBERS + NOT_INTEGERS for name in COUNTS},
    ("hysteresis_reset", (ValueError, TypeError)): (
        *("never", "", "GROWTH", None, 1, True, ["growth"]),
    ),
}
BAD_PARAMETERS = [(*named, value) for named, values in BAD.items() for value in values]


@pytest.mark.parametrize(
    ("name", "error", "value"), BAD_PARAMETERS, ids=lambda part: f"{part!r:.20}"
)
def test_a_parameter_that_cannot_work_is_an_error_that_names_it_and_its_value(name, error, value):
    with pytest.raises(error) as caught:
        DynamicScale(**{name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)
    if error is TypeError:
        assert str(caught.value).endswith(f"({type(value).__name__})")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"hysteresis_reset": "never"}, r"finite_step.*finite_step_only.*growth"),
        ({"init_scale": 4.0, "min_scale": 8.0, "max_scale": 4.0}, r"min_scale.*max_scale.*8.*4"),
        (
            {"init_scale": 0.5, "min_scale": 1.0, "max_scale": 32.0},
            r"init_scale.*1\.0.*32\.0.*0\.5",
        ),
        ({"init_scale": 33.0, "min_scale": 1.0, "max_scale": 32.0}, r"init_scale.*1\.0.*32\.0.*33"),
        ({"min_scale": -1.0}, "^min_scale must"),
        ({"max_scale": -1.0}, "^max_scale must"),
    ],
)
def test_an_error_names_the_bounds_and_the_choices(parameters, message):
    with pytest.raises(ValueError, match=message):
        DynamicScale(**parameters)


def test_the_smallest_factors_that_differ_from_one_in_float32_are_accepted():
    policy = DynamicScale(1.0, 1 + 2.0**-23, 1 - 2.0**-24, growth_interval=1)
    assert scales(policy, "x.") == [1 - 2.0**-24, 1.0]


def test_the_smallest_normal_and_the_largest_float32_are_accepted():
    assert DynamicScale(SMALLEST_NORMAL).init().scale == SMALLEST_NORMAL
    assert DynamicScale(LARGEST).init().scale == LARGEST


# Growth by tiers.


def test_the_scale_grows_sooner_while_it_is_small():
    policy = DynamicScale(0.25, growth_interval=4, growth_tiers=((1.0, 1), (4.0, 2)))
    assert scales(policy, "........" "....") == [
        0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0
    ]  # fmt: skip


def test_a_tier_with_a_longer_interval_waits_for_it():
    policy = DynamicScale(1.0, growth_interval=1, growth_tiers=[[2.0, 3]])
    assert scales(policy, ".....") == [1.0, 1.0, 2.0, 4.0, 8.0]
    assert policy.growth_tiers == ((2.0, 3),)
    hash(policy)


def test_a_policy_that_was_pickled_before_there_were_tiers_has_none():
    policy = DynamicScale(8.0)
    state = policy.__getstate__()
    del state["growth_tiers"]
    unpickled = DynamicScale.__new__(DynamicScale)
    unpickled.__setstate__(state)
    assert unpickled == policy


@pytest.mark.parametrize(
    ("tiers", "error", "message"),
    [
        (100, TypeError, "growth_tiers must be pairs of a scale and an interval, .* got 100"),
        ((1.0, 100), TypeError, r"growth_tiers must be pairs .* got \(1.0, 100\)"),
        (((1.0, 100, 2),), TypeError, "growth_tiers must be pairs"),
        ("ab", TypeError, "growth_tiers must be pairs"),
        (((0.0, 100),), ValueError, "a scale in growth_tiers must be positive"),
        (((1.0, 0),), ValueError, "an interval in growth_tiers must be at least 1, got 0"),
        (((1.0, 1.5),), TypeError, "an interval in growth_tiers must be an integer"),
        (((8.0, 1), (1.0, 1)), ValueError, "growth_tiers must have the lowest scale first"),
        (((8.0, 1), (8.0, 2)), ValueError, "growth_tiers must have the lowest scale first"),
    ],
)
def test_tiers_that_cannot_work_are_refused(tiers, error, message):
    with pytest.raises(error, match=f"^{message}"):
        DynamicScale(growth_tiers=tiers)
