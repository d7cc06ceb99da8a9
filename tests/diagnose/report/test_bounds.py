"""Reports of a run that is too long, or of a model that is too large, to draw in full."""

import re
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="the report is drawn with it")

from gradscaler.diagnose import report
from gradscaler.outcome import NonfiniteGradient
from tests.support.reports import drawn
from tests.support.run_files import run_of, sample, skip


@pytest.fixture
def page_of(tmp_path):
    """Writes a run's report, and returns its HTML."""

    def page_of(run):
        report.write(run, tmp_path / "report.html")
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return page_of


def test_the_report_of_very_many_steps_is_small_and_shows_a_single_high_scale(page_of):
    samples = [
        sample(n, 2.0 ** (n % 7), [(n, 2.0 ** (n % 7))], 1, [n], n % 11) for n in range(1, 30_000)
    ]
    samples[20_000]["scale"] = 2.0**40
    page = page_of(run_of(*samples))
    assert len(page) < 300_000
    path, *_ = re.findall(r'<path d="([^"]*)"[^>]*stroke: #0072b2', page)  # that of the scales
    heights = sorted(float(height) for height in re.findall(r"[ML] \S+ (\S+)", path))
    assert heights[0] < heights[5] - 50  # of the page, downwards


def test_of_very_many_parameters_some_have_a_row_and_those_that_set_the_bounds_always(
    page_of, made_up_run, tmp_path
):
    names = [f"layer{n}" for n in range(2501)]
    run = made_up_run(samples=1, names=names, verdict=("underflow", "What. Why.", None))
    assert "One in 70 of the 2,501 parameters has a row." in page_of(run)
    axes = next(axes for axes in drawn(run, tmp_path / "report.png").axes if axes.images)
    assert axes.images[0].get_array().shape[0] <= 1 + 36 + 2
    names = {label.get_text() for label in axes.get_yticklabels()}
    assert {run.fit.lowest, run.fit.highest} <= names


def test_of_very_many_kinds_of_skips_the_latest_have_a_row(page_of, made_up_run):
    skips = [
        skip(n, 8.0, 1.0, [NonfiniteGradient(f"w{n}", (2,), "float16", 1, 0, 1.0)])
        for n in range(1, 51)
    ]
    page = page_of(replace(made_up_run(samples=1), skips=run_of(*skips).skips))
    assert "the latest 10 kinds of 50</h2>" in page
    steps = re.findall(r"<tr><td>(\d+)</td>", page)
    assert steps == [str(n) for n in range(50, 40, -1)]
