"""A run file has one writer at a time, in whichever process."""

import errno
import gc
import os
import subprocess
import sys
import time
import warnings
from contextlib import closing
from types import SimpleNamespace

import pytest

from gradscaler.diagnose import read_run
from gradscaler.diagnose._run import writer
from gradscaler.diagnose._run.lines import Skip, Start
from gradscaler.diagnose._run.writer import RunFile

pytest.importorskip("fcntl", reason="files are not locked here")

START = Start("torch", "float16", 100, 0, {"name": "FixedScale", "scale": 8.0}, "2026-01-01T00:00Z")
REFUSAL = r"run\.jsonl: another monitor is writing to this file; .*path=\"run\.\{rank\}\.jsonl\""


def steps_of(path):
    return [skip.step for skip in read_run(path).skips]


def write_one(path, step):
    with closing(RunFile(path, START)) as file:
        file.write(Skip(step, 2.0))


def test_a_second_writer_in_one_process_is_refused_until_the_first_closes(path):
    with closing(RunFile(path, START)) as file:
        with pytest.raises(ValueError, match=REFUSAL):
            RunFile(path, START)
        file.write(Skip(1, 2.0))
        assert len(read_run(path).starts) == 1
    write_one(path, 2)
    assert steps_of(path) == [1, 2]


def test_a_link_to_the_file_is_no_way_around(path):
    link = path.with_name("link.jsonl")
    with closing(RunFile(path, START)):
        link.symlink_to(path)
        with pytest.raises(ValueError, match="another monitor is writing"):
            RunFile(link, START)


WRITER = """
import sys
from pathlib import Path
from gradscaler.diagnose._run.writer import RunFile
from gradscaler.diagnose._run.lines import Start

file = RunFile(Path(sys.argv[1]), Start("torch", "float16", 100, 0, {}, ""))
print("opened", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_ends(path):
    command = [sys.executable, "-c", WRITER, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        first.stdout.readline()
        second = subprocess.run(command, input="", capture_output=True, text=True)
        before = path.read_bytes()
        first.kill()
    assert second.returncode == 1
    assert "ValueError" in second.stderr
    assert "another monitor is writing to this file" in second.stderr
    assert path.read_bytes() == before
    write_one(path, 1)


class Writer:
    """Refers to itself, as a monitor does by its scaler, and closes its file in the end."""

    def __init__(self, path):
        self.file, self.itself = RunFile(path, START), self

    def __del__(self):
        self.file.close()


def test_a_writer_that_nothing_refers_to_is_no_writer(path):
    gc.collect()
    gc.disable()
    try:
        Writer(path)
        write_one(path, 1)
    finally:
        gc.enable()


def test_a_file_that_is_refused_or_foreign_is_not_held(path):
    path.write_text("dear diary\n")
    with pytest.raises(ValueError, match="line 1") as raised:
        RunFile(path, START)
    path.write_text("")
    write_one(path, 1)  # while the traceback still refers to the first
    assert raised.traceback


@pytest.fixture
def fork():
    """Runs a function in a child, which then waits; returns how to end it."""
    if not hasattr(os, "fork"):
        pytest.skip("there is no fork here")
    children = []

    def fork(run):
        reader, ready = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of other threads
            child = os.fork()
        if child == 0:
            try:
                run()
                os.write(ready, b"!")
                time.sleep(60)
            finally:
                os._exit(1)
        children.append(child)
        os.close(ready)
        assert os.read(reader, 1) == b"!"
        os.close(reader)

    yield fork
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_keep_the_file_from_the_next_writer(fork, path):
    with closing(RunFile(path, START)):
        fork(lambda: None)  # as a data loader's worker
    write_one(path, 1)


def test_a_forked_child_writes_nothing_and_says_so_and_its_parent_goes_on(fork, path):
    with closing(RunFile(path, START)) as file:

        def in_the_child():
            with pytest.warns(RuntimeWarning, match=r"before this process was forked; .*\{rank\}"):
                file.write(Skip(1, 2.0))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                file.write(Skip(2, 2.0))
            with pytest.raises(ValueError, match=REFUSAL):
                RunFile(path, START)
            file.close()

        fork(in_the_child)
        file.write(Skip(3, 2.0))
        with pytest.raises(ValueError, match=REFUSAL):
            RunFile(path, START)
    assert steps_of(path) == [3]


def test_a_file_system_without_locks_is_warned_of_and_written_to(monkeypatch, path):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    fcntl = SimpleNamespace(LOCK_EX=2, LOCK_NB=4, flock=flock)
    monkeypatch.setattr(writer, "_fcntl", fcntl)
    with pytest.warns(RuntimeWarning, match=r"run\.jsonl cannot be locked, so a second writer"):
        write_one(path, 1)
    monkeypatch.setattr(writer, "_fcntl", None)  # as on Windows
    write_one(path, 2)
    assert steps_of(path) == [1, 2]
