"""Which loss scales fit the gradients of the latest samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.formats import Format, format_named
from gradscaler.diagnose._gradients.histogram import sum_of_bins
from gradscaler.diagnose._run.lines import Bins
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._texts import number, percent, power, shown

FLUSHED, SMALL = (
    0.01,
    0.1,
)  # of the nonzero gradients of a parameter: flushed, and that or subnormal
_FEW = 0.05  # of all gradients: those of parameters that may be left out
ROOM = 2  # how often the largest gradient can double
_LATEST = 10  # samples, as one batch's gradients may be unusual
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

    first: int  # the step of the first sample that counts
    last: int  # that of the last one
    num_samples: int
    own: float  # the scale that the last one used
    whole: Range
    parameters: Mapping[str, Range | None]  # None: no gradient is finite and nonzero
    common: Range  # that of all parameters
    lowest: str  # the parameter that sets `common.low`; empty if there is no name
    highest: str  # the one that sets `common.high`
    lost: float  # of the gradients of `lowest` at 2**common.high: flushed or subnormal
    left_out: tuple[str, ...]  # parameters that do not fit, and hold few of the gradients

    @property
    def is_empty(self) -> bool:
        """Whether no scale fits."""
        return self.common.low > self.common.high

    @property
    def sentence(self) -> str:
        """Which scales fit, and where the run's own is."""
        low, high = power(2, self.common.low), power(2, self.common.high)
        lowest, highest = (shown(name, 60) or "one" for name in (self.lowest, self.highest))
        which = "every parameter"
        if self.left_out:
            which = f"all but {shown(self.left_out[0], 60)}"
            which += f" and {len(self.left_out) - 1:,} more" * (len(self.left_out) > 1)
            which += f", with less than {_FEW:.0%} of the gradients"
        fits = f"Loss scales from {low} to {high} fit {which}. The {self._place}."
        if self.is_empty:
            limits = f"{lowest} needs at least {low}, and {highest} at most {high}"
            if self.lowest == self.highest:
                limits = f"{lowest} needs at least {low}, and at most {high}"
            fits = (
                f"No loss scale fits every parameter: {limits}. At {high}, {percent(self.lost)} of "
                f"the nonzero gradients of {lowest} are flushed to zero or subnormal. "
                f"The run's own is {number(self.own)}."
            )
        zero = list(self.parameters.values()).count(None)
        if zero:
            fits += f" {zero:,} parameters had no gradient but zero: unused, or flushed already."
        return fits.replace(" 1 parameters ", " 1 parameter ")

    @property
    def _place(self) -> str:
        """Where the run's own scale is, if some scales fit."""
        exponent = math.log2(self.own) if 0 < self.own < math.inf else math.nan
        where = "is one of them"
        if exponent < self.common.low:
            where = "is smaller"
        elif exponent > self.common.edge:
            where = "is larger"
        elif exponent > self.common.high:
            where = "leaves less room"
        return f"run's own, {number(self.own)}, {where}"


RULE = (
    f"A scale fits if no gradient overflows even when it is {2**ROOM} times as large, and if of "
    f"each parameter's nonzero gradients at most {FLUSHED:.0%} are flushed to zero, and at most "
    f"{SMALL:.0%} that or subnormal"
)


def fit_of(run: Run) -> Fit | None:
    """The scales that fit the latest samples with finite gradients other than 0."""
    form = format_named(run.starts[-1].dtype)
    samples = [each for each in run.samples if each.histogram and any(each.histogram.counts)]
    if not samples:
        return None
    samples = samples[-_LATEST:]
    whole = _sum(each.histogram for each in samples if each.histogram)
    parts = {
        name: _sum(s.parameters[name].histogram for s in samples if name in s.parameters)
        for name in samples[-1].parameters
    }
    ranges = {name: range_of(*part, form) for name, part in parts.items()}
    range_of_whole = range_of(*whole, form)
    assert range_of_whole is not None  # its counts are not all 0
    found = {name: each for name, each in ranges.items() if each is not None}
    if not found:
        found, parts = {"": range_of_whole}, {"": whole}
    highest = min(found, key=lambda name: found[name].high)
    # Such as a bias before a normalization, whose gradient is nothing but rounding errors.
    misfits = tuple(name for name in found if found[name].low > found[highest].high)
    sizes = {name: float(parts[name][1].sum()) for name in found}
    are_few = sum(sizes[name] for name in misfits) < _FEW * sum(sizes.values())
    left_out = misfits if are_few and highest not in misfits else ()
    counted = {name: each for name, each in found.items() if name not in left_out}
    lowest = max(counted, key=lambda name: counted[name].low)
    unflushed = max(each.unflushed for each in counted.values())
    common = found[highest]._replace(unflushed=unflushed, low=found[lowest].low)
    lost = _share_below(*parts[lowest], form.min_exponent - common.high)
    steps = [each.step for each in samples]
    own = samples[-1].scale
    return Fit(
        min(steps),
        max(steps),
        len(samples),
        own,
        range_of_whole,
        ranges,
        common,
        lowest,
        highest,
        lost,
        left_out,
    )


def range_of(first: int, counts: NDArray[Any], form: Format) -> Range | None:
    """The loss scales, powers of 2, that fit gradients with these exponents; None if none are.

    ``counts[i]`` gradients have a magnitude from ``2**(first + i)`` to below twice that.
    """
    occupied = np.flatnonzero(counts)
    if not occupied.size:
        return None
    below = np.cumsum(counts) / counts.sum()  # the share up to each exponent
    # The exponents of the smallest gradients that are to be kept, and to be normal.
    kept, normal = (int(np.argmax(below > share)) + first for share in (FLUSHED, SMALL))
    unflushed = form.min_exponent - form.mantissa_bits - 1 - kept
    top = first + int(occupied[-1])
    edge = min(math.frexp(form.largest)[1] - (top + 1), _LARGEST)
    low = max(unflushed, form.min_exponent - normal, _SMALLEST)
    return Range(max(unflushed, _SMALLEST), low, edge - ROOM, edge)


def _share_below(first: int, counts: NDArray[Any], exponent: int) -> float:
    """The share of gradients with a smaller exponent."""
    return float(counts[: max(0, exponent - first)].sum() / counts.sum())


def _sum(parts: Iterable[Bins]) -> _Counts:
    return sum_of_bins((each.first, np.array(each.counts, float)) for each in parts)
