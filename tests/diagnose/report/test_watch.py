"""``python -m gradscaler watch``: a live view of a run."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscaler.__main__ import main
from gradscaler.diagnose import read_run
from gradscaler.diagnose._findings.run import Run

# `watch` shows neither how often it reads a line nor which run it then holds.
from gradscaler.diagnose._record.reader import RunFollower
from tests.support import run_files
from tests.support.run_files import append, run_of, skip, start, verdict

pytest.importorskip("rich", reason="the terminal is written to with it")

from rich.cells import cell_len
from rich.console import Console

# Each of 100 random views in a terminal would start the command.
from gradscaler.diagnose.report._watch import view

pty = pytest.importorskip("pty", reason="it is of Unix")
fcntl, struct, termios = map(pytest.importorskip, ("fcntl", "struct", "termios"))

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
SHOW_CURSOR = "\x1b[?25h"
COMMAND = [sys.executable, "-W", "error", "-m", "gradscaler", "watch"]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "PYTHONUTF8": "1"}
for name in ("NO_COLOR", "COLUMNS", "LINES"):  # which a worker of the tests sets
    ENV.pop(name, None)


def sample(step, loss=1.0):
    return run_files.sample(step, 8.0, [(step, 8.0)], 1, [], loss)


def _lead_the_terminal():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell makes its background processes ignore it
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """The command in a terminal of a size."""

    def __init__(self, path, columns=80, rows=24, **env):
        self._screen, inner = pty.openpty()
        self._inner = inner
        self.resize(columns, rows)
        self.before = termios.tcgetattr(inner)
        self.process = subprocess.Popen(
            [*COMMAND, str(path)],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**ENV, **env},
            preexec_fn=_lead_the_terminal,
        )
        self.output = ""

    def wait_for(self, text, seconds=60):
        """The frame, as lines without styles, that is the first to hold a text."""
        end = time.monotonic() + seconds
        while text not in self.frame:
            assert time.monotonic() < end, self.output[-2000:]
            self._read()
        return self.frame.split("\n")

    @property
    def frame(self):
        """The last frame that was written in full, which the terminal shows."""
        frames = [
            frame for frame in self.output.split("\x1b[H") if frame.count("\n") >= self._rows - 1
        ]
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frames[-1] if frames else "")
        return "\n".join(line.rstrip() for line in text.replace("\r", "").split("\n"))

    def resize(self, columns, rows):
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._inner, termios.TIOCSWINSZ, size)
        self._rows = rows

    def _read(self):
        if select.select([self._screen], [], [], 0.1)[0]:
            self.output += os.read(self._screen, 65536).decode(errors="replace")

    def interrupt(self):
        """Ctrl-C, as the terminal turns it into a signal; returns the exit status."""
        os.write(self._screen, b"\x03")
        status = self.process.wait(60)
        while select.select([self._screen], [], [], 0.1)[0]:
            self._read()
        return status

    @property
    def after(self):
        return termios.tcgetattr(self._inner)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._screen)
        os.close(self._inner)


@pytest.fixture
def open_terminal(path):
    with contextmanager_of_terminals() as terminals:

        def open_terminal(*size, **env):
            terminals.append(Terminal(path, *size, **env))
            return terminals[-1]

        yield open_terminal


@contextmanager
def contextmanager_of_terminals():
    terminals = []
    try:
        yield terminals
    finally:
        for terminal in terminals:
            terminal.close()


def test_it_waits_for_a_file_follows_it_and_leaves_the_terminal_as_it_was(open_terminal, path):
    terminal = open_terminal()
    terminal.wait_for("Waiting")
    append(path, start())
    terminal.wait_for("No step is recorded yet")
    append(path, sample(1, 0.5))
    terminal.wait_for("step 1\n")
    for step in range(2, 60):
        append(path, sample(step, 0.5 / step))
    append(path, skip(60, 8.0, float("nan")))
    append(path, verdict(60, "nan", "The gradient of w is NaN. Look there.", "w"))
    lines = terminal.wait_for("Look there.")  # the text written last
    assert lines[0] == "run.jsonl  step 60"
    assert lines[1].startswith("╭─ A gradient is NaN or Inf ─")
    assert lines[2].startswith("│ The gradient of w is NaN. Look there. ")
    assert [line.split()[-1] for line in lines if line.startswith("loss")] == ["8", "NaN"]
    an_hour_ago = time.time() - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))
    terminal.wait_for("(nothing new for 60 min)")
    assert terminal.interrupt() == 130
    assert terminal.output.startswith(ENTER)
    assert terminal.output.rindex(LEAVE) > terminal.output.rindex("loss")
    assert SHOW_CURSOR in terminal.output[terminal.output.rindex("loss") :]
    assert "Traceback" not in terminal.output
    assert terminal.after == terminal.before


def test_a_file_that_is_truncated_or_replaced_is_read_from_its_start(open_terminal, path):
    append(path, start(), sample(70))
    terminal = open_terminal(200)  # so that no message is broken
    terminal.wait_for("step 70\n")
    path.write_text("")
    terminal.wait_for("holds no run yet")
    append(path, start(time="2026-01-02T00:00Z"), sample(5))
    terminal.wait_for("step 5\n")
    other = path.with_name("other.jsonl")
    append(other, start(), sample(1234))
    other.replace(path)
    terminal.wait_for("step 1,234\n")
    path.write_text("hello\n")
    terminal.wait_for("line 1: is not JSON")
    path.unlink()
    terminal.wait_for("does not exist yet")


@pytest.mark.parametrize(("columns", "rows"), [(20, 8), (40, 12), (9, 3)])
def test_a_frame_fits_a_small_terminal(open_terminal, made_up_run, save, columns, rows):
    save(made_up_run(stuck=30, verdict=("nan", "What happened here. What to try.", "w")))
    lines = open_terminal(columns, rows).wait_for("run.jso")
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns


def test_a_new_size_of_the_terminal_is_noticed(open_terminal, made_up_run, save):
    save(made_up_run(stuck=30, verdict=("nan", "What happened here. What to try.", "w")))
    terminal = open_terminal(40, 24)
    assert max(map(len, terminal.wait_for("╭─"))) == 40
    terminal.resize(60, 24)
    terminal.wait_for("─" * 32)


def test_colours_are_left_out_if_that_is_asked_for(open_terminal, save, made_up_run):
    save(made_up_run(stuck=30))
    coloured = re.compile("(^|;)[349][0-7]")
    assert not any(map(coloured.search, styles_of(open_terminal(NO_COLOR="1"))))
    assert any(map(coloured.search, styles_of(open_terminal())))


def styles_of(terminal):
    terminal.wait_for("gradient norm")
    terminal.interrupt()
    return re.findall(r"\x1b\[([0-9;]*)m", terminal.output)


def test_another_signal_to_end_leaves_the_terminal_as_it_was_too(open_terminal, save, made_up_run):
    save(made_up_run())
    terminal = open_terminal()
    terminal.wait_for("gradient norm")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(60) == 143
    terminal.interrupt()
    after = terminal.output[terminal.output.rindex("gradient norm") :]
    assert LEAVE in after
    assert SHOW_CURSOR in after


def test_where_there_is_no_terminal_it_says_what_prints_a_run(save, made_up_run, capsys):
    assert main(["watch", save(made_up_run())]) == 1
    message = "watch redraws a terminal, and the output is not one; explain prints once"
    assert capsys.readouterr() == ("", f"{message}\n")


# Its parts.


@given(
    st.integers(8, 200),
    st.dictionaries(st.integers(1, 500), st.floats(), max_size=20),
    st.text(max_size=60),
)
def test_no_line_is_wider_than_the_terminal_and_no_letter_controls_it(
    made_up_run, columns, losses, text
):
    skips = run_of(*(skip(step, 2.0, loss) for step, loss in losses.items())).skips
    run = replace(made_up_run(samples=1, verdict=("nan", text, "名前")), skips=skips)
    for shown in (view(Path(f"名前{text}.jsonl"), run, ""), view(Path("run"), None, text)):
        console = Console(file=StringIO(), width=columns)
        console.print(shown)
        lines = console.file.getvalue().split("\n")
        assert all(cell_len(line) <= columns for line in lines)
        assert all(line.isprintable() for line in lines)


def test_a_follower_reads_a_file_again_that_lost_its_last_lines(path):
    append(path, start(), sample(1))
    follower, whole = RunFollower(path, Run), path.stat().st_size
    append(path, sample(2), sample(3))
    assert follower.read().num_steps == 3
    os.truncate(path, whole)
    assert follower.read().num_steps == 1


def test_a_follower_reads_what_a_reader_does_each_line_once(path):
    follower = RunFollower(path, Run)
    append(path, start())
    for step in range(1, 6):
        append(path, sample(step))
        assert follower.read() == read_run(path)
        assert follower.read() is follower.read()
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(whole.splitlines(keepends=True)[-1][:20])
    assert follower.read() == read_run(path)
    path.write_bytes(whole + whole.splitlines(keepends=True)[-1])
    assert len(follower.read().samples) == 6


def test_a_follower_notices_a_longer_run_in_the_place_of_the_one_it_read(path):
    append(path, start(), sample(1))
    follower = RunFollower(path, Run)
    assert follower.read().num_steps == 1
    other = path.with_name("other.jsonl")
    append(other, start(time="2026-01-02T00:00Z"), *map(sample, range(10, 20)))
    path.write_bytes(other.read_bytes())
    assert follower.read() == read_run(other)
