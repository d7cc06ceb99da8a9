"""What is drawn of a run too long, or a model too large, to draw in full."""

import re
from dataclasses import replace
from io import StringIO

import pytest

pytest.importorskip("matplotlib", reason="the report is drawn with it")

from matplotlib.figure import Figure

from gradscaler.diagnose import report
from gradscaler.diagnose.report._content import content_of
from gradscaler.diagnose.report._figures import WIDTH, drawing_settings, over_time, which_scale
from gradscaler.outcome import NonfiniteGradient
from tests.support.run_files import run_of, sample, skip


def test_a_report_of_very_many_steps_is_small(tmp_path):
    samples = [
        sample(n, 2.0 ** (n % 7), [(n, 2.0 ** (n % 7))], 1, [n], n % 11) for n in range(1, 90_000)
    ]
    report.write(run_of(*samples), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 300_000


def test_a_single_high_scale_among_very_many_is_drawn():
    samples = [sample(n, 2.0 ** (n % 7), [(n, 2.0 ** (n % 7))], 1, []) for n in range(1, 90_000)]
    samples[70_000]["scale"] = 2.0**40
    run = run_of(*samples)
    with drawing_settings():
        over_time(content_of(run).courses).draw(figure := Figure(figsize=(WIDTH, 3)))
        figure.savefig(file := StringIO(), format="svg")
        (path,) = re.findall(r'<path d="([^"]*)"[^>]*stroke: #0072b2', file.getvalue())
    heights = sorted(float(height) for height in re.findall(r"[ML] \S+ (\S+)", path))
    assert heights[0] < heights[5] - 50  # of the page, downwards


def test_of_very_many_parameters_some_have_a_row_and_those_that_set_the_bounds_always(made_up_run):
    run = made_up_run(samples=1, names=[f"layer{n}" for n in range(2501)])
    drawing, figure = which_scale(run.fit), Figure()
    assert "One in 70 of the 2,501 parameters has a row." in drawing.caption
    with drawing_settings():
        drawing.draw(figure)
    ((image,),) = (axes.images for axes in figure.axes)
    assert image.get_array().shape[0] <= 1 + 36 + 2
    names = {label.get_text() for label in figure.axes[0].get_yticklabels()}
    assert {run.fit.lowest, run.fit.highest} <= names


def test_of_very_many_kinds_of_skips_the_latest_have_a_row(made_up_run):
    skips = [
        skip(n, 8.0, 1.0, [NonfiniteGradient(f"w{n}", (2,), "float16", 1, 0, 1.0)])
        for n in range(1, 51)
    ]
    (table,) = content_of(replace(made_up_run(samples=1), skips=run_of(*skips).skips)).tables
    assert table.title.endswith("the latest 10 kinds of 50")
    assert [row[0] for row in table.rows] == [str(n) for n in range(50, 40, -1)]
