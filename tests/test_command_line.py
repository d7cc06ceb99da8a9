"""The command line itself: how it is called, and what it does where nobody reads its output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradscaler.__main__ import main
from tests.support.long_run import write_long_run

pytest.importorskip("matplotlib", reason="the report is drawn with it")
pytest.importorskip("rich", reason="the terminal is written to with it")

COMMANDS = ["run", "demo", "convert", "report", "explain", "compare", "watch", "simulate", "doctor"]


@pytest.fixture
def run(tmp_path):
    """The path of a run with one sample."""
    return str(write_long_run(tmp_path / "run.jsonl", steps=1, every=1, parameters=1))


def command(*arguments, **options):
    line = [sys.executable, "-m", "gradscaler", *arguments]
    # Unbuffered, argparse itself ignores that its help cannot be written.
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    return subprocess.run(line, stderr=subprocess.PIPE, text=True, env=environment, **options)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["explain", "--help"],
        ["doctor"],
        ["explain", "RUN"],
        ["simulate", "RUN"],
    ],
    ids=" ".join,
)
def test_a_closed_pipe_ends_a_command_without_a_word(run, arguments):
    arguments = [run if argument == "RUN" else argument for argument in arguments]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        result = command(*arguments, stdout=output)
    assert (result.returncode, result.stderr) == (1, "")


def test_a_report_is_written_whether_or_not_anyone_reads_the_output(run, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        result = command("report", run, "-o", str(tmp_path / "report.html"), stdout=output)
    assert (result.returncode, result.stderr) == (0, f"wrote {tmp_path / 'report.html'}\n")
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_a_pattern_that_no_shell_has_expanded_is_a_list_of_files(run, capsys):
    assert main(["explain", run]) == 0
    alone = capsys.readouterr().out
    assert main(["explain", run.replace("run.", "r*.")]) == 0
    assert capsys.readouterr().out == alone
    assert main(["explain", run.replace("run.", "no*.")]) == 1
    assert "no*.jsonl" in capsys.readouterr().err


def test_two_runs_that_are_no_ranks_are_explained_apart_or_compared(run, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_bytes(Path(run).read_bytes())
    assert main(["explain", run, str(other)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "explain each run by itself, or compare them: python -m gradscaler compare A B" in err


@pytest.mark.parametrize("name", ["", *COMMANDS])
@pytest.mark.parametrize(
    ("started_as", "shown"),
    [
        ("/usr/bin/gradscaler", "gradscaler"),
        ("gradscaler.exe", "gradscaler"),
        ("/lib/gradscaler/__main__.py", "python -m gradscaler"),
    ],
)
def test_the_usage_shows_how_the_command_line_was_started(
    capsys, monkeypatch, name, started_as, shown
):
    monkeypatch.setattr(sys, "argv", [started_as])
    with pytest.raises(SystemExit):
        main([name, "--help"] if name else ["--help"])
    printed = capsys.readouterr().out
    usage = f"{shown} {name}".rstrip()
    assert printed.startswith(f"usage: {usage} [-h]")
    assert not name or f"example: {usage}" in " ".join(printed.split())


def test_a_single_file_cannot_be_compared(run, tmp_path, capsys):
    target = tmp_path / "report.html"
    with pytest.raises(SystemExit) as exit_:
        main(["compare", run, "-o", str(target)])
    assert exit_.value.code == 2
    assert "RUN: give the files of at least two runs, got one" in capsys.readouterr().err
    assert not target.exists()
