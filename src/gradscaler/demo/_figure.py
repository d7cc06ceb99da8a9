"""The picture of the demo: restored photographs, losses, the scale, and gradient exponents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from gradscaler.demo._training import MODES, Run, picture
from gradscaler.diagnose.report._picture import png_of

# Okabe and Ito's palette, which colour-blind readers can tell apart.
RED, YELLOW, GREEN, BLUE = "#D55E00", "#E69F00", "#009E73", "#0072B2"
GREY = "#777777"  # about as far from white as from black, so that either may be behind it
ON_ANY_GROUND: dict[Any, str] = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), GREY),
    **dict.fromkeys(("xtick.color", "ytick.color"), GREY),
}
COLOURS = dict(zip(MODES, (GREY, RED, BLUE), strict=True))

SMALLEST = -24  # log2 of fp16's smallest subnormal
SMALLEST_NORMAL = -14
LARGEST = 16  # fp16 ends just below 2**16


@rc_context(ON_ANY_GROUND)
def draw(runs: list[Run], held_out: np.ndarray, output: Path) -> None:
    """Draw the held-out patches, the patches that each mode restores, and three panels of causes.

    Args:
        runs: for each seed, a run in each mode, in the order of ``MODES``.
        held_out: the true patches.
        output: the file to write.
    """
    layout = ConstrainedLayoutEngine(h_pad=0.08, rect=(0.005, 0, 0.99, 1))  # or it cuts off texts
    figure = Figure(figsize=(9, 5.6), dpi=180, layout=layout)
    FigureCanvasAgg(figure)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.25))[:, 0]
    _draw_pictures(above.subplots(1, 1 + len(MODES)), runs[: len(MODES)], held_out)
    losses, scale, exponents = below.subplots(1, 3, width_ratios=(1, 1, 1.25))
    _draw_losses(losses, runs)
    _draw_scale(scale, [run for run in runs if run.scales])
    _draw_exponents(exponents, runs[1], np.log2(runs[2].scales[0]))
    for letter, axes in zip("abc", (losses, scale, exponents), strict=True):
        axes.set_title(f"$\\bf{{{letter}}}$  {axes.get_title(loc='left')}", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    output.write_bytes(png_of(figure))


def _draw_pictures(all_axes: np.ndarray, runs: list[Run], held_out: np.ndarray) -> None:
    pictures = [(held_out, "held-out photograph", GREY)]
    for run in runs:
        title = f"{run.mode}: {round(100 * run.explained) + 0} %"
        pictures.append((run.restored, title, COLOURS[run.mode]))
    for axes, (patches, title, colour) in zip(all_axes, pictures, strict=True):
        axes.imshow(picture(patches))
        axes.set_title(title, fontsize=9, color=colour, fontweight="bold")
        axes.set_axis_off()


def _draw_losses(axes: Axes, runs: list[Run]) -> None:
    for mode, colour in COLOURS.items():
        losses = np.array([_running_mean(run.losses) for run in runs if run.mode == mode])
        axes.fill_between(
            range(losses.shape[1]), losses.min(0), losses.max(0), color=colour, alpha=0.25
        )
        dashed = "--" if mode == MODES[2] else "-"  # it lies on fp32's line, which shows through
        dot = "." if losses.shape[1] == 1 else None
        axes.plot(losses.mean(0), dashed, marker=dot, color=colour, linewidth=1.6, label=mode)
    seeds = len(runs) // len(MODES)
    axes.set_title("Training loss" + (f", {seeds} seeds" if seeds > 1 else ""), loc="left")
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylim(0)
    axes.legend(fontsize=7.5, frameon=False, loc="center right")


def _draw_scale(axes: Axes, runs: list[Run]) -> None:
    for i, run in enumerate(runs):
        dot = "." if len(run.scales) == 1 else None  # a line of one point shows nothing
        style: dict[str, Any] = {"color": BLUE, "linewidth": 1.6, "alpha": 0.3 if i else 1.0}
        axes.step(range(len(run.scales)), run.scales, where="post", marker=dot, **style)
    axes.set_yscale("log", base=2)
    low, high = (f(f(run.scales) for run in runs) for f in (min, max))
    axes.set_ylim(low / 4, high * 8)
    skipped = f"{runs[0].skipped} step{'' if runs[0].skipped == 1 else 's'} skipped"
    if len(runs) > 1:
        skipped += f", seed {runs[0].seed}"
    axes.text(0.97, 0.95, skipped, transform=axes.transAxes, ha="right", va="top", fontsize=8)
    axes.set_title("Loss scale", loc="left")
    axes.set_xlabel("step", fontsize=9)


def _draw_exponents(axes: Axes, run: Run, scale: float) -> None:
    left = -50.0  # hardly any gradients are below it
    bins = [float(edge) for edge in np.arange(left, LARGEST + 5)]
    weights = np.full(run.exponents.shape, 100 / max(1, run.exponents.size))
    shown = (
        (run.exponents, RED, "as they are"),
        (run.exponents + scale, BLUE, f"scaled by 2$^{{{scale:.0f}}}$"),
    )
    for exponents, colour, _ in shown:
        axes.hist(exponents, bins, weights=weights, color=colour, alpha=0.25)
        axes.hist(exponents, bins, weights=weights, color=colour, histtype="step", linewidth=1.6)
    top = axes.get_ylim()[1] * 1.42
    axes.set_ylim(0, top)
    axes.set_xlim(left, LARGEST + 5)
    for low, high, colour, text in (
        (left, SMALLEST, RED, "flushed to zero"),
        (SMALLEST, SMALLEST_NORMAL, YELLOW, "sub-\nnormal"),
        (SMALLEST_NORMAL, LARGEST, GREEN, "fp16 normal\nnumbers"),
        (LARGEST, LARGEST + 5, "none", "inf"),
    ):
        axes.axvspan(low, high, color=colour, alpha=0.15, linewidth=0, zorder=0)
        axes.text((low + high) / 2, 0.98 * top, text, ha="center", va="top", fontsize=7.5)
    bold: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 8, "fontweight": "bold"}
    for height, (exponents, colour, text) in zip((0.84, 0.77), shown, strict=True):
        axes.text(float(np.median(exponents)), height * top, text, color=colour, **bold)
    axes.set_title("Weight gradients during the fp16 run", loc="left")
    axes.set_xlabel("log$_2$ of the magnitude", fontsize=9)
    axes.set_ylabel("% of gradients", fontsize=9)


def _running_mean(values: list[float], window: int = 10) -> np.ndarray:
    """The mean of the last ``window`` values at each point."""
    ends = range(1, len(values) + 1)
    return np.array([np.mean(values[max(0, end - window) : end]) for end in ends])
