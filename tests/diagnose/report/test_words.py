"""No panel is empty: words say why there is nothing to draw. The banner agrees with the figures."""

from dataclasses import replace
from io import StringIO

import pytest

pytest.importorskip("matplotlib", reason="the report is drawn with it")
pytest.importorskip("rich", reason="the terminal is written to with it")

from rich.console import Console

from gradscaler.diagnose import report
from gradscaler.diagnose._findings.finding import KINDS
from gradscaler.diagnose._run.lines import Bins, ParameterSample, Sample, Shares, Skip, VerdictLine
from gradscaler.diagnose.report._summary import headline_of
from gradscaler.diagnose.report._terminal import Explained
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
        console.print(Explained(run))
        return (tmp_path / "report.html").read_text(encoding="utf-8"), console.file.getvalue()

    return texts_of


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([sample(1)], ["No loss was recorded.", "No gradients were sampled in 1 steps."]),
        ([sample(1, loss=NAN)], ["The loss is NaN or Inf at the one step where it was seen."]),
        (
            [sample(1, loss=NAN), sample(2, loss=NAN)],
            ["The loss is NaN or Inf at all 2 steps where it was seen."],
        ),
    ],
)
def test_words_stand_where_nothing_can_be_drawn(texts_of, samples, words):
    page, terminal = texts_of(*samples)
    for text in words:
        assert text in page
        assert text in terminal


def test_a_norm_that_is_never_finite_is_said_in_words(texts_of):
    page, _ = texts_of(sample(1, LOST, norm=NAN))
    assert "The norm is NaN or Inf at the one step where it was seen." in page


def test_a_run_with_everything_has_no_such_words(texts_of, made_up_run):
    for text in texts_of(*made_up_run().samples):
        assert "was recorded" not in text
        assert "were sampled" not in text


def test_the_banner_is_not_green_over_figures_that_show_otherwise(made_up_run):
    run = made_up_run()
    assert headline_of(run) == KINDS["normal"]
    lost = [Skip(step, 8.0, NAN) for step in (910, 950, 999)]
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
