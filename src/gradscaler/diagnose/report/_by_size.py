"""The figure of how large the gradients are."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import FigureBase
from matplotlib.ticker import MaxNLocator

from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._spectrum import Spectrum, spectrum_of
from gradscaler.diagnose.report._style import COLOURS, MOST_NAMES, Drawing, as_percent, write_words
from gradscaler.diagnose.report._texts import number, percent, power, shown
from gradscaler.diagnose.report._words import later_samples, no_gradients, rows_drawn


def by_size(run: Run) -> Drawing:
    """The latest sample's gradients against their format's range, or why none can be placed."""
    if (spectrum := spectrum_of(run)) is None:
        return Drawing("By size", "", 0.9, partial(_write, text=no_gradients(run)))
    caption = (
        "How large the gradients are, multiplied by the scale, and what "
        f"{shown(run.starts[-1].dtype, 20)} makes of them. The outer columns: those that are zero, "
        f"and those that are Inf or NaN.{later_samples(run, spectrum.step)}"
        f"{rows_drawn(spectrum.num_parameters)}"
    )
    height = 2.8 + _height_of_heat_map(spectrum)
    return Drawing("By size", caption, height, partial(_draw, spectrum=spectrum))


def _write(figure: FigureBase, text: str) -> None:
    axes = figure.subplots()
    axes.set_title("All gradients")
    axes.set_xticks([])
    write_words(axes, text)


def _draw(figure: FigureBase, spectrum: Spectrum) -> None:
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
    axes.yaxis.set_major_formatter(as_percent)


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
    named = range(0, rows, math.ceil(rows / MOST_NAMES))
    names = [shown(spectrum.names[row], 22) for row in named]
    axes.set_yticks([row + 0.5 for row in named], names, fontsize=7.5)
    axes.tick_params(axis="y", length=0)


def _height_of_heat_map(spectrum: Spectrum) -> float:
    return 0.3 + 0.16 * min(len(spectrum.names), MOST_NAMES)


def _columns(spectrum: Spectrum) -> tuple[int, int, int]:
    """The ends of the exponents, and how wide the columns of zeros and of Inf and NaN are."""
    exponents = spectrum.exponents
    return int(exponents[0]), int(exponents[-1]) + 1, math.ceil(exponents.size / 30)
