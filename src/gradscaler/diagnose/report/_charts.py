"""Charts out of letters, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", ".:-=+*#@"


def spread(*curves: Mapping[int, float]) -> list[Mapping[int, float]]:
    """The numbers of curves with a common axis, or their logarithms if those show more."""
    finite = [value for points in curves for value in points.values() if math.isfinite(value)]
    if not 0 < 100 * min(finite, default=0.0) < max(finite, default=0.0):
        return list(curves)
    return [
        {step: math.log(v) if 0 < v < math.inf else math.nan for step, v in points.items()}
        for points in curves
    ]


def curve(
    points: Mapping[int, float],
    last_step: int,
    width: int,
    blocks: str,
    limits: tuple[float, float] | None = None,
) -> str:
    """The latest number in each column as a block; "!" is Inf or NaN.

    The lowest block stands for the lower limit, or for the smallest number.
    """
    finite = [value for value in points.values() if math.isfinite(value)]
    # Halves, so that their range is finite.
    low, high = (end / 2 for end in limits or (min(finite, default=0.0), max(finite, default=0.0)))
    width = min(width, max(1, last_step))
    latest: dict[int, tuple[int, float]] = {}  # the latest number in each column, and its step
    for step, value in points.items():
        column = column_of(step, last_step, width)
        if column not in latest or latest[column][0] <= step:
            latest[column] = step, value
    line = [" "] * width
    for column, (_, value) in sorted(latest.items()):
        share = (value / 2 - low) / ((high - low) or 1.0)
        block = blocks[min(7, max(0, round(7 * share)))] if math.isfinite(share) else "!"
        line[column:] = [block] * (width - column)
    return "".join(line)


def density(steps: tuple[int, ...], last_step: int, width: int, blocks: str) -> str:
    """How many of the steps are in each column, as a block; a space for none."""
    width = min(width, max(1, last_step))
    counts = np.bincount([column_of(step, last_step, width) for step in steps], minlength=width)
    heights = np.ceil(8 * counts / max(1, counts.max())).astype(int)
    return "".join((" " + blocks)[height] for height in heights)


def column_of(step: int, last_step: int, width: int) -> int:
    """The column of a step in a chart."""
    return min(max(0, step - 1) * width // max(1, last_step), width - 1)
