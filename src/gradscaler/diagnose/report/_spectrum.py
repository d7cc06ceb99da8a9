"""Where gradients lie in the range of their format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradscaler.diagnose._gradients.formats import format_named
from gradscaler.diagnose._run.lines import Bins, ParameterSample, Sample, Shares
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._words import every_nth

MOST_WORST = 10
"""Worst parameters that are listed; a monitor names 5."""


class Zone(NamedTuple):
    """A part of a format's range: the exponents from ``start`` up to ``stop``."""

    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class Spectrum:
    """Where gradients, times the scale in use, lie in their format's range.

    ``shares``, ``zero`` and ``nonfinite`` have a row for all, and then one for each parameter.
    """

    step: int  # of the sample
    scale: float  # that the step used
    exponents: np.ndarray  # each column's, from below the format's range to beyond it
    shares: np.ndarray  # of the row's gradients, in each column
    zero: np.ndarray  # the share that is 0
    nonfinite: np.ndarray  # the share that is Inf or NaN
    names: tuple[str, ...]  # the parameters', or those of every n-th
    worst: tuple[str, ...]  # the names of the worst parameters, the worst first
    zones: tuple[Zone, ...]  # from the smallest exponents to the largest
    num_parameters: int

    def within(self, zone: Zone) -> np.ndarray:
        """Which columns are in a zone."""
        return (self.exponents >= zone.start) & (self.exponents < zone.stop)

    def share(self, zone: Zone) -> float:
        """The share of all gradients that is in a zone."""
        return float(self.shares[0][self.within(zone)].sum())


def spectrum_of(run: Run) -> Spectrum | None:
    """The spectrum of the latest sample that has finite gradients other than 0."""
    for sample in reversed(run.samples):
        if sample.shares and sample.histogram and any(sample.histogram.counts):
            return _spectrum(sample, sample.shares, sample.histogram, run.starts[-1].dtype)
    return None


def _spectrum(sample: Sample, shares: Shares, histogram: Bins, dtype: str) -> Spectrum:
    parts: list[tuple[Shares | ParameterSample, Bins]] = [(shares, histogram)]
    worst = tuple(name for name in sample.worst if name in sample.parameters)[:MOST_WORST]
    parameters = {name: sample.parameters[name] for name in every_nth(sample.parameters, worst)}
    parts += [(parameter, parameter.histogram) for parameter in parameters.values()]
    shift = round(math.log2(sample.scale)) if 0 < sample.scale < math.inf else 0
    zones = _zones(dtype)
    bottom, top = int(zones[0].stop), int(zones[-1].start)
    first, counts = histogram
    occupied = [first + shift + column for column, count in enumerate(counts) if count]
    left = max(min([bottom - 9, *occupied]), bottom - 40)
    right = min(max([top + 4, *(exponent + 1 for exponent in occupied)]), top + 40)
    rows = np.zeros((len(parts), right - left))
    for row, (part, (first, counts)) in zip(rows, parts, strict=True):
        columns = np.clip(first + shift + np.arange(len(counts)), left, right - 1) - left
        finite = max(0.0, 1 - part.zero - part.nonfinite)
        row += finite * np.bincount(columns, counts, right - left) / max(1, sum(counts))
    return Spectrum(
        sample.step,
        sample.scale,
        np.arange(left, right),
        rows,
        np.array([part.zero for part, _ in parts]),
        np.array([part.nonfinite for part, _ in parts]),
        tuple(parameters),
        worst,
        zones,
        len(sample.parameters),
    )


def _zones(dtype: str) -> tuple[Zone, ...]:
    form = format_named(dtype)
    kept = form.min_exponent - form.mantissa_bits - 1  # rounded up to the smallest subnormal
    beyond = math.frexp(form.largest)[1]
    return (
        Zone("flushed", -math.inf, kept),
        Zone("subnormal", kept, form.min_exponent),
        Zone("normal", form.min_exponent, beyond),
        Zone("overflow", beyond, math.inf),
    )
