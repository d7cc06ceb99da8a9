"""The unscaled gradients of a run, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from gradscaler.diagnose._findings.run import Run
from gradscaler.diagnose._gradients.fitting_scales import has_sizes
from gradscaler.diagnose._record.lines import Bins
from gradscaler.diagnose._record.thresholds import MOST_GROWTH, SPIKE, TYPICAL_STEPS

OVERFLOW = 65520.0
"""The smallest magnitude that float16 rounds to Inf."""

_MOST_STEPS = 4_000_000  # take 1 GB
_MOST_BINS = 2**27  # in all histograms together; they take 1 GB
_LOWEST, _HIGHEST = -160, 140  # exponents beyond which no scale in float32 makes a difference
_CHUNK = 2**14  # steps


class Trace:
    """The unscaled gradients of each step: all that float16's loss scale depends on.

    Attributes:
        largest: float64 of shape (steps,), the largest magnitude of the parameters' gradients. A
            policy gets it after a finite step.
        extreme: float64 of shape (steps,), the largest magnitude anywhere in the backward pass. A
            step is non-finite if ``extreme * scale >= 65520``. Inf marks a bad batch, which is
            non-finite at any scale. The default is ``largest``.
        first: the exponent of the first column of ``counts``.
        counts: float64 of shape (steps, bins). In each step, ``counts[step, i]`` gradients, or
            their total weight, have ``floor(log2(abs(g))) == first + i``. None if only the largest
            magnitudes are known.
        rows: the distinct rows of ``counts``: steps with the same histogram share a row.
        row_of: int of shape (steps,), the row of each step. If the constructor gets ``row_of``, its
            argument ``counts`` is ``rows``.

    Raises:
        ValueError: the shapes do not match, or a value is not a valid magnitude, count or row.

    >>> trace = Trace([0.5, 0.25, 0.5], extreme=[0.5, np.inf, 0.5])
    >>> trace.num_steps, trace.is_bad.tolist()
    (3, [False, True, False])
    """

    def __init__(
        self,
        largest: ArrayLike,
        extreme: ArrayLike | None = None,
        first: int = 0,
        counts: ArrayLike | None = None,
        row_of: ArrayLike | None = None,
    ) -> None:
        sizes = np.array(largest, np.float64)
        extremes = sizes.copy() if extreme is None else np.array(extreme, np.float64)
        bins = None if counts is None else np.array(counts, np.float64)
        places = np.arange(sizes.size) if row_of is None else np.array(row_of, np.intp)
        if sizes.ndim != 1 or not np.all((sizes >= 0) & (sizes < math.inf)):
            raise ValueError("largest must be one finite magnitude for each step")
        if extremes.shape != sizes.shape or not np.all(extremes >= 0):
            raise ValueError("extreme must be one magnitude, or Inf, for each step")
        if bins is not None and (
            bins.ndim != 2
            or places.shape != sizes.shape
            or not np.all((places >= 0) & (places < len(bins)))
            or (row_of is None and len(bins) != len(sizes))
            or not np.all(bins >= 0)
        ):
            raise ValueError("counts must be one row of counts for each step")
        self.largest, self.extreme = sizes, extremes
        self.first, self.rows, self.row_of = int(first), bins, places

    @property
    def counts(self) -> NDArray[np.float64] | None:
        """The histogram of each step, of shape (steps, bins); None if there are none."""
        return None if self.rows is None else self.rows[self.row_of]

    @property
    def num_steps(self) -> int:
        """The number of steps."""
        return len(self.largest)

    @property
    def is_bad(self) -> NDArray[np.bool_]:
        """Whether each step is non-finite at any scale."""
        return np.isinf(self.extreme)

    @cached_property
    def spikes(self) -> tuple[tuple[int, int], ...]:
        """The first step of each spike, and the first step after it; see :attr:`Replay.spikes`."""
        found = []
        start, limit = None, 0.0
        with np.errstate(over="ignore"):
            limits = (SPIKE * self._typical).tolist()
        for step, size in enumerate(self.extreme.tolist()):
            if start is None and size >= limits[step] > 0:
                start, limit = step, limits[step]
            elif start is not None and not size >= limit:
                found.append((start, step))
                start = None
        if start is not None:
            found.append((start, self.num_steps))
        return tuple(found)

    @property
    def _typical(self) -> NDArray[np.float64]:
        """The median ``largest`` of the 100 steps before each step; 0 for the first step.

        A median beyond float64's range becomes Inf.
        """
        medians = np.zeros(self.num_steps)
        with np.errstate(over="ignore"):  # the mean of the middle two values may overflow
            for step in range(1, min(TYPICAL_STEPS, self.num_steps)):
                medians[step] = np.median(self.largest[:step])
            for start in range(TYPICAL_STEPS, self.num_steps, _CHUNK):
                part = self.largest[start - TYPICAL_STEPS : start + _CHUNK - 1]
                windows = sliding_window_view(part, TYPICAL_STEPS)[: self.num_steps - start]
                medians[start : start + _CHUNK] = np.median(windows, axis=1)
        return medians

    @classmethod
    def of_run(cls, run: Run) -> Trace:
        """Make the trace of a run that a :class:`gradscaler.diagnose.Monitor` recorded in float16.

        With ``every=1``, a monitor records each step. A step without a sample gets the gradients of
        the latest sample before it, or of the first sample. Gradients that the run's own scale
        flushed to zero are not in the file, so a run at a low scale says little about a higher one.

        For a skipped step, it is known only that a gradient was at least ``65520 / scale``. Its
        ``extreme`` is that value, or the largest gradient of the latest sample if that is larger.
        The step counts as a bad batch if its loss is not finite, or if ``65520 / scale`` is more
        than 2**12 times that largest gradient.

        Raises:
            ValueError: the run has no loss scale or histograms, is not in float16, or is too long.
        """
        if not run.has_scaler:
            raise ValueError("the run has no loss scale, so there is no policy to replay")
        dtype = run.starts[-1].dtype
        if dtype != "float16":
            raise ValueError(f"only a run in float16 can be replayed, and this one is in {dtype}")
        if run.num_steps > _MOST_STEPS:
            raise ValueError(
                f"the run has {run.num_steps:,} steps, and at most {_MOST_STEPS:,} can be replayed"
            )
        skipped = set(run.skipped)
        seen = (s for s in run.samples if has_sizes(s) and s.step not in skipped)
        samples = sorted(seen, key=lambda s: s.step)
        if not samples:
            raise ValueError(
                "the run holds no histograms of gradients, which a Monitor records at every "
                "`every`-th step (for JAX, Keras and MindSpore: if record is given gradients): "
                "record it again with a lower `every`, or by `run --every 1`"
            )
        steps = np.arange(1, run.num_steps + 1)
        latest = np.searchsorted([s.step for s in samples], steps, side="right").clip(1) - 1
        largest = np.array([s.largest or 0.0 for s in samples])[latest]
        extreme = largest.copy()
        if skipped:
            at = np.array(sorted(skipped)) - 1
            least = OVERFLOW / scales_of(run)[at]
            losses = np.array([run.losses.get(step, 0.0) for step in sorted(skipped)])
            with np.errstate(over="ignore"):
                is_bad = ~np.isfinite(losses) | (least > MOST_GROWTH * largest[at])
            extreme[at] = np.where(is_bad, math.inf, np.maximum(least, largest[at]))
        return cls(largest, extreme, *_rows([s.histogram for s in samples if s.histogram]), latest)


def _rows(histograms: Sequence[Bins]) -> tuple[int, NDArray[np.float64]]:
    """Align histograms: the first exponent, and a row of counts for each histogram."""
    lowest = min(first for first, counts in histograms if counts)
    highest = max(first + len(counts) - 1 for first, counts in histograms if counts)
    lowest, highest = (min(max(e, _LOWEST), _HIGHEST) for e in (lowest, highest))
    width = highest - lowest + 1
    if width * len(histograms) > _MOST_BINS:
        raise ValueError(f"the run holds too many histograms to replay: {len(histograms):,}")
    rows = np.zeros((len(histograms), width))
    for row, (first, counts) in zip(rows, histograms, strict=True):
        places = (first - lowest + np.arange(len(counts))).clip(0, width - 1)
        np.add.at(row, places, np.array(counts, float))
    return lowest, rows


def scales_of(run: Run) -> NDArray[np.float64]:
    """The scale that each step of a run used."""
    steps = np.arange(1, run.num_steps + 1)
    latest = np.searchsorted([*run.scales], steps, side="right").clip(1) - 1
    used: NDArray[np.float64] = np.array([*run.scales.values()], np.float64)[latest]
    return used
