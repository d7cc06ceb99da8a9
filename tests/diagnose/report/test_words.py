"""What was not seen has no panel. The banner agrees with the figures."""

import re
from dataclasses import replace
from io import StringIO

import pytest

pytest.importorskip("matplotlib", reason="the report is drawn with it")
pytest.importorskip("rich", reason="the terminal is written to with it")

from rich.console import Console

from gradscaler.diagnose import report
from gradscaler.diagnose._findings.finding import KINDS
from gradscaler.diagnose._run.lines import Bins, ParameterSample, Sample, Shares, Skip, VerdictLine
from gradscaler.diagnose.report._content import content_of, headline_of
from gradscaler.diagnose.report._terminal import Printed
from gradscaler.diagnose.report._words import sentence_of

NAN = float("nan")
LOST = Shares(0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


def sample(step, shares=None, loss=None, norm=None, scale=8.0):
    bins = None if shares is None else Bins(0, ())
    return Sample(step, scale, ((step, scale),), 1, (), loss, norm, shares, bins)


@pytest.fixture
def texts_of(made_up_run, tmp_path):
    """What the page and the terminal say of a run with these samples."""

    def texts_of(*samples):
        run = replace(made_up_run(samples=0), samples=samples)
        report.write(run, tmp_path / "report.html")
        console = Console(file=StringIO(), width=300)
        console.print(Printed(content_of(run)))
        return (tmp_path / "report.html").read_text(encoding="utf-8"), console.file.getvalue()

    return texts_of


def test_what_was_not_seen_has_no_panel(texts_of):
    for text in texts_of(sample(1, norm=1.0)):
        assert ">Loss<" not in text
        assert "\nloss  " not in text
        assert "gradient norm" in text.lower()
        assert "normal" not in text


def test_numbers_that_are_never_finite_are_marked(texts_of):
    page, terminal = texts_of(sample(1, LOST, loss=NAN, norm=NAN), sample(2, LOST, loss=NAN))
    assert ">Loss<" in page
    assert re.search("\nloss +!! +NaN", terminal)
    assert re.search("\ngradient norm +!! +NaN", terminal)


def test_the_banner_is_not_green_over_figures_that_show_otherwise(made_up_run):
    run = made_up_run()
    assert headline_of(run) == KINDS["normal"]
    lost = [Skip(step, 8.0, NAN) for step in (1_010, 1_050, 1_099)]
    assert headline_of(replace(run, skips=(*run.skips, *lost[2:]))) == KINDS["normal"]
    assert headline_of(replace(run, skips=(*run.skips, *lost))) == KINDS["data"]
    stuck = replace(run, verdicts=(VerdictLine(50, "nan", "", None),))
    assert headline_of(stuck) == KINDS["nan"]  # though it recovered
    fit = run.fit  # of the smallest parameter's gradients most fit at the largest scale
    assert fit.is_empty
    assert fit.lost < 0.5
    assert " fits best: " in sentence_of(fit)
    low = replace(run, samples=(sample(1, loss=1.0, scale=0.5),), skips=())
    assert headline_of(low) == KINDS["floor"]


def test_a_run_that_no_scale_fits_is_not_green(made_up_run):
    run = made_up_run(samples=1)
    bins = Bins(-40, (1000,)), Bins(0, (1000,))
    parameters = {
        name: ParameterSample(0.0, 0.0, 0.0, 0.0, b) for name, b in zip("ab", bins, strict=True)
    }
    spread = replace(run.samples[0], parameters=parameters)
    spread = replace(run, samples=(spread,))
    assert headline_of(spread) == KINDS["range"]
    assert spread.verdict.where == "a"
    assert "those of b overflow from 65536 on" in spread.verdict.text
