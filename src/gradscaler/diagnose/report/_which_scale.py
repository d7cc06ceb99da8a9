"""The figure that shows which loss scales fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from textwrap import fill

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import FigureBase
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gradscaler.diagnose._fitting_scales import Fit, Range
from gradscaler.diagnose.report._figures import COLOURS, INK, Drawing, write_legend
from gradscaler.diagnose.report._words import RULE, number, power, sentence_of, shown

_MOST_EXPONENTS = 48  # exponents of scales on the axis
_MOST_ROWS = 36  # rows for parameters; the two that set the bounds may add to them
_COLOURS = {
    "flushed": COLOURS["flushed"],
    "subnormal": COLOURS["subnormal"],
    "fits": COLOURS["normal"],
    "no room": "#A9CBE5",  # a pale "normal"
    "overflow": COLOURS["overflow"],
    "zero, NaN": COLOURS["zero"],
}


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
    return Drawing("Which loss scale fits", caption, height, partial(_draw, fit=fit, rows=rows))


def _draw(figure: FigureBase, fit: Fit, rows: Mapping[str, Range | None]) -> None:
    axes = figure.subplots()
    figure.suptitle(fill(sentence_of(fit), 68), x=0.01, ha="left", fontsize=8.5)
    own = math.log2(fit.own)
    ranges = [each for each in rows.values() if each is not None]
    right = math.ceil(max(own, *(max(each.edge, each.low) for each in ranges))) + 3
    left = math.floor(min(own, *(min(each.high, each.low) for each in ranges))) - 3
    exponents = np.arange(max(left, right - _MOST_EXPONENTS), right + 1)
    axes.imshow(
        np.array([_row(each, exponents) for each in rows.values()]),
        aspect="auto",
        interpolation="nearest",
        extent=(exponents[0] - 0.5, exponents[-1] + 0.5, len(rows), 0),
    )
    axes.axhline(1, color="white", linewidth=2)
    axes.axvline(own, color="white", linewidth=3)
    axes.axvline(own, color=INK, linewidth=1.4, linestyle=(0, (3, 1.5)))
    axes.set_title("Each loss scale")
    note = f"dashed: the run's own, {number(fit.own)}"
    axes.set_title(note, loc="right", color=INK, fontsize=8, fontweight="normal")
    axes.set_yticks([row + 0.5 for row in range(len(rows))], [shown(name, 22) for name in rows])
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    for name, label in zip(rows, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if name in (fit.lowest, fit.highest) else "normal")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda exponent, _: power(2, exponent)))
    axes.set_xlabel("loss scale")
    patches = [Patch(color=colour, label=label) for label, colour in _COLOURS.items()]
    write_legend(figure, patches, columns=3)


def _row(found: Range | None, exponents: np.ndarray) -> np.ndarray:
    """The colour of each scale, for its worst effect on the gradients of a row."""
    row = np.empty((exponents.size, 3))
    row[:] = to_rgb(_COLOURS["zero, NaN" if found is None else "fits"])
    if found is not None:
        row[exponents < found.low] = to_rgb(_COLOURS["subnormal"])
        row[exponents < found.unflushed] = to_rgb(_COLOURS["flushed"])
        row[exponents > found.high] = to_rgb(_COLOURS["no room"])
        row[exponents > found.edge] = to_rgb(_COLOURS["overflow"])
    return row
