"""``explain`` and ``compare`` print plain text where rich is not installed."""

import sys

import pytest

from gradscaler.__main__ import main
from gradscaler.diagnose.report import _plain
from tests.support.long_run import write_long_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's file, in a process that cannot import rich."""
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.delitem(sys.modules, "gradscaler.diagnose.report._terminal", raising=False)
    return str(write_long_run(tmp_path / "run.jsonl", steps=300, every=100, parameters=2))


def test_a_run_is_explained_in_plain_text(run, capsys):
    assert main(["explain", run]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Nothing unusual: " in out
    assert "Steps: 300." in out
    assert "\nloss scale: 16,384\nloss: 2.281 → 2.601\n" in out


def test_a_log_is_explained_in_plain_text(run, tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text("".join(f"iter {step}: loss {2 - step / 100}\n" for step in range(20)))
    assert main(["explain", str(log)]) == 0
    assert "Nothing unusual: " in capsys.readouterr().out


def test_runs_are_compared_in_plain_text_and_columns_stand_below_their_headings(
    run, tmp_path, capsys
):
    other = str(write_long_run(tmp_path / "other.jsonl", steps=200, every=100, parameters=2))
    assert main(["compare", run, other]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = lines[lines.index("What differs") + 1]
    steps = next(line for line in lines if line.startswith("steps "))
    assert steps.split() == ["steps", "300", "200"]
    assert len(steps) == len(heading.rstrip()) == len(heading)


def test_a_module_of_ours_that_is_missing_is_no_lack_of_rich(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradscaler.diagnose.report._terminal", None)
    with pytest.raises(ImportError, match="_terminal"):
        _plain.print_content(None, sys.stdout)
