"""``python -m gradscaler explain``: a run in the terminal."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("rich", reason="the terminal is written to with it")

from hypothesis import given
from hypothesis import strategies as st

from gradscaler.__main__ import main
from gradscaler.outcome import NonfiniteGradient
from tests.support import run_files
from tests.support.reports import explained, line_of
from tests.support.run_files import run_of, skip


def chart_of(losses, width=80):
    """The chart of a run whose steps have these losses."""
    run = run_of(*(skip(step, 1.0, loss) for step, loss in enumerate(losses, 1)))
    return line_of(explained(run, width), "loss  ").split()[1]


def test_the_verdict_comes_first(made_up_run):
    run = made_up_run(stuck=37, verdict=("nan", "What happened. What to try.", "encoder.0.weight"))
    text = explained(run)
    assert "A gradient is NaN or Inf" in text.splitlines()[0]
    assert "What happened. What to try." in text.splitlines()[1]
    assert "Look at: encoder.0.weight" in text.splitlines()[3]


def test_it_shows_the_numbers(made_up_run):
    text = explained(made_up_run(stuck=37))
    assert "Skipped: 45 (4.3%)" in text
    assert line_of(text, "loss scale").split()[-3:] == ["65,536", "→", "2⁻²²"]
    assert line_of(text, "gradient norm").split()[-3:] == ["2.7", "→", "1.046"]
    assert "encoder.0.weight: 12 Inf" in text
    assert "1,001 → 1,037" in text


def test_a_chart_has_a_column_for_each_step_of_a_short_run(made_up_run):
    text = explained(made_up_run(samples=0, stuck=8))
    assert line_of(text, "loss scale").split()[2] == "█▇▆▅▄▃▂▁"
    assert line_of(text, "loss  ").split()[1:] == ["!!!!!!!!", "NaN"]


def test_the_largest_and_the_smallest_float_differ_in_a_chart():
    assert chart_of([-1.7e308, 1.7e308]) == "▁█"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(made_up_run, width):
    run = made_up_run(names=["w" * 300, "[bold]b[/bold]"], stuck=30)
    assert max(map(len, explained(run, width).splitlines())) <= width


def test_names_are_shown_as_they_are_and_control_nothing(made_up_run):
    run = made_up_run(names=["[red]x[/red]", "bell\x07 \x1b[31m"])
    text = explained(run)
    assert "[red]x[/red]" in text
    assert "\x07" not in text
    assert "\x1b" not in text


def test_several_ranks_have_one_verdict_and_a_row_each(save_ranks, capsys):
    paths = save_ranks(at_fault=2)
    assert main(["explain", *paths]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    text = " ".join(" ".join(line) for line in lines)
    assert "Gradients overflow at the smallest scale" in text
    assert "rank 2: What happened. What to try." in text
    assert "Rank: 2 (of 4)" in text
    assert "Ranks: the files of 3 of 4" in text
    rows = [line for line in lines if line[1:3] in (["elsewhere", "100"], ["floor", "100"])]
    assert rows == [
        ["2", "floor", "100", "2", "2", "98", "16,384"],
        ["0", "elsewhere", "100", "2", "0", "16,384"],
        ["1", "elsewhere", "100", "2", "0", "16,384"],
    ]
    assert main(["explain", paths[0]]) == 0
    assert capsys.readouterr().out.count("another rank's") == 1  # in the table of skipped steps


@pytest.mark.parametrize(("skips", "text"), [(1, "1 step"), (2, "2 steps")])
def test_the_skipped_steps_are_counted(skips, text):
    run = run_of(*(skip(step, 8.0) for step in range(1, skips + 1)))
    assert line_of(explained(run), "skipped").rstrip().endswith(f"  {text}")


def test_a_run_without_steps_is_no_error(made_up_run):
    assert "No step is recorded yet" in explained(made_up_run(samples=0))


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_the_command_prints_in_any_encoding(save, made_up_run, encoding):
    path = save(made_up_run(names=["名前"]))
    command = [sys.executable, "-W", "error", "-m", "gradscaler", "explain", path]
    env = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    result = subprocess.run(command, env=env, capture_output=True, check=True)
    assert result.stderr == b""
    text = result.stdout.decode(encoding)
    blocks = {"ascii": "@@", "utf-8": "██"}[encoding]
    assert blocks in line_of(text, "loss scale")
    assert ("名前" in text) == (encoding == "utf-8")


NAN = float("nan")
numbers = st.floats() | st.sampled_from([0.0, 1.0, 65536.0, 5e-324, float("nan"), float("inf")])
scales = st.floats(2.0**-149, 2.0**127)
steps = st.integers(1, 50) | st.integers(1, 10**11)
share = st.floats(0, 1)
bins = st.tuples(st.integers(-1100, 1100), st.lists(st.integers(0, 2**63 - 1), max_size=60))
parameters = st.builds(run_files.parameter, share, share, share, share, bins)


@st.composite
def samples(draw):
    step = draw(steps)
    num_steps = draw(st.integers(0, min(step, 50)))
    window = range(step + 1 - num_steps, step + 1)
    some = st.sets(st.sampled_from(window), max_size=3).map(sorted) if window else st.just([])
    return run_files.sample(
        step,
        draw(scales),
        [(each, draw(scales)) for each in draw(some)],
        num_steps,
        draw(some),
        draw(st.none() | numbers),
        draw(st.none() | numbers.map(abs)),
        draw(st.none() | st.builds(run_files.shares, *[share] * 6)),
        draw(st.none() | bins),
        parameters=draw(st.dictionaries(st.text(max_size=3), parameters, max_size=3)),
        worst=draw(st.lists(st.text(max_size=3), max_size=3)),
    )


shapes = st.just((2, 3))
nonfinite = st.builds(NonfiniteGradient, st.text(), shapes, st.text(), steps, steps, numbers)
found = st.none() | st.lists(nonfinite, max_size=2)
skips = st.builds(skip, steps, scales, st.none() | numbers, found, steps)


@given(st.lists(samples(), max_size=4), st.lists(skips, max_size=4))
def test_whatever_a_file_may_hold_can_be_explained(made_up_samples, made_up_skips):
    verdict = run_files.verdict(0, "normal", "Text.")
    assert explained(run_of(*made_up_samples, *made_up_skips, verdict))


def test_a_chart_marks_nan_and_shows_the_latest_number_of_a_column():
    assert chart_of([0.0, 1.0, NAN, 0.5]) == "▁█!▅"
    # 16 steps in 8 columns
    assert chart_of([0.0, 1.0, NAN, 0.5] * 3 + [1.0, 0.5, NAN, NAN], width=40) == "█!█!█!▅!"


def test_a_chart_goes_on_from_the_latest_number():
    run = run_of(skip(2, 1.0, 0.0), skip(3, 1.0, 1.0), skip(6, 1.0))
    indent = len("loss scale  ")
    assert line_of(explained(run), "loss  ")[indent:].rstrip() == " ▁████  0 → 1"


def test_numbers_of_very_different_sizes_are_drawn_by_their_logarithms():
    assert chart_of([1.0, 10.0, 1e4]) == "▁▃█"
    assert chart_of([1.0, 10.0]) == "▁█"
