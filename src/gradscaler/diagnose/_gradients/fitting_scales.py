"""Computes which loss scales fit the gradients of samples, for verdicts and figures alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.histogram import sum_of_bins
from gradscaler.diagnose._record.formats import Format, format_named
from gradscaler.diagnose._record.lines import Bins, ParameterSample, Sample
from gradscaler.diagnose._record.thresholds import (
    FAR_SCALE,
    LATEST_SAMPLES,
    LEAST_ROOM,
    MOST_FLUSHED,
    MOST_LEFT_OUT,
    MOST_LOST,
    MOST_SMALL,
    ROOM,
)

_SMALLEST, _LARGEST = -126, 127  # exponents of a scale in float32

_Counts = tuple[int, NDArray[Any]]  # the first exponent, and the number of gradients of each


class Range(NamedTuple):
    """The loss scales that fit some gradients: 2**low to 2**high; empty if ``low > high``."""

    unflushed: int  # at this exponent and above, few gradients are flushed
    low: int  # at this exponent and above, few gradients are flushed or subnormal
    high: int  # up to this exponent, no gradient overflows even if it doubles `ROOM` times
    edge: int  # up to this exponent, no gradient overflows


@dataclass(frozen=True)
class Fit:
    """The loss scales that fit a run: for all gradients together, and for each parameter."""

    last: int  # the step of the latest sample that counts
    own: float  # the scale that this sample used
    whole: Range  # for all gradients together
    parameters: Mapping[str, Range | None]  # None: no gradient is finite and nonzero
    common: Range  # fits every parameter; `unflushed` is that of `highest`
    lowest: str  # the parameter that sets `common.low`; empty if there is no name
    highest: str  # the parameter that sets `common.high`
    lost: float  # the share of `lowest` that 2**common.high flushes or makes subnormal
    left_out: tuple[str, ...]  # parameters that do not fit, and hold few of the gradients
    gone: tuple[str, ...]  # parameters that are flushed to 0, and that no scale brings back

    @property
    def is_empty(self) -> bool:
        """Whether no scale fits each parameter in full."""
        return self.common.low > self.common.high

    @property
    def is_hopeless(self) -> bool:
        """Whether every scale loses most of a parameter, which gives the verdict ``"range"``.

        False if only enormous scales would fit, because such small gradients have vanished.
        """
        if self.common.high > FAR_SCALE:
            return False
        return bool(self.gone) or (self.is_empty and self.lost > MOST_LOST)


def has_sizes(sample: Sample) -> bool:
    """Whether the histogram of a sample holds gradients that are finite and not 0."""
    return sample.histogram is not None and any(sample.histogram.counts)


def fit_of(samples: Sequence[Sample], dtype: str) -> Fit | None:
    """The scales that fit the latest samples with finite nonzero gradients; None without such."""
    form = format_named(dtype)
    samples = [each for each in samples if has_sizes(each)][-LATEST_SAMPLES:]
    if not samples:
        return None
    whole = _sum(each.histogram for each in samples if each.histogram)
    parts = {
        name: _sum(s.parameters[name].histogram for s in samples if name in s.parameters)
        for name in samples[-1].parameters
    }
    ranges = {name: range_of(*part, form) for name, part in parts.items()}
    range_of_whole = range_of(*whole, form)
    assert range_of_whole is not None  # its counts are not all 0
    found = {name: each for name, each in ranges.items() if each is not None}
    gone = _gone(samples[-1], {name: parts[name] for name in found}, range_of_whole.edge)
    if not found:
        found, parts = {"": range_of_whole}, {"": whole}
    highest = min(found, key=lambda name: found[name].high)
    # An example is a bias before a normalization: its gradient is nothing but rounding errors.
    misfits = tuple(name for name in found if found[name].low > found[highest].high)
    sizes = {name: float(parts[name][1].sum()) for name in found}
    are_few = sum(sizes[name] for name in misfits) < MOST_LEFT_OUT * sum(sizes.values())
    left_out = misfits if are_few and highest not in misfits else ()
    counted = {name: each for name, each in found.items() if name not in left_out}
    lowest = max(counted, key=lambda name: counted[name].low)
    common = found[highest]._replace(low=found[lowest].low)
    first, counts = parts[lowest]
    num_lost = counts[: max(0, form.min_exponent - common.high - first)].sum()
    lost = float(num_lost / counts.sum())
    last = samples[-1]
    bounds = common, lowest, highest
    return Fit(last.step, last.scale, range_of_whole, ranges, *bounds, lost, left_out, gone)


def _gone(sample: Sample, parts: Mapping[str, _Counts], edge: int) -> tuple[str, ...]:
    """The parameters that are flushed to 0, and that no scale without overflow brings back.

    Empty unless another parameter fades, or the scale is below 1. The doublings that would bring
    them back are estimated from ``parts``, the other parameters: the span of their exponents, times
    the ratio of parameters gone to parameters left. Empty too if the scale can double more often
    than that without an overflow.
    """
    parameters = sample.parameters
    gone = tuple(n for n, found in parameters.items() if found.zero == 1 and n not in parts)
    if not (gone and parts and (sample.scale < 1 or any(map(fades, parameters.values())))):
        return ()
    ends = [exponent for first, counts in parts.values() for exponent in _ends(first, counts)]
    span = max(ends) + 1 - min(ends)
    room = edge - math.log2(sample.scale)
    return gone if room <= max(LEAST_ROOM, span * len(gone) / len(parts)) else ()


def fades(found: ParameterSample) -> bool:
    """Whether most of a parameter's nonzero gradients are flushed or subnormal."""
    return found.zero < 1 and found.flushed + found.subnormal > (1 - found.zero) / 2


def range_of(first: int, counts: NDArray[Any], form: Format) -> Range | None:
    """The loss scales, powers of 2, that fit gradients of these exponents.

    ``counts[i]`` gradients have a magnitude of at least ``2**(first + i)`` and below twice that.
    None if all counts are 0.
    """
    if not counts.any():
        return None
    below = np.cumsum(counts) / counts.sum()  # the share up to each exponent
    # The exponents of the smallest gradients that must not be flushed, and that must be normal.
    kept, normal = (int(np.argmax(below > share)) + first for share in (MOST_FLUSHED, MOST_SMALL))
    unflushed = form.min_exponent - form.mantissa_bits - 1 - kept
    _, top = _ends(first, counts)
    edge = min(math.frexp(form.largest)[1] - (top + 1), _LARGEST)
    low = max(unflushed, form.min_exponent - normal, _SMALLEST)
    return Range(max(unflushed, _SMALLEST), low, edge - ROOM, edge)


def _ends(first: int, counts: NDArray[Any]) -> tuple[int, int]:
    """The smallest and the largest exponent with a count above 0."""
    occupied = np.flatnonzero(counts)
    return first + int(occupied[0]), first + int(occupied[-1])


def _sum(parts: Iterable[Bins]) -> _Counts:
    return sum_of_bins((each.first, np.array(each.counts, float)) for each in parts)
