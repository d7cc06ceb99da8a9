"""The figure of what happened over time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from gradscaler.diagnose._run.lines import Shares
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._style import (
    COLOURS,
    MOST_POINTS,
    Drawing,
    Panel,
    as_percent,
    draw_curve,
    draw_panels,
    draw_scale,
    fit_axis,
    mark,
    panel_of,
    scales_drawn,
)
from gradscaler.diagnose.report._words import CLASSES, no_gradients, no_points, shown

_STUCK = 10  # skips in a row that are worth showing


def over_time(run: Run) -> Drawing:
    """The scale, the loss, the norm and the shares by step."""
    first, last = run.longest_skips
    length = last - first + 1
    dtype = shown(run.starts[-1].dtype, 20)
    panels = [
        panel_of(title, 1.2, no_points(name, points), partial(_draw_curve, points=points))
        for title, name, points in (
            ("Loss, unscaled", "loss", run.losses),
            ("Norm of the gradients", "norm", run.norms),
        )
        if points or name == "loss"
    ]
    if run.scales[0]:
        panels.insert(0, Panel("Loss scale", 1.8, partial(_draw_scale, run=run)))
    makes = partial(_draw_shares, shares=run.shares)
    panels.append(panel_of(f"What {dtype} makes of the gradients", 1.6, no_gradients(run), makes))
    caption = "The loss scale that each step used; a mark below it is a skipped step."
    if length >= _STUCK:
        caption += f" Shaded: {length:,} skips in a row, from step {first:,} on."
    caption += scales_drawn(len(run.scales[0]))
    if len(run.losses) > MOST_POINTS:
        caption += " Of many losses, the line is the mean of equal parts, and the band their range."
    shaded = (first, last) if length >= _STUCK else None
    height = sum(panel.height for panel in panels) + 0.6
    draw = partial(draw_panels, panels=panels, last_step=run.num_steps, shaded=shaded)
    return Drawing("Over time", caption, height, draw)


def _draw_scale(axes: Axes, run: Run) -> None:
    draw_scale(axes, run)
    if run.skipped:
        mark(axes, run.skipped, 0.06, f"{len(run.skipped):,} of {run.num_steps:,} steps skipped")


def _draw_curve(axes: Axes, points: Mapping[int, float]) -> None:
    lost = [step for step, value in points.items() if not math.isfinite(value)]
    draw_curve(axes, points)
    fit_axis(axes, points.values())
    if lost:
        mark(axes, lost, 0.94, f"NaN or Inf at {len(lost):,} of the {len(points):,} seen")


def _draw_shares(axes: Axes, shares: Mapping[int, Shares]) -> None:
    """Stack the shares of each sample, drawn from the sample before it up to its own step."""
    groups = np.array_split(sorted(shares), min(len(shares), MOST_POINTS))
    stack = [
        [100 * np.mean([share(shares[step]) for step in group]) for group in groups]
        for share in CLASSES.values()
    ]
    axes.stackplot(
        [0.5, *(group[-1] + 0.5 for group in groups)],
        [[layer[0], *layer] for layer in stack],
        step="pre",
        labels=list(CLASSES),
        colors=[COLOURS[name.partition(",")[0]] for name in CLASSES],
    )
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter(as_percent)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.3),
        ncols=5,
        fontsize=8,
        frameon=False,
        handlelength=1,
        columnspacing=1,
    )
