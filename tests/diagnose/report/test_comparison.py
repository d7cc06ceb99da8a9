"""``python -m gradscaler compare``: several runs side by side."""

import re
from dataclasses import replace
from html import unescape

import pytest

pytest.importorskip("matplotlib", reason="the report is drawn with it")
pytest.importorskip("rich", reason="the terminal is written to with it")

from matplotlib.colors import to_hex

from gradscaler.__main__ import main
from gradscaler.diagnose import report
from tests.support.reports import drawn, printed
from tests.support.run_files import HEADLINES, append, append_run, skip, start


def test_runs_of_the_same_name_go_by_their_paths_and_a_file_is_given_once(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for folder, scale in (("a", 8.0), ("b", 4.0)):
        (tmp_path / folder).mkdir()
        append(tmp_path / folder / "run.jsonl", start(), skip(1, scale))
    append(tmp_path / "third.jsonl", start())
    assert headings_of("a/run.jsonl", "third.jsonl") == ["run", "third"]
    assert headings_of("a/run.jsonl", "b/run.jsonl") == ["a/run.jsonl", "b/run.jsonl"]
    assert main(["compare", "third.jsonl", "third.jsonl"]) == 1
    assert "third.jsonl: is given twice" in capsys.readouterr().err


def headings_of(*paths):
    """The runs' names above the table of differences."""
    _title, headings, *_ = printed("compare", *paths).splitlines()
    return headings.split()


def test_ranks_of_one_run_can_be_compared(save_ranks, capsys):
    assert main(["compare", *save_ranks(at_fault=1)]) == 0
    out = capsys.readouterr().out
    assert "Another rank's gradients" in " ".join(out.split())


@pytest.mark.parametrize("ranks", [[(0, 1), (0, 1)], [(0, 2), (1, 2), (0, 2)]])
@pytest.mark.parametrize("command", ["explain", "report"])
def test_files_that_are_no_ranks_of_one_run_are_refused_with_the_way_to_compare_them(
    tmp_path, capsys, ranks, command
):
    paths = [tmp_path / f"{place}.jsonl" for place in range(len(ranks))]
    for path, (rank, world_size) in zip(paths, ranks, strict=True):
        append(path, start(rank=rank, world_size=world_size))
    output = ["-o", str(tmp_path / "report.html")] if command == "report" else []
    assert main([command, *map(str, paths), *output]) == 1
    assert "compare them: python -m gradscaler compare A B" in capsys.readouterr().err


@pytest.fixture
def runs(made_up_run):
    policy = {"name": "DynamicScale", "init_scale": 65536.0, "growth_interval": 50}
    stuck = made_up_run(samples=4, stuck=37, verdict=("nan", "What. Why.", "w"))
    stuck = replace(stuck, starts=(replace(stuck.starts[0], policy=policy),))
    return {"a<b>": made_up_run(samples=8), "stuck": stuck}


class ComparisonPage:
    """The page that compares runs: its level, its headline, and the rows of its tables."""

    def __init__(self, runs, path):
        report.write(runs, path)
        text = path.read_text(encoding="utf-8")
        self.headline = re.search(r'<header class="(\w+)">\s*<h1>(.*?)</h1>', text).groups()
        self.tables = {
            unescape(title): [cells_of(row) for row in re.findall("<tr>(.*?)</tr>", table)]
            for title, table in re.findall(
                r"<h2>([^<]*)</h2>\s*<div.*?<table>(.*?)</table>", text, re.S
            )
        }


def cells_of(row):
    return [unescape(cell) for cell in re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row)]


def test_the_table_has_a_column_for_each_run_and_a_row_for_each_difference(runs, tmp_path):
    page = ComparisonPage(runs, tmp_path / "report.html")
    headings, *rows = page.tables["What differs"]
    assert headings == ["", "a<b>", "stuck"]
    first, second = (run.samples[-1].shares for run in runs.values())
    assert rows == [
        ["verdict", HEADLINES["normal"][1], HEADLINES["nan"][1]],
        ["growth_interval", "", "50"],
        ["steps", "800", "437"],
        ["skipped", "6 (0.8%)", "41 (9.4%)"],
        ["last scale", "32,768", "2⁻²²"],
        ["last finite loss", "0.2875", "0.575"],
        ["flushed", "0%", f"{second.flushed:.1%}"],
        ["subnormal", f"{first.subnormal:.1%}", f"{second.subnormal:.1%}"],
    ]
    assert page.tables["What is alike"][1:] == [
        ["policy", "DynamicScale"],
        ["init_scale", "65,536"],
        ["measured against", "float16"],
        ["framework", "torch"],
    ]


def test_runs_that_do_not_differ_have_no_table(made_up_run, tmp_path):
    page = ComparisonPage(dict.fromkeys("ab", made_up_run()), tmp_path / "report.html")
    assert list(page.tables) == ["What is alike"]
    assert ["steps", "1,000"] in page.tables["What is alike"]


def test_the_headline_is_as_bad_as_the_worst_run(runs, tmp_path):
    path, good = tmp_path / "report.html", dict.fromkeys("abc", runs["a<b>"])
    assert ComparisonPage(runs, path).headline == ("bad", "2 runs side by side")
    assert ComparisonPage(good, path).headline == ("good", "3 runs side by side")


def test_scales_skips_and_losses_are_drawn_over_the_same_steps(runs, tmp_path):
    figure = drawn(runs, tmp_path / "report.png")
    scale, skips, loss = (axes for axes in figure.axes if axes.get_xlim()[0] == 0.5)
    assert {axes.get_xlim() for axes in (scale, skips, loss)} == {(0.5, 800.5)}
    colours = [to_hex(line.get_color()) for line in scale.lines]
    assert scale.get_title(loc="left") == "Loss scale"
    assert len(set(colours)) == 2
    assert skips.get_title(loc="left") == "Skipped steps so far"
    for run, colour, line in zip(runs.values(), colours, skips.lines, strict=True):
        edges, counts = line.get_xdata(), line.get_ydata()
        for step in range(1, run.num_steps + 1):
            so_far = sum(each <= step for each in run.skipped)
            assert counts[sum(edge < step for edge in edges) - 1] == so_far
        assert to_hex(line.get_color()) == colour
    first, second, lost = loss.lines
    assert loss.get_title(loc="left") == "Loss"
    assert tuple(second.get_ydata()) == tuple(runs["stuck"].losses[s] for s in second.get_xdata())
    assert len(first.get_xdata()) == len(runs["a<b>"].losses)
    assert tuple(lost.get_xdata()) == tuple(range(401, 438))


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_the_command_compares_files_of_different_runs(tmp_path, runs, suffix, capsys):
    paths = []
    for name, run in zip(("first", "second"), runs.values(), strict=True):
        paths.append(str(append_run(tmp_path / f"{name}.jsonl", run)))
    target = tmp_path / f"report{suffix}"
    assert main(["compare", *paths, "-o", str(target)]) == 0
    out, err = capsys.readouterr()
    assert err == f"wrote {target}\n"
    lines = [line for line in out.splitlines() if line.strip()]
    assert lines[0].strip() == "What differs"
    assert lines[1].split() == ["first", "second"]
    lines = [line.rstrip() for line in lines]
    scale, loss, skipped = map(lines.index, ("loss scale", "loss", "skipped"))
    assert [line.split()[0] for line in lines[scale + 1 : loss]] == ["first", "second"]
    first, second = (line.split()[1] for line in lines[loss + 1 : skipped])
    assert len(first) == 32  # and 4 columns without a loss
    assert second.endswith("!")
    assert len(second) == 16  # up to its own end
    if suffix == ".html":
        page = target.read_text(encoding="utf-8")
        assert "2 runs side by side" in page
        texts = "Nothing unusual", "A gradient is NaN or Inf"
        assert all(f"<td>{text}</td>" in page for text in texts)


def test_names_are_escaped_and_empty_runs_can_be_drawn(tmp_path, runs, made_up_run):
    empty = {"none": made_up_run(samples=0), **runs}
    report.write(empty, tmp_path / "report.html")
    assert "a<b>" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    report.write({"none": made_up_run(samples=0)}, tmp_path / "report.png")
