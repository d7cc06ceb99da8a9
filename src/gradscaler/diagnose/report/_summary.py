"""What the page, the picture and the terminal all say: the headline, facts and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from gradscaler.diagnose._findings.kinds import Kind, Level, kind_of
from gradscaler.diagnose._run.lines import Sample
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._texts import number, percent, shown

LATEST = 10  # rows of a table
_MOST_RANKS = 20
_MOST_MODULES = 100

LEVELS: tuple[Level, ...] = ("bad", "warning", "good")


class Table(NamedTuple):
    """Texts in rows. The column ``names`` holds names, the others numbers."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    names: int


def headline_of(run: Run) -> Kind:
    """What is wrong with a run, in a few words."""
    if run.num_steps == run.starts[-1].step:
        return Kind("warning", "No step is recorded yet")
    level, headline = kind_of(run.verdict.kind)
    return Kind(level, shown(headline, 60))


def headline_of_runs(runs: Mapping[str, Run]) -> Kind:
    """How many runs are compared, as bad as the worst of them."""
    levels = {headline_of(run).level for run in runs.values()}
    worst = next(level for level in LEVELS if level in levels)
    return Kind(worst, f"{len(runs)} runs side by side")


def facts_of(run: Run) -> dict[str, str]:
    """What to know about a run at a glance, by name."""
    start = run.starts[-1]
    facts = {"Steps": f"{run.num_steps:,}", "Skipped": f"{len(run.skipped):,}"}
    if run.skipped:
        first, last = run.longest_skips
        facts["Skipped"] += f" ({percent(len(run.skipped) / max(1, run.num_steps))})"
        facts["Most in a row"] = f"{last - first + 1:,}"
    _, scales = run.scales
    if scales:
        ends = (scales[0], scales[-1]) if scales[0] != scales[-1] else scales[:1]
        facts["Loss scale"] = " → ".join(map(number, ends))
    if start.world_size > 1:
        facts["Rank"] = f"{start.rank:,} (of {start.world_size:,})"
    facts["Policy"] = shown(str(start.policy.get("name", "unknown")), 40)
    facts["Trained with"] = shown(start.framework, 40)
    facts["Measured against"] = shown(start.dtype, 40)
    return facts


def exponents_of(run: Run) -> dict[int, float]:
    """The binary logarithm of each scale, by the step that first used it; NaN if it has none."""
    return {
        step: math.log2(scale) if 0 < scale < math.inf else math.nan
        for step, scale in zip(*run.scales, strict=True)
    }


def ends_of(points: Mapping[int, float], show: Callable[[float], str] = number) -> str:
    """The number of the first step, and of the last."""
    steps = sorted(points)
    return " → ".join(show(points[step]) for step in steps[:: max(1, len(steps) - 1)])


def tables_of(run: Run) -> list[Table]:
    """The tables that have rows."""
    latest = [sample for sample in run.samples if sample.parameters][-1:]
    tables = (*map(_worst, latest), _skips(run), _located(run), _dtypes(run), _ranks(run))
    return [table for table in tables if table.rows]


def _worst(sample: Sample) -> Table:
    """The parameters that lose most."""
    rows = []
    for name in sample.worst[:LATEST]:
        if (parameter := sample.parameters.get(name)) is not None:
            shares = parameter.nonfinite, parameter.flushed, parameter.subnormal, parameter.zero
            rows.append((shown(name), *map(percent, shares)))
    headings = "Parameter", "NaN or Inf", "Flushed", "Subnormal", "Zero"
    return Table(f"Worst parameters at step {sample.step:,}", headings, rows, names=0)


def _skips(run: Run) -> Table:
    """The latest skipped steps that were inspected, the latest first."""
    rows = []
    for skip in reversed(run.skips[-LATEST:]):
        gradient, counts = "", ("", "", "")
        if skip.nonfinite == () and run.starts[-1].world_size > 1:
            gradient = "another rank's"
        if skip.nonfinite:
            first, others = skip.nonfinite[0], len(skip.nonfinite) - 1 + skip.more
            shape = shown("x".join(map(str, first.shape)), 60)
            gradient = f"{shown(first.name)} ({shown(first.dtype, 20)} {shape})"
            gradient += f", {others:,} more" if others else ""
            rest = "none" if math.isnan(first.largest_finite) else number(first.largest_finite)
            counts = f"{first.num_inf:,}", f"{first.num_nan:,}", rest
        loss = "" if skip.loss is None else number(skip.loss)
        rows.append((f"{skip.step:,}", gradient, *counts, loss, number(skip.scale)))
    headings = "Step", "Gradient", "Inf", "NaN", "Largest finite", "Loss", "Scale"
    title = "Skipped steps"
    if len(run.skips) > LATEST:
        title += f": the latest {LATEST} of {len(run.skips):,} inspected"
    return Table(title, headings, rows, names=1)


def _located(run: Run) -> Table:
    """Where the latest Inf or NaN were made, the latest first."""
    found = [watched for watched in run.watched if watched.located is not None][-LATEST:]
    rows = [(f"{watched.step:,}", shown(str(watched.located))) for watched in reversed(found)]
    return Table("Where the first Inf or NaN was made", ("Step", "Where"), rows, names=1)


def _dtypes(run: Run) -> Table:
    """The dtype of each module's output, as last seen."""
    seen = [watched for watched in run.watched if watched.dtypes][-1:]
    pairs = list(seen[0].dtypes.items()) if seen else []
    rows = [(shown(name) or "the model", shown(dtype, 20)) for name, dtype in pairs[:_MOST_MODULES]]
    title = "What each module computes in"
    if len(pairs) > _MOST_MODULES:
        title += f": the first {_MOST_MODULES} of {len(pairs):,}"
    return Table(title, ("Module", "Output"), rows, names=0)


def _ranks(run: Run) -> Table:
    """What each rank says of itself, if several ranks' files were read; the one at fault first."""
    rows = []
    for rank, own in islice(run.ranks.items(), _MOST_RANKS):
        kind, scales = shown(own.verdict.kind, 40), own.scales[1]
        bad = [skip for skip in own.skips if skip.nonfinite]
        first = f"{bad[0].step:,}" if bad else ""
        scale = number(scales[-1]) if scales else ""
        counts = f"{own.num_steps:,}", f"{len(own.skipped):,}", f"{len(bad):,}"
        rows.append((f"{rank:,}", kind, *counts, first, scale))
    headings = "Rank", "Verdict", "Steps", "Skipped", "Own Inf or NaN", "First step", "Last scale"
    title = f"Ranks: the files of {len(run.ranks):,} of {run.starts[-1].world_size:,}"
    return Table(title, headings, rows, names=1)
