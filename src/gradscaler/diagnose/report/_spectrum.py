"""Where gradients lie in the range of their format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradscaler.diagnose._gradients.formats import format_named
from gradscaler.diagnose._run.lines import Bins, Sample, Shares
from gradscaler.diagnose._run.run import Run


class Zone(NamedTuple):
    """A part of a format's range: the exponents from ``start`` up to ``stop``."""

    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class Spectrum:
    """Where all gradients, times the scale in use, lie in their format's range."""

    step: int  # of the sample
    scale: float  # that the step used
    exponents: np.ndarray  # each column's, from below the format's range to beyond it
    shares: np.ndarray  # of the gradients, in each column
    zero: float  # the share that is 0
    nonfinite: float  # the share that is Inf or NaN
    zones: tuple[Zone, ...]  # from the smallest exponents to the largest

    def within(self, zone: Zone) -> np.ndarray:
        """Which columns are in a zone."""
        return (self.exponents >= zone.start) & (self.exponents < zone.stop)

    def share(self, zone: Zone) -> float:
        """The share of the gradients that is in a zone."""
        return float(self.shares[self.within(zone)].sum())


def spectrum_of(run: Run) -> Spectrum | None:
    """The spectrum of the latest sample that has finite gradients other than 0."""
    for sample in reversed(run.samples):
        if sample.shares and sample.histogram and any(sample.histogram.counts):
            return _spectrum(sample, sample.shares, sample.histogram, run.starts[-1].dtype)
    return None


def _spectrum(sample: Sample, found: Shares, histogram: Bins, dtype: str) -> Spectrum:
    shift = round(math.log2(sample.scale)) if 0 < sample.scale < math.inf else 0
    zones = _zones(dtype)
    bottom, top = int(zones[0].stop), int(zones[-1].start)
    exponents = histogram.first + shift + np.arange(len(histogram.counts))
    occupied = exponents[np.flatnonzero(histogram.counts)]
    left = max(min(bottom - 9, int(occupied[0])), bottom - 40)
    right = min(max(top + 4, int(occupied[-1]) + 1), top + 40)
    columns = np.clip(exponents, left, right - 1) - left
    finite = max(0.0, 1 - found.zero - found.nonfinite)
    shares = np.bincount(columns, histogram.counts, right - left) / sum(histogram.counts)
    return Spectrum(
        sample.step,
        sample.scale,
        np.arange(left, right),
        finite * shares,
        found.zero,
        found.nonfinite,
        zones,
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
