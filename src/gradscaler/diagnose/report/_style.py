"""What all figures share: colours, settings, and how curves, marks and words are drawn."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._words import power

COLOURS = {
    "flushed": "#A03200",
    "subnormal": "#DB9500",
    "overflow": "#420F50",
    "zero": "#C6C6C6",
    "normal": "#3382C0",
}
"""The colours of what a format makes of gradients; Inf and NaN have that of ``"overflow"``.

They also differ in grey, and for colour-blind readers. Nothing is drawn over them.
"""
LINE, SKIP, SHADE, GRID = "#0072B2", "#1B1B1B", "#FAE8E0", "#D8D8D8"
LEVELS = {"good": "#00664B", "warning": "#8A5A00", "bad": "#A93B00"}  # readable on white

_SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # a parameter may be called $x_{
    "svg.fonttype": "none",
}

WIDTH = 4.6
"""The width of a figure in inches. At this width its letters are readable on a phone."""

MOST_POINTS = 400
"""Points that are distinct in a figure of this width."""

_MOST_SCALES = 3 * MOST_POINTS

as_percent = FuncFormatter(lambda share, _: f"{share:.0f}%")


class Drawing(NamedTuple):
    """A figure to draw, alone or beside others."""

    title: str
    caption: str  # how to read it
    height: float  # in inches, at a width of `WIDTH`
    draw: Callable[[FigureBase], None]  # on an empty figure


class Panel(NamedTuple):
    """A part of a figure over the steps."""

    title: str
    height: float  # in inches
    draw: Callable[[Axes], None]  # on empty axes


def panel_of(title: str, height: float, words: str, draw: Callable[[Axes], None]) -> Panel:
    """A panel to draw; or, if there are words on why nothing can be drawn, one of these words."""
    return (
        Panel(title, 0.6, partial(write_words, text=words)) if words else Panel(title, height, draw)
    )


def draw_panels(
    figure: FigureBase,
    panels: Sequence[Panel],
    last_step: int,
    shaded: tuple[int, int] | None = None,
) -> None:
    """Panels below each other, from the first step to the last, with a stretch of steps shaded."""
    heights = [panel.height for panel in panels]
    column = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(column, panels, strict=True):
        axes.set_title(panel.title)
        panel.draw(axes)
        axes.yaxis.grid(color=GRID)
        axes.set_axisbelow(True)
        if shaded is not None:
            axes.axvspan(shaded[0] - 0.5, shaded[1] + 0.5, color=SHADE, linewidth=0, zorder=0)
        axes.set_xlim(0.5, last_step + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
        axes.tick_params(labelbottom=axes is column[-1])
    column[-1].set_xlabel("step")


@contextmanager
def drawing_settings() -> Iterator[None]:
    """Matplotlib's settings while figures are made and saved."""
    with rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # drawn as a box
        yield


def write_words(axes: Axes, text: str) -> None:
    """Say in words, in the middle of empty axes, why nothing is drawn there."""
    axes.set_yticks([])
    axes.text(0.5, 0.5, fill(text, 60), ha="center", va="center", transform=axes.transAxes)


def write_legend(figure: FigureBase, handles: Iterable[Artist], columns: int) -> None:
    """A legend below the figure, of handles that have labels."""
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        fontsize=8,
        frameon=False,
        handlelength=1.5,
        columnspacing=1,
    )


def scales_drawn(num_scales: int) -> str:
    """Which of so many scales are drawn; empty if all are."""
    if num_scales <= _MOST_SCALES:
        return ""
    return (
        f" Of {num_scales:,} scales, the lowest and the highest of {MOST_POINTS} equal parts are "
        "drawn."
    )


def _ends_of_parts(values: NDArray[np.float64]) -> NDArray[np.intp]:
    """Where the first, the lowest and the highest number of each of equal parts are."""
    parts = np.array_split(np.arange(values.size), MOST_POINTS)
    low, high = np.nan_to_num(values, nan=math.inf), np.nan_to_num(values, nan=-math.inf)
    ends = [(part[0], part[low[part].argmin()], part[high[part].argmax()]) for part in parts]
    return np.unique(ends)


class Course(NamedTuple):
    """What is drawn of a run step by step, or of a replay of one."""

    num_steps: int
    scales: tuple[Sequence[int], Sequence[float]]  # as in `Run`
    skipped: Sequence[int]
    curve: Mapping[int, float]  # such as the losses, by step


def draw_scale(axes: Axes, run: Run | Course, colour: str = LINE, style: str = "-") -> None:
    """The loss scale of each step, and an axis of powers of 2 with room for marks below."""
    steps, scales = (np.array(values, float) for values in run.scales)
    usable = np.isfinite(scales) & (scales > 0)
    exponents = np.log2(scales, out=np.full(scales.shape, np.nan), where=usable)
    if steps.size > _MOST_SCALES:
        kept = _ends_of_parts(exponents)
        steps, exponents = steps[kept], exponents[kept]
    edges = [*(steps - 0.5), run.num_steps + 0.5]
    levels = [*exponents, exponents[-1]]
    axes.step(edges, levels, where="post", color=colour, linestyle=style)
    drawn = [line.get_ydata() for line in axes.lines]
    seen = np.concatenate([np.asarray(values, float) for values in drawn])
    if np.isfinite(seen).any():
        lowest, highest = np.nanmin(seen), np.nanmax(seen)
        axes.set_ylim(lowest - 2.5 - (highest - lowest) / 8, highest + 1.5)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda exponent, _: power(2, exponent)))


def draw_curve(
    axes: Axes, points: Mapping[int, float], colour: str = LINE, style: str = "-"
) -> None:
    """The finite numbers by step; of very many, the means and the ranges of equal parts."""
    steps, values = np.fromiter(points, int), np.fromiter(points.values(), float)
    order = np.argsort(steps, kind="stable")
    order = order[np.isfinite(values[order])]
    steps, values = steps[order], values[order].clip(-1e100, 1e100)  # room for margins
    marker = "." if steps.size <= 50 else ""
    if steps.size > MOST_POINTS:
        groups = np.array_split(values, MOST_POINTS)
        steps = np.array([part[-1] for part in np.array_split(steps, MOST_POINTS)])
        ends = [part.min() for part in groups], [part.max() for part in groups]
        axes.fill_between(steps, *ends, color=colour, alpha=0.2, linewidth=0)
        values = np.array([part.mean() for part in groups])
    axes.plot(steps, values, marker=marker, color=colour, linestyle=style, linewidth=1.2)


_SMALLEST = 1e-290  # that matplotlib leaves room below on a logarithmic axis


def fit_axis(axes: Axes, points: Iterable[float]) -> None:
    """A logarithmic axis if finite numbers need it, else a linear one."""
    values = [value for value in points if math.isfinite(value)]
    if _SMALLEST < 100 * min(values) < max(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power(10, math.log10(value))))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4))


def mark(
    axes: Axes, steps: Iterable[int], height: float, note: str = "", colour: str = SKIP
) -> None:
    """Mark steps at a height of the axes, as many as are distinct, with a note on them."""
    positions = np.array(sorted(steps))
    if positions.size:
        share = (positions - positions[0]) / max(1, positions[-1] - positions[0])
        _, seen = np.unique(np.round(2 * MOST_POINTS * share), return_index=True)
        axes.plot(
            positions[seen],
            np.full(seen.size, height),
            "|",
            color=colour,
            markersize=7,
            transform=axes.get_xaxis_transform(),
        )
    axes.set_title(note, loc="right", color=SKIP, fontsize=8, fontweight="normal")
