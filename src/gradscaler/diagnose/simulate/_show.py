"""Replays side by side: a table and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from gradscaler.diagnose._findings.finding import Kind
from gradscaler.diagnose.report._summary import Content, Table
from gradscaler.diagnose.report._words import number, percent, shown
from gradscaler.diagnose.simulate._replay import Replay

HEADINGS = ("policy", "skipped", "flushed", "lost", "subnormal", "back after", "at most", "at last")


def rows_of(replays: Mapping[str, Replay]) -> list[tuple[str, ...]]:
    """A row of texts for each replay, under ``HEADINGS``.

    ``flushed`` is a share of the gradients; ``lost`` and ``subnormal`` are of the sum of their
    magnitudes. ``back after`` is the median steps after bad batches or a spike until the scale is
    back, and ``at most`` the most; ``at last`` is the last scale.
    """
    return [
        (
            shown(name),
            f"{replay.num_skipped:,}",
            *map(_share, (replay.mean(f"flushed{what}") for what in ("", "_magnitude"))),
            _share(replay.mean("subnormal_magnitude")),
            *_recovery(replay),
            number(float(replay.scales[-1])),
        )
        for name, replay in replays.items()
    ]


def words_on(replays: Mapping[str, Replay]) -> str:
    """What the trace holds, and how to read the table."""
    replay = next(iter(replays.values()))
    is_bad = replay.trace.is_bad
    spikes = sum(not is_bad[start:stop].all() for start, stop, _ in replay.spikes)
    return (
        f"Steps: {is_bad.size:,}. Bad batches, non-finite at any scale: {int(is_bad.sum()):,}. "
        f"Spikes of large gradients: {spikes:,}. Flushed: gradients rounded to zero. Lost, "
        "subnormal: shares of their magnitude. Back after, at most: steps until the scale is back "
        "after bad batches or a spike, median and most."
    )


def table_of(replays: Mapping[str, Replay]) -> Table:
    """The table, as a report shows it."""
    return Table("What each policy would have done", HEADINGS, rows_of(replays), names=0)


def content_of_replays(
    replays: Mapping[str, Replay], title: str = "Policies side by side"
) -> Content:
    """The table, and each policy's scale, skips and lost magnitude over time, as a report."""
    from gradscaler.diagnose.report._comparison import drawing_of
    from gradscaler.diagnose.report._style import Course

    courses = {}
    for name, replay in replays.items():
        steps = np.arange(1, replay.trace.num_steps + 1)
        lost = {
            step: 100 * share
            for step, share in enumerate(replay.flushed_magnitude.tolist(), 1)
            if not math.isnan(share)
        }
        scales = steps.tolist(), replay.scales.tolist()
        courses[name] = Course(steps.size, scales, steps[replay.skipped].tolist(), lost)
    drawing = drawing_of(courses, "share", "Gradients' magnitude flushed to zero, %")
    text = words_on(replays)
    return Content(Kind("good", title), text, None, [table_of(replays)], {}, [drawing], [])


def _recovery(replay: Replay) -> tuple[str, str]:
    """The steps to recover: the median and the most, ``"never"`` for not at all."""
    steps = sorted(math.inf if s.recovery is None else s.recovery for s in replay.spikes)
    if not steps:
        return "-", "-"
    middle, most = (
        "never" if math.isinf(value) else f"{value:,.0f}"
        for value in (steps[len(steps) // 2], steps[-1])
    )
    return middle, most


def _share(value: float) -> str:
    return "-" if math.isnan(value) else percent(value)
