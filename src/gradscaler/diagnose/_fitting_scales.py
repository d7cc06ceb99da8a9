"""Which loss scales fit the gradients of samples: what verdicts and figures both go by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.formats import Format, format_named, sum_of_bins
from gradscaler.diagnose._run.lines import Bins, ParameterSample, Sample

FLUSHED = 0.01  # of a parameter's nonzero gradients may be flushed
SMALL = 0.1  # may be flushed or subnormal
FEW = 0.05  # of all gradients: those of parameters that may be left out
ROOM = 2  # how often the largest gradient can double
MOST_SAMPLES = 10  # count, the latest, as one batch's gradients may be unusual
_MOST_LOST = 0.5  # of a parameter's gradients, at the largest scale with room
_LEAST_ROOM = 4  # powers of 2 up to an overflow, with which parameters that are gone may come back
_VANISHED = 64  # the exponent of a scale that only gradients of about 2**-50 need
_SMALLEST, _LARGEST = -126, 127  # exponents of a scale in float32

_Counts = tuple[int, NDArray[Any]]  # the first exponent, and how many gradients there are of each


class Range(NamedTuple):
    """The loss scales that fit some gradients: 2**low to 2**high; none if ``low > high``."""

    unflushed: int  # from this exponent on, few gradients are flushed
    low: int  # from this one on, few are subnormal either
    high: int  # up to this one, none overflows, and there is room
    edge: int  # up to this one, none overflows


@dataclass(frozen=True)
class Fit:
    """The loss scales that fit a run: all gradients as one, and each parameter's."""

    last: int  # the step of the latest sample that counts
    own: float  # the scale that the last one used
    whole: Range
    parameters: Mapping[str, Range | None]  # None: no gradient is finite and nonzero
    common: Range  # that of all parameters; `unflushed` is that of `highest`
    lowest: str  # the parameter that sets `common.low`; empty if there is no name
    highest: str  # the one that sets `common.high`
    lost: float  # of the gradients of `lowest` at 2**common.high: flushed or subnormal
    left_out: tuple[str, ...]  # parameters that do not fit, and hold few of the gradients
    gone: tuple[str, ...]  # parameters that are flushed to 0, and out of reach of any scale

    @property
    def is_empty(self) -> bool:
        """Whether no scale fits each parameter in full."""
        return self.common.low > self.common.high

    @property
    def is_hopeless(self) -> bool:
        """Whether every scale loses most of a parameter: what the verdict ``"range"`` says.

        Where all gradients are so small that such scales fit them, they have vanished.
        """
        if self.common.high > _VANISHED:
            return False
        return bool(self.gone) or (self.is_empty and self.lost > _MOST_LOST)


def has_sizes(sample: Sample) -> bool:
    """Whether a sample has gradients that are finite and not 0, by their sizes."""
    return sample.histogram is not None and any(sample.histogram.counts)


def fit_of(samples: Sequence[Sample], dtype: str) -> Fit | None:
    """The scales that fit the latest samples that have sizes; None if there are none."""
    form = format_named(dtype)
    samples = [each for each in samples if has_sizes(each)][-MOST_SAMPLES:]
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
    # Such as a bias before a normalization, whose gradient is nothing but rounding errors.
    misfits = tuple(name for name in found if found[name].low > found[highest].high)
    sizes = {name: float(parts[name][1].sum()) for name in found}
    are_few = sum(sizes[name] for name in misfits) < FEW * sum(sizes.values())
    left_out = misfits if are_few and highest not in misfits else ()
    counted = {name: each for name, each in found.items() if name not in left_out}
    lowest = max(counted, key=lambda name: counted[name].low)
    common = found[highest]._replace(low=found[lowest].low)
    lost = _share_below(*parts[lowest], form.min_exponent - common.high)
    last = samples[-1]
    bounds = common, lowest, highest
    return Fit(last.step, last.scale, range_of_whole, ranges, *bounds, lost, left_out, gone)


def _gone(sample: Sample, parts: Mapping[str, _Counts], edge: int) -> tuple[str, ...]:
    """The parameters that are flushed to 0 by more than the largest gradient leaves room for.

    How much more is estimated from those that are left, ``parts``, and fade: as many powers of 2
    per parameter as between their largest gradient and their smallest.
    """
    parameters = sample.parameters
    gone = tuple(n for n, found in parameters.items() if found.zero == 1 and n not in parts)
    if not (gone and parts and (sample.scale < 1 or any(map(fades, parameters.values())))):
        return ()
    ends = [exponent for first, counts in parts.values() for exponent in _ends(first, counts)]
    span = max(ends) + 1 - min(ends)
    room = edge - math.log2(sample.scale)
    return gone if room <= max(_LEAST_ROOM, span * len(gone) / len(parts)) else ()


def fades(found: ParameterSample) -> bool:
    """Whether most gradients that are left of a parameter are too small."""
    return found.zero < 1 and found.flushed + found.subnormal > (1 - found.zero) / 2


def range_of(first: int, counts: NDArray[Any], form: Format) -> Range | None:
    """The loss scales, powers of 2, that fit gradients with these exponents; None if none are.

    ``counts[i]`` gradients have a magnitude from ``2**(first + i)`` to below twice that.
    """
    if not counts.any():
        return None
    below = np.cumsum(counts) / counts.sum()  # the share up to each exponent
    # The exponents of the smallest gradients that are to be kept, and to be normal.
    kept, normal = (int(np.argmax(below > share)) + first for share in (FLUSHED, SMALL))
    unflushed = form.min_exponent - form.mantissa_bits - 1 - kept
    _, top = _ends(first, counts)
    edge = min(math.frexp(form.largest)[1] - (top + 1), _LARGEST)
    low = max(unflushed, form.min_exponent - normal, _SMALLEST)
    return Range(max(unflushed, _SMALLEST), low, edge - ROOM, edge)


def _ends(first: int, counts: NDArray[Any]) -> tuple[int, int]:
    """The smallest and the largest exponent of which there are gradients."""
    occupied = np.flatnonzero(counts)
    return first + int(occupied[0]), first + int(occupied[-1])


def _share_below(first: int, counts: NDArray[Any], exponent: int) -> float:
    """The share of gradients with a smaller exponent."""
    return float(counts[: max(0, exponent - first)].sum() / counts.sum())


def _sum(parts: Iterable[Bins]) -> _Counts:
    return sum_of_bins((each.first, np.array(each.counts, float)) for each in parts)
