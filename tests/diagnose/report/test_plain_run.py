"""The report on a run without a scaler."""

import math
import re

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from gradscaler.__main__ import main
from gradscaler.diagnose import Located, report
from gradscaler.outcome import NonfiniteGradient
from tests.support.reports import drawn, explained, printed
from tests.support.run_files import append_run, bad_step, run_of, sample, start

PLACE = Located(
    None, "backward", "", "float32", 0, 0, 0, math.nan, math.nan, None, "sqrt", "t.py:9"
)
GRADIENT = NonfiniteGradient("fc.weight", (4, 8), "float32", 0, 32, math.nan)


@pytest.fixture
def run():
    """Fifty steps in bfloat16, of which the thirtieth was applied with NaN."""
    losses = [2.0 - step / 50 if step < 31 else math.nan for step in range(1, 51)]
    return run_of(
        start(policy={}, dtype="bfloat16"),
        {"kind": "sample", "step": 20, "steps": 20, "losses": losses[:20], "norm": 1.5},
        bad_step(30, losses[29], [GRADIENT], PLACE),
        {"kind": "sample", "step": 50, "steps": 30, "losses": losses[20:]},
    )


def test_the_terminal_shows_the_bad_step_and_no_scale(run):
    text = explained(run)
    assert "sqrt at t.py:9, though" in " ".join(text.split())
    assert "fc.weight: 32 NaN of 4x8 (float32)" in text
    assert "Computed in: bfloat16" in text
    assert "loss" in text
    assert [
        word for word in ("scale", "kip", "olicy") if word in text.replace("gradscaler", "")
    ] == []


def test_the_figure_has_no_panel_of_scales_and_skips(run, tmp_path):
    figure = drawn(run, tmp_path / "run.png")
    titles = {axes.get_title(loc="left") for axes in figure.findobj(match=_is_axes)}
    assert {"Loss", "Gradient norm"} <= titles
    assert titles.isdisjoint({"Loss scale", "Skipped steps so far"})


def _is_axes(artist):
    return hasattr(artist, "get_title")


def test_a_run_with_a_scaler_beside_it_shows_its_own_scale(run, tmp_path):
    scaled = run_of(sample(50, 8.0, [(1, 8.0)], 50, []))
    paths = [append_run(tmp_path / name, each) for name, each in (("a", run), ("b", scaled))]
    text = printed("compare", *paths, width=100)
    assert "first bad step" in text
    assert "last scale" in text


def test_there_is_no_policy_to_replay(run, tmp_path, capsys):
    assert main(["simulate", str(append_run(tmp_path / "run.jsonl", run))]) == 1
    assert "has no loss scale" in capsys.readouterr().err


def test_an_unknown_loss_of_a_bad_step_is_left_out():
    text = explained(run_of(start(policy={}), bad_step(3, None, [GRADIENT])))
    assert "The gradient of fc.weight is NaN, and step 3 was applied with it" in " ".join(
        text.split()
    )


def test_the_page_shows_a_step_s_numbers_under_the_pointer_and_marks_the_first_bad_one(
    run, tmp_path
):
    report.write(run, tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    strips = re.findall(r'<rect class="at" x="([\d.]+)" .*?<title>(.*?)</title>', page)
    assert len(strips) == 50
    assert strips[19][1] == "step 20: loss 1.6, gradient norm 1.5"
    places = [float(place) for place, _ in strips]
    assert places == sorted(set(places))
    assert "The dotted line is step 30, the first bad one that was applied." in page
    lines = [
        line
        for axes in drawn(run, tmp_path / "run.png").findobj(match=_is_axes)
        for line in axes.lines
        if line.get_linestyle() == ":"
    ]
    assert [list(line.get_xdata()) for line in lines] == [[30, 30]] * 2


def test_numbers_that_are_never_finite_get_a_word_and_no_panel(tmp_path):
    seen = {"kind": "sample", "step": 2, "steps": 2, "losses": [1.0, 0.5], "norm": math.nan}
    run = run_of(start(policy={}, dtype="float32"), seen)
    figure = drawn(run, tmp_path / "run.png")
    assert [axes.get_title(loc="left") for axes in figure.findobj(match=_is_axes)] == ["Loss"]
    assert "Gradient norm: never finite." in " ".join(explained(run).split())


def test_steps_are_named_with_their_epoch_and_batch_and_the_weights_norm_has_a_panel(tmp_path):
    def of(step, batch):
        seen = {"weights": [2.0, 1.0 + step]}
        return {"kind": "sample", "step": step, "steps": 1, "optimizers": seen, "batch": batch}

    failed = {**bad_step(2, 1.0, [GRADIENT], PLACE), "batch": [1, 2]}
    run = run_of(start(policy={}, dtype="float32"), of(1, [1, 1]), failed, of(3, [2, 1]))
    figure = drawn(run, tmp_path / "run.png")
    assert "Weights' norm" in [a.get_title(loc="left") for a in figure.findobj(match=_is_axes)]
    report.write(run, tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert "<title>step 3 (epoch 2, batch 1): loss 1, weights&#x27; norm 4</title>" in page
    assert "The dotted line is step 2 (epoch 1, batch 2), the first bad one" in page
    assert "<td>2 (epoch 1, batch 2)</td>" in page


def test_a_rate_that_changes_has_a_panel_and_one_that_does_not_a_word(tmp_path):
    def with_rates(*rates):
        kept = [
            {"kind": "sample", "step": n, "steps": 1, "losses": [1.0], "optimizers": {"rate": rate}}
            for n, rate in enumerate(rates, 1)
        ]
        return run_of(start(policy={}, dtype="float32"), *kept)

    titles = [
        [
            axes.get_title(loc="left")
            for axes in drawn(run, tmp_path / "a.png").findobj(match=_is_axes)
        ]
        for run in (with_rates(0.1, 0.01), with_rates(0.1, 0.1))
    ]
    assert titles == [["Loss", "Learning rate"], ["Loss"]]
    assert "Learning rate: 0.1." in " ".join(explained(with_rates(0.1, 0.1)).split())
