"""Charts out of letters, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", ".:-=+*#@"


def curve(
    points: Mapping[int, float],
    last_step: int,
    width: int,
    blocks: str,
    height: int = 1,
    limits: tuple[float, float] | None = None,
) -> list[str]:
    """Rows that chart the latest number in each column, the top row first; "!" is Inf or NaN.

    The lowest block stands for the lower limit, or for the smallest number. Of several rows, the
    lowest has a "!" in each column with an Inf or a NaN, whatever comes after it there.
    """
    finite = [value for value in points.values() if math.isfinite(value)]
    # Halves, so that their range is finite.
    ends = [limit / 2 for limit in limits or (min(finite, default=0.0), max(finite, default=0.0))]
    low, span = ends[0], ends[1] - ends[0]
    width = min(width, max(1, last_step))
    latest: dict[int, tuple[int, float]] = {}  # the latest number in each column, and its step
    for step, value in points.items():
        column = column_of(step, last_step, width)
        if column not in latest or latest[column][0] <= step:
            latest[column] = step, value
    levels = [0.0] * width  # in eighths of a row; 0 before the first number
    for column, (_, value) in sorted(latest.items()):
        share = (value / 2 - low) / (span or 1.0)
        level = 1 + round((8 * height - 1) * share) if math.isfinite(share) else math.nan
        levels[column:] = [level] * (width - column)
    rows = [[_cell(level, row, blocks) for level in levels] for row in reversed(range(height))]
    for step, value in points.items():
        if height > 1 and not math.isfinite(value):
            rows[-1][column_of(step, last_step, width)] = "!"
    return list(map("".join, rows))


def _cell(level: float, row: int, blocks: str) -> str:
    """A column's part in a row, counted from the lowest one."""
    if math.isnan(level):
        return " " if row else "!"
    filled = min(8, max(0, int(level) - 8 * row))
    return (" " + blocks)[filled]


def bars(values: np.ndarray, blocks: str) -> str:
    """A block for each value, of its height relative to the largest; a space for 0."""
    heights = np.ceil(8 * values / (values.max() or 1.0)).astype(int)
    return "".join((" " + blocks)[height] for height in heights)


def density(steps: tuple[int, ...], last_step: int, width: int, blocks: str) -> str:
    """How many of the steps are in each column."""
    width = min(width, max(1, last_step))
    columns = [column_of(step, last_step, width) for step in steps]
    return bars(np.bincount(columns, minlength=width), blocks)


def column_of(step: int, last_step: int, width: int) -> int:
    """The column of a step in a chart."""
    return min(max(0, step - 1) * width // max(1, last_step), width - 1)
