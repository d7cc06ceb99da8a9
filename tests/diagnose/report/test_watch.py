"""``python -m gradscaler watch``: a live view of a run, in a terminal and through a pipe."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscaler.__main__ import main
from gradscaler.diagnose import read_run
from gradscaler.diagnose._run.lines import Sample, Skip, Start, VerdictLine
from gradscaler.diagnose._run.reader import RunFollower
from gradscaler.diagnose._run.writer import RunFile, has_writer
from gradscaler.diagnose.report._charts import BLOCKS, curve
from gradscaler.diagnose.report._watch import View, frame

pty = pytest.importorskip("pty", reason="it is of Unix")
fcntl, struct, termios = map(pytest.importorskip, ("fcntl", "struct", "termios"))

START = Start("torch", "float16", 100, 0, {"name": "DynamicScale"}, "2026-01-01T00:00Z")
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
COMMAND = [sys.executable, "-W", "error", "-m", "gradscaler", "watch"]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "PYTHONUTF8": "1"}
ENV.pop("NO_COLOR", None)


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
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(inner)
        self._inner = inner
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
        frames = re.findall(r"\x1b\[H(.*?)\x1b\[J", self.output, re.DOTALL)
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frames[-1] if frames else "")
        return text.replace("\r", "")

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
    terminal.wait_for("(no monitor writes to it now)")
    assert lines[1:3] == [
        "A gradient is NaN at every scale",
        "The gradient of w is NaN. Look there.",
    ]
    assert "loss scale  8 → 8" in lines
    assert "loss  0.5 → NaN" in lines
    assert "skipped  1 (1.7%), 1 in a row" in lines
    assert terminal.interrupt() == 130
    assert terminal.output.startswith(ENTER)
    assert terminal.output.endswith(LEAVE)
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


@pytest.mark.parametrize(("columns", "rows"), [(20, 8), (40, 12), (7, 3)])
def test_a_frame_fits_a_small_terminal(open_terminal, path, made_up_run, save, columns, rows):
    save(made_up_run(stuck=30, verdict=("nan", "What happened here. What to try.", "w")))
    lines = open_terminal(columns, rows).wait_for("run.js"[: columns - 1])
    assert len(lines) <= rows
    assert max(map(len, lines)) < columns


def test_colours_are_left_out_if_that_is_asked_for(open_terminal, save, made_up_run):
    save(made_up_run(stuck=30))
    assert set(styles_of(open_terminal(NO_COLOR="1"))) == set()
    assert {"1;31", "34", "31"} <= set(styles_of(open_terminal()))


def styles_of(terminal):
    terminal.wait_for("skipped  ")
    terminal.interrupt()
    return re.findall(r"\x1b\[([0-9;]*)m", terminal.output)


def test_another_signal_to_end_leaves_the_terminal_as_it_was_too(open_terminal, save, made_up_run):
    save(made_up_run())
    terminal = open_terminal()
    terminal.wait_for("skipped  ")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(30) == 143
    terminal.interrupt()
    assert terminal.output.endswith(LEAVE + "^C")


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


def test_it_needs_no_package_for_drawing():
    code = (
        "import sys, gradscaler.diagnose.report._watch\n"
        "assert not {'rich', 'matplotlib', 'torch'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True)


# Its parts.


@given(
    st.integers(1, 200),
    st.integers(1, 60),
    st.dictionaries(st.integers(1, 500), st.floats(), max_size=20),
    st.text(max_size=60),
)
def test_no_line_is_wider_than_the_terminal_and_no_frame_higher(
    made_up_run, columns, rows, losses, text
):
    skips = tuple(Skip(step, 2.0, loss) for step, loss in losses.items())
    run = replace(made_up_run(samples=1, verdict=("nan", text, "名前")), skips=skips)
    for view in (View(run, "", False), View(None, text)):
        lines = frame(Path("名前.jsonl"), view, columns, rows, BLOCKS)
        assert len(lines) <= max(1, rows - 1)
        assert all(len(line) <= max(1, columns - 1) for _, line in lines)
        assert all(line.isprintable() for _, line in lines)


def test_wide_letters_take_two_columns(made_up_run):
    (_, title), *_ = frame(Path("名前名前.jsonl"), View(made_up_run()), 6, 24, BLOCKS)
    assert title == "名前"


def test_a_curve_of_several_rows_stands_on_the_lowest_and_marks_nan():
    points = {1: 0.0, 2: 1.0, 3: float("nan"), 4: 0.5}
    assert curve(points, 4, 4, "12345678", 2) == [" 8 1", "18!8"]
    assert curve(points, 4, 2, "12345678", 2) == ["81", "8!"]  # the NaN shares a column
    assert curve(points, 4, 4, "12345678") == ["18!5"]


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
