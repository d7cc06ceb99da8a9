"""The figures of a report: the run over time, and which loss scales fit."""

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
from matplotlib.colors import to_rgb
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from gradscaler.diagnose._gradients.fitting_scales import Fit, Range
from gradscaler.diagnose._record.lines import Shares
from gradscaler.diagnose.report._content import CLASSES, Content, Course
from gradscaler.diagnose.report._words import RULE, named, number, power, sentence_of, shown

COLOURS = {
    "flushed": "#A03200",
    "subnormal": "#DB9500",
    "overflow": "#420F50",
    "zero": "#C6C6C6",
    "normal": "#3382C0",
}
"""The colours of the classes of gradients; Inf and NaN have the colour of ``"overflow"``.

The colours can also be told apart in grey, and by colour-blind readers. Nothing is drawn over them.
"""
_INK = "#1B1B1B"
LEVELS = {"good": "#00664B", "warning": "#8A5A00", "bad": "#A93B00"}  # readable on white

WIDTH = 4.6
"""The width of a figure in inches, at which its text is readable on a phone."""

_RUNS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"
_STYLES: Any = "-", "--", "-.", ":"  # keep overlapping curves visible, and distinct in grey
_SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "path.simplify_threshold": 0.5,  # in pixels; it shrinks a curve of a million steps
    "text.parse_math": False,  # the name of a parameter may hold "$", such as $x_{
    "svg.fonttype": "none",
}
_MOST_POINTS = 400  # points that can be told apart in a figure of this width
_LARGEST = 1e100  # the largest number drawn; it leaves room for margins
_SMALLEST = 1e-292  # the smallest number on a logarithmic axis; matplotlib needs room below it

_MOST_EXPONENTS = 48  # exponents of scales on the axis
_MOST_ROWS = 36  # rows for parameters; the two that set the bounds may add to them
_EFFECTS = {
    "flushed": COLOURS["flushed"],
    "subnormal": COLOURS["subnormal"],
    "fits": COLOURS["normal"],
    "no room": "#A9CBE5",  # a pale "normal"
    "overflow": COLOURS["overflow"],
    "zero, NaN": COLOURS["zero"],
}


class Drawing(NamedTuple):
    """A figure to draw, alone or beside others."""

    title: str
    caption: str  # how to read the figure
    height: float  # in inches, at a width of `WIDTH`
    draw: Callable[[FigureBase], None]  # on an empty figure
    readings: Mapping[int, str] = {}  # what is shown of a step, where its axis has steps


class _Panel(NamedTuple):
    """A part of the figure, with the steps as its horizontal axis."""

    title: str
    height: float  # in inches
    draw: Callable[[Axes], None]  # on empty axes


@contextmanager
def drawing_settings() -> Iterator[None]:
    """Use our settings of matplotlib while figures are made and saved."""
    with rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # drawn as a box
        yield


def drawings_of(content: Content) -> list[Drawing]:
    """The figures of a report."""
    courses = {name: _drawable(course) for name, course in content.courses.items()}
    is_drawn = any(course.scales or course.curves for course in courses.values())
    drawings = [over_time(courses)] if is_drawn else []
    return drawings if content.fit is None else [*drawings, which_scale(content.fit)]


def _drawable(course: Course) -> Course:
    """A course without the curves that are never finite, as their panels would be empty."""
    curves = course.curves.items()
    drawn = {name: points for name, points in curves if any(map(math.isfinite, points.values()))}
    return course._replace(curves=drawn)


def over_time(courses: Mapping[str, Course]) -> Drawing:
    """The scales, skips and curves of all runs on shared axes, and the shares of a single run."""
    runs = list(courses.values())
    scaled = [run for run in runs if run.scales]
    panels = [
        _Panel("Loss scale", 1.6, partial(_draw_scales, runs=runs)),
        _Panel("Skipped steps so far", 1.0, partial(_draw_skips, runs=runs)),
    ] * bool(scaled)
    for name in dict.fromkeys(name for run in runs for name in run.curves):
        curves = [run.curves.get(name, {}) for run in runs]
        panels.append(_Panel(name, 1.3, partial(_draw_curves, curves=curves)))
    if len(runs) == 1 and runs[0].shares:
        title = f"What {runs[0].dtype} makes of the gradients"
        panels.append(_Panel(title, 1.6, partial(_draw_shares, shares=runs[0].shares)))
    height = sum(panel.height for panel in panels) + 0.9 + 0.1 * len(runs)
    caption = "A mark above a curve is a number that is NaN or Inf."
    if scaled:
        caption = (
            "The loss scale that each step used, and how many steps were skipped up to it. "
            f"{caption}"
        )
    if any("Weights' norm" in run.curves for run in runs):
        caption += " The weights' norm is that of an optimizer's matrices before the step."
    drawn = partial(_draw, courses=courses, panels=panels)
    if len(runs) > 1:
        return Drawing("Over time", caption, height, drawn)
    if runs[0].first_bad is not None:
        caption += (
            f" The dotted line is step {named(runs[0].first_bad, runs[0].batches)}, the first bad "
            "one that was applied."
        )
    steps = sorted(
        {step for points in (runs[0].scales, *runs[0].curves.values()) for step in points}
    )
    steps = steps[:: math.ceil(len(steps) / _MOST_POINTS)]
    readings = {step: runs[0].at(step) for step in steps}
    return Drawing("Over time", caption, height, drawn, readings)


def _draw(figure: FigureBase, courses: Mapping[str, Course], panels: Sequence[_Panel]) -> None:
    heights = [panel.height for panel in panels]
    column = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(column, panels, strict=True):
        axes.set_title(panel.title)
        panel.draw(axes)
        axes.yaxis.grid(color="#D8D8D8")
        axes.set_axisbelow(True)
        for run in courses.values():
            if run.first_bad is not None:
                axes.axvline(run.first_bad, color=LEVELS["bad"], linewidth=1, linestyle=":")
    axes.set_xlim(0.5, max(1, *(run.num_steps for run in courses.values())) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.set_xlabel("step")
    if len(courses) > 1:
        names = [shown(name, 40) for name in courses]
        lines = [Line2D([], [], label=name, **_look(place)) for place, name in enumerate(names)]
        _write_legend(figure, lines, columns=2)


def _write_legend(figure: FigureBase, handles: Iterable[Artist], columns: int) -> None:
    """Write a legend below the figure. Each handle has a label."""
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        fontsize=8,
        frameon=False,
        handlelength=1.5,
        columnspacing=1,
    )


def _look(place: int) -> dict[str, Any]:
    """The colour and the style of a run's lines, as arguments for matplotlib."""
    return {"color": _RUNS[place % len(_RUNS)], "linestyle": _STYLES[place % len(_STYLES)]}


def _draw_scales(axes: Axes, runs: Sequence[Course]) -> None:
    seen = list[float]()
    for place, run in enumerate(runs):
        exponents = np.log2([*run.scales.values()])
        edges = [*(step - 0.5 for step in run.scales), run.num_steps + 0.5]
        axes.step(edges, [*exponents, *exponents[-1:]], where="post", **_look(place))
        seen += [*exponents]
    if max(seen) - min(seen) < 1:  # else the labels, which are rounded, would be alike
        axes.set_ylim(min(seen) - 1, max(seen) + 1)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda exponent, _: power(2, exponent)))


def _draw_skips(axes: Axes, runs: Sequence[Course]) -> None:
    """Draw the number of skipped steps up to each step."""
    for place, run in enumerate(runs):
        counts = [*range(len(run.skipped) + 1), len(run.skipped)]
        edges = [0.5, *(step - 0.5 for step in run.skipped), run.num_steps + 0.5]
        axes.step(edges, counts, where="post", **_look(place))
    axes.set_ylim(bottom=0, top=max(1, *(1.05 * len(run.skipped) for run in runs)))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))


def _draw_curves(axes: Axes, curves: Sequence[Mapping[int, float]]) -> None:
    """Draw the finite numbers by step, and marks for Inf and NaN.

    The axis is logarithmic if the numbers are positive and span more than a factor of 100.
    """
    seen, num_marked = list[float](), 0
    for place, points in enumerate(curves):
        steps, values = np.fromiter(points, int), np.fromiter(points.values(), float)
        is_finite = np.isfinite(values)
        finite = values[is_finite].clip(-_LARGEST, _LARGEST)
        marker = "." if finite.size <= 50 else ""
        axes.plot(steps[is_finite], finite, marker=marker, linewidth=1.2, **_look(place))
        if not is_finite.all():
            _mark(axes, steps[~is_finite], place, 0.97 - 0.07 * num_marked)
            num_marked += 1
        seen += [finite.min(), finite.max()] if finite.size else []
    axes.margins(y=0.05 + 0.08 * num_marked)  # the marks are above the curves
    low, high = min(seen, default=0.0), max(seen, default=0.0)
    if _SMALLEST < low < high / 100:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power(10, math.log10(value))))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4))


def _mark(axes: Axes, steps: Iterable[int], place: int, height: float) -> None:
    """Mark a run's steps at a height of the axes; steps too close to tell apart get one mark."""
    positions = np.array(sorted(steps))
    if positions.size:
        share = (positions - positions[0]) / max(1, positions[-1] - positions[0])
        _, seen = np.unique(np.round(2 * _MOST_POINTS * share), return_index=True)
        axes.plot(
            positions[seen],
            np.full(seen.size, height),
            "|",
            color=_look(place)["color"],
            markersize=7,
            transform=axes.get_xaxis_transform(),
        )


def _draw_shares(axes: Axes, shares: Mapping[int, Shares]) -> None:
    """Draw the shares of each sample in a stack, from the previous sample up to its own step."""
    groups = np.array_split(sorted(shares), min(len(shares), _MOST_POINTS))
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
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0f}%"))
    _write_legend(axes.figure, axes.collections, columns=3)


def which_scale(fit: Fit) -> Drawing:
    """The figure of the effect of each loss scale on all gradients, and on each parameter's."""
    rows: dict[str, Range | None] = {"all gradients": fit.whole}
    every = math.ceil(len(fit.parameters) / _MOST_ROWS)
    for row, (name, found) in enumerate(fit.parameters.items()):
        if row % every == 0 or name in (fit.lowest, fit.highest):
            rows[name] = found
    caption = f"{RULE}. Measured on the latest samples, up to step {fit.last:,}."
    if every > 1:
        caption += f" One in {every:,} of the {len(fit.parameters):,} parameters has a row."
    height = 1.9 + 0.16 * len(rows)
    return Drawing("Which loss scale fits", caption, height, partial(_draw_fit, fit=fit, rows=rows))


def _draw_fit(figure: FigureBase, fit: Fit, rows: Mapping[str, Range | None]) -> None:
    axes = figure.subplots()
    figure.suptitle(fill(sentence_of(fit), 68), x=0.01, ha="left", fontsize=8.5)
    own = math.log2(fit.own)
    ranges = [each for each in rows.values() if each is not None]
    right = math.ceil(max(own, *(max(each.edge, each.low) for each in ranges))) + 3
    left = math.floor(min(own, *(min(each.high, each.low) for each in ranges))) - 3
    exponents = np.arange(max(left, right - _MOST_EXPONENTS), right + 1)
    axes.imshow(
        np.array([_colours(each, exponents) for each in rows.values()]),
        aspect="auto",
        interpolation="nearest",
        extent=(exponents[0] - 0.5, exponents[-1] + 0.5, len(rows), 0),
    )
    axes.axhline(1, color="white", linewidth=2)
    axes.axvline(own, color="white", linewidth=3)
    axes.axvline(own, color=_INK, linewidth=1.4, linestyle=(0, (3, 1.5)))
    axes.set_title("Each loss scale")
    note = f"dashed: the run's own, {number(fit.own)}"
    axes.set_title(note, loc="right", color=_INK, fontsize=8, fontweight="normal")
    axes.set_yticks([row + 0.5 for row in range(len(rows))], [shown(name, 22) for name in rows])
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    for name, label in zip(rows, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if name in (fit.lowest, fit.highest) else "normal")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda exponent, _: power(2, exponent)))
    axes.set_xlabel("loss scale")
    patches = [Patch(color=colour, label=label) for label, colour in _EFFECTS.items()]
    _write_legend(figure, patches, columns=3)


def _colours(found: Range | None, exponents: np.ndarray) -> np.ndarray:
    """The colour of each scale, for its worst effect on the gradients of a row."""
    row = np.empty((exponents.size, 3))
    row[:] = to_rgb(_EFFECTS["zero, NaN" if found is None else "fits"])
    if found is not None:
        row[exponents < found.low] = to_rgb(_EFFECTS["subnormal"])
        row[exponents < found.unflushed] = to_rgb(_EFFECTS["flushed"])
        row[exponents > found.high] = to_rgb(_EFFECTS["no room"])
        row[exponents > found.edge] = to_rgb(_EFFECTS["overflow"])
    return row
