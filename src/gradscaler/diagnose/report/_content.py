"""The content of a report on one run or several, which page, picture and terminal all show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from gradscaler.diagnose._findings.ranks import read_run
from gradscaler.diagnose._findings.run import Run
from gradscaler.diagnose._gradients.fitting_scales import Fit
from gradscaler.diagnose._record.kinds import Kind, Level, kind_of
from gradscaler.diagnose._record.lines import BadStep, LineT, Shares, Skip, Watched
from gradscaler.diagnose._record.source import Source, source_of
from gradscaler.diagnose.report._words import ends, named, number, percent, shown

LEVELS: tuple[Level, ...] = ("bad", "warning", "good")
_MOST_ROWS = 10  # of a table; the latest ones, and the title counts the others
_MOST_RANKS = 20  # more than two nodes of eight; the title counts the others

CLASSES: dict[str, Callable[[Shares], float]] = {
    "flushed": lambda share: share.flushed,
    "subnormal": lambda share: share.subnormal,
    "overflow, Inf, NaN": lambda share: share.overflow + share.nonfinite,
    "zero": lambda share: share.zero,
    "normal": lambda share: share.normal,
}
"""The classes of gradients after a cast to a format, each with a function for its share."""


class Headline(NamedTuple):
    """A report in a few words, and how bad they are."""

    level: Level
    text: str


class Table(NamedTuple):
    """Rows of texts. The column ``names`` holds names; the other columns hold numbers."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    names: int


class Course(NamedTuple):
    """The course of a run, or of a replay of one, step by step."""

    num_steps: int
    scales: Mapping[int, float]  # as in `Run`
    skipped: Sequence[int]
    curves: Mapping[str, Mapping[int, float]]  # numbers by step, such as losses, by their name
    shares: Mapping[int, Shares]
    dtype: str  # the format that the shares refer to
    first_bad: int | None = None  # the first step that was applied with an Inf or NaN
    batches: Mapping[int, tuple[int, int]] = {}  # the epoch and the batch in it by step, from 1

    def at(self, step: int) -> str:
        """The numbers of a step, or the latest before it, in one line."""
        numbers = {"loss scale": self.scales} if self.scales else {}
        numbers |= {name.lower(): points for name, points in self.curves.items()}
        latest = {
            name: max((s for s in points if s <= step), default=None)
            for name, points in numbers.items()
        }
        texts = [
            f"{name} {number(numbers[name][s])}" for name, s in latest.items() if s is not None
        ]
        return f"step {named(step, self.batches)}: {', '.join(texts)}"


@dataclass(frozen=True)
class Content:
    """The headline, its text, and the evidence, in the order in which a report shows them."""

    headline: Headline
    text: str
    first: Sequence[Table]  # tables that explain the headline
    facts: str  # a summary in one line
    courses: Mapping[str, Course]  # by the runs' names
    fit: Fit | None  # given if another scale may help
    tables: Sequence[Table]
    action: str = ""  # what to try, which the text holds, too; empty if it is not known
    source: Source | None = None  # the user's line that is at fault
    origin: str = ""  # where and when the run was made; a picture leaves it out
    meanings: Mapping[str, Kind] = field(default_factory=dict)  # of the findings, by their kinds

    @property
    def why(self) -> str:
        """The text without the action."""
        return " ".join(self.text.replace(self.action, "", 1).split()) if self.action else self.text


def content_of(run: Run) -> Content:
    """The report on one run."""
    verdict, latest = run.verdict, run.latest
    kinds = dict.fromkeys([verdict.kind, *(finding.kind for finding in verdict.findings)])
    curves = {"Gradient norm": run.norms}
    if len(run.weights) > 1:
        curves["Weights' norm"] = run.weights
    if len(set(run.rates.values())) > 1:
        curves["Learning rate"] = run.rates
    found = next(iter(latest.verdict.findings), None)
    if found is not None and found.kind != verdict.kind:  # it is about the ranks
        found = None
    return Content(
        headline_of(run),
        verdict.text,
        _with_rows(_origins(latest)),
        _facts_of(latest),
        {"": _course_of(run, curves, run.shares)} if _has_course(run) else {},
        latest.fit if any(kind_of(kind).shows_fit for kind in kinds) else None,
        _with_rows(_skips(latest), _bad_steps(latest), _ranks(run)),
        "" if found is None else found.action,
        None if found is None else source_of(found.line, latest.starts[-1].time),
        _origin_of(latest),
        {kind: kind_of(kind) for kind in kinds if kind_of(kind).meaning},
    )


def content_of_runs(runs: Mapping[str, Run]) -> Content:
    """The report on several runs, by their names. Their differences come first."""
    levels = {headline_of(run).level for run in runs.values()}
    worst = next(level for level in LEVELS if level in levels)
    cells = _cells(runs)
    differing = [(name, *row) for name, row in cells.items() if len(set(row)) > 1]
    alike = [(name, row[0]) for name, row in cells.items() if len(set(row)) == 1 and row[0]]
    names = "", *(shown(name, 40) for name in runs)
    return Content(
        Headline(worst, f"{len(runs)} runs side by side"),
        "",
        _with_rows(Table("What differs", names, differing, names=0)),
        "",
        {name: _course_of(run, {}, {}) for name, run in runs.items() if _has_course(run)},
        None,
        _with_rows(Table("What is alike", ("", "all"), alike, names=0)),
    )


def read_each(paths: Iterable[Path]) -> dict[str, Run]:
    """Read runs to compare, by the names of their files; by their paths if two names are the same.

    Raises:
        ValueError: a file is given twice, or :func:`~gradscaler.diagnose.read_run` refuses it.
        OSError: a file cannot be read.
    """
    paths = list(paths)
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = list(map(str, paths))
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name}: is given twice; give each run to compare once")
    return {name: read_run(path) for name, path in zip(names, paths, strict=True)}


def headline_of(run: Run) -> Headline:
    """The headline of a run's verdict, and its level."""
    if run.num_steps == run.starts[-1].step and run.verdict.kind == "normal":
        return Headline("warning", "No step is recorded yet")
    kind = kind_of(run.verdict.kind)
    return Headline(kind.level, shown(kind.headline, 60))


def _facts_of(run: Run) -> str:
    """The summary of a run in one line."""
    start, where = run.starts[-1], run.verdict.where
    facts = {} if where is None else {"Look at": shown(where)}
    if where is not None and run.verdict.kind in ("underflow", "range"):
        facts |= _shares_of(where, run)
    facts |= {"Steps": _steps(run)}
    if run.has_scaler:
        facts["Skipped"] = _skipped(run)
    if run.scales:
        facts["Loss scale"] = ends(list(map(number, run.scales.values())))
    if len(set(run.rates.values())) == 1:
        facts["Learning rate"] = number(*set(run.rates.values()))
    for name, points in {"Loss": run.losses, "Gradient norm": run.norms}.items():
        if points and not any(map(math.isfinite, points.values())):
            facts[name] = "never finite"
    if run.num_losses > 1:
        facts["Losses in a step"] = (
            f"{run.num_losses:,} (the loss shown is the last one: under accumulation, the share of "
            "a micro-batch)"
        )
    if start.world_size > 1:
        facts["Rank"] = f"{start.rank:,} (of {start.world_size:,})"
    if run.has_scaler:
        facts["Policy"] = shown(str(start.policy.get("name", "unknown")), 40)
    else:
        facts["Computed in"] = start.dtype
    return _in_one_line(facts)


def _in_one_line(facts: Mapping[str, str]) -> str:
    return ". ".join(f"{name}: {fact}" for name, fact in facts.items()) + "."


def _origin_of(run: Run) -> str:
    """Where and when a run was made, as far as its file says so."""
    start = run.starts[-1]
    versions = ", ".join(f"{name} {version}" for name, version in start.versions.items())
    facts = {"Run": run.file, "Script": start.script, "Started": start.time, "With": versions}
    return _in_one_line({name: shown(fact, 80) for name, fact in facts.items() if fact})


def _shares_of(where: str, run: Run) -> dict[str, str]:
    """A parameter's shares in the latest sample that has it, as a text with its label."""
    for sample in reversed(run.samples):
        if where in sample.parameters:
            found = sample.parameters[where]
            shares = {"flushed": found.flushed, "subnormal": found.subnormal, "zero": found.zero}
            text = ", ".join(f"{percent(share)} {name}" for name, share in shares.items())
            return {f"{shown(where, 40)} at step {sample.step:,}": text}
    return {}


def _has_course(run: Run) -> bool:
    """Whether anything was seen of a run's steps."""
    return bool(run.scales or run.losses or run.norms)


def _course_of(
    run: Run, curves: Mapping[str, Mapping[int, float]], shares: Mapping[int, Shares]
) -> Course:
    dtype = shown(run.starts[-1].dtype, 20)
    seen = {name: points for name, points in {"Loss": run.losses, **curves}.items() if points}
    applied = [bad.step for bad in run.bad_steps if not bad.is_left_out]
    first_bad = min(applied, default=None)
    scales, skipped = run.scales, run.skipped
    return Course(run.num_steps, scales, skipped, seen, shares, dtype, first_bad, run.batches)


def _with_rows(*tables: Table) -> list[Table]:
    return [table for table in tables if table.rows]


def _origins(run: Run) -> Table:
    """The places where an Inf or NaN was made first, the latest place on top."""
    groups: dict[object, list[Watched | BadStep]] = {}
    # After the first bad step, the parameters themselves are bad.
    last = min((bad.step for bad in run.bad_steps), default=run.num_steps)
    seen: list[Watched | BadStep] = [each for each in run.watched if each.step <= last]
    for watched in (*run.bad_steps, *seen):
        if (found := watched.located) is not None:
            place = (found.operation, found.line) if found.operation else found.module
            groups.setdefault(place, []).append(watched)
    rows = [
        (shown(str(alike[-1].located)), ends([f"{each.step:,}" for each in alike]))
        for alike in _latest_first(groups.values())
    ]
    return Table("Where the first Inf or NaN was made", ("Where", "Steps"), rows, names=0)


def _skips(run: Run) -> Table:
    """The inspected skips, with a row for each group of similar ones, the latest group first."""
    groups: dict[object, list[Skip]] = {}
    for skip in run.skips:
        found = skip.nonfinite and skip.nonfinite[0]
        kind = found and (found.name, found.num_inf > 0, found.num_nan > 0)
        loss = None if skip.loss is None or math.isfinite(skip.loss) else number(skip.loss)
        groups.setdefault((kind, loss), []).append(skip)
    rows = [_row(alike, run.starts[-1].world_size > 1) for alike in _latest_first(groups.values())]
    title = "Skipped steps" if run.has_scaler else "Steps that the script left out"
    if len(run.skips) < len(run.skipped):
        title += f": the {len(run.skips):,} of {len(run.skipped):,} that were inspected"
    if len(groups) > _MOST_ROWS:
        title += f", the latest {_MOST_ROWS} kinds of {len(groups):,}"
    gradients = "Gradients with Inf or NaN"
    if not run.has_scaler:
        rows = [row[:-1] for row in rows]
        return Table(title, ("Steps", "Number", gradients, "Loss"), rows, names=2)
    return Table(title, ("Steps", "Skips", gradients, "Loss", "Scale"), rows, names=2)


def _bad_steps(run: Run) -> Table:
    """The steps that were applied with gradients of Inf or NaN, the first of each streak."""
    rows = [
        (named(bad.step, run.batches), _held(bad), "" if bad.loss is None else number(bad.loss))
        for bad in run.bad_steps[:_MOST_ROWS]
        if bad.nonfinite and not bad.is_left_out
    ]
    title = "Steps that were applied with Inf or NaN, the first of each streak"
    return Table(title, ("Step", "Gradients with Inf or NaN", "Loss"), rows, names=1)


def _latest_first(groups: Iterable[list[LineT]]) -> list[list[LineT]]:
    """The latest groups of lines, sorted by the last step of each group, the latest first."""
    return sorted(groups, key=lambda alike: alike[-1].step, reverse=True)[:_MOST_ROWS]


def _row(alike: Sequence[Skip], are_of_ranks: bool) -> tuple[str, ...]:
    """A row on similar skips: the first and the last of them, and the gradients of the last."""
    steps = ends([named(skip.step, {skip.step: skip.batch}) for skip in alike])
    losses = ends(["" if skip.loss is None else number(skip.loss) for skip in alike])
    scales = ends([number(skip.scale) for skip in alike])
    gradients, last = "", alike[-1]
    if are_of_ranks and last.nonfinite == ():
        gradients = "another rank's"
    if last.nonfinite:
        gradients = _held(last)
    return steps, f"{len(alike):,}", gradients, losses, scales


def _held(step: Skip | BadStep) -> str:
    """The first gradient of a step that held an Inf or NaN, and the number of the others."""
    first, *rest = step.nonfinite or ()
    counts, others = {"Inf": first.num_inf, "NaN": first.num_nan}, len(rest) + step.more
    held = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
    shape = shown("x".join(map(str, first.shape)), 60)
    gradients = f"{shown(first.name)}: {held} of {shape} ({shown(first.dtype, 20)})"
    return f"{gradients}; {others:,} more" if others else gradients


def _ranks(run: Run) -> Table:
    """A row for each rank, the rank at fault first; empty unless several ranks' files were read.

    A rank's own skips are the steps in which its own gradients held an Inf or a NaN.
    """
    rows = []
    for rank, own in islice(run.ranks.items(), _MOST_RANKS):
        bad = [skip.step for skip in own.skips if skip.nonfinite]
        counts = f"{own.num_steps:,}", f"{len(own.skipped):,}", f"{len(bad):,}"
        first = f"{bad[0]:,}" if bad else ""
        rows.append((f"{rank:,}", shown(own.verdict.kind, 40), *counts, first, _last_scale(own)))
    headings = "Rank", "Verdict", "Steps", "Skipped", "Own skips", "First own", "Last scale"
    title = f"Ranks: the files of {len(run.ranks):,} of {run.starts[-1].world_size:,}"
    return Table(title, headings, rows, names=1)


def _cells(runs: Mapping[str, Run]) -> dict[str, list[str]]:
    """The verdict, the settings and the results of the runs: a cell per run, by the row's name."""
    each = [run.latest for run in runs.values()]
    starts = [run.starts[-1] for run in each]
    policies = [start.policy for start in starts]
    keys = dict.fromkeys(key for policy in policies for key in policy if key != "name")
    cells = {
        "verdict": [headline_of(run).text for run in each],
        "policy": [str(policy.get("name", "unknown" if policy else "")) for policy in policies],
        **{key: [_value(policy.get(key)) for policy in policies] for key in keys},
        "measured against": [start.dtype for start in starts],
        "framework": [start.framework for start in starts],
        "steps": list(map(_steps, each)),
        "skipped": [_skipped(run) if run.has_scaler else "" for run in each],
        "first bad step": [f"{run.bad_steps[0].step:,}" if run.bad_steps else "" for run in each],
        "last scale": list(map(_last_scale, each)),
        "last finite loss": list(map(_last_loss, each)),
        "flushed": [_latest_share(run, "flushed") for run in each],
        "subnormal": [_latest_share(run, "subnormal") for run in each],
    }
    return {shown(name, 40): [shown(cell, 60) for cell in row] for name, row in cells.items()}


def _steps(run: Run) -> str:
    start = run.starts[-1].step
    return f"{run.num_steps - start:,}" + (f", from {start + 1:,} on" if start else "")


def _skipped(run: Run) -> str:
    share = len(run.skipped) / max(1, run.num_steps - run.starts[-1].step)
    return f"{len(run.skipped):,} ({percent(share)})"


def _last_scale(run: Run) -> str:
    return number(run.scales[max(run.scales)]) if run.scales else ""


def _latest_share(run: Run, name: str) -> str:
    """A share in the latest sample that has shares, as a text; empty if there is none."""
    return percent(getattr(run.shares[max(run.shares)], name)) if run.shares else ""


def _last_loss(run: Run) -> str:
    finite = (loss for loss in reversed(run.losses.values()) if math.isfinite(loss))
    return next(map(number, finite), "")


def _value(value: object) -> str:
    """A parameter of a policy, as a text."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(float(value))
    return "" if value is None else str(value)
