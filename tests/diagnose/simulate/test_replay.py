"""Policies replayed on traces, beside closed forms and float16 itself."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscaler import AmaxScale, DynamicScale, FixedScale
from gradscaler.diagnose.simulate import Replay, Spike, Trace, replay
from tests.support.chosen import examples


def trace_of(gradients):
    """A trace of arrays of gradients, one for each step."""
    magnitudes = [np.abs(np.asarray(each, float)) for each in gradients]
    counts = np.zeros((len(magnitudes), 80))
    for row, sizes in zip(counts, magnitudes, strict=True):
        np.add.at(row, np.floor(np.log2(sizes[sizes > 0])).astype(int) + 50, 1)
    return Trace([sizes.max(initial=0) for sizes in magnitudes], None, -50, counts)


@pytest.mark.parametrize("policy", [DynamicScale(2.0**20, growth_interval=3), FixedScale(2.0**12)])
@given(st.lists(st.floats(2.0**-20, 2.0**10), min_size=1, max_size=30))
@settings(max_examples=examples(40))
def test_a_step_is_skipped_exactly_where_float16_overflows(policy, sizes):
    found = replay(policy, Trace(sizes))
    state = policy.init()
    for size, scale, skipped in zip(sizes, found.scales, found.skipped, strict=True):
        assert scale == state.scale
        with np.errstate(over="ignore"):
            assert skipped == np.isinf(np.float16(size * float(scale)))
        state = policy.update(state, bool(skipped))


@given(
    st.lists(st.integers(-45, 14), min_size=1, max_size=20),
    st.integers(-4, 20).map(lambda e: 2.0**e),
)
def test_shares_are_those_of_float16(exponents, scale):
    gradients = 1.5 * 2.0 ** np.array(exponents)
    found = replay(FixedScale(scale), trace_of([gradients]))
    with np.errstate(over="ignore"):
        halves = (gradients * scale).astype(np.float16).astype(float)
    if np.isinf(halves).any():
        assert found.skipped.all()
        assert math.isnan(found.flushed[0])
        return
    flushed, subnormal = halves == 0, (halves > 0) & (halves < 2.0**-14)
    assert found.flushed[0] == pytest.approx(flushed.mean())
    assert found.subnormal[0] == pytest.approx(subnormal.mean())
    total = gradients.sum()
    assert found.flushed_magnitude[0] == pytest.approx(gradients[flushed].sum() / total)
    assert found.subnormal_magnitude[0] == pytest.approx(gradients[subnormal].sum() / total)


def test_a_scale_between_powers_of_two_splits_a_bin_evenly():
    trace = Trace([2.0**-20], None, -25, [[8.0, 0, 0, 0, 0]])
    found = replay(FixedScale(2.0**-0.25), trace)
    assert found.flushed[0] == pytest.approx(0.25)


def test_a_bad_batch_is_skipped_at_any_scale():
    found = replay(FixedScale(2.0**-126), Trace([1.0, 1.0], [math.inf, 1.0]))
    assert found.skipped.tolist() == [True, False]
    assert (found.num_skipped, found.trace.is_bad.sum()) == (1, 1)


def test_a_policy_that_looks_at_the_largest_gradient_is_told_it():
    sizes = np.full(50, 2.0**-12)
    assert replay(AmaxScale(1.0), Trace(sizes)).scales[-1] == 2.0**15  # 2**-12 * 2**15 * 2 <= 15.99
    assert replay(DynamicScale(1.0), Trace(sizes)).scales[-1] == 1.0


def test_means_leave_out_skipped_steps():
    found = replay(DynamicScale(2.0**10), trace_of([[1000.0, 2.0**-40], [1.0, 2.0**-40]]))
    assert found.skipped.tolist() == [True, False]
    assert found.mean("flushed") == 0.5
    assert math.isnan(replay(FixedScale(1.0), Trace([1.0])).mean("flushed"))


def test_a_spike_is_found_and_its_recovery_counted():
    sizes = np.full(400, 2.0**-2)
    sizes[200:203] = 2.0**4
    found = replay(DynamicScale(2.0**14, growth_interval=50), Trace(sizes))
    scale_before = found.scales[199]
    (spike,) = found.spikes
    back = next(step for step in range(203, 400) if found.scales[step] >= scale_before)
    assert spike == Spike(200, 203, back - 203)
    assert spike.recovery > 50


def test_a_scale_that_never_comes_back_has_no_recovery():
    sizes = np.ones(300)
    sizes[200] = 2.0**14
    (spike,) = replay(DynamicScale(), Trace(sizes)).spikes
    assert spike == Spike(200, 201, None)


def test_slow_drift_is_no_spike():
    assert replay(FixedScale(1.0), Trace(2.0 ** np.linspace(-20, 0, 2000))).spikes == ()


def spikes_by_definition(found):
    extreme, largest = found.trace.extreme, found.trace.largest
    spikes, step = [], 1
    while step < len(extreme):
        median = np.median(largest[max(0, step - 100) : step])
        stop = step
        while median > 0 and stop < len(extreme) and extreme[stop] >= 16 * median:
            stop += 1
        if stop > step:
            is_back = found.scales[stop:] >= found.scales[step - 1]
            recovery = int(np.argmax(is_back)) if is_back.any() else None
            spikes.append(Spike(step, stop, recovery))
        step = max(stop, step) + 1
    return tuple(spikes)


@pytest.mark.parametrize("seed", range(5))
def test_spikes_are_as_they_are_defined(seed, monkeypatch):
    # 700 steps take several chunks.
    monkeypatch.setattr("gradscaler.diagnose.simulate._trace._CHUNK", 37)
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.integers(-9, 3, 700) * (rng.random(700) > 0.1)
    sizes[rng.random(700) < 0.05] *= 2.0**12
    extreme = np.where(rng.random(700) < 0.03, math.inf, sizes)
    found = replay(DynamicScale(2.0**10, growth_interval=9), Trace(sizes, extreme))
    assert found.spikes == spikes_by_definition(found)
    assert any(spike.recovery is None for spike in found.spikes) or seed
    assert len(found.spikes) > 20


def test_steps_that_share_a_histogram_are_replayed_as_with_one_each():
    rng = np.random.default_rng(0)
    rows, row_of = rng.integers(0, 50, (5, 20)), rng.integers(0, 5, 300)
    sizes = np.full(300, 2.0**-4)
    shared = Trace(sizes, None, -24, rows, row_of)
    apart = Trace(sizes, None, -24, rows[row_of])
    assert (shared.counts == apart.counts).all()
    policy = DynamicScale(2.0**-4, growth_factor=4.0, growth_interval=40)
    ours, theirs = (replay(policy, trace) for trace in (shared, apart))
    assert ours.scales[-1] == 2.0**10
    assert len({*ours.flushed[:40].tolist()}) == 5  # one for each row, at the first scale
    for name in ("flushed", "subnormal", "flushed_magnitude", "subnormal_magnitude"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one == other).all()
        assert one.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0]],), "largest must be"),
        (([math.inf],), "largest must be"),
        (([-1.0],), "largest must be"),
        (([1.0], [1.0, 2.0]), "extreme must be"),
        (([1.0], [math.nan]), "extreme must be"),
        (([1.0], None, 0, [1.0]), "counts must be"),
        (([1.0], None, 0, [[-1.0]]), "counts must be"),
        (([1.0], None, 0, [[1.0]], [1]), "counts must be"),
        (([1.0], None, 0, [[1.0]], [0, 0]), "counts must be"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Trace(*arguments)


def test_a_replay_is_what_replay_returns():
    assert isinstance(replay(FixedScale(1.0), Trace([1.0])), Replay)
