"""Replays side by side: a table and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from gradscaler.diagnose.report._style import GRID, SKIP, drawing_settings
from gradscaler.diagnose.report._words import number, percent, power, shown
from gradscaler.diagnose.simulate._replay import Replay

HEADINGS = ("policy", "skipped", "flushed", "lost", "subnormal", "back after", "at most", "at last")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MOST_POINTS = 800


def rows_of(replays: Mapping[str, Replay]) -> list[tuple[str, ...]]:
    """A row of texts for each replay, under ``HEADINGS``.

    ``flushed`` is a share of the gradients; ``lost`` and ``subnormal`` are of the sum of their
    magnitudes. ``back after`` is the median steps after bad batches or a spike until the scale is
    back, and ``at most`` the most; ``at last`` is the last scale.
    """
    return [
        (
            name,
            f"{replay.num_skipped:,}",
            *map(_share, (replay.mean(f"flushed{what}") for what in ("", "_magnitude"))),
            _share(replay.mean("subnormal_magnitude")),
            *_recovery(replay),
            number(float(replay.scales[-1])),
        )
        for name, replay in replays.items()
    ]


def print_table(replays: Mapping[str, Replay]) -> None:
    """Print the table, and what its trace holds."""
    trace = next(iter(replays.values())).trace
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column, heading in enumerate(HEADINGS):
        if column:
            table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold", min_width=14)
    for row in rows_of(replays):
        table.add_row(*(Text(shown(cell)) for cell in row))
    console = Console()
    # Rich leaves out the last columns of a table that is wider than the terminal.
    names = table.columns[0]
    names.max_width = 20
    least = Measurement.get(console, console.options.update(width=1000), table).minimum
    names.max_width = None
    console.width = max(console.width, least)
    console.print(table)
    stretches = next(iter(replays.values())).spikes
    spikes = sum(not trace.is_bad[start:stop].all() for start, stop, _ in stretches)
    console.print(
        f"\nSteps: {trace.num_steps:,}. Bad batches, non-finite at any scale: "
        f"{int(trace.is_bad.sum()):,}. Spikes of large gradients: {spikes:,}.\n"
        "flushed: gradients rounded to zero. lost, subnormal: shares of their magnitude.\n"
        "back after, at most: steps until the scale is back after bad batches or a\n"
        "spike, median and most.",
        style="dim",
        highlight=False,
    )


def _recovery(replay: Replay) -> tuple[str, str]:
    """The steps to recover: the median and the most, ``"never"`` for not at all."""
    steps = sorted(math.inf if s.recovery is None else s.recovery for s in replay.spikes)
    if not steps:
        return "-", "-"
    middle, most = (
        "never" if math.isinf(value) else f"{value:,.0f}"
        for value in (steps[len(steps) // 2], steps[-1])
    )
    return middle, most


def picture_of(replays: Mapping[str, Replay], title: str = "") -> bytes:
    """A PNG: the size of the gradients, then each policy's scale, skips and lost magnitude."""
    trace = next(iter(replays.values())).trace
    steps = np.arange(1, trace.num_steps + 1)
    with drawing_settings():
        figure = Figure(figsize=(9, 8), layout="constrained")
        figure.suptitle(title)
        sizes, scales, skips, lost = figure.subplots(4, 1, sharex=True, height_ratios=(1, 2, 1, 1))
        finite = np.where(trace.is_bad, np.nan, trace.extreme)
        sizes.set_title("Largest gradient, unscaled")
        sizes.plot(*_thinned(steps, _log2(finite)), color="#555555", linewidth=1)
        bad = steps[trace.is_bad]
        note = f"{bad.size:,} bad batch{'es' * (bad.size > 1)}" if bad.size else ""
        bad = bad[np.unique(bad * 2 * _MOST_POINTS // steps.size, return_index=True)[1]]
        sizes.plot(
            bad, np.full(bad.size, 0.05), "|", color=SKIP, transform=sizes.get_xaxis_transform()
        )
        sizes.set_title(note, loc="right", fontsize=8, fontweight="normal")
        for place, (name, replay) in enumerate(replays.items()):
            style = {"color": _COLOURS[place % len(_COLOURS)], "linewidth": 1.4}
            style["linestyle"] = ("-", "--", ":")[place // len(_COLOURS) % 3]
            label = shown(name, 60)
            scales.step(*_ends(steps, _log2(replay.scales)), where="mid", label=label, **style)
            skips.step(*_ends(steps, np.cumsum(replay.skipped)), where="mid", **style)
            lost.plot(*_thinned(steps, 100 * replay.flushed_magnitude), **style)
        scales.set_title("Loss scale")
        scales.legend(fontsize=8, frameon=False, loc="lower left", ncols=2)
        skips.set_title("Steps skipped so far")
        lost.set_title("Gradients' magnitude flushed to zero, %")
        lost.set_ylim(bottom=0)
        every = math.ceil(steps.size / _MOST_POINTS)
        lost.set_xlabel("step" + f" (curves: the mean or the ends of each {every:,})" * (every > 1))
        for axes in (sizes, scales):
            _in_powers(axes)
        for axes in (sizes, scales, skips, lost):
            axes.yaxis.grid(color=GRID)
            axes.set_axisbelow(True)
            axes.set_xlim(0.5, trace.num_steps + 0.5)
        lost.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
        file = BytesIO()
        figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def _in_powers(axes: Axes) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda exponent, _: power(2, exponent)))


def _share(value: float) -> str:
    return "-" if math.isnan(value) else percent(value)


def _log2(values: NDArray[np.floating]) -> NDArray[np.float64]:
    wide = values.astype(np.float64)
    return np.log2(wide, out=np.full(wide.shape, np.nan), where=wide > 0)


def _ends(steps: NDArray[np.int64], values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The first, the lowest and the highest value in each of these stretches."""
    groups = np.array_split(np.arange(steps.size), min(steps.size, _MOST_POINTS))
    ends = [(g[0], g[values[g].argmin()], g[values[g].argmax()]) for g in groups]
    kept = np.unique(ends)
    return steps[kept], values[kept]


def _thinned(
    steps: NDArray[np.int64], values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The mean of the known values in each of at most ``_MOST_POINTS`` stretches of steps."""
    groups = np.array_split(np.arange(steps.size), min(steps.size, _MOST_POINTS))
    known = [values[group][~np.isnan(values[group])] for group in groups]
    means = [float(each.mean()) if each.size else math.nan for each in known]
    return np.array([float(steps[group].mean()) for group in groups]), np.array(means)
