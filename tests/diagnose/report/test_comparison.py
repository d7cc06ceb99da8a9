"""Several runs side by side, and how they are told from the ranks of one run."""

from contextlib import closing
from dataclasses import replace

import pytest

from gradscaler.diagnose._run.lines import Start
from gradscaler.diagnose._run.reader import read_run, read_runs
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose._run.writer import RunFile

pytest.importorskip("matplotlib", reason="the report is drawn with it")

from matplotlib.colors import to_hex

from gradscaler.__main__ import main
from gradscaler.diagnose import report
from gradscaler.diagnose._findings.kinds import KINDS
from gradscaler.diagnose.report._comparison import difference_table, drawing_of_runs
from gradscaler.diagnose.report._content import content_of_runs
from gradscaler.diagnose.report._picture import draw
from gradscaler.diagnose.report._style import drawing_settings
from gradscaler.diagnose.report._texts import percent

START = Start("torch", "float16", 100, 0, {"name": "DynamicScale"}, "")


@pytest.fixture
def files(tmp_path):
    """Empty runs with these starts, each in a file of its own; returns their paths."""

    def files(*starts):
        paths = [tmp_path / f"{place}.jsonl" for place in range(len(starts))]
        for path, (rank, world_size) in zip(paths, starts, strict=True):
            RunFile(path, replace(START, rank=rank, world_size=world_size)).close()
        return paths

    return files


@pytest.mark.parametrize(
    ("starts", "compare", "kind"),
    [
        ([(0, 1)], False, Run),
        ([(0, 1), (0, 1)], False, dict),
        ([(0, 2), (1, 2)], False, Run),
        ([(0, 2), (1, 2)], True, dict),
        ([(0, 2), (0, 2)], False, dict),  # each file is of rank 0 of a run of its own
        ([(0, 2), (0, 4)], False, dict),
        ([(0, 1), (1, 2)], False, dict),
        ([(0, 1)], True, dict),
    ],
)
def test_files_are_of_several_runs_unless_they_are_of_different_ranks(files, starts, compare, kind):
    found = read_runs(files(*starts), compare)
    assert type(found) is kind or isinstance(found, kind)
    if kind is dict:
        assert list(found) == [str(place) for place in range(len(starts))]
    else:
        assert len(found.ranks) == (len(starts) if len(starts) > 1 else 0)


def test_ranks_of_different_runs_are_refused_with_the_way_to_compare_them(files):
    with pytest.raises(ValueError, match=r"is of rank 0, as .* is: give one file .*--compare"):
        read_runs(files((0, 2), (1, 2), (0, 2)))


def test_runs_of_the_same_name_go_by_their_paths_and_a_file_is_given_once(files, tmp_path):
    (first,) = files((0, 1))
    second = tmp_path / "other" / first.name
    second.parent.mkdir()
    RunFile(second, START).close()
    assert list(read_runs([first, second])) == [str(first), str(second)]
    with pytest.raises(ValueError, match="is given twice"):
        read_runs([first, first])


@pytest.fixture
def runs(made_up_run):
    policy = {"name": "DynamicScale", "init_scale": 65536.0, "growth_interval": 50}
    stuck = made_up_run(samples=4, stuck=37, verdict=("nan", "What. Why.", "w"))
    stuck = replace(stuck, starts=(replace(stuck.starts[0], policy=policy),))
    return {"a<b>": made_up_run(samples=8), "stuck": stuck}


def test_the_table_has_a_column_for_each_run_and_a_row_for_each_difference(runs):
    table = difference_table(runs)
    assert table.headings == ("", "a<b>", "stuck")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["Verdict"] == (KINDS["normal"].headline, KINDS["nan"].headline)
    assert rows["Steps"] == ("800", "437")
    assert rows["Skipped"] == ("6 (0.8%)", "41 (9.4%)")
    first, second = (run.samples[-1].shares for run in runs.values())
    assert rows["Flushed"] == (percent(first.flushed), percent(second.flushed))
    assert rows["Last finite loss"] == ("0.2875", "0.575")
    assert rows["growth_interval"] == ("", "50")
    assert "init_scale" not in rows  # it is the same
    assert "measured against" not in rows


def test_private_attributes_in_older_files_are_read_and_not_shown(runs, save):
    policy = {"name": "DynamicScale", "_shortest_interval": 50, "growth_interval": 50}
    old, new = runs.values()
    old = read_run(save(replace(old, starts=(replace(old.starts[0], policy=policy),))))
    assert old.starts[0].policy == policy
    rows = {row[0]: row[1:] for row in difference_table({"old": old, "new": new}).rows}
    assert not [name for name in rows if name.startswith("_")]
    assert "growth_interval" not in rows  # it is the same


def test_the_headline_is_as_bad_as_the_worst_run(runs):
    assert content_of_runs(runs).headline == ("bad", "2 runs side by side")
    good = dict.fromkeys(("a", "b", "c"), runs["a<b>"])
    assert content_of_runs(good).headline == ("good", "3 runs side by side")


def test_scales_skips_and_losses_are_drawn_over_the_same_steps(runs):
    with drawing_settings():
        figure = draw(content_of_runs(runs))
    scale, skips, loss = (axes for axes in figure.axes if axes.get_xlim()[0] == 0.5)
    assert {axes.get_xlim() for axes in (scale, skips, loss)} == {(0.5, 800.5)}
    colours = [to_hex(line.get_color()) for line in scale.lines]
    assert len(set(colours)) == 2
    for run, colour, marks in zip(runs.values(), colours, skips.lines, strict=True):
        assert tuple(marks.get_xdata()) == run.skipped
        assert to_hex(marks.get_color()) == colour
    first, second, lost = loss.lines
    assert tuple(second.get_ydata()) == tuple(runs["stuck"].losses[s] for s in second.get_xdata())
    assert len(first.get_xdata()) == len(runs["a<b>"].losses)
    assert tuple(lost.get_xdata()) == tuple(range(401, 438))


def test_a_run_without_a_finite_loss_is_said_in_words(made_up_run):
    lost = made_up_run(samples=0, stuck=5)
    caption = drawing_of_runs({"a": made_up_run(), "b": lost}).caption
    assert caption.endswith("b: The loss is NaN or Inf at all 5 steps where it was seen.")


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_the_command_compares_files_of_different_runs(tmp_path, runs, suffix):
    paths = []
    for name, run in zip(("first", "second"), runs.values(), strict=True):
        paths.append(str(tmp_path / f"{name}.jsonl"))
        with closing(RunFile(tmp_path / f"{name}.jsonl", run.starts[0])) as file:
            for line in (*run.samples, *run.skips, *run.verdicts):
                file.write(line)
    target = tmp_path / f"report{suffix}"
    assert main(["report", *paths, "-o", str(target)]) == 0
    if suffix == ".html":
        page = target.read_text(encoding="utf-8")
        assert "2 runs side by side" in page
        assert "first: Nothing unusual. second: A gradient is NaN at every scale." in page


def test_names_are_escaped_and_empty_runs_can_be_drawn(tmp_path, runs, made_up_run):
    empty = {"none": made_up_run(samples=0), **runs}
    report.write(empty, tmp_path / "report.html")
    assert "a<b>" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    report.write({"none": made_up_run(samples=0)}, tmp_path / "report.png")
