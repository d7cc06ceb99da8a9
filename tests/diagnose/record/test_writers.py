"""A run file has one writer at a time, in whichever process."""

import errno
import gc
import os
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import pytest

from gradscaler import DynamicScale
from gradscaler.diagnose import Monitor, read_run

# Its module of locks is replaced, as no file system without locks is at hand.
from gradscaler.diagnose._record import writer

pytest.importorskip("fcntl", reason="files are not locked here")

REFUSAL = r"run\.jsonl: another monitor is writing to this file; .*path=\"run\.\{rank\}\.jsonl\""


def monitor_into(path):
    """A monitor that writes a line for each step, of a scaler that announces none."""
    policy = DynamicScale()
    return Monitor(SimpleNamespace(policy=policy, state=policy.init()), path=path, every=1)


def steps_of(path):
    return [sample.step for sample in read_run(path).samples]


def write_one(path):
    with monitor_into(path) as monitor:
        monitor.record()


def test_a_second_writer_in_one_process_is_refused_until_the_first_closes(path):
    with monitor_into(path) as monitor:
        with pytest.raises(ValueError, match=REFUSAL):
            monitor_into(path)
        monitor.record()
        assert len(read_run(path).starts) == 1
    write_one(path)
    assert steps_of(path) == [1, 2]


def test_a_link_to_the_file_is_no_way_around(path):
    link = path.with_name("link.jsonl")
    with monitor_into(path):
        link.symlink_to(path)
        with pytest.raises(ValueError, match="another monitor is writing"):
            monitor_into(link)


WRITER = """
import sys
from types import SimpleNamespace
from gradscaler import DynamicScale
from gradscaler.diagnose import Monitor

policy = DynamicScale()
monitor = Monitor(SimpleNamespace(policy=policy, state=policy.init()), path=sys.argv[1])
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
    write_one(path)


def test_a_monitor_that_nothing_refers_to_is_no_writer(path):
    gc.collect()
    gc.disable()
    try:
        policy = DynamicScale()
        scaler = SimpleNamespace(policy=policy, state=policy.init())
        scaler.monitor = Monitor(scaler, path=path)  # a cycle, which only the collector frees
        del scaler
        write_one(path)
    finally:
        gc.enable()


def test_a_file_that_is_refused_or_foreign_is_not_held(path):
    path.write_text("dear diary\n")
    with pytest.raises(ValueError, match="line 1") as raised:
        monitor_into(path)
    path.write_text("")
    write_one(path)  # while the traceback still refers to the first
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
    with monitor_into(path):
        fork(lambda: None)  # as a data loader's worker
    write_one(path)


def test_a_forked_child_writes_nothing_and_says_so_and_its_parent_goes_on(fork, path):
    with monitor_into(path) as monitor:

        def in_the_child():
            with pytest.warns(RuntimeWarning, match=r"before this process was forked; .*\{rank\}"):
                monitor.record()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                monitor.record()
            with pytest.raises(ValueError, match=REFUSAL):
                monitor_into(path)
            monitor.close()

        fork(in_the_child)
        monitor.record()
        with pytest.raises(ValueError, match=REFUSAL):
            monitor_into(path)
    assert steps_of(path) == [1]


def test_a_file_system_without_locks_is_warned_of_and_written_to(monkeypatch, path):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    fcntl = SimpleNamespace(LOCK_EX=2, LOCK_NB=4, flock=flock)
    monkeypatch.setattr(writer, "_fcntl", fcntl)
    with pytest.warns(RuntimeWarning, match=r"run\.jsonl cannot be locked, so a second writer"):
        write_one(path)
    monkeypatch.setattr(writer, "_fcntl", None)  # as on Windows
    write_one(path)
    assert steps_of(path) == [1, 2]
