"""A run in the terminal, or several side by side, as rich draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import TextIOWrapper
from typing import TextIO

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._charts import (
    BLOCKS,
    PLAIN_BLOCKS,
    column_of,
    curve,
    density,
    spread,
)
from gradscaler.diagnose.report._differences import alike, difference_tables
from gradscaler.diagnose.report._summary import Table as SummaryTable
from gradscaler.diagnose.report._summary import (
    ends_of,
    exponents_of,
    facts_of,
    headline_of,
    in_lines,
    origin_tables_of,
    tables_of,
)
from gradscaler.diagnose.report._words import (
    CLASSES,
    fit_to_show,
    no_gradients,
    no_points,
    percent,
    sentence_of,
    shown,
)

LEVELS = {"good": "green", "warning": "yellow", "bad": "red"}

_BESIDE = 44  # columns of a chart's name and numbers
_NARROWEST, _WIDEST = 8, 80  # of the charts
_LEAST = 24  # columns of a table that hold words


def console_of(output: TextIO) -> Console:
    """A console on an output that need not be able to write every letter of a name."""
    if isinstance(output, TextIOWrapper):
        output.reconfigure(errors="replace")
    return Console(file=output, highlight=False)


@dataclass(frozen=True)
class Explained:
    """What is wrong with a run, and the evidence."""

    run: Run

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The verdict, where the first Inf or NaN was made, the charts and the tables."""
        run = self.run
        headline, verdict = headline_of(run), run.verdict
        text = Text(shown(verdict.text, 1000))
        if verdict.where:
            text.append("\nLook at ").append(shown(verdict.where), "bold")
        title, style = Text(headline.headline, "bold"), LEVELS[headline.level]
        yield Panel(text, title=title, title_align="left", border_style=style)
        for table in origin_tables_of(run):
            yield drawn_table(table)
            yield ""
        yield Text(in_lines(facts_of(run), options.max_width).replace("\xa0", " "), "dim")
        yield ""
        yield _over_time(run, options)
        for words in _words(run):
            yield ""
            yield Text(words)
        for table in tables_of(run):
            yield ""
            yield drawn_table(table)


@dataclass(frozen=True)
class Compared:
    """In what several runs, by their names, differ; and their scales and losses."""

    runs: Mapping[str, Run]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What differs, what is alike, and the charts."""
        for table in difference_tables(self.runs):
            yield drawn_table(table)
            yield ""
        yield Text(alike(self.runs), "dim")
        runs = self.runs.values()
        scales = [dict(zip(*run.scales, strict=True)) for run in runs]
        losses = [run.losses for run in runs]
        last_step = max(run.num_steps for run in runs)
        for title, drawn, printed in (
            ("loss scale", [exponents_of(run) for run in runs], scales),
            ("loss", spread(*losses), losses),
        ):
            finite = [value for each in drawn for value in each.values() if math.isfinite(value)]
            limits = min(finite, default=0.0), max(finite, default=0.0)
            chart = Table.grid(padding=(0, 2))
            for (name, run), points, ends in zip(self.runs.items(), drawn, printed, strict=True):
                line = _line(points, last_step, options, limits)
                end = column_of(run.num_steps, last_step, len(line)) + 1
                chart.add_row(Text(shown(name, 20)), line[:end], ends_of(ends))
            yield ""
            yield Text(title, "bold")
            yield chart


def _words(run: Run) -> list[str]:
    """Which scales fit; and what has no chart."""
    if not run.num_steps:
        return []
    fit = fit_to_show(run)
    scales = "" if fit is None else sentence_of(fit, run.lowest_overflow)
    found = no_points("loss", run.losses), no_gradients(run), scales
    return [words for words in found if words]


def _over_time(run: Run, options: ConsoleOptions) -> Table:
    """A line for each quantity that the run has, from its first step to its last."""
    chart = Table.grid(padding=(0, 2))
    for name, points, ends in (
        ("loss scale", exponents_of(run), ends_of(dict(zip(*run.scales, strict=True)))),
        ("loss", spread(run.losses)[0], ends_of(run.losses)),
        ("gradient norm", spread(run.norms)[0], ends_of(run.norms)),
    ):
        if points:
            chart.add_row(name, _line(points, run.num_steps, options), ends)
    for name, share in CLASSES.items():
        shares = {step: share(found) for step, found in run.shares.items()}
        if any(shares.values()):
            line = _line(shares, run.num_steps, options, limits=(0.0, 1.0))
            chart.add_row(name, line, ends_of(shares, percent))
    if run.skipped:
        skips = density(run.skipped, run.num_steps, _width(options), _blocks(options))
        chart.add_row("skipped", Text(skips, "red"), f"{len(run.skipped):,} steps")
    return chart


def _line(
    points: Mapping[int, float],
    last_step: int,
    options: ConsoleOptions,
    limits: tuple[float, float] | None = None,
) -> Text:
    line = Text(curve(points, last_step, _width(options), _blocks(options), limits))
    line.stylize("blue")
    line.highlight_regex("!+", "bold red")
    return line


def _width(options: ConsoleOptions) -> int:
    return min(max(options.max_width - _BESIDE, _NARROWEST), _WIDEST)


def _blocks(options: ConsoleOptions) -> str:
    return PLAIN_BLOCKS if options.ascii_only else BLOCKS


def drawn_table(table: SummaryTable) -> Table:
    """A table, whose names are folded if the terminal is narrow."""
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
            drawn.add_column(heading, justify="right", no_wrap=longest < _LEAST)
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn
