"""What the page, the picture and the terminal all say: the headline, facts and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from gradscaler.diagnose._findings.finding import Kind, Level, kind_of
from gradscaler.diagnose._run.lines import Skip, Watched
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._words import number, percent, shown

if TYPE_CHECKING:
    from gradscaler.diagnose.report._style import Drawing

LEVELS: tuple[Level, ...] = ("bad", "warning", "good")
_MOST_ROWS = 10
_MOST_RANKS = 20


class Table(NamedTuple):
    """Texts in rows. The column ``names`` holds names, the others numbers."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    names: int


@dataclass(frozen=True)
class Content:
    """The headline, its text, and the evidence, in their order."""

    headline: Kind
    text: str
    where: str | None  # the name to look at
    first: list[Table]  # what explains the headline
    facts: Mapping[str, str]
    drawings: list[Drawing]
    tables: list[Table]


def headline_of(run: Run) -> Kind:
    """What is wrong with a run, in a few words."""
    if run.num_steps == run.starts[-1].step and run.verdict.kind == "normal":
        return Kind("warning", "No step is recorded yet")
    level, headline = kind_of(run.verdict.kind)
    return Kind(level, shown(headline, 60))


def facts_of(run: Run) -> dict[str, str]:
    """What to know about a run at a glance, by name."""
    start = run.starts[-1]
    facts = {"Steps": f"{run.num_steps:,}", "Skipped": f"{len(run.skipped):,}"}
    if run.skipped:
        first, last = run.longest_skips
        facts["Skipped"] += f" ({percent(len(run.skipped) / max(1, run.num_steps))})"
        facts["Most in a row"] = f"{last - first + 1:,}"
    if run.scales[0]:
        facts["Loss scale"] = _ends(list(map(number, run.scales[1])))
    facts |= _facts_on(run, run.verdict.where)
    if start.world_size > 1:
        facts["Rank"] = f"{start.rank:,} (of {start.world_size:,})"
    facts["Policy"] = shown(str(start.policy.get("name", "unknown")), 40)
    facts["Trained with"] = shown(start.framework, 40)
    facts["Measured against"] = shown(start.dtype, 40)
    return facts


def in_lines(facts: Mapping[str, str], width: int) -> str:
    """Facts in lines of so many letters; a no-break space keeps each in one."""
    each = (f"{name}: {fact}".replace(" ", "\xa0") for name, fact in facts.items())
    return fill("   ".join(each), width)


def _facts_on(run: Run, where: str | None) -> dict[str, str]:
    """What decided the verdict about the parameter or the module that it names."""
    if where is None:
        return {}
    for sample in reversed(run.samples):
        if where in sample.parameters and run.verdict.kind in ("underflow", "range"):
            found = sample.parameters[where]
            shares = {"flushed": found.flushed, "subnormal": found.subnormal, "zero": found.zero}
            text = ", ".join(f"{percent(share)} {name}" for name, share in shares.items())
            return {f"{shown(where, 40)} at step {sample.step:,}": text}
    for watched in reversed(run.watched):
        if where in watched.dtypes and run.verdict.kind == "activations":
            return {f"{shown(where, 40)} computes in": shown(watched.dtypes[where], 20)}
    return {}


def exponents_of(run: Run) -> dict[int, float]:
    """The binary logarithm of each scale, by the step that first used it; NaN if it has none."""
    return {
        step: math.log2(scale) if 0 < scale < math.inf else math.nan
        for step, scale in zip(*run.scales, strict=True)
    }


def ends_of(points: Mapping[int, float], show: Callable[[float], str] = number) -> str:
    """The number of the first step, and of the last."""
    return _ends([show(points[step]) for step in (min(points), max(points))]) if points else ""


def _ends(texts: Sequence[str]) -> str:
    """The first and the last, or the one if they are the same."""
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} → {texts[-1]}"


def origin_tables_of(run: Run) -> list[Table]:
    """Where the latest Inf or NaN were made, the latest first; empty if that was not seen."""
    groups: dict[object, list[Watched]] = {}
    for watched in run.watched:
        if (found := watched.located) is not None:
            place = (found.operation, found.line) if found.operation else found.module
            groups.setdefault(place, []).append(watched)
    latest = sorted(groups.values(), key=lambda alike: alike[-1].step, reverse=True)[:_MOST_ROWS]
    rows = [
        (shown(str(alike[-1].located)), _ends([f"{each.step:,}" for each in alike]))
        for alike in latest
    ]
    title = "Where the first Inf or NaN was made"
    return [Table(title, ("Where", "Steps"), rows, names=0)] if rows else []


def tables_of(run: Run) -> list[Table]:
    """The other tables that have rows."""
    return [table for table in (_skips(run), _ranks(run)) if table.rows]


def _skips(run: Run) -> Table:
    """The skipped steps that were inspected, those that are alike in one row, the latest first."""
    groups: dict[object, list[Skip]] = {}
    for skip in run.skips:
        found = skip.nonfinite and skip.nonfinite[0]
        kind = found and (found.name, found.num_inf > 0, found.num_nan > 0)
        loss = None if skip.loss is None or math.isfinite(skip.loss) else number(skip.loss)
        groups.setdefault((kind, loss), []).append(skip)
    latest = sorted(groups.values(), key=lambda alike: alike[-1].step, reverse=True)
    are_of_ranks = run.starts[-1].world_size > 1
    rows = [_row(alike, are_of_ranks) for alike in latest[:_MOST_ROWS]]
    title = "Skipped steps"
    if len(run.skips) < len(run.skipped):
        title += f": the {len(run.skips):,} of {len(run.skipped):,} that were inspected"
    if len(latest) > _MOST_ROWS:
        title += f", the latest {_MOST_ROWS} kinds of {len(latest):,}"
    headings = "Steps", "Skips", "Gradients with Inf or NaN", "Loss", "Scale"
    return Table(title, headings, rows, names=2)


def _row(alike: Sequence[Skip], are_of_ranks: bool) -> tuple[str, ...]:
    """A row on skips that are alike: their ends, and what the gradients of the last one held."""
    steps = _ends([f"{skip.step:,}" for skip in alike])
    losses = _ends(["" if skip.loss is None else number(skip.loss) for skip in alike])
    scales = _ends([number(skip.scale) for skip in alike])
    gradients, last = "", alike[-1]
    if are_of_ranks and last.nonfinite == ():
        gradients = "another rank's"
    if last.nonfinite:
        first, others = last.nonfinite[0], len(last.nonfinite) - 1 + last.more
        counts = {"Inf": first.num_inf, "NaN": first.num_nan}
        held = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
        shape = shown("x".join(map(str, first.shape)), 60)
        gradients = f"{shown(first.name)}: {held} of {shape} ({shown(first.dtype, 20)})"
        gradients += f"; {others:,} more" if others else ""
    return steps, f"{len(alike):,}", gradients, losses, scales


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
