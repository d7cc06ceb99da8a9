"""The figure of which loss scale would be right."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import FigureBase
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gradscaler.diagnose._fit import Fit, Range
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._fit import RULE, sentence_of
from gradscaler.diagnose.report._style import (
    COLOURS,
    MOST_NAMES,
    SKIP,
    Drawing,
    write_legend,
)
from gradscaler.diagnose.report._texts import number, power, shown
from gradscaler.diagnose.report._words import every_nth, rows_drawn

_NO_ROOM = "#A9CBE5"  # a pale "normal"
_MOST_EXPONENTS = 48  # of a scale, on the axis


def which_scale(run: Run) -> Drawing | None:
    """What each loss scale would make of the gradients; None if none can be placed by size."""
    if (fit := run.fit) is None:
        return None
    samples = f"the latest {fit.num_samples:,} samples" if fit.num_samples > 1 else "one sample"
    caption = f"{RULE}. From {samples}, up to step {fit.last:,}.{rows_drawn(len(fit.parameters))}"
    text = sentence_of(fit, run.verdict.kind)
    names = every_nth(fit.parameters, (fit.lowest, fit.highest))
    fit = replace(fit, parameters={name: fit.parameters[name] for name in names})
    rows = min(len(fit.parameters), MOST_NAMES) + 1
    return Drawing(
        "Which loss scale fits", caption, 1.7 + 0.16 * rows, partial(_draw, fit=fit, text=text)
    )


def _draw(figure: FigureBase, fit: Fit, text: str) -> None:
    axes = figure.subplots()
    figure.suptitle(fill(text, 68), x=0.01, ha="left", fontsize=8.5)
    axes.set_title("Each loss scale")
    ranges = [fit.whole, *fit.parameters.values()]
    exponents = _exponents(fit)
    left, right = int(exponents[0]) - 0.5, int(exponents[-1]) + 0.5
    image = np.array([_row(each, exponents) for each in ranges])
    extent = left, right, len(ranges), 0
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
    axes.axhline(1, color="white", linewidth=2)
    if 0 < fit.own < math.inf:
        own = min(max(math.log2(fit.own), left), right)
        axes.axvline(own, color="white", linewidth=3)
        axes.axvline(own, color=SKIP, linewidth=1.4, linestyle=(0, (3, 1.5)))
    note = f"dashed: the run's own, {number(fit.own)}"
    axes.set_title(note, loc="right", color=SKIP, fontsize=8, fontweight="normal")
    _name_rows(axes, fit)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda exponent, _: power(2, exponent)))
    axes.set_xlabel("loss scale")
    labels = {
        "flushed": COLOURS["flushed"],
        "subnormal": COLOURS["subnormal"],
        "fits": COLOURS["normal"],
        "no room": _NO_ROOM,
        "overflow": COLOURS["overflow"],
        "zero": COLOURS["zero"],
    }
    if None not in ranges:
        del labels["zero"]
    patches = [
        Patch(color=colour, label="zero, NaN" if label == "zero" and fit.nonfinite else label)
        for label, colour in labels.items()
    ]
    write_legend(figure, patches, columns=len(patches))


def _row(found: Range | None, exponents: np.ndarray) -> np.ndarray:
    """The colour of each scale: the worst that it does to the gradients of a row."""
    row = np.empty((exponents.size, 3))
    row[:] = to_rgb(COLOURS["zero" if found is None else "normal"])
    if found is not None:
        row[exponents < found.low] = to_rgb(COLOURS["subnormal"])
        row[exponents < found.unflushed] = to_rgb(COLOURS["flushed"])
        row[exponents > found.high] = to_rgb(_NO_ROOM)
        row[exponents > found.edge] = to_rgb(COLOURS["overflow"])
    return row


def _exponents(fit: Fit) -> np.ndarray:
    """The scales on the axis: where ranges begin and end, and the run's own, as far as they fit."""
    ranges = [fit.whole, *(each for each in fit.parameters.values() if each is not None)]
    own = round(math.log2(fit.own)) if 0 < fit.own < math.inf else fit.whole.edge
    right = max(own, *(each.edge for each in ranges), *(each.low for each in ranges)) + 3
    left = min(own, *(each.low for each in ranges), *(each.high for each in ranges)) - 3
    return np.arange(max(left, right - _MOST_EXPONENTS), right + 1)


def _name_rows(axes: Axes, fit: Fit) -> None:
    """Name the rows, or one of several; those that set a bound always, in bold."""
    names = ["all gradients", *fit.parameters]
    every = math.ceil(len(names) / MOST_NAMES)
    bounds = {row for row, name in enumerate(names) if row and name in (fit.lowest, fit.highest)}
    crowded = {row // every * every for row in bounds}
    rows = sorted({*range(0, len(names), every)} - crowded | bounds)
    axes.set_yticks([row + 0.5 for row in rows], [shown(names[row], 22) for row in rows])
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    for row, label in zip(rows, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if row in bounds else "normal")
