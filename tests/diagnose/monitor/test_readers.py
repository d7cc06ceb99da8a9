"""A monitor that other threads and signal handlers read and close while a training runs."""

import signal
import sys
import threading

import pytest

pytest.importorskip("torch")

import torch

from gradscaler.diagnose import Monitor, read_run
from gradscaler.diagnose._monitor import observer
from gradscaler.torch import GradScaler
from tests.support.threads import repeated_beside
from tests.support.watched import is_watched

INF = float("inf")


class BadAtTimes:
    """Steps of a small model; each third overflows, or those whose numbers ``is_bad`` accepts."""

    def __init__(self, is_bad=lambda number: number % 3 == 0, **options):
        torch.manual_seed(0)
        self.is_bad = is_bad
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.scaler = GradScaler(init_scale=2.0**10)
        options = {"every": 4, "on_stuck": "continue"} | options
        self.monitor = Monitor(self.scaler, self.model, **options)

    def forward(self, number):
        self.optimizer.zero_grad()
        inputs = torch.full((2, 4), INF if self.is_bad(number) else 1.0)
        self.scaler.scale(self.model(inputs).sum()).backward()

    def finish(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, steps):
        for number in range(1, steps + 1):
            self.forward(number)
            self.finish()
        return self

    @property
    def seen(self):
        return [(step.step, step.scale, step.skipped) for step in self.monitor.history]


def interrupt_each(nth, call, handler):
    """Run a handler before each n-th line of gradscaler's, as Python runs those of signals."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if "/gradscaler/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines % nth == 0:
                handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("forensics", [0, 1])
def test_a_reader_in_a_handler_at_any_line_changes_nothing(forensics, tmp_path):
    expected = BadAtTimes(forensics=forensics, path=tmp_path / "expected").run(30)
    expected.monitor.close()
    read = BadAtTimes(forensics=forensics, path=tmp_path / "read")
    seen = []

    def reads():
        seen.append([step.step for step in read.monitor.history])
        assert read.monitor.verdict.kind

    interrupt_each(211, lambda: read.run(30), reads)
    assert all(steps == list(range(1, len(steps) + 1)) for steps in seen)
    assert max(map(len, seen)) >= 29
    assert read.seen == expected.seen
    read.monitor.close()
    lines = [(tmp_path / name).read_text().splitlines()[1:] for name in ("expected", "read")]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("is_bad", [lambda n: n % 3 == 0, lambda n: True], ids=["some", "all"])
def test_a_close_in_a_handler_at_any_line_leaves_a_whole_file_and_nothing_on_the_model(
    is_bad, tmp_path
):
    for nth in range(5, 2500, 499):
        training = BadAtTimes(is_bad, path=tmp_path / str(nth), stuck_after=3)
        interrupt_each(nth, lambda training=training: training.run(6), training.monitor.close)
        training.monitor.close()
        assert not torch.nn.modules.module._has_any_global_hook()
        assert not is_watched()
        assert training.scaler._observers == []
        steps = len(training.monitor.history)
        assert read_run(tmp_path / str(nth)).num_steps == steps


def test_a_close_within_a_method_waits_for_its_end(tmp_path, monkeypatch):
    training = BadAtTimes(path=tmp_path / "run", every=1)
    real, within = observer.measure, []

    def closing(*args):
        training.monitor.close()
        within.extend(training.scaler._observers)
        return real(*args)

    training.run(1)
    monkeypatch.setattr(observer, "measure", closing)
    training.run(1)
    assert len(within) == 1
    assert training.scaler._observers == []
    assert read_run(tmp_path / "run").num_steps == 1


def test_a_thread_reads_while_a_training_runs():
    training = BadAtTimes(forensics=0)

    def poll():
        steps = [step.step for step in training.monitor.history]
        assert steps == list(range(1, len(steps) + 1))
        assert training.monitor.verdict.kind

    with repeated_beside(poll) as errors:
        training.run(60)
    assert errors == []
    assert training.seen == BadAtTimes(forensics=0).run(60).seen


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no such timers")
def test_a_timer_s_handler_reads_and_closes(tmp_path):
    training = BadAtTimes(path=tmp_path / "run")
    calls = []

    def handler(*_):
        calls.append(training.monitor.verdict.kind)
        if len(calls) == 20:
            training.monitor.close()
        if len(calls) < 30:
            start()

    def start():  # once for each call: on a busy machine, a periodic timer's handlers pile up
        signal.setitimer(signal.ITIMER_REAL, 1e-3)

    before = signal.signal(signal.SIGALRM, handler)
    start()
    try:
        while len(calls) < 30:
            training.run(5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert read_run(tmp_path / "run").num_steps == len(training.monitor.history)


@pytest.mark.parametrize("ends", ["step", "close"])
def test_a_watch_that_ends_on_another_thread_leaves_nothing_behind(ends):
    training = BadAtTimes(lambda number: True, stuck_after=3)
    training.run(1)  # the second is watched
    assert is_watched()
    training.forward(2)
    other = threading.Thread(target=training.finish if ends == "step" else training.monitor.close)
    other.start()
    other.join()
    training.model(torch.ones(1, 4))
    assert not is_watched()
    training.monitor.close()
    assert not torch.nn.modules.module._has_any_global_hook()
