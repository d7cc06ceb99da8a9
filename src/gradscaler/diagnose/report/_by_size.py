"""The figure of how large the gradients are."""

from __future__ import annotations

import math
from functools import partial

from matplotlib.figure import FigureBase
from matplotlib.ticker import MaxNLocator

from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._spectrum import Spectrum, spectrum_of
from gradscaler.diagnose.report._style import COLOURS, Drawing, as_percent, write_words
from gradscaler.diagnose.report._words import (
    later_samples,
    no_gradients,
    number,
    percent,
    power,
    shown,
)


def by_size(run: Run) -> Drawing:
    """The latest sample's gradients against their format's range, or why none can be placed."""
    if (spectrum := spectrum_of(run)) is None:
        return Drawing("By size", "", 0.9, partial(_write, text=no_gradients(run)))
    caption = (
        "How large the gradients are, multiplied by the scale, and what "
        f"{shown(run.starts[-1].dtype, 20)} makes of them. The outer columns: those that are zero, "
        f"and those that are Inf or NaN.{later_samples(run, spectrum.step)}"
    )
    return Drawing("By size", caption, 2.8, partial(_draw, spectrum=spectrum))


def _write(figure: FigureBase, text: str) -> None:
    axes = figure.subplots()
    axes.set_title("All gradients")
    axes.set_xticks([])
    write_words(axes, text)


def _draw(figure: FigureBase, spectrum: Spectrum) -> None:
    axes = figure.subplots()
    axes.set_title(f"All gradients at step {spectrum.step:,}")
    left, right = int(spectrum.exponents[0]), int(spectrum.exponents[-1]) + 1
    outer = math.ceil((right - left) / 30)  # the width of the columns of zeros, and of Inf and NaN
    shares = 100 * spectrum.shares
    zero, nonfinite = 100 * spectrum.zero, 100 * spectrum.nonfinite
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
    axes.set_xlim(left - outer - 1, right + outer + 1)
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(as_percent)
    every = 8 if right - left <= 100 else 32
    margin = 2 + (right - left) // 20  # so that no label touches an outer one
    exponents = [e for e in range(left + margin, right + 1 - margin) if e % every == 0]
    axes.set_xticks(
        [left - 1 - outer / 2, *exponents, right + 1 + outer / 2],
        ["0", *(power(2, exponent) for exponent in exponents), "NaN"],
    )
    axes.set_xlabel(f"magnitude times the scale, {number(spectrum.scale)}")
