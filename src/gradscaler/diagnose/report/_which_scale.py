"""The figure of which loss scale would be right."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from textwrap import fill

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import FigureBase
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gradscaler.diagnose._fitting_scales import Fit, Range
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._style import COLOURS, SKIP, Drawing, write_legend
from gradscaler.diagnose.report._words import (
    RULE,
    fit_to_show,
    number,
    power,
    sentence_of,
    shown,
)

_NO_ROOM = "#A9CBE5"  # a pale "normal"
_MOST_EXPONENTS = 48  # of a scale, on the axis
_MOST_ROWS = 36  # of parameters, and the two that set the bounds


def which_scale(run: Run) -> Drawing | None:
    """What each loss scale would make of the gradients; None if that decides nothing."""
    if (fit := fit_to_show(run)) is None:
        return None
    text = sentence_of(fit, run.lowest_overflow)
    samples = f"the latest {fit.num_samples:,} samples" if fit.num_samples > 1 else "one sample"
    caption = f"{RULE}. From {samples}, up to step {fit.last:,}."
    if (every := math.ceil(len(fit.parameters) / _MOST_ROWS)) > 1:
        caption += f" One in {every:,} of the {len(fit.parameters):,} parameters has a row."
    shown_rows = {
        name: found
        for row, (name, found) in enumerate(fit.parameters.items())
        if row % every == 0 or name in (fit.lowest, fit.highest)
    }
    fit = replace(fit, parameters=shown_rows)
    height = 1.86 + 0.16 * len(shown_rows)
    return Drawing("Which loss scale fits", caption, height, partial(_draw, fit=fit, text=text))


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
    names = ["all gradients", *fit.parameters]
    axes.set_yticks([row + 0.5 for row in range(len(names))], [shown(name, 22) for name in names])
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    for name, label in zip(names, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if name in (fit.lowest, fit.highest) else "normal")
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
