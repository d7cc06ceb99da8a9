"""What is drawn of a run too long, or a model too large, to draw in full."""

from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="the report is drawn with it")

import numpy as np
from matplotlib.figure import Figure

from gradscaler.diagnose._run.lines import Sample, Skip
from gradscaler.diagnose.report._over_time import over_time
from gradscaler.diagnose.report._style import draw_scale, drawing_settings
from gradscaler.diagnose.report._summary import facts_of, tables_of
from gradscaler.diagnose.report._which_scale import which_scale
from gradscaler.outcome import NonfiniteGradient


def test_many_scales_are_drawn_by_the_ends_of_equal_parts(made_up_run):
    samples = tuple(
        Sample(n, 2.0 ** (n % 7), ((n, 2.0 ** (n % 7)),), 1, ()) for n in range(1, 9000)
    )
    samples = (*samples[:5000], replace(samples[5000], scale=2.0**40), *samples[5001:])
    run = replace(made_up_run(samples=0), samples=samples)
    assert (
        " Of 8,999 scales, the lowest and the highest of 400 equal parts" in over_time(run).caption
    )
    axes = Figure().subplots()
    draw_scale(axes, run)
    (line,) = axes.lines
    assert 400 < line.get_ydata().size < 1300
    assert (np.nanmin(line.get_ydata()), np.nanmax(line.get_ydata())) == (0, 40)
    assert tuple(line.get_xdata()[[0, -1]]) == (0.5, 8999.5)


def test_a_run_with_few_scales_is_drawn_in_full(made_up_run):
    assert "equal parts" not in over_time(made_up_run()).caption


def test_of_very_many_parameters_some_have_a_row_and_those_that_set_the_bounds_always(made_up_run):
    run = made_up_run(samples=1, names=[f"layer{n}" for n in range(2501)])
    drawing, figure = which_scale(run), Figure()
    assert "One in 70 of the 2,501 parameters has a row." in drawing.caption
    with drawing_settings():
        drawing.draw(figure)
    ((image,),) = (axes.images for axes in figure.axes)
    assert image.get_array().shape[0] <= 1 + 36 + 2
    names = {label.get_text() for label in figure.axes[0].get_yticklabels()}
    assert {run.fit.lowest, run.fit.highest} <= names


def test_of_very_many_kinds_of_skips_the_latest_have_a_row(made_up_run):
    skips = tuple(
        Skip(n, 8.0, 1.0, (NonfiniteGradient(f"w{n}", (2,), "float16", 1, 0, 1.0),))
        for n in range(1, 51)
    )
    (table,) = tables_of(replace(made_up_run(samples=1), skips=skips))
    assert table.title.endswith("the latest 10 kinds of 50")
    assert [row[0] for row in table.rows] == [str(n) for n in range(50, 40, -1)]


def test_the_format_of_the_samples_is_not_said_to_be_that_of_the_training(made_up_run):
    facts = facts_of(made_up_run(dtype="bfloat16"))
    assert (facts["Trained with"], facts["Measured against"]) == ("torch", "bfloat16")
