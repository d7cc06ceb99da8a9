"""The update rule as one pure function, for host scalars and for the tensors of any library."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradscaler.policies.state import Scalar, Where


class Constants(NamedTuple):
    """A policy's parameters in the types that the rule computes with."""

    growth_factor: Scalar
    backoff_factor: Scalar
    min_scale: Scalar
    max_scale: Scalar
    growth_interval: int
    hysteresis: int
    finite_step_resets: bool
    backoff_resets: bool
    growth_tiers: tuple[tuple[float, int], ...] = ()

    def on_host(self) -> Constants:
        """The constants as NumPy scalars, because NumPy 1 turns float32 * float into float64."""
        return self._replace(
            growth_factor=np.float32(self.growth_factor),
            backoff_factor=np.float32(self.backoff_factor),
            min_scale=np.float32(self.min_scale),
            max_scale=np.float32(self.max_scale),
        )


def next_values(
    constants: Constants,
    scale: Scalar,
    finite_count: Scalar,
    nonfinite_count: Scalar,
    found_inf: Scalar,
    where: Where,
) -> tuple[Scalar, Scalar, Scalar]:
    """The state after one step, by arithmetic, comparisons and ``where``: no branch on a value.

    State and result are plain values, because MindSpore's compiler loses the dtypes in a named
    tuple.
    """
    finite_steps = finite_count + 1
    zero = finite_count * 0  # of the counters' own type

    interval = constants.growth_interval
    if constants.growth_tiers:  # MindSpore's compiler takes no loop over an empty tuple
        for below, steps in constants.growth_tiers[::-1]:
            interval = where(scale < below, zero + steps, interval)
    grow = finite_steps >= interval
    grown = scale * constants.growth_factor
    in_range = grown <= constants.max_scale
    after_finite = where(grow, where(in_range, grown, scale), scale)

    reduced = scale * constants.backoff_factor
    reduced = where(reduced > constants.min_scale, reduced, constants.min_scale)
    after_nonfinite, counted = reduced, zero
    if constants.hysteresis > 1:
        nonfinite_steps = nonfinite_count + 1
        back_off = nonfinite_steps >= constants.hysteresis
        after_nonfinite = where(back_off, reduced, scale)
        # If a backoff does not reset the count, it stays below the hysteresis, and cannot overflow.
        spent = zero if constants.backoff_resets else zero + (constants.hysteresis - 1)
        counted = where(back_off, spent, nonfinite_steps)
    kept = zero
    if not constants.finite_step_resets:
        kept = where(grow, where(in_range, zero, nonfinite_count), nonfinite_count)
    return (
        where(found_inf, after_nonfinite, after_finite),
        where(found_inf, zero, where(grow, zero, finite_steps)),
        where(found_inf, counted, kept),
    )
