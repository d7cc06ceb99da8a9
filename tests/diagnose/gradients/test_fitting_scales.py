"""Which loss scales fit the sampled gradients, against a direct count at each scale."""

from dataclasses import replace

import numpy as np
import pytest

from gradscaler.diagnose import exponents

# A report shows the sentence only if a scale may help, and would take 30 times as long for each of
# 300 random runs.
from gradscaler.diagnose.report._content import headline_of
from gradscaler.diagnose.report._words import sentence_of
from tests.support import run_files
from tests.support.run_files import HEADLINES, run_of

FORMATS = "float16", "bfloat16", "float8_e5m2", "float8_e4m3"


def bins_of(values):
    found = exponents(values).total
    return found.first, found.counts.tolist()


def run_with(*samples, scale=1024.0, dtype="float16"):
    """A run with a sample of these parameters, by name, at each step."""
    made = []
    for step, parameters in enumerate(samples, 1):
        kept = {
            name: run_files.parameter(0.0, 0.0, 0.0, 0.0, bins_of(values))
            for name, values in parameters.items()
        }
        whole = bins_of(np.concatenate([np.ravel(values) for values in parameters.values()]))
        shares = run_files.shares(0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
        seen = [step, scale, [(step, scale)], 1, [], 1.0, 1.0, shares, whole]
        made.append(run_files.sample(*seen, parameters=kept))
    return run_of(run_files.start(dtype=dtype, every=1), *made)


def fits(values, exponent, dtype):
    """Whether a scale fits, counted on the gradients: with room, and not."""
    found = exponents(values * 2.0**exponent, dtype).total
    with_room = exponents(values * 2.0 ** (exponent + 2), dtype).total
    flushed = found.num_flushed / values.size
    small = (found.num_flushed + found.num_subnormal) / values.size
    return flushed <= 0.01, small <= 0.1, not with_room.num_overflow, not found.num_overflow


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0, 12.0])
def test_the_range_is_that_of_the_scales_at_which_few_gradients_are_lost(dtype, spread):
    # Of the two ends of each bin, the lower one is exact, so values lie just above it.
    rng = np.random.default_rng(0)
    values = 1.01 * 2.0 ** np.floor(rng.normal(-12, spread, 5_000))
    found = run_with({"w": values}, dtype=dtype).fit.whole
    for exponent in range(max(-120, found.low - 30), min(120, found.edge + 30)):
        few_flushed, few_small, has_room, is_finite = fits(values, exponent, dtype)
        assert (exponent >= found.unflushed) == few_flushed, exponent
        assert (exponent >= found.low) == (few_flushed and few_small), exponent
        assert (exponent <= found.high) == has_room, exponent
        assert (exponent <= found.edge) == is_finite, exponent


def test_a_single_gradient_has_the_whole_range_of_float16():
    found = run_with({"w": np.full(7, 2.0**-20)}).fit.whole
    # 2**-20 becomes the smallest normal number, 2**-14, at 2**6; the next exponent's end is 2**16.
    assert (found.unflushed, found.low, found.high, found.edge) == (-5, 6, 33, 35)
    unused = {"unused": np.zeros(2), "w": np.full(7, 2.0**-20)}
    assert run_with(unused).fit.parameters == {"unused": None, "w": found}


def test_the_scales_that_fit_are_those_that_fit_every_parameter():
    run = run_with({"small": np.full(4, 2.0**-30), "large": np.full(4, 2.0**-2)})
    fit = run.fit
    assert (fit.common.low, fit.common.high) == (16, 15)
    assert (fit.lowest, fit.highest) == ("small", "large")
    assert fit.is_empty
    fit = run_with({"small": np.full(4, 2.0**-20), "large": np.full(4, 2.0**-2)}).fit
    assert (fit.common.low, fit.common.high) == (6, 15)


def test_one_scale_that_fits_is_enough():
    fit = run_with({"small": np.full(4, 2.0**-29), "large": np.full(4, 2.0**-2)}).fit
    assert (fit.common.low, fit.common.high) == (15, 15)
    assert not fit.is_empty


def test_the_sentence_gives_the_scales_that_fit_and_the_runs_own():
    run = run_with({"a": np.full(4, 2.0**-20), "b": np.full(4, 2.0**-2)}, scale=2.0**5)
    text = "Loss scales from 2⁶ to 2¹⁵ fit every parameter. The run's own is 32."
    assert sentence_of(run.fit) == text


def test_a_parameter_whose_gradients_vanish_is_no_matter_of_the_scale():
    vanished = {"a": np.full(4, 2.0**-140), "b": np.full(4, 2.0**-100)}
    assert run_with(vanished, scale=2.0**100).verdict.kind != "range"


def test_where_no_scale_fits_the_sentence_names_both_parameters():
    small = np.array([2.0**-40] * 3 + [2.0**-10])
    run = run_with({"small": small, "large": np.ones(4), "unused": np.zeros(4)})
    assert sentence_of(run.fit) == (
        "No loss scale fits every parameter: small needs at least 2²⁶, and large at most 2¹³. "
        "The run's own is 1,024."
    )


def test_a_parameter_with_few_of_the_gradients_may_be_left_out():
    large, noise = np.full(96, 2.0**-2), np.full(4, 2.0**-40)
    fit = run_with({"weight": large, "bias": noise}).fit
    assert (fit.common.low, fit.common.high, fit.left_out) == (-12, 15, ("bias",))
    assert sentence_of(fit).startswith("Loss scales from 2⁻¹² to 2¹⁵ fit all but bias. The ")
    assert run_with({"weight": large[4:], "bias": np.tile(noise, 2)}).fit.is_empty


def test_a_parameter_can_set_both_bounds():
    run = run_with({"wide": np.array([2.0**-40, 1.0])})
    assert "wide needs at least 2²⁶, and wide at most 2¹³." in sentence_of(run.fit)


def test_the_latest_ten_samples_count_together():
    samples = [{"w": np.full(4, 2.0**-10)} for _ in range(12)]
    samples[1] = {"w": np.full(4, 2.0**10)}  # long ago
    samples[5] = {"w": np.full(4, 2.0**-4)}  # one batch
    fit = run_with(*samples).fit
    assert fit.last == 12
    assert fit.common.edge == 16 - (-4 + 1)


def test_without_a_gradient_that_is_finite_and_nonzero_there_is_no_fit():
    run = run_with({"w": np.zeros(3)}, {"w": np.array([np.nan])})
    assert run.fit is None
    assert replace(run, samples=()).fit is None


def random_run(seed):
    """A run whose gradients went through float16 at its scale, as a monitor would record it."""
    rng = np.random.default_rng(seed)
    scale, first, fall = 2.0 ** rng.integers(0, 17), rng.uniform(-14, -2), rng.uniform(0, 12)
    layers = range(rng.integers(1, 7))
    middles = {f"layer{i}.weight": rng.normal(first - i * fall, 3.0) for i in layers}
    samples = []
    for step in range(1, rng.integers(2, 5)):
        parameters, values = {}, []
        for name, middle in middles.items():
            exact = 2.0 ** np.minimum(rng.normal(middle, 2.0, rng.integers(4, 400)), -1)
            with np.errstate(over="ignore"):
                scaled = np.float64(np.float16(np.minimum(exact * scale, 65504)))
            values.append(scaled / scale)
            found = exponents(values[-1], scale=scale).total
            lost = found.zero, found.flushed, found.subnormal, found.nonfinite
            parameters[name] = run_files.parameter(*lost, bins_of(values[-1]))
        whole = np.concatenate(values)
        found = exponents(whole, scale=scale).total
        shares = {name: getattr(found, name) for name in run_files.CLASSES}
        seen = [step, scale, [(step, scale)], 1, [], 1.0, step, shares, bins_of(whole)]
        worst = [min(middles, key=middles.get)]
        samples.append(run_files.sample(*seen, parameters=parameters, worst=worst))
    return run_of(run_files.start(every=1), *samples)


RANDOM = [random_run(seed) for seed in range(300)]


def test_random_runs_are_of_each_kind():
    kinds = [run.verdict.kind for run in RANDOM]
    assert min(kinds.count(kind) for kind in ("normal", "underflow", "range")) >= 5
    assert any(run.fit and run.fit.gone for run in RANDOM)
    assert any(run.fit and run.fit.is_hopeless and not run.fit.gone for run in RANDOM)


@pytest.mark.parametrize("run", RANDOM, ids=range(len(RANDOM)))
def test_the_banner_the_verdict_and_the_figure_say_the_same_of_a_random_run(run):
    headline, verdict = headline_of(run), run.verdict
    assert headline == HEADLINES[verdict.kind]
    if run.fit is None or verdict.kind == "dead":
        return
    says_none = sentence_of(run.fit).startswith("No loss scale fits")
    assert (verdict.kind == "range") == says_none
    if says_none:
        assert verdict.where == (run.fit.gone or (run.fit.lowest,))[0]
        assert verdict.where in sentence_of(run.fit)
        assert run.fit.highest in verdict.text
    if says_none and not run.fit.gone:  # counted on the recorded gradients, at each scale
        for exponent in range(-40, 60):
            assert any(is_lost_at(run, name, exponent) for name in run.fit.parameters)
    if headline.level == "good":
        best = run.fit.common.high
        lost = [lost_at(run, name, best) for name in run.fit.parameters]
        assert max(lost) <= 0.5 or run.fit.left_out


def lost_at(run, name, exponent):
    """The share of a parameter's nonzero gradients below float16's normal numbers."""
    counts = {}
    for sample in run.samples:
        first, found = sample.parameters[name].histogram
        for place, count in enumerate(found, first):
            counts[place] = counts.get(place, 0) + count
    small = sum(count for place, count in counts.items() if place + exponent < -14)
    return small / max(1, sum(counts.values()))


def is_lost_at(run, name, exponent):
    """Whether a parameter overflows when its gradients grow fourfold, or loses half of them."""
    tops = [
        sample.parameters[name].histogram.first + len(sample.parameters[name].histogram.counts)
        for sample in run.samples
        if sample.parameters[name].histogram.counts
    ]
    return max(tops, default=-99) + exponent + 2 > 16 or lost_at(run, name, exponent) > 0.5


def test_where_no_scale_fits_a_loss_beyond_float16_is_to_be_divided():
    gradients = {"small": np.full(4, 2.0**-30), "large": np.full(4, 2.0**12)}
    run = run_with(gradients, gradients)
    of_large_loss = replace(run, samples=[replace(each, loss=2e10) for each in run.samples])
    assert run.verdict.kind == of_large_loss.verdict.kind == "range"
    assert "Bring the layers closer" in run.verdict.text
    assert "Divide the term that makes the loss 2e+10 " in of_large_loss.verdict.text


def test_what_only_the_lines_of_skips_say_counts_for_the_verdict():
    """The process was killed after its last sample, at step 1."""
    run = run_with({"w": np.full(4, 2.0**-4)})
    assert run.verdict.kind == "normal"
    killed = replace(
        run, skips=run_of(*(run_files.skip(step, 8.0, np.nan) for step in (3, 5))).skips
    )
    assert killed.verdict.kind == "data"
    assert killed.verdict.text.startswith("2 of 5 steps were skipped, each with a loss of nan")
    elsewhere = replace(killed.starts[0], rank=0, world_size=2)
    skips = tuple(replace(skip, nonfinite=()) for skip in killed.skips)
    assert replace(killed, starts=(elsewhere,), skips=skips).verdict.kind == "silent"
    fewer = run_of(run_files.skip(2, 8.0, 1.0), run_files.skip(3, 4.0, 1.0)).skips
    cured = replace(run, skips=fewer)
    assert cured.verdict.kind == "normal"
