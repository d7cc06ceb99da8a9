"""What a report holds, of one run or of several, for the page and for the picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradscaler.diagnose._findings.kinds import Kind
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._comparison import difference_table, drawing_of_runs
from gradscaler.diagnose.report._figures import drawings_of
from gradscaler.diagnose.report._style import Drawing
from gradscaler.diagnose.report._summary import (
    Table,
    facts_of,
    headline_of,
    headline_of_runs,
    tables_of,
)


@dataclass(frozen=True)
class Content:
    """The headline, its text, and the evidence, in their order."""

    headline: Kind
    text: str
    where: str | None  # the name to look at
    facts: Mapping[str, str]
    drawings: list[Drawing]
    tables: list[Table]


def content_of(run: Run) -> Content:
    """The report on one run."""
    verdict = run.verdict
    return Content(
        headline_of(run),
        verdict.text,
        verdict.where,
        facts_of(run),
        drawings_of(run),
        tables_of(run),
    )


def content_of_runs(runs: Mapping[str, Run]) -> Content:
    """The report on several runs, by their names, side by side."""
    headline = headline_of_runs(runs)
    text = " ".join(f"{name}: {headline_of(run).headline}." for name, run in runs.items())
    return Content(headline, text, None, {}, [drawing_of_runs(runs)], [difference_table(runs)])
