"""The figures of a run: what happened over time, and how large the gradients are."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import FigureBase
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from gradscaler.diagnose._run.lines import Shares
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._spectrum import Spectrum, spectrum_of
from gradscaler.diagnose.report._texts import number, percent, power, shown

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

_STUCK = 10  # skips in a row that are worth showing
_MOST_POINTS = 400  # that are distinct in a figure of this width
_MOST_NAMES = 36


class Panel(NamedTuple):
    """A part of the figure over time."""

    title: str
    height: float  # in inches
    draw: Callable[[Axes], None]  # on empty axes
    start: int = 0  # its first step


class Drawing(NamedTuple):
    """A figure to draw, alone or beside others."""

    title: str
    caption: str  # how to read it
    height: float  # in inches, at a width of `WIDTH`
    draw: Callable[[FigureBase], None]  # on an empty figure


@contextmanager
def drawing_settings() -> Iterator[None]:
    """Matplotlib's settings while figures are made and saved."""
    with rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # drawn as a box
        yield


def drawings_of(run: Run) -> list[Drawing]:
    """The figures for which the run has data."""
    made = []
    first, last = run.longest_skips
    length = last - first + 1
    dtype = shown(run.starts[-1].dtype, 20)
    panels = []
    if run.scales[0]:
        if _STUCK <= length < run.num_steps / 10:  # too narrow to see in the whole
            start = max(1, first - length)
            draw = partial(_draw_scale, run=run, start=start)
            panels.append(Panel(f"Loss scale from step {start:,} on", 1.8, draw, start))
        panels.append(Panel("Loss scale", 1.8, partial(_draw_scale, run=run)))
    if run.losses:
        panels.append(Panel("Loss, unscaled", 1.2, partial(_draw_curve, points=run.losses)))
    if run.norms:
        panels.append(Panel("Norm of the gradients", 1.2, partial(_draw_curve, points=run.norms)))
    if run.shares:
        title = f"What {dtype} makes of the gradients"
        panels.append(Panel(title, 1.6, partial(_draw_shares, shares=run.shares)))
    if panels:
        caption = "The loss scale that each step used; a mark below it is a skipped step."
        if length >= _STUCK:
            caption += f" Shaded: {length:,} skips in a row, from step {first:,} on."
        height = sum(panel.height for panel in panels) + 0.6
        over_time = partial(_over_time, run=run, panels=panels)
        made.append(Drawing("Over time", caption, height, over_time))
    if (spectrum := spectrum_of(run)) is not None:
        caption = (
            f"How large the gradients are, multiplied by the scale, and what {dtype} makes of "
            "them. The outer columns: those that are zero, and those that are Inf or NaN."
        )
        height = 2.8 + _height_of_heat_map(spectrum)
        made.append(Drawing("By size", caption, height, partial(_by_size, spectrum=spectrum)))
    return made


def _over_time(figure: FigureBase, run: Run, panels: list[Panel]) -> None:
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
        stop = 2 * last - panel.start if panel.start else run.num_steps
        axes.set_xlim(max(1, panel.start) - 0.5, min(stop, run.num_steps) + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    for axes, panel, below in zip(column, panels, panels[1:], strict=False):
        axes.tick_params(labelbottom=panel.start != below.start)
    column[-1].set_xlabel("step")


def _draw_scale(axes: Axes, run: Run, start: int = 0) -> None:
    steps, scales = (np.array(values, float) for values in run.scales)
    usable = np.isfinite(scales) & (scales > 0)
    exponents = np.log2(scales, out=np.full(scales.shape, np.nan), where=usable)
    edges = [*(steps - 0.5), run.num_steps + 0.5]
    axes.step(edges, [*exponents, exponents[-1]], where="post", color=LINE)
    if usable.any():
        lowest, highest = np.nanmin(exponents), np.nanmax(exponents)
        axes.set_ylim(lowest - 2.5 - (highest - lowest) / 8, highest + 1.5)  # marks go below
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda exponent, _: power(2, exponent)))
    if run.skipped:
        note = "" if start else f"{len(run.skipped):,} of {run.num_steps:,} steps skipped"
        _mark(axes, [step for step in run.skipped if step >= start], 0.06, note)


def _draw_curve(axes: Axes, points: Mapping[int, float]) -> None:
    steps = np.array(sorted(points))
    values = np.array([points[step] for step in steps])
    finite = np.isfinite(values)
    lost = steps[~finite]
    if lost.size:
        _mark(axes, lost, 0.94, f"NaN or Inf at {lost.size:,} of the {steps.size:,} seen")
    if lost.size == steps.size:
        axes.set_yticks([])
        return
    steps, values = steps[finite], values[finite].clip(-1e100, 1e100)  # leaves room for margins
    axes.plot(steps, values, marker="." if steps.size <= 50 else "", color=LINE, linewidth=1.2)
    if 0 < 100 * values.min() < values.max():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power(10, math.log10(value))))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4))


def _draw_shares(axes: Axes, shares: Mapping[int, Shares]) -> None:
    """Stack the shares of each sample, drawn from the sample before it up to its own step."""
    groups = np.array_split(sorted(shares), min(len(shares), _MOST_POINTS))
    layers: dict[str, Callable[[Shares], float]] = {
        "flushed": lambda share: share.flushed,
        "subnormal": lambda share: share.subnormal,
        "overflow, Inf, NaN": lambda share: share.overflow + share.nonfinite,
        "zero": lambda share: share.zero,
        "normal": lambda share: share.normal,
    }
    stack = [
        [100 * np.mean([share(shares[step]) for step in group]) for group in groups]
        for share in layers.values()
    ]
    axes.stackplot(
        [0.5, *(group[-1] + 0.5 for group in groups)],
        [[layer[0], *layer] for layer in stack],
        step="pre",
        labels=list(layers),
        colors=[COLOURS[name.partition(",")[0]] for name in layers],
    )
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter(_percent)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.3),
        ncols=5,
        fontsize=8,
        frameon=False,
        handlelength=1,
        columnspacing=1,
    )


def _mark(axes: Axes, steps: Iterable[int], height: float, note: str) -> None:
    """Mark steps at a height of the axes, as many as are distinct, with a note on them."""
    positions = np.array(sorted(steps))
    share = (positions - positions[0]) / max(1, positions[-1] - positions[0])
    columns = np.round(2 * _MOST_POINTS * share)
    _, seen = np.unique(columns, return_index=True)
    axes.plot(
        positions[seen],
        np.full(seen.size, height),
        "|",
        color=SKIP,
        markersize=7,
        transform=axes.get_xaxis_transform(),
    )
    axes.set_title(note, loc="right", color=SKIP, fontsize=8, fontweight="normal")


def _by_size(figure: FigureBase, spectrum: Spectrum) -> None:
    heights = [2.0, _height_of_heat_map(spectrum)][: 1 + bool(spectrum.names)]
    column = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    column[0].set_title(f"All gradients at step {spectrum.step:,}")
    _draw_histogram(column[0], spectrum)
    if spectrum.names:
        column[1].set_title("Each parameter")
        _draw_heat_map(column[1], spectrum)
    axes, (left, right, outer) = column[-1], _columns(spectrum)
    axes.set_xlim(left - outer - 1, right + outer + 1)
    every = 8 if right - left <= 100 else 32
    margin = 2 + (right - left) // 20  # so that no label touches an outer one
    exponents = [e for e in range(left + margin, right + 1 - margin) if e % every == 0]
    axes.set_xticks(
        [left - 1 - outer / 2, *exponents, right + 1 + outer / 2],
        ["0", *(power(2, exponent) for exponent in exponents), "NaN"],
    )
    axes.set_xlabel(f"magnitude times the scale, {number(spectrum.scale)}")


def _draw_histogram(axes: Axes, spectrum: Spectrum) -> None:
    left, right, outer = _columns(spectrum)
    shares = 100 * spectrum.shares[0]
    zero, nonfinite = 100 * spectrum.zero[0], 100 * spectrum.nonfinite[0]
    top = 1.45 * max(4.0, shares.max(), zero, nonfinite)
    for zone in spectrum.zones:
        start, stop = max(zone.start, left), min(zone.stop, right)
        inside = spectrum.within(zone)
        colour = COLOURS[zone.name]
        axes.axvspan(start, stop, color=colour, alpha=0.1, linewidth=0)
        axes.bar(spectrum.exponents[inside], shares[inside], 1, align="edge", color=colour)
        if stop - start > 0.07 * (right - left):
            text = f"{zone.name}\n{percent(spectrum.share(zone))}"
            axes.text((start + stop) / 2, 0.97 * top, text, ha="center", va="top", fontsize=8)
    for share, name, side, edge, width in (
        (zero, "zero", "left", left - 1 - outer, outer),
        (nonfinite, "overflow", "right", right + 1 + outer, -outer),
    ):
        axes.bar(edge, share, width, align="edge", color=COLOURS[name])
        if share:  # within the panel, however narrow the column
            axes.text(edge, share, percent(share / 100), ha=side, va="bottom", fontsize=7)
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(_percent)


def _draw_heat_map(axes: Axes, spectrum: Spectrum) -> None:
    left, right, outer = _columns(spectrum)
    rows, inner = len(spectrum.names), slice(outer + 1, -outer - 1)
    image = np.zeros((rows, right - left + 2 * outer + 2, 4))
    image[:, :outer, :3] = to_rgb(COLOURS["zero"])
    image[:, -outer:, :3] = to_rgb(COLOURS["overflow"])
    for zone in spectrum.zones:
        image[:, inner][:, spectrum.within(zone), :3] = to_rgb(COLOURS[zone.name])
    image[:, :outer, 3] = spectrum.zero[1:, None]
    image[:, inner, 3] = spectrum.shares[1:]
    image[:, -outer:, 3] = spectrum.nonfinite[1:, None]
    opacity = image[..., 3]
    opacity[:] = np.sqrt(opacity / max(opacity.max(), 1e-9))  # so that even a few show
    extent = left - outer - 1, right + outer + 1, rows, 0
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
    for zone in spectrum.zones[1:]:
        axes.axvline(zone.start, color="#999999", linewidth=0.8)
    named = range(0, rows, math.ceil(rows / _MOST_NAMES))
    names = [shown(spectrum.names[row], 22) for row in named]
    axes.set_yticks([row + 0.5 for row in named], names, fontsize=7.5)
    axes.tick_params(axis="y", length=0)


def _height_of_heat_map(spectrum: Spectrum) -> float:
    return 0.3 + 0.16 * min(len(spectrum.names), _MOST_NAMES)


def _columns(spectrum: Spectrum) -> tuple[int, int, int]:
    """The ends of the exponents, and how wide the columns of zeros and of Inf and NaN are."""
    exponents = spectrum.exponents
    return int(exponents[0]), int(exponents[-1]) + 1, math.ceil(exponents.size / 30)


_percent = FuncFormatter(lambda share, _: f"{share:.0f}%")
