"""The rule of AmaxScale: every step of a trace beside plain Python, and what the rule is for."""

import copy
import dataclasses
import math
import pickle
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradscaler import AmaxScale, AmaxState
from tests.support.chosen import examples

LARGEST_FP16 = 65504.0
SMALLEST_NORMAL = 2.0**-126
LARGEST = (2.0 - 2.0**-23) * 2.0**127
NAN = math.inf  # a magnitude that overflows at any scale


def float32(value):
    """Round to float32 without NumPy, too large becoming inf."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.inf


def reference(policy, trace):  # noqa: C901, PLR0912 # the rule, a branch for each case
    """The state after each step of (found_inf, amax), written with ``if``.

    Plain Python: a product of two float32 numbers is exact in a Python float, and rounded once.
    """
    growth, backoff = float32(policy.growth_factor), float32(policy.backoff_factor)
    min_scale, max_scale = float32(policy.min_scale), float32(policy.max_scale)
    decay = float32(0.5 ** (policy.amax_interval / policy.half_life))
    floor = float32(LARGEST_FP16 / 2**policy.margin)
    scale, g, b, peak, reach = float32(policy.init_scale), 0, 0, 0.0, 0.0
    for found_inf, amax in trace:
        if found_inf:
            g = 0
            if b >= policy.patience:
                b, peak = 0, 0.0
            else:
                b += 1
            if not (peak > 0 and float32(scale * peak) <= min(reach, floor)):
                scale = max(float32(scale * backoff), min_scale)
        else:
            is_first = g == 0
            is_measured = g % policy.amax_interval == 0 and amax is not None
            is_seen = is_measured and SMALLEST_NORMAL <= amax <= LARGEST
            g += 1
            if g % 5 == 0 and b > 0:
                b -= 1
            grows = g > policy.growth_interval
            if grows:
                g = 1
            lower = float32(reach * backoff)
            if peak == 0:
                if is_seen and reach > 0:
                    reach = max(lower, floor / 2**8)
            elif is_first:
                if not is_seen or amax <= float32(2 * peak):
                    reach = max(lower, min(reach, floor))
            elif grows:
                reach = min(float32(reach * growth), LARGEST_FP16 / 4)
            if is_seen:
                peak = max(amax, float32(peak * decay))
            if reach == 0 and peak > 0:
                reach = max(min(float32(scale * peak), LARGEST_FP16 / 4), floor)
            grown = float32(scale * growth)
            wants = float32(grown * peak) <= reach if peak > 0 else grows
            if wants:
                scale = grown if grown <= max_scale else scale
            elif peak > 0 and float32(scale * peak) > float32(2 * reach):
                scale = max(float32(scale * backoff), min_scale)
        yield scale, g, b, peak, reach


def test_it_starts_at_the_scale_of_every_other_scaler_in_pytorch():
    assert AmaxScale().init() == AmaxState(np.float32(65536.0), 0, 0, 0.0, 0.0)


def replayed(policy, sizes, state=None, told=True):
    """Scales and skips over gradients of these largest magnitudes."""
    state = policy.init() if state is None else state
    scales, skips = [], []
    for size in sizes:
        scales.append(float(state.scale))
        skips.append(not size * scales[-1] < 65520)
        state = policy.update(state, skips[-1], amax=None if skips[-1] or not told else size)
    return np.array(scales), np.array(skips), state


def noisy(seed, steps, sigma=0.2, size=None):
    """Largest gradients of a random run, about one typical size."""
    generator = np.random.default_rng(seed)
    size = 2.0 ** generator.uniform(-14, 2) if size is None else size
    return size * np.exp(sigma * generator.standard_normal(steps))


policies = st.builds(
    AmaxScale,
    init_scale=st.one_of(st.floats(2.0**-125, 2.0**127), st.sampled_from([2.0**8, 2.0**12])),
    growth_factor=st.floats(1 + 2.0**-20, 2.0**20),
    backoff_factor=st.floats(2.0**-20, 1 - 2.0**-20),
    growth_interval=st.integers(1, 7),
    margin=st.one_of(st.integers(3, 12), st.integers(3, 40)),
    patience=st.integers(0, 3),
    half_life=st.floats(0.25, 100.0),
    amax_interval=st.integers(1, 3),
)
sizes = st.one_of(
    st.none(),
    st.sampled_from([0.0, math.inf, math.nan, 1e-45, SMALLEST_NORMAL, LARGEST]),
    st.floats(2.0**-140, LARGEST, width=32),
    st.floats(2.0**-12, 1.0, width=32),
    st.sampled_from([0.25, 0.5, 0.75, 1.0, 1.5, 3.0, 9.0]),
)
traces = st.lists(st.tuples(st.sampled_from([False, False, False, True]), sizes), max_size=40)


WIDE = AmaxScale(2.0**13, margin=8)  # its first gradient of 1 has a reach above the floor


@settings(max_examples=examples(800))
@given(policies, traces)
@example(WIDE, [(False, 1.0), (True, None), (False, 2.0)])
@example(WIDE, [(False, 1.0), (True, None), (False, 3.0)])
@example(AmaxScale(2.0**8, margin=8), [(False, LARGEST_FP16 / 2**16), (True, None)])  # at the floor
@example(AmaxScale(4.0, growth_interval=1, max_scale=8.0), [(False, None)] * 5)
def test_every_step_of_every_trace_is_what_a_straight_line_reference_gives(policy, trace):
    state = policy.init()
    for (found_inf, amax), expected in zip(trace, reference(policy, trace), strict=True):
        state = policy.update(state, found_inf, amax=amax)
        assert tuple(map(float, state)) == expected


def test_a_state_is_host_scalars():
    state = AmaxScale().update(AmaxScale().init(), False, amax=0.25)
    assert [type(value) for value in state] == [np.float32, int, int, np.float32, np.float32]
    assert state == AmaxState(65536.0, 1, 0, 0.25, 65504 / 4)


# The purpose of the rule.


@pytest.mark.parametrize("seed", range(3))
def test_one_bad_batch_in_twenty_does_not_sink_the_scale(seed):
    sizes = noisy(seed, 4000, size=2.0**-6)
    sizes[np.random.default_rng(seed).random(4000) < 0.05] = NAN
    scales, skips, _ = replayed(AmaxScale(), sizes)
    assert (skips == np.isinf(sizes)).all()
    assert scales.min() * 2.0**-6 >= 1
    after, *_ = replayed(AmaxScale(), sizes, told=False)
    assert after[-1] < 2.0**-60  # the ordinary rule's


@pytest.mark.parametrize(("share", "sinks"), [(0.1, False), (0.15, True)])
def test_the_scale_sinks_below_the_floor_if_one_batch_in_eight_is_bad(share, sinks):
    sizes = noisy(0, 8000, size=2.0**-6)
    sizes[np.random.default_rng(0).random(8000) < share] = NAN
    scales, *_ = replayed(AmaxScale(), sizes)
    assert (scales[-1] * 2.0**-6 < 1) == sinks


def recovery(seed):
    """The number of steps after a spike, 2**12 for 30 steps, until the scale is back."""
    sizes = noisy(seed, 4000)
    sizes[3000:3030] *= 2.0**12
    scales, *_ = replayed(AmaxScale(), sizes)
    is_back = scales[3030:] >= scales[2999]
    return int(np.argmax(is_back)) if is_back.any() else math.inf


def test_after_a_spike_the_scale_is_back_within_200_steps_in_nine_runs_of_ten():
    assert np.quantile([recovery(seed) for seed in range(30)], 0.9) <= 200


def test_gradients_that_shrink_and_grow_slowly_cost_no_skips():
    drift = 2.0 ** np.interp(np.arange(8000), [0, 4000, 8000], [0, -20, 0])
    scales, skips, _ = replayed(AmaxScale(), noisy(0, 8000, 0.1, 1.0) * drift)
    assert skips[20:].sum() == 0
    assert (scales * drift)[20:].min() >= 4


@pytest.mark.parametrize("seed", range(3))
def test_a_run_without_events_has_no_skips_once_the_scale_has_settled(seed):
    _, skips, _ = replayed(AmaxScale(growth_interval=200), noisy(seed, 6000, 0.1))
    assert skips[20:].sum() <= 1


def test_steps_that_are_never_finite_are_left_behind_within_200_steps():
    sizes = noisy(0, 1500, size=2.0**-6)
    sizes[:] = 2.0**-6
    sizes[500:800] = NAN
    scales, *_ = replayed(AmaxScale(), sizes)
    assert scales[799] < 2.0**-100  # nothing could be known
    assert scales[1000] >= scales[499] / 2


@pytest.mark.parametrize("factor", [2.0**12, 2.0**16])
def test_activations_beyond_the_margin_lower_the_scale_all_the_same(factor):
    policy, state, skipped = AmaxScale(), AmaxScale().init(), []
    for size in noisy(0, 6000, size=2.0**-3):
        skipped.append(not size * factor * float(state.scale) < 65520)
        state = policy.update(state, skipped[-1], amax=None if skipped[-1] else size)
    assert sum(skipped) < 600
    assert 0 < sum(skipped[-2000:]) < 100  # bad batches, as far as the rule can tell


def test_gradients_that_are_all_zero_do_not_raise_the_scale():
    policy = AmaxScale()
    state = policy.update(policy.init(), False, amax=0.25)
    for _ in range(100):
        state = policy.update(state, False, amax=0.0)
    assert state.scale == 2.0**16


def test_where_nothing_is_measured_it_is_the_ordinary_rule_with_one_more_step_to_growth():
    policy = AmaxScale(8.0, growth_interval=3)
    scales = []
    state = policy.init()
    for found_inf in (True, *[False] * 7):
        state = policy.update(state, found_inf)
        scales.append(float(state.scale))
    assert scales == [4.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0]


def test_a_state_without_a_reach_finds_one_at_the_next_step():
    policy = AmaxScale()
    state = AmaxState(np.float32(2.0**16), 7, 0, np.float32(0.25), np.float32(0))
    moved = policy.update(state, False)
    assert moved == AmaxState(2.0**16, 8, 0, 0.25, 65504 / 4)


def test_a_measurement_is_good_for_several_steps():
    policy = AmaxScale(amax_interval=2)
    state = policy.init()
    for amax in (0.25, 0.5, 0.25):  # the second does not count
        state = policy.update(state, False, amax=amax)
    assert state.peak == 0.25


# Parameters.


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"margin": 2}, "margin must be at least 3, got 2"),
        ({"margin": 101}, "margin must be at most 100, got 101"),
        ({"patience": -1}, "patience must be at least 0, got -1"),
        ({"half_life": 0.0}, "half_life must be positive, got 0.0"),
        ({"half_life": math.nan}, "half_life must be positive, got nan"),
        ({"amax_interval": 0}, "amax_interval must be at least 1, got 0"),
        ({"growth_interval": 0}, "growth_interval must be at least 1, got 0"),
        ({"growth_factor": 1.0}, "growth_factor must be > 1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor must be > 0.0 and < 1.0"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale must not be above max_scale"),
        ({"init_scale": 0.0}, "init_scale must be positive"),
        ({"init_scale": 8.0, "max_scale": 4.0}, "init_scale must lie between"),
        ({"patience": 2**31 - 1}, "patience must be at most 2147483646"),
        ({"half_life": "10"}, "half_life must be a number"),
    ],
)
def test_a_parameter_out_of_range_is_named(parameters, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        AmaxScale(**parameters)


def test_parameters_are_kept_as_python_s_numbers():
    given = {field.name: field.default for field in dataclasses.fields(AmaxScale)}
    policy = AmaxScale(**{name: np.array(value)[()] for name, value in given.items()})
    kept = dataclasses.asdict(policy)
    assert kept == given
    assert [type(value) for value in kept.values()] == list(map(type, given.values()))


def test_a_policy_is_equal_hashed_copied_and_pickled_by_its_parameters():
    policy = AmaxScale(margin=9)
    for same in (
        AmaxScale(margin=9),
        copy.deepcopy(policy),
        pickle.loads(pickle.dumps(policy)),
        dataclasses.replace(AmaxScale(), margin=9),
    ):
        assert same == policy
        assert hash(same) == hash(policy)
        assert repr(same) == repr(policy)
        assert replayed(same, [1.0, 2.0])[2] == replayed(policy, [1.0, 2.0])[2]
    assert policy != AmaxScale()


def test_a_pickle_that_names_the_state_s_former_module_loads():
    state = AmaxState(np.float32(8.0), 1, 2, np.float32(0.5), np.float32(4.0))
    saved = pickle.dumps(state, 0)
    assert b"gradscaler.policies.state\n" in saved
    former = saved.replace(b"gradscaler.policies.state\n", b"gradscaler.policies.amax\n")
    assert pickle.loads(former) == state
    assert type(pickle.loads(former)) is AmaxState
