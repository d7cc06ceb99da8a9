"""Streaks of skipped steps, and the line of each skip."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from gradscaler.diagnose._record.lines import Skip, VerdictLine
from gradscaler.diagnose._record.step import Step
from gradscaler.outcome import NonfiniteGradient

MOST_NONFINITE = 10  # gradients that a line lists


class SkipStreak(NamedTuple):
    """A streak of consecutive skipped steps of one optimizer."""

    length: int
    first_scale: float  # of the first skipped step
    skips: tuple[Skip, ...]  # the latest skips
    verdict: VerdictLine | None = None  # the latest verdict on this streak


def continued(
    streaks: Mapping[int, SkipStreak],
    step: Step,
    skip: Skip | None,
    optimizers: Mapping[int, bool],
    stuck_after: int,
) -> dict[int, SkipStreak]:
    """The streaks after a step of ``optimizers``; ``skip`` is None if it was applied.

    A skip lengthens its optimizer's streak. A streak ends if its optimizer applies a step, or if
    its latest skip is more than ``stuck_after`` steps ago.
    """
    kept = {
        optimizer: streak
        for optimizer, streak in streaks.items()
        if step.step - streak.skips[-1].step <= stuck_after
        and optimizers.get(optimizer, optimizer != 0)
    }
    for optimizer, skipped in optimizers.items():
        if skip is not None and skipped:
            streak = kept.get(optimizer, SkipStreak(0, skip.scale, ()))
            skips = (*streak.skips, skip)[-stuck_after:]
            kept[optimizer] = streak._replace(length=streak.length + 1, skips=skips)
    return kept


def skip_of(step: Step) -> Skip:
    """The line of a skipped step."""
    found = step.nonfinite or ()
    listed = None if step.nonfinite is None else _listed(found)
    more = len(found[MOST_NONFINITE:])
    return Skip(step.step, step.scale, step.loss, listed, more, step.batch)


def _listed(found: tuple[NonfiniteGradient, ...]) -> tuple[NonfiniteGradient, ...]:
    """The gradients that a line lists: the first ones, and one with an Inf if any holds one."""
    first, rest = found[:MOST_NONFINITE], found[MOST_NONFINITE:]
    inf = next((each for each in rest if each.num_inf), None)
    is_missing = inf is not None and not any(each.num_inf for each in first)
    return (*first[:-1], inf) if is_missing and inf is not None else first


def in_one_line(skip: Skip) -> str:
    """One line on a skipped step, for the log."""
    listed = "; ".join(
        f"{g.name} ({'x'.join(map(str, g.shape)) or 'scalar'} {g.dtype}): {g.num_inf} Inf, "
        f"{g.num_nan} NaN"
        + ("" if math.isnan(g.largest_finite) else f", largest of the rest {g.largest_finite:g}")
        for g in skip.nonfinite or ()
    )
    found = listed or "this process' gradients are finite"
    more = f"; and {skip.more} more" if skip.more else ""
    line = f"step {skip.step} skipped at loss scale {skip.scale:g}: {found}{more}"
    return "".join(letter if letter.isprintable() else " " for letter in line)
