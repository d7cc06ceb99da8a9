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
    halves = {step: value / 2 for step, value in points.items()}  # so that their range is finite
    ends = [limit / 2 for limit in limits or ()] or list(filter(math.isfinite, halves.values()))
    low = min(ends, default=0.0)
    span = max(ends, default=0.0) - low
    width = min(width, max(1, last_step))
    levels = [0.0] * width  # in eighths of a row; 0 before the first number
    for step in sorted(halves):
        share = (halves[step] - low) / (span or 1.0)
        level = 1 + round((8 * height - 1) * share) if math.isfinite(share) else math.nan
        start = column_of(step, last_step, width)
        levels[start:] = [level] * (width - start)
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
