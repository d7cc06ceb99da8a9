"""Quantities that were not seen have no panel. The banner agrees with the figures."""

import re
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="the report is drawn with it")
pytest.importorskip("rich", reason="the terminal is written to with it")

from gradscaler.diagnose import report
from tests.support.reports import explained
from tests.support.run_files import HEADLINES, parameter, run_of, shares, skip, verdict
from tests.support.run_files import sample as sample_line

NAN = float("nan")
LOST = shares(0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


def sample(step, shares=None, loss=None, norm=None, scale=8.0):
    bins = None if shares is None else (0, [])
    return sample_line(step, scale, [(step, scale)], 1, [], loss, norm, shares, bins)


@pytest.fixture
def texts_of(tmp_path):
    """The texts of the page and of the terminal on a run with these samples."""

    def texts_of(*samples):
        run = run_of(*samples)
        report.write(run, tmp_path / "report.html")
        return (tmp_path / "report.html").read_text(encoding="utf-8"), explained(run, width=300)

    return texts_of


def test_what_was_not_seen_has_no_panel(texts_of):
    for text in texts_of(sample(1, norm=1.0)):
        assert ">Loss<" not in text
        assert "\nloss  " not in text
        assert "gradient norm" in text.lower()
        assert "subnormal" not in text


def test_numbers_that_are_never_finite_are_marked(texts_of):
    page, terminal = texts_of(sample(1, LOST, loss=NAN, norm=NAN), sample(2, LOST, loss=NAN))
    assert "never finite" in page  # an empty panel would say no more
    assert ">Loss<" not in page
    assert re.search("\nloss +!! +NaN", terminal)
    assert re.search("\ngradient norm +!! +NaN", terminal)


def assert_banner(run, kind):
    """Assert that the banner of a run in the terminal is that of a kind of verdict."""
    assert f"╭─ {HEADLINES[kind][1]} ─" in explained(run)


def test_the_banner_is_not_green_over_figures_that_show_otherwise(made_up_run):
    run = made_up_run()
    assert_banner(run, "normal")
    lost = run_of(*(skip(step, 8.0, NAN) for step in (1_010, 1_050, 1_099))).skips
    assert_banner(replace(run, skips=(*run.skips, *lost[2:])), "normal")
    assert_banner(replace(run, skips=(*run.skips, *lost)), "data")
    stuck = replace(run, verdicts=run_of(verdict(50, "nan", "The gradient is NaN.")).verdicts)
    assert_banner(stuck, "nan")  # though it recovered
    assert_banner(run_of(sample(1, loss=1.0, scale=0.5)), "floor")


def test_a_run_is_normal_if_most_gradients_of_the_smallest_parameter_fit(made_up_run):
    assert_banner(made_up_run(), "normal")
    assert made_up_run().fit.is_empty
    shown = explained(made_up_run(verdict=("underflow", "What. Why.", None)))
    assert " fits best: encoder.5.weight needs at least " in " ".join(shown.split())


def test_a_run_that_no_scale_fits_is_not_green(made_up_run):
    run, ends = made_up_run(samples=1), {"a": -40, "b": 0}
    parameters = {name: parameter(0.0, 0.0, 0.0, 0.0, (end, [1000])) for name, end in ends.items()}
    given = run_of(sample_line(1, 8.0, [], 1, [], parameters=parameters)).samples[0].parameters
    spread = replace(run, samples=(replace(run.samples[0], parameters=given),))
    assert_banner(spread, "range")
    assert spread.verdict.where == "a"
    assert "those of b overflow from 65536 on" in spread.verdict.text
