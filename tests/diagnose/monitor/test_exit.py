"""The run file of a process that ends without closing its monitor."""

import gc
import logging
import math
import os
import signal
import sys
import textwrap
import warnings

import pytest

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradscaler.diagnose import Monitor, read_run

# Its clock is replaced.
from gradscaler.diagnose._monitor import step_log
from gradscaler.torch import GradScaler
from tests.support import programs

# Their trainings are in float32, which is a finding of its own.
pytestmark = pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")

SCRIPT = """
import os, signal, sys, time
import torch
from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler

def train(steps, pause=0.0):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()
    monitor = Monitor(scaler, model, path=sys.argv[1], every=1000, forensics=0)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(2)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        time.sleep(pause)
    return scaler, monitor
"""


def run(path, script):
    """The exit status of a script that trains, and its stderr."""
    done = programs.run("-c", SCRIPT + textwrap.dedent(script), path, cwd=path.parent)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "script",
    [
        "kept = train(90)",
        "train(90)  # nothing refers to the monitor",
        "kept = train(90); raise SystemExit(0)",
    ],
    ids=["end", "dropped", "exit"],
)
def test_each_step_is_on_file_at_exit(script, tmp_path):
    assert run(tmp_path / "run", script) == (0, "")
    assert read_run(tmp_path / "run").num_steps == 90


def test_each_step_is_on_file_after_an_exception(tmp_path):
    status, error = run(tmp_path / "run", "kept = train(90); raise RuntimeError('no more')")
    assert status == 1
    assert "no more" in error
    assert read_run(tmp_path / "run").num_steps == 90


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_that_exits_writes_nothing(tmp_path):
    script = """
        kept = train(90)
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
    """
    status, error = run(tmp_path / "run", script)
    assert status == 0
    assert "no more lines" not in error
    assert read_run(tmp_path / "run").num_steps == 90


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the system has no such signal")
def test_a_killed_process_leaves_the_steps_of_all_but_the_last_second(tmp_path):
    script = "kept = train(15, pause=0.2); os.kill(os.getpid(), signal.SIGKILL)"
    assert run(tmp_path / "run", script)[0] == -signal.SIGKILL
    assert 5 <= read_run(tmp_path / "run").num_steps <= 15


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds that the monitor reads."""
    now = [0.0]
    monkeypatch.setattr(step_log, "_LONGEST_UNWRITTEN", 1.0)
    monkeypatch.setattr(step_log, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("forensics", [0, 1])
def test_a_line_is_written_at_the_first_step_after_a_second(forensics, clock, tmp_path):
    weight = torch.ones(1, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler()
    with Monitor(scaler, path=tmp_path / "run", every=50, forensics=forensics):
        for number in range(1, 50):
            clock[0] += 0.3
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert read_run(tmp_path / "run").num_steps == number // 4 * 4


def test_a_dropped_monitor_writes_the_rest(tmp_path):
    weight = torch.ones(1, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler()
    Monitor(scaler, path=tmp_path / "run", every=50)  # without early samples
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert read_run(tmp_path / "run").num_steps == 0
    del scaler, optimizer, weight
    gc.collect()
    assert read_run(tmp_path / "run").num_steps == 3


def test_a_dropped_monitor_raises_no_warning_where_warnings_are_errors(monkeypatch, tmp_path):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    weight = torch.ones(1, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler()
    Monitor(scaler, path=tmp_path / "run")
    for number in range(7):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (math.nan if number % 2 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del scaler, optimizer, weight
        gc.collect()
    assert unraisable == []
    assert read_run(tmp_path / "run").verdict.kind == "data"


def test_a_monitor_that_is_dropped_during_a_compilation_raises_nothing(monkeypatch, tmp_path):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    weight = torch.ones(1, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler()
    Monitor(scaler, path=tmp_path / "run", every=50)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * math.nan).backward()
        scaler.step(optimizer)
        scaler.update()
    with FakeTensorMode():  # in which PyTorch's compiler runs the user's code
        del scaler, optimizer, weight
        gc.collect()
    assert unraisable == []
    assert read_run(tmp_path / "run").num_steps == 3


def train(path, losses):
    weight = torch.ones(1, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.0), GradScaler()
    with Monitor(scaler, path=path, on_stuck="continue"):
        for loss in losses:
            optimizer.zero_grad()
            scaler.scale((weight * loss).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    return read_run(path)


def test_the_verdict_is_on_the_latest_run_in_a_file(tmp_path, caplog):
    path = tmp_path / "run"
    assert train(path, [float("nan")] * 40).verdict.kind == "loss"
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING, "gradscaler"):
        found = train(path, [1.0] * 40)
    assert caplog.messages == [
        f"{path}: holds a run of 40 steps already; this one is appended, and judged alone"
    ]
    assert found.verdict.kind == "misuse"
    assert found.verdict.text.startswith(
        "The file holds 2 runs, one after another; this is on the latest, from step 41 on. "
        "The backward pass computes in float32"
    )
    assert found.num_steps == 80
    assert train(path, [float("nan")] * 30).verdict.kind == "loss"
