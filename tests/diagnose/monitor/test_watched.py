"""The steps in which a monitor watches the calls of PyTorch's functions."""

import gc
import math

import pytest

pytest.importorskip("torch")

import torch

from gradscaler.diagnose import Monitor, read_run

# The clock and the budget are replaced, and a call that must not be watched fails.
from gradscaler.diagnose._graph import budget as watch_budget
from gradscaler.diagnose._graph import module_calls, ungraphed_watch
from gradscaler.diagnose._graph.calls import CallWatch
from gradscaler.torch import GradScaler
from tests.support.marked_lines import lines_marked_in
from tests.support.reports import line_of, printed
from tests.support.watched import is_watched

line_with = lines_marked_in(__file__)


@pytest.fixture(autouse=True)
def no_constant_term_is_sought(monkeypatch):
    """Which is another watch, as the losses here add one."""
    monkeypatch.setattr(ungraphed_watch, "_MOST_SOUGHT", 0)


class UnderAutocast:
    """Steps of a model under autocast; the loss is Inf in those marked "!".

    In those marked "?" the loss is NaN, but the gradients are finite.
    """

    def __init__(self, monitored=True, model=True, scale=256.0, **options):
        torch.manual_seed(0)
        linear = torch.nn.Linear
        self.model = torch.nn.Sequential(linear(4, 8), torch.nn.Dropout(0.1), linear(8, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.scaler = GradScaler(init_scale=scale, max_retries=4)
        self.watched = []
        self.monitor = None
        if monitored:
            self.monitor = Monitor(self.scaler, self.model if model else None, **options)

    def loss(self, flag):
        self.watched.append(is_watched())
        with torch.autocast("cpu", torch.float16):
            hidden = self.model(torch.randn(8, 4))
        chances = hidden.float().softmax(-1) * (1.0 if flag != "!" else 0.0)
        entropy = torch.zeros(1) / (0.0 if flag == "?" else 1.0)  # the entropy
        return -chances.log().mean() + entropy.mean()  # the log

    def backward(self, flag):
        self.optimizer.zero_grad()
        loss = self.loss(flag)
        self.scaler.scale(loss).backward()
        return loss

    def steps(self, flags, closure=False):
        for flag in flags:
            if closure:
                self.scaler.step(self.optimizer, lambda flag=flag: self.backward(flag))
            else:
                self.backward(flag)
                self.scaler.step(self.optimizer)
            self.scaler.update()
        return self


pytestmark = pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")


def watched_in(path):
    """The step, the operation and the line of each step in which something was located."""
    found = [line for line in read_run(path).watched if line.located is not None]
    return [(line.step, line.located.operation, line.located.line) for line in found]


@pytest.mark.parametrize("model", [True, False])
@pytest.mark.parametrize("forensics", [0, 1])
def test_operation_and_line_are_written_in_the_first_step_that_fails(model, forensics, path):
    options = {"path": path, "stuck_after": 6, "on_stuck": "continue", "forensics": forensics}
    training = UnderAutocast(model=model, every=1, **options).steps("..!!!!!!!!")
    assert watched_in(path) == [(3, "log", line_with("the log"))]
    assert not any(training.watched)  # the loss' own graph shows it
    located = training.monitor._source.located
    assert (located.module, located.kind, located.num_inf) == (None, "forward", 32)


@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        ("loss", "..!!!!", "in float32, by log at {log}, from finite inputs"),
        (
            "data",
            "..!!....!!....",
            "each with a loss of inf, first seen in log at {log}.",
        ),
        ("silent", "..??....??....", "4 of 14 steps, first seen in div at {div}, and the"),
    ],
)
def test_a_verdict_names_the_operation_in_the_file_as_in_the_monitor(kind, flags, words, path):
    training = UnderAutocast(path=path, stuck_after=4, on_stuck="continue").steps(flags)
    found = training.monitor.verdict
    training.monitor.close()
    assert found.kind == kind
    text = words.format(log=line_with("the log"), div=line_with("the entropy"))
    assert text in found.text
    assert read_run(path).verdict == found


@pytest.fixture
def takes_time(monkeypatch):
    """Each step of a training takes a second; a watched step takes ten, or the given number."""

    def add(training, slower=10.0):
        now, seen = 0.0, 0

        def clock():
            nonlocal now, seen
            new, seen = training.watched[seen:], len(training.watched)
            now += sum(slower if was else 1.0 for was in new)
            return now

        monkeypatch.setattr(watch_budget, "clock", clock)
        return clock

    return add


def watched_steps(training):
    return [step for step, was in enumerate(training.watched, 1) if was]


@pytest.mark.parametrize("bad", [(7, 12, 60), (7, 8, 9), (30, 34)])
def test_steps_after_a_failure_without_a_graph_are_watched_until_one_is_located(
    bad, takes_time, path
):
    training = UnderAutocast(path=path)
    takes_time(training, slower=1.1)
    training.steps("?" if step in bad else "." for step in range(1, 81))
    first, second = bad[:2]
    assert watched_steps(training) == list(range(first + 1, second + 1))
    read, made = line_with("the log"), line_with("the entropy")
    assert watched_in(path) == [(first, "add", read), (second, "div", made)]


def test_three_watched_failures_that_show_nothing_are_enough(takes_time):
    training = UnderAutocast()
    takes_time(training, slower=1.1)
    hidden = torch.full((), math.nan)  # made before the steps, so it is data
    entropy = training.loss
    training.loss = lambda flag: entropy(".") + (hidden if flag == "?" else 0.0)
    training.steps(".?.?.?.?.?.?")
    assert watched_steps(training) == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("slower", [3.0, 10.0, 40.0])
def test_a_budget_allows_watches_in_5_percent_of_the_time(slower, monkeypatch):
    now, spent = 0.0, 0.0
    monkeypatch.setattr(watch_budget, "clock", lambda: now)
    budget = watch_budget.Budget()
    for step in range(1, 10_000):
        now += 1.0
        budget.step_ended(step)
        left = budget.left(step, watch_budget.WATCHED)
        if left is not None:
            budget.begin(left)
            now += min(slower, left)  # it breaks off
            spent += min(slower, left)
            budget.end()
        assert spent <= 0.05 * now
    assert spent > 0.04 * now


@pytest.mark.parametrize("period", [2, 5])
def test_failures_are_watched_within_the_budget_however_often_batches_fail(
    period, takes_time, monkeypatch
):
    monkeypatch.setattr(watch_budget, "SHARE", 0.4)
    training = UnderAutocast()
    clock = takes_time(training)
    for step in range(1, 121):
        is_bad = step % period == 0 and step % (3 * period) != 0  # not periodic, nor in a row
        training.steps("?" if is_bad else ".")
        # Beyond the budget are a second, and the first watch, whose cost is not known before.
        assert 9.0 * sum(training.watched) <= 0.4 * clock() + 1.0 + 9.0
    assert any(training.watched)


class Slow(torch.nn.Module):
    """Takes a second, or a hundred while it is watched."""

    now = 0.0

    def forward(self, inputs):
        self.now += 100.0 if is_watched() else 1.0
        return inputs


def test_a_watch_that_takes_longer_than_the_budget_breaks_off(monkeypatch):
    monkeypatch.setattr(watch_budget, "SHARE", 0.5)
    training = UnderAutocast()
    slow, watched = Slow(), []
    training.model.insert(1, slow)
    training.model[-1].register_forward_hook(
        lambda *_: watched.append(torch.nn.modules.module._has_any_global_hook())
    )
    monkeypatch.setattr(watch_budget, "clock", lambda: slow.now)
    training.steps("?" if step in (60, 90, 200) else "." for step in range(1, 210))
    assert watched_steps(training) == [61]  # the next one may take at least 200 seconds
    assert not any(watched)


def test_a_skip_at_a_scale_that_is_too_large_is_not_watched(path):
    training = UnderAutocast(scale=2.0**126, path=path).steps("....")
    assert training.monitor.history[0].skipped
    assert not any(training.watched)


def test_a_closure_that_fails_is_located_in_its_first_call(path):
    training = UnderAutocast(path=path, stuck_after=9).steps("..!..", closure=True)
    assert watched_in(path) == [(3, "log", line_with("the log"))]
    assert not any(training.watched)


def test_the_report_tells_where(path):
    training = UnderAutocast(path=path).steps(".!!")
    training.monitor.close()
    row = line_of(printed("explain", path, width=300), "forward of a function (float32), log at ")
    assert f"log at {line_with('the log')}: 32 inf" in row
    assert row.split()[-1] == "2"  # the step


@pytest.mark.parametrize("closure", [False, True])
def test_a_watched_training_has_the_same_bits(closure):
    def bits(monitored):
        options = {"stuck_after": 3, "on_stuck": "continue"} if monitored else {}
        training = UnderAutocast(monitored, **options).steps(".?..???..!!!!..", closure)
        assert any(training.watched) == monitored
        state = training.optimizer.state_dict()["state"]
        moments = [each for entry in state.values() for each in entry.values()]
        return [*training.model.parameters(), *moments, torch.get_rng_state()]

    # A watched batch draws the same random numbers, and makes the same gradients.
    assert all(map(torch.equal, bits(True), bits(False)))


@pytest.mark.parametrize("closure", [False, True])
def test_an_update_is_not_watched_so_an_interrupt_cannot_move_the_scale_twice(closure, monkeypatch):
    training = UnderAutocast(stuck_after=3, on_stuck="continue")
    watched, update = [], training.scaler.update

    def watched_update():
        with monkeypatch.context() as patch:
            patch.setattr(CallWatch, "call", lambda *_: watched.append("update") or 1 / 0)
            update()

    monkeypatch.setattr(training.scaler, "update", watched_update)
    training.steps(".?..???..", closure)
    assert any(training.watched)
    assert watched == []


def test_a_compiled_model_is_run_as_it_was_written_in_watched_steps_alone():
    calls = []

    def backend(graph, _):
        def run(*args):
            calls[-1] += 1
            return graph(*args)

        return run

    training = UnderAutocast()
    compiled = torch.compile(training.model, backend=backend)
    training.model = lambda inputs: calls.append(0) or compiled(inputs)
    training.steps("..?.?.")
    assert training.watched == [False, False, False, True, True, False]
    assert [bool(count) for count in calls] == [not watched for watched in training.watched]


class Listener:
    """Is told of the calls of modules, which are counted."""

    num_calls = 0

    def enter_module(self, *_):
        self.num_calls += 1
        return False


def test_code_that_is_compiled_while_modules_are_watched_is_the_same():
    graphs, model, listener = [], torch.nn.Linear(4, 4), Listener()
    compiled = torch.compile(model, backend=lambda g, _: graphs.append(g) or g, fullgraph=True)
    module_calls.listen(listener)
    try:
        watched = compiled(torch.ones(1, 4))
    finally:
        module_calls.ignore(listener)
    assert listener.num_calls > 0
    assert torch.equal(compiled(torch.ones(1, 4)), watched)
    assert {str(graph.graph) for graph in graphs} == {str(graphs[0].graph)}


def test_a_closed_monitor_watches_no_more():
    training = UnderAutocast().steps("?")
    assert is_watched()
    training.monitor.close()
    assert not is_watched()


def test_a_monitor_that_is_dropped_while_it_watches_watches_no_more():
    training = UnderAutocast().steps("?")
    assert is_watched()
    training.backward("!")  # its graph has hooks now
    del training
    gc.collect()
    assert not is_watched()


@pytest.mark.parametrize("steps", ["!", "!!"])
def test_a_monitor_that_is_dropped_while_its_model_lives_leaves_nothing_on_it(steps):
    training = UnderAutocast().steps(steps)
    model = training.model
    training.backward("!")
    del training
    gc.collect()
    assert not is_watched()
    assert not torch.nn.modules.module._has_any_global_hook()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_a_loss_that_recovers_is_no_longer_watched(path):
    training = UnderAutocast(path=path).steps("?...?..")
    assert training.watched == [False, True, True, True, True, False, False]
    assert math.isfinite(training.loss(".").item())
    found = [(1, "add", line_with("the log")), (5, "div", line_with("the entropy"))]
    assert watched_in(path) == found
