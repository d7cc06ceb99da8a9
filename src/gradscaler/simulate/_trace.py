"""The gradients of a run as they are before scaling, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradscaler.diagnose._gradients.histogram import sum_of_bins
from gradscaler.diagnose._run.run import Run

OVERFLOW = 65520.0
"""Magnitudes from here on are rounded to Inf in float16."""

_MOST_GROWTH = 2.0**12  # beyond what was seen; a step that had to be larger is a bad batch


@dataclass(frozen=True, eq=False)
class Trace:
    """The gradients of each step, unscaled: all that a loss scale in float16 depends on.

    Attributes:
        largest: float64 of shape (steps,), the largest magnitude of the parameters' gradients,
            which is what a policy is told of a finite step.
        extreme: float64 of shape (steps,), the largest magnitude anywhere in the backward pass. The
            step is non-finite at a scale with ``extreme * scale >= 65520``; Inf stands for a bad
            batch, non-finite at any scale. By default, ``largest``.
        first: the exponent that ``counts`` begins with.
        counts: of shape (steps, bins); in each step ``counts[step, i]`` gradients, or that weight
            of them, have ``floor(log2(abs(g))) == first + i``. None if only the largest are known.

    Raises:
        ValueError: the shapes do not match, or a value cannot be a magnitude or a count.

    >>> trace = Trace([0.5, 0.25, 0.5], extreme=[0.5, np.inf, 0.5])
    >>> trace.num_steps, trace.is_bad.tolist()
    (3, [False, True, False])
    """

    largest: NDArray[np.float64]
    extreme: NDArray[np.float64]
    first: int
    counts: NDArray[np.float64] | None

    def __init__(
        self,
        largest: ArrayLike,
        extreme: ArrayLike | None = None,
        first: int = 0,
        counts: ArrayLike | None = None,
    ) -> None:
        sizes = np.array(largest, np.float64)
        extremes = sizes.copy() if extreme is None else np.array(extreme, np.float64)
        bins = None if counts is None else np.array(counts, np.float64)
        if sizes.ndim != 1 or not np.all((sizes >= 0) & (sizes < math.inf)):
            raise ValueError("largest must be one finite magnitude for each step")
        if extremes.shape != sizes.shape or not np.all(extremes >= 0):
            raise ValueError("extreme must be one magnitude, or Inf, for each step")
        if bins is not None and (
            bins.ndim != 2 or len(bins) != len(sizes) or not np.all(bins >= 0)
        ):
            raise ValueError("counts must be one row of counts for each step")
        values = {"largest": sizes, "extreme": extremes, "first": int(first), "counts": bins}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def num_steps(self) -> int:
        """How many steps there are."""
        return len(self.largest)

    @property
    def is_bad(self) -> NDArray[np.bool_]:
        """Which steps are non-finite at any scale."""
        return np.isinf(self.extreme)

    @classmethod
    def of_run(cls, run: Run) -> Trace:
        """The trace of a run that a :class:`gradscaler.diagnose.Monitor` recorded in float16.

        ``every=1`` records each step. Other steps count as the latest sample before them, or the
        first. What the run's own scale flushed to zero is not in its file, so a run at a low scale
        says little of a higher one.

        A skipped step says only that its gradients were at least ``65520 / scale``. It counts as
        that large; or as a bad batch, if its loss is not finite, or if it had to be more than 2**12
        times as large as the latest sample.

        Raises:
            ValueError: the run has no histograms, or is not in float16.
        """
        dtype = run.starts[-1].dtype
        if dtype != "float16":
            raise ValueError(f"only a run in float16 can be replayed, and this one is in {dtype}")
        skipped = set(run.skipped)
        seen = [s for s in run.samples if s.histogram and any(s.histogram.counts)]
        samples = [s for s in seen if s.step not in skipped]
        if not samples:
            raise ValueError(
                "the run holds no histograms of gradients, which a Monitor records at every "
                "`every`-th step (for JAX, Keras and MindSpore: if record is given gradients)"
            )
        steps = np.arange(1, run.num_steps + 1)
        latest = np.searchsorted([s.step for s in samples], steps, side="right").clip(1) - 1
        bins = [
            (s.histogram.first, np.array(s.histogram.counts, float)) for s in samples if s.histogram
        ]
        largest = np.array([_largest(s) for s in samples])[latest]
        extreme = largest.copy()
        scales = scales_of(run)
        for step in skipped:
            least = OVERFLOW / scales[step - 1]
            loss = run.losses.get(step, 0.0)
            is_bad = not math.isfinite(loss) or least > _MOST_GROWTH * largest[step - 1]
            extreme[step - 1] = math.inf if is_bad else max(least, largest[step - 1])
        first, total = sum_of_bins(bins)
        counts = np.zeros((len(bins), total.size))
        for row, (start, found) in zip(counts, bins, strict=True):
            row[start - first :][: found.size] = found
        return cls(largest, extreme, first, counts[latest])


def scales_of(run: Run) -> NDArray[np.float64]:
    """The scale that each step of a run used."""
    changed, scales = run.scales
    steps = np.arange(1, run.num_steps + 1)
    latest = np.searchsorted(changed, steps, side="right").clip(1) - 1
    used: NDArray[np.float64] = np.array(scales, np.float64)[latest]
    return used


def _largest(sample: Any) -> float:
    """The largest magnitude of a sample, or the middle of its last bin in an older file."""
    if sample.largest is not None:
        return float(sample.largest)
    return float(1.5 * 2.0 ** (sample.histogram.first + len(sample.histogram.counts) - 1))
