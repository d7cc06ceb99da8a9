"""Replays a policy on a trace, and measures the outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradscaler.diagnose.simulate._trace import OVERFLOW, Trace
from gradscaler.policies import Policy

_KEPT = -25  # float16 rounds magnitudes with smaller exponents to 0
_NORMAL = -14  # the exponent of float16's smallest normal number
_CHUNK = 2**20  # counts that are summed at once


class Spike(NamedTuple):
    """Steps whose gradients are far larger than before, or non-finite at any scale.

    Attributes:
        start: the first of these steps, from 0.
        stop: the first step after them.
        recovery: the number of steps after ``stop`` until the scale is back at its value in the
            step before ``start``; None if it is not back before the trace ends.
    """

    start: int
    stop: int
    recovery: int | None


@dataclass(frozen=True, eq=False)
class Replay:
    """The effect of one sequence of loss scales on a trace.

    All arrays have the shape (steps,). The shares are NaN if the step was skipped or the trace has
    no histograms.

    Attributes:
        trace: the trace.
        scales: the scale that each step used, in float32.
        skipped: whether each step was skipped.
        flushed: the share of each step's gradients that float16 flushed to zero.
        subnormal: the share that became subnormal, and lost bits.
        flushed_magnitude: the flushed share of the sum of the gradients' magnitudes.
        subnormal_magnitude: the share of that sum that became subnormal.
    """

    trace: Trace
    scales: NDArray[np.float32]
    skipped: NDArray[np.bool_]
    flushed: NDArray[np.float64]
    subnormal: NDArray[np.float64]
    flushed_magnitude: NDArray[np.float64]
    subnormal_magnitude: NDArray[np.float64]

    @property
    def num_skipped(self) -> int:
        """The number of skipped steps."""
        return int(self.skipped.sum())

    def mean(self, name: str) -> float:
        """The mean of a share, such as ``"flushed"``, over the steps that were not skipped.

        NaN if all steps were skipped, or the trace has no histograms.
        """
        values: NDArray[np.float64] = getattr(self, name)[~self.skipped]
        return float(values.mean()) if values.size else math.nan

    @cached_property
    def spikes(self) -> tuple[Spike, ...]:
        """The spikes of the trace, and the number of steps until the scale was back after each.

        A spike is a stretch of steps whose ``extreme`` is at least 16 times the median ``largest``
        of the 100 steps before it. A spike that begins during another's recovery counts on its own.
        """
        steps_from = lru_cache(10)(lambda scale: np.flatnonzero(self.scales >= scale))
        found = []
        for start, stop in self.trace.spikes:
            steps = steps_from(self.scales[start - 1])
            later = steps[np.searchsorted(steps, stop) :][:1].tolist()
            found.append(Spike(start, stop, later[0] - stop if later else None))
        return tuple(found)


def replay(policy: Policy, trace: Trace) -> Replay:
    """Run a policy over a trace, as a scaler does in training.

    At each step with scale ``s``, ``found_inf`` is ``extreme * s >= 65520``. A policy that has an
    ``amax_interval`` gets the largest gradient of each finite step.

    >>> from gradscaler import DynamicScale
    >>> trace = Trace([1.0, 1.0, 1.0], extreme=[1.0, np.inf, 1.0])
    >>> found = replay(DynamicScale(2.0**17), trace)
    >>> found.scales.tolist(), found.skipped.tolist()
    ([131072.0, 65536.0, 32768.0], [True, True, False])
    """
    state = policy.init()
    scales = np.empty(trace.num_steps, np.float32)
    looks: Any = policy if getattr(policy, "amax_interval", 0) else None
    for step, (largest, extreme) in enumerate(
        zip(trace.largest.tolist(), trace.extreme.tolist(), strict=True)
    ):
        scales[step] = state.scale
        found_inf = not extreme * float(state.scale) < OVERFLOW
        if looks is None:
            state = policy.update(state, found_inf)
        else:
            state = looks.update(state, found_inf, amax=None if found_inf else largest)
    return at_scales(scales, trace)


def at_scales(scales: ArrayLike, trace: Trace) -> Replay:
    """The replay of a trace with these scales, one for each step."""
    used = np.array(scales, np.float32)
    with np.errstate(over="ignore"):
        skipped = ~(trace.extreme * used.astype(np.float64) < OVERFLOW)
    shares = np.full((4, trace.num_steps), np.nan)
    if trace.rows is not None and trace.num_steps:
        places, exponents = trace.row_of, np.log2(used.astype(np.float64))
        is_new = (places[1:] != places[:-1]) | (exponents[1:] != exponents[:-1])
        starts = np.flatnonzero(np.concatenate([[True], is_new]))  # of stretches of equal shares
        sizes = 2.0 ** (np.arange(trace.rows.shape[1]) - trace.rows.shape[1])
        found = np.empty((4, starts.size))
        for part in np.array_split(np.arange(starts.size), starts.size * sizes.size // _CHUNK + 1):
            at = starts[part]
            rows = trace.rows[places[at]]
            for row, counts in ((0, rows), (2, rows * sizes)):
                kept, normal = (
                    _share_below(counts, limit - trace.first - exponents[at])
                    for limit in (_KEPT, _NORMAL)
                )
                found[row, part], found[row + 1, part] = kept, normal - kept
        shares = np.repeat(found, np.diff([*starts, trace.num_steps]), axis=1)
        shares[:, skipped] = np.nan
    return Replay(trace, used, skipped, *shares)


def _share_below(counts: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
    """The share of each row's counts below a fractional bin index; bins are taken as uniform."""
    sums = np.concatenate([np.zeros((len(counts), 1)), np.cumsum(counts, axis=1)], axis=1)
    places = np.clip(places, 0, counts.shape[1])
    whole = np.minimum(places.astype(int), counts.shape[1] - 1)
    rows = np.arange(len(counts))
    below = sums[rows, whole] + (places - whole) * counts[rows, whole]
    total = sums[:, -1]
    return np.asarray(np.divide(below, total, out=np.zeros(len(counts)), where=total > 0))
