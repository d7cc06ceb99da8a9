"""In what several runs differ, and in what they do not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from gradscaler.diagnose._findings.finding import Kind
from gradscaler.diagnose._run.reader import read_run
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._summary import LEVELS, Table, headline_of
from gradscaler.diagnose.report._words import number, percent, shown


def read_each(paths: Iterable[Path]) -> dict[str, Run]:
    """Runs to compare by their names: their files' own, or their paths where two are the same.

    Raises:
        ValueError, OSError: as :func:`~gradscaler.diagnose.read_run` does; or a file is given
            twice.
    """
    paths = list(paths)
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = list(map(str, paths))
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name}: is given twice; give each run to compare once")
    return {name: read_run(path) for name, path in zip(names, paths, strict=True)}


def headline_of_runs(runs: Mapping[str, Run]) -> Kind:
    """How many runs are compared, as bad as the worst of them."""
    levels = {headline_of(run).level for run in runs.values()}
    worst = next(level for level in LEVELS if level in levels)
    return Kind(worst, f"{len(runs)} runs side by side")


def difference_tables(runs: Mapping[str, Run]) -> list[Table]:
    """A table with a row for each number that differs, and a column for each run, if any does."""
    rows = [(name, *cells) for name, cells in _cells(runs).items() if len(set(cells)) > 1]
    headings = ("", *(shown(name, 40) for name in runs))
    return [Table("What differs", headings, rows, names=0)] if rows else []


def alike(runs: Mapping[str, Run]) -> str:
    """What is the same in all runs, in a sentence."""
    same = {name: cells[0] for name, cells in _cells(runs).items() if len(set(cells)) == 1}
    return f"Alike: {', '.join(f'{name} {cell}' for name, cell in same.items() if cell)}."


def _cells(runs: Mapping[str, Run]) -> dict[str, list[str]]:
    """What each run was told, then what became of it, by name."""
    each = list(runs.values())
    starts = [run.starts[-1] for run in each]
    policies = [start.policy for start in starts]
    keys = dict.fromkeys(key for policy in policies for key in policy if key != "name")
    cells = {
        "policy": [str(policy.get("name", "unknown")) for policy in policies],
        **{key: [_value(policy.get(key)) for policy in policies] for key in keys},
        "measured against": [start.dtype for start in starts],
        "framework": [start.framework for start in starts],
        "steps": [f"{run.num_steps:,}" for run in each],
        "skipped": [_skipped(run) for run in each],
        "last scale": [number(run.scales[1][-1]) if run.scales[1] else "" for run in each],
        "last finite loss": [_last_loss(run) for run in each],
        "flushed": [_latest_share(run, "flushed") for run in each],
        "subnormal": [_latest_share(run, "subnormal") for run in each],
        "verdict": [headline_of(run).headline for run in each],
    }
    return {shown(name, 40): [shown(cell, 60) for cell in row] for name, row in cells.items()}


def _skipped(run: Run) -> str:
    share = len(run.skipped) / max(1, run.num_steps)
    return f"{len(run.skipped):,} ({percent(share)})"


def _latest_share(run: Run, name: str) -> str:
    """A share in the latest sample with gradients."""
    return percent(getattr(run.shares[max(run.shares)], name)) if run.shares else ""


def _last_loss(run: Run) -> str:
    finite = [loss for loss in run.losses.values() if math.isfinite(loss)]
    return number(finite[-1]) if finite else ""


def _value(value: object) -> str:
    """A parameter of a policy."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(float(value))
    return "" if value is None else str(value)
