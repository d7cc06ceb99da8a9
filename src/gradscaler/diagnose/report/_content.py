"""What a report holds, of one run or of several, for the page and for the picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gradscaler._atomic import replacing
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._comparison import drawing_of
from gradscaler.diagnose.report._differences import alike, difference_tables, headline_of_runs
from gradscaler.diagnose.report._over_time import over_time
from gradscaler.diagnose.report._page import page_of
from gradscaler.diagnose.report._picture import picture_of
from gradscaler.diagnose.report._style import Course
from gradscaler.diagnose.report._summary import (
    Content,
    facts_of,
    headline_of,
    origin_tables_of,
    tables_of,
)
from gradscaler.diagnose.report._which_scale import which_scale


def save(content: Content, path: Path) -> None:
    """Write a report; see :func:`gradscaler.diagnose.report.write`."""
    makers = {".html": page_of, ".png": picture_of}
    make = makers.get(path.suffix.lower())
    if make is None:
        raise ValueError(f"{path}: the name must end in {' or '.join(makers)}")
    data = make(content)
    with replacing(path) as file:
        file.write(data)


def content_of(run: Run) -> Content:
    """The report on one run."""
    verdict = run.verdict
    drawings = (over_time(run), which_scale(run)) if run.num_steps else ()
    return Content(
        headline_of(run),
        verdict.text,
        verdict.where,
        origin_tables_of(run),
        facts_of(run),
        [drawing for drawing in drawings if drawing is not None],
        tables_of(run),
    )


def content_of_runs(runs: Mapping[str, Run]) -> Content:
    """The report on several runs, by their names, side by side."""
    courses = {
        name: Course(run.num_steps, run.scales, run.skipped, run.losses)
        for name, run in runs.items()
    }
    verdicts = [f"{name}: {headline_of(run).headline}." for name, run in runs.items()]
    return Content(
        headline_of_runs(runs),
        " ".join([*verdicts, alike(runs)]),
        None,
        difference_tables(runs),
        {},
        [drawing_of(courses, "loss", "Loss, unscaled")],
        [],
    )
