"""The report in the terminal, drawn by rich, with charts of block characters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gradscaler.diagnose.report._content import CLASSES, Content, Course
from gradscaler.diagnose.report._content import Table as ContentTable
from gradscaler.diagnose.report._words import ends, number, percent, sentence_of, shown

BLOCKS, _PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
_STYLES = {"good": "green", "warning": "yellow", "bad": "red"}
_BESIDE = 44  # columns for a chart's name and numbers
_NARROWEST, _WIDEST = 8, 80  # columns of a chart
_LEAST = 24  # characters; a column of a table with longer texts may be wrapped


def console_of(output: TextIO) -> Console:
    """A console on an output, which replaces characters that the output cannot encode."""
    if isinstance(output, TextIOWrapper):
        output.reconfigure(errors="replace")
    return Console(file=output, highlight=False)


@dataclass(frozen=True)
class Printed:
    """A report on one run or several, which rich can print."""

    content: Content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the headline and its text, the first tables, the charts and the other tables."""
        content = self.content
        level, headline = content.headline
        if content.action:
            yield Text(shown(content.action, 1000), "bold")
            yield ""
        if content.text:
            text, title = Text(shown(content.why, 1000)), Text(headline, "bold")
            yield Panel(text, title=title, title_align="left", border_style=_STYLES[level])
        for table in content.first:
            yield drawn_table(table)
            yield ""
        if content.facts:
            yield Text("\n".join(filter(None, (content.facts, content.origin))), "dim")
            yield ""
        yield _over_time(content.courses, options)
        if content.fit is not None:
            yield ""
            yield Text(sentence_of(content.fit))
        for table in content.tables:
            yield ""
            yield drawn_table(table)


def drawn_table(table: ContentTable) -> Table:
    """A table for rich. Its names are folded if the terminal is narrow."""
    drawn = Table(
        title=table.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )
    for column, heading in enumerate(table.headings):
        longest = max(len(row[column]) for row in table.rows)
        if column == table.names:
            drawn.add_column(heading, overflow="fold", min_width=min(longest, _LEAST))
        else:
            no_wrap = longest < _LEAST
            drawn.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=no_wrap)
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn


class _Quantity(NamedTuple):
    """A quantity that the runs have in some of their steps."""

    name: str
    points: Sequence[Mapping[int, float]]  # of each run
    limits: tuple[float, float] | None = None  # of the charts; by default, the range of `points`
    show: Callable[[float], str] = number


def _quantities(runs: Sequence[Course]) -> Iterator[_Quantity]:
    if any(run.scales for run in runs):
        yield _Quantity("loss scale", [run.scales for run in runs])
    for name in dict.fromkeys(name for run in runs for name in run.curves):
        yield _Quantity(name.lower(), [run.curves.get(name, {}) for run in runs])
    for name, share in CLASSES.items():
        points = [{step: share(found) for step, found in run.shares.items()} for run in runs]
        if any(any(each.values()) for each in points):
            yield _Quantity(name, points, (0.0, 1.0), percent)


def _over_time(courses: Mapping[str, Course], options: ConsoleOptions) -> Table:
    """A chart in one line for each quantity of each run, from the first step to the last."""
    runs = list(courses.values())
    last_step = max((run.num_steps for run in runs), default=0)
    width = min(max(options.max_width - _BESIDE, _NARROWEST), _WIDEST, max(1, last_step))
    blocks = _PLAIN_BLOCKS if options.ascii_only else BLOCKS
    chart = Table.grid(padding=(0, 2))

    def add(title: str, rows: Iterable[tuple[Text, str]]) -> None:
        """Add a row with a chart and its numbers for each run, named if there are several runs."""
        if len(runs) > 1:
            chart.add_row(Text(title, "bold"))
        for name, row in zip(courses, rows, strict=True):
            chart.add_row(Text(shown(name, 20) if len(runs) > 1 else title), *row)

    for quantity in _quantities(runs):
        rows = []
        for run, points, heights in zip(runs, quantity.points, _heights(quantity), strict=True):
            columns, (end,) = (
                columns_of(each, last_step, width) for each in (points, [run.num_steps])
            )
            line = Text(curve(columns, heights, int(end) + 1, blocks), "blue")
            line.highlight_regex("!+", "bold red")
            values = list(points.values())
            rows.append((line, ends([quantity.show(each) for each in values[:1] + values[-1:]])))
        add(quantity.name, rows)
    if any(run.skipped for run in runs):
        skips = [columns_of(run.skipped, last_step, width) for run in runs]
        lines = [Text(density(columns, width, blocks), "red") for columns in skips]
        counts = [f"{len(run.skipped):,} step{'s' * (len(run.skipped) != 1)}" for run in runs]
        add("skipped", zip(lines, counts, strict=True))
    return chart


def _heights(quantity: _Quantity) -> list[NDArray[Any]]:
    """The numbers of each run, scaled to 0 to 1.

    The axis is logarithmic if the numbers are positive and span more than a factor of 100.
    """
    values = [np.fromiter(points.values(), float) for points in quantity.points]
    finite = [each[np.isfinite(each)] for each in values]
    ends = [end for each in finite if each.size for end in (each.min(), each.max())] or [0.0]
    low, high = quantity.limits or (min(ends), max(ends))
    with np.errstate(invalid="ignore"):
        if 0 < low < high / 100:
            low, high, *values = map(np.log, (low, high, *values))
        # The numbers are halved so that their range does not overflow.
        return [(each / 2 - low / 2) / ((high / 2 - low / 2) or 1.0) for each in values]


def curve(columns: NDArray[Any], heights: NDArray[Any], width: int, blocks: str) -> str:
    """A line with a block for the latest height in each column; "!" if any there is Inf or NaN."""
    latest = np.zeros(width)
    latest[columns] = heights  # if several share a column, the last one stays
    latest[columns[~np.isfinite(heights)]] = np.nan
    line = [" "] * width
    for column in np.flatnonzero(np.bincount(columns, minlength=width)).tolist():
        height = latest[column]
        block = "!" if np.isnan(height) else blocks[min(7, round(7 * height))]
        line[column:] = [block] * (width - column)
    return "".join(line)


def columns_of(steps: Iterable[int], last_step: int, width: int) -> NDArray[np.int64]:
    """The column of each step in a chart."""
    places = (np.fromiter(steps, np.int64) - 1) * width // max(1, last_step)
    return places.clip(0, width - 1)


def density(columns: NDArray[Any], width: int, blocks: str) -> str:
    """A line with a block for the number of steps in each column; a space for none."""
    counts = np.bincount(columns, minlength=width)
    heights = np.ceil(8 * counts / max(1, counts.max())).astype(int)
    return "".join((" " + blocks)[height] for height in heights)
