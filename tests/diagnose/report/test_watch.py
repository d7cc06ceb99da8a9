"""``python -m gradscaler watch``: a live view of a run, in a terminal and through a pipe."""

import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscaler.__main__ import main
from gradscaler.diagnose import read_run
from gradscaler.diagnose._run.lines import Sample, Skip, Start, VerdictLine
from gradscaler.diagnose._run.reader import RunFollower
from gradscaler.diagnose._run.writer import RunFile, has_writer
from gradscaler.diagnose.report._charts import curve, spread

pytest.importorskip("rich", reason="the terminal is written to with it")

from rich.cells import cell_len
from rich.console import Console

from gradscaler.diagnose.report._watch import view

pty = pytest.importorskip("pty", reason="it is of Unix")
fcntl, struct, termios = map(pytest.importorskip, ("fcntl", "struct", "termios"))

START = Start("torch", "float16", 100, 0, {"name": "DynamicScale"}, "2026-01-01T00:00Z")
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
SHOW_CURSOR = "\x1b[?25h"
COMMAND = [sys.executable, "-W", "error", "-m", "gradscaler", "watch"]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "PYTHONUTF8": "1"}
for name in ("NO_COLOR", "COLUMNS", "LINES"):  # which a worker of the tests sets
    ENV.pop(name, None)


def sample(step, loss=1.0):
    return Sample(step, 8.0, ((step, 8.0),), 1, (), loss)


def _lead_the_terminal():
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # a shell lets what it runs beside itself ignore it
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
        """What the terminal shows: the last frame that was written whole."""
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
        status = self.process.wait(30)
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
    with closing(RunFile(path, START)) as file:
        terminal.wait_for("No step is recorded yet")
        file.write(sample(1, 0.5))
        terminal.wait_for("step 1 ")
        for step in range(2, 60):
            file.write(sample(step, 0.5 / step))
        file.write(Skip(60, 8.0, float("nan")))
        file.write(VerdictLine(60, "nan", "The gradient of w is NaN. Look there.", "w"))
        lines = terminal.wait_for("Look there.")  # what is written last
        assert lines[0] == "run.jsonl  step 60  torch DynamicScale"
        assert lines[1].startswith("╭─ A gradient is NaN at every scale ─")
        assert lines[2].startswith("│ The gradient of w is NaN. Look there. ")
        assert [line.split()[-1] for line in lines if line.startswith("loss")] == ["8", "NaN"]
    terminal.wait_for("(no monitor writes to it now)")
    assert terminal.interrupt() == 130
    assert terminal.output.startswith(ENTER)
    assert terminal.output.rindex(LEAVE) > terminal.output.rindex("loss")
    assert SHOW_CURSOR in terminal.output[terminal.output.rindex("loss") :]
    assert "Traceback" not in terminal.output
    assert terminal.after == terminal.before


def test_a_file_that_is_truncated_or_replaced_is_read_from_its_start(open_terminal, path):
    with closing(RunFile(path, START)) as file:
        file.write(sample(70))
    terminal = open_terminal(200)  # so that no message is broken
    terminal.wait_for("step 70 ")
    path.write_text("")
    terminal.wait_for("holds no run yet")
    with closing(RunFile(path, replace(START, time="2026-01-02T00:00Z"))) as file:
        file.write(sample(5))
    terminal.wait_for("step 5 ")
    other = path.with_name("other.jsonl")
    with closing(RunFile(other, START)) as file:
        file.write(sample(1234))
    other.replace(path)
    terminal.wait_for("step 1,234 ")
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
    assert terminal.process.wait(30) == 143
    terminal.interrupt()
    after = terminal.output[terminal.output.rindex("gradient norm") :]
    assert LEAVE in after
    assert SHOW_CURSOR in after


# Through a pipe.


def test_through_a_pipe_it_prints_one_frame_when_the_run_has_ended(path):
    command = [*COMMAND, str(path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env=ENV, text=True) as process:
        waiting = process.stderr.readline()
        with closing(RunFile(path, START)) as file:
            file.write(sample(1))
            time.sleep(2)
            assert process.poll() is None
            file.write(sample(2))
        text, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert waiting == f"{path}: waiting; the file does not exist yet\n"
    assert "\x1b" not in text
    assert text.startswith("run.jsonl  step 2 ")
    assert text.count("run.jsonl") == 1


def test_once_prints_what_there_is_while_a_monitor_writes(path, capsys):
    with closing(RunFile(path, START)) as file:
        file.write(sample(3))
        assert main(["watch", "--once", str(path)]) == 0
    assert capsys.readouterr().out.startswith("run.jsonl  step 3 ")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "No such file"), ("hi\n", "line 1: "), ("hi", "line 1: "), ("", "holds no run")],
)
def test_once_a_bad_file_is_one_line_with_exit_status_1(path, capsys, content, complaint):
    if content is not None:
        path.write_text(content)
    assert main(["watch", "--once", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert complaint in err


# Its parts.


@given(
    st.integers(8, 200),
    st.dictionaries(st.integers(1, 500), st.floats(), max_size=20),
    st.text(max_size=60),
)
def test_no_line_is_wider_than_the_terminal_and_no_letter_controls_it(
    made_up_run, columns, losses, text
):
    skips = tuple(Skip(step, 2.0, loss) for step, loss in losses.items())
    run = replace(made_up_run(samples=1, verdict=("nan", text, "名前")), skips=skips)
    for shown in (view(Path(f"名前{text}.jsonl"), run), view(Path("run"), None, text)):
        console = Console(file=StringIO(), width=columns)
        console.print(shown)
        lines = console.file.getvalue().split("\n")
        assert all(cell_len(line) <= columns for line in lines)
        assert all(line.isprintable() for line in lines)


def test_a_curve_marks_nan_and_shows_the_latest_number_of_a_column():
    points = {1: 0.0, 2: 1.0, 3: float("nan"), 4: 0.5}
    assert curve(points, 4, 4, "12345678") == "18!5"
    assert curve(points, 4, 2, "12345678") == "85"
    assert curve({2: 1.0}, 4, 4, "12345678", (0.0, 2.0)) == " 555"


def test_curves_of_very_different_sizes_are_drawn_by_their_logarithms():
    small, large = {1: 1.0, 2: math.nan}, {1: 1e4, 2: math.inf}
    assert spread(small, {1: 99.0}) == [small, {1: 99.0}]
    found = [each[step] for each in spread(small, large) for step in (1, 2)]
    assert found == pytest.approx([0.0, math.nan, math.log(1e4), math.nan], nan_ok=True)


def test_a_follower_reads_what_a_reader_does_each_line_once(path):
    follower = RunFollower(path)
    with closing(RunFile(path, START)) as file:
        for step in range(1, 6):
            file.write(sample(step))
            assert follower.read() == read_run(path)
            assert follower.read() is follower.read()
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(whole.splitlines(keepends=True)[-1][:20])
    assert follower.read() == read_run(path)
    path.write_bytes(whole + whole.splitlines(keepends=True)[-1])
    assert len(follower.read().samples) == 6


def test_a_follower_notices_a_longer_run_in_the_place_of_the_one_it_read(path):
    with closing(RunFile(path, START)) as file:
        file.write(sample(1))
    follower = RunFollower(path)
    assert follower.read().num_steps == 1
    other = path.with_name("other.jsonl")
    with closing(RunFile(other, replace(START, time="2026-01-02T00:00Z"))) as file:
        for step in range(10, 20):
            file.write(sample(step))
    path.write_bytes(other.read_bytes())
    assert follower.read() == read_run(other)


def test_a_file_has_a_writer_until_it_is_closed(path):
    with closing(RunFile(path, START)) as file:
        assert has_writer(path)
        file.write(sample(1))
    assert has_writer(path) is False
    assert has_writer(path) is False  # asking keeps no lock
    RunFile(path, START).close()
