"""A run in the terminal: the verdict, and the evidence for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._charts import BLOCKS, PLAIN_BLOCKS, bars, curve, density
from gradscaler.diagnose.report._fit import sentence_of
from gradscaler.diagnose.report._spectrum import spectrum_of
from gradscaler.diagnose.report._summary import Table as SummaryTable
from gradscaler.diagnose.report._summary import (
    ends_of,
    exponents_of,
    facts_of,
    headline_of,
    tables_of,
)
from gradscaler.diagnose.report._texts import percent, power, shown
from gradscaler.diagnose.report._words import later_samples, no_gradients, no_points

LEVELS = {"good": "green", "warning": "yellow", "bad": "red"}
COLOURS = {"flushed": "red", "subnormal": "yellow", "normal": "blue", "overflow": "magenta"}

_WIDTH, _WIDEST = 36, 57  # of the charts, so that everything fits in 80 columns
_LONGEST_NAME = 20


def explain(run: Run, console: Console) -> None:
    """Print what is wrong with a run, and the evidence."""
    headline, verdict = headline_of(run), run.verdict
    text = Text(shown(verdict.text, 1000))
    if verdict.where:
        text.append("\nLook at ").append(shown(verdict.where), "bold")
    title = Text(headline.headline, "bold")
    console.print(Panel(text, title=title, title_align="left", border_style=LEVELS[headline.level]))
    facts = (f"{name}: {fact}" for name, fact in facts_of(run).items())
    console.print(Text("   ".join(facts), "dim"))
    blocks = PLAIN_BLOCKS if console.options.ascii_only else BLOCKS
    for part in (_over_time(run, blocks), _by_size(run, blocks)):
        if part.row_count:
            console.print()
            console.print(part)
    for words in _words(run):
        console.print()
        console.print(Text(words))
    for table in tables_of(run):
        console.print()
        console.print(_table(table))


def _words(run: Run) -> list[str]:
    """Which scales fit; and what has no chart."""
    if not run.num_steps:
        return []
    fit = run.fit
    gradients = no_gradients(run)
    if fit is not None:
        gradients = sentence_of(fit, run.verdict.kind) + later_samples(run, fit.last)
    return [words for words in (no_points("loss", run.losses), gradients) if words]


def _over_time(run: Run, blocks: str) -> Table:
    """A line for each quantity that the run has, from its first step to its last."""
    chart = Table.grid(padding=(0, 2))
    for name, points, ends in (
        ("loss scale", exponents_of(run), ends_of(dict(zip(*run.scales, strict=True)))),
        ("loss", run.losses, ends_of(run.losses)),
        ("gradient norm", run.norms, ends_of(run.norms)),
    ):
        if points:
            chart.add_row(name, _line(points, run, blocks), ends)
    kinds = {"zero": "zero", "flushed to zero": "flushed", "subnormal": "subnormal"}
    for name, kind in kinds.items():
        if shares := {step: getattr(found, kind) for step, found in run.shares.items()}:
            line = _line(shares, run, blocks, limits=(0.0, 1.0))
            chart.add_row(name, line, ends_of(shares, percent))
    if run.skipped:
        skips = Text(density(run.skipped, run.num_steps, _WIDTH, blocks), "red")
        chart.add_row("skipped", skips, f"{len(run.skipped):,} steps")
    return chart


def _line(points: Mapping[int, float], run: Run, blocks: str, **limits: Any) -> Text:
    (row,) = curve(points, run.num_steps, _WIDTH, blocks, **limits)
    line = Text(row, "blue")
    line.highlight_regex("!+", "bold red")
    return line


def _by_size(run: Run, blocks: str) -> Table:
    """The exponents of all gradients, and of the worst parameters'."""
    chart = Table.grid(padding=(0, 2))
    if (spectrum := spectrum_of(run)) is None:
        return chart
    group = math.ceil(spectrum.exponents.size / (_WIDEST - 3))
    starts: list[int] = []  # of the columns: each zone begins a new one
    styles: list[str] = []
    ruler = ""
    for zone in spectrum.zones:
        columns = np.flatnonzero(spectrum.within(zone))[::group].tolist()
        if starts:
            label = f"|{power(2, zone.start)}"
            is_last = zone is spectrum.zones[-1]
            ruler += label if is_last or len(label) <= len(columns) else "|"
        starts += columns
        styles += [COLOURS[zone.name]] * len(columns)
        ruler = ruler.ljust(len(starts))
    rows = {name: row for row, name in enumerate(spectrum.names, 1)}
    worst = {name: rows[name] for name in spectrum.worst}
    chart.add_row(f"step {spectrum.step:,}", ruler[:_WIDEST])
    for name, row in {"all gradients": 0, **worst}.items():
        row_of_bars = bars(np.add.reduceat(spectrum.shares[row], starts), blocks)
        line = Text.assemble(*zip(row_of_bars, styles, strict=True))
        chart.add_row(Text(shown(name, _LONGEST_NAME)), line)
    parts = [
        (f"zero {percent(spectrum.zero[0])}  ", ""),
        *(
            (f"{zone.name} {percent(spectrum.share(zone))}  ", COLOURS[zone.name])
            for zone in spectrum.zones
        ),
        (f"NaN {percent(spectrum.nonfinite[0])}", ""),
    ]
    chart.add_row("", Text.assemble(*parts))
    return chart


def _table(table: SummaryTable) -> Table:
    drawn = Table(
        title=table.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    for column, heading in enumerate(table.headings):
        if column == table.names:
            drawn.add_column(heading, overflow="fold")
        else:
            drawn.add_column(heading, justify="right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn
