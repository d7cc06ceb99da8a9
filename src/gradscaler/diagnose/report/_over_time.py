"""The figure of what happened over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from gradscaler.diagnose._run.lines import Shares
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._style import (
    COLOURS,
    GRID,
    MOST_POINTS,
    SHADE,
    Drawing,
    as_percent,
    draw_curve,
    draw_scale,
    fit_axis,
    mark,
    number_steps,
    scales_drawn,
    write_words,
)
from gradscaler.diagnose.report._words import CLASSES, no_gradients, no_points, shown

_STUCK = 10  # skips in a row that are worth showing
_HEIGHT_OF_WORDS = 0.6  # in inches


class Panel(NamedTuple):
    """A part of the figure."""

    title: str
    height: float  # in inches
    draw: Callable[[Axes], None]  # on empty axes


def over_time(run: Run) -> Drawing:
    """The scale, the loss, the norm and the shares by step."""
    first, last = run.longest_skips
    length = last - first + 1
    dtype = shown(run.starts[-1].dtype, 20)
    panels = []
    if run.scales[0]:
        panels.append(Panel("Loss scale", 1.8, partial(_draw_scale, run=run)))
    curves = [("Loss, unscaled", "loss", run.losses)]
    if run.norms:
        curves.append(("Norm of the gradients", "norm", run.norms))
    for title, name, points in curves:
        words = no_points(name, points)
        make = partial(write_words, text=words) if words else partial(_draw_curve, points=points)
        panels.append(Panel(title, _HEIGHT_OF_WORDS if words else 1.2, make))
    words = no_gradients(run)
    make = partial(write_words, text=words) if words else partial(_draw_shares, shares=run.shares)
    title = f"What {dtype} makes of the gradients"
    panels.append(Panel(title, _HEIGHT_OF_WORDS if words else 1.6, make))
    caption = "The loss scale that each step used; a mark below it is a skipped step."
    if length >= _STUCK:
        caption += f" Shaded: {length:,} skips in a row, from step {first:,} on."
    caption += scales_drawn(len(run.scales[0]))
    if len(run.losses) > MOST_POINTS:
        caption += " Of many losses, the line is the mean of equal parts, and the band their range."
    height = sum(panel.height for panel in panels) + 0.6
    return Drawing("Over time", caption, height, partial(_draw, run=run, panels=panels))


def _draw(figure: FigureBase, run: Run, panels: list[Panel]) -> None:
    heights = [panel.height for panel in panels]
    column = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    first, last = run.longest_skips
    for axes, panel in zip(column, panels, strict=True):
        axes.set_title(panel.title)
        panel.draw(axes)
        axes.yaxis.grid(color=GRID)
        axes.set_axisbelow(True)
        if last - first + 1 >= _STUCK:
            axes.axvspan(first - 0.5, last + 0.5, color=SHADE, linewidth=0, zorder=0)
        axes.set_xlim(0.5, run.num_steps + 0.5)
        number_steps(axes)
        axes.tick_params(labelbottom=axes is column[-1])
    column[-1].set_xlabel("step")


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
