"""Training loops as users write them: counts of a monitor's hooks, warnings and calls in each."""

import gc
import math
import re
import sys
import warnings
from itertools import pairwise

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.modules.module import _has_any_global_hook

from gradscaler.diagnose import FindingWarning, Monitor
from gradscaler.torch import GradScaler
from tests.support.watched import is_watched

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


class Probe(torch.nn.Module):
    """Notes whether anything is hooked while it runs."""

    def __init__(self):
        super().__init__()
        self.hooked = []

    def forward(self, inputs):
        self.hooked.append(is_watched() or bool(_has_any_global_hook()))
        return inputs


class Loop:
    """A training in fp16, whose loss is NaN in the steps that ``flags`` mark with "!" or "?"."""

    def __init__(self, monitored=True, model=None, **options):
        linear, self.probe = torch.nn.Linear, Probe()
        self.model = model or torch.nn.Sequential(linear(4, 8), self.probe, linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.scaler = GradScaler(init_scale=256.0)
        self.monitor = Monitor(self.scaler, self.model, **options) if monitored else None

    def backward(self, flag):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            outputs = self.model(torch.randn(8, 4))
        weight = torch.ones(()) * (math.nan if flag == "?" else 1.0)  # has no graph
        loss = outputs.float().square().mean() * (math.nan if flag == "!" else 1.0) + weight - 1
        self.scaler.scale(loss).backward()

    def step(self, flag="."):
        self.backward(flag)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def steps(self, flags):
        for flag in flags:
            self.step(flag)

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            self.model(torch.randn(8, 4))
        self.model.train()


def hooked_in(probe, call, *args):
    """The hooks that a probe notes in a call."""
    probe.hooked.clear()
    call(*args)
    return probe.hooked


@pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")
def test_nothing_is_hooked_in_an_evaluation_before_a_step_that_is_to_be_watched():
    loop = Loop()
    loop.steps("..?")
    assert is_watched()
    assert hooked_in(loop.probe, loop.evaluate) == [False]
    assert hooked_in(loop.probe, loop.steps, "?.") == [False, True]


@pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")
def test_an_evaluation_within_a_watched_step_ends_the_watch():
    loop = Loop()
    loop.steps("..?")
    loop.backward(".")
    assert is_watched()
    assert hooked_in(loop.probe, loop.evaluate) == [False]
    assert not is_watched()


@pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")
def test_what_a_watch_saw_before_it_broke_off_is_not_blamed():
    loop = Loop()
    loop.steps("..?")
    kept = torch.zeros(1) / 0.0  # in code between the steps, and it does no harm
    loop.evaluate()
    loop.steps("?")
    assert kept.isnan().all()
    assert loop.monitor._source.located.operation == "add"


@pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")
def test_nothing_is_hooked_between_a_step_and_its_update():
    loop = Loop()
    loop.steps("..?")
    loop.backward(".")
    loop.scaler.step(loop.optimizer)
    assert not is_watched()
    loop.scaler.update()
    assert not _has_any_global_hook()


@pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")
def test_a_monitor_that_has_located_a_failure_hooks_nothing_more():
    loop = Loop()
    assert hooked_in(loop.probe, loop.steps, ".!!" + "!." * 20) == [False] * 43


@pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")
def test_an_error_in_a_watched_step_leaves_a_training_that_goes_on():
    loop = Loop()
    loop.steps("..!")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        loop.model(torch.randn(8, 3))
    loop.steps("!..")
    assert len(loop.monitor.history) == 6
    assert not is_watched()
    assert loop.monitor._log.counts.evidence.watched.operation == "mul"


def python_calls(loop, steps=9):
    """How many Python functions an ordinary step calls."""
    counts = []
    for _ in range(steps):
        calls = 0

        def profile(frame, event, _):
            nonlocal calls
            calls += event == "call"

        sys.setprofile(profile)
        try:
            loop.step()
        finally:
            sys.setprofile(None)
        counts.append(calls)
    return sorted(counts)[steps // 2]


@pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")
@pytest.mark.parametrize("forensics", [0, 1])
def test_a_monitor_adds_few_calls_to_a_step_however_many_parameters_there_are(forensics):
    added = []
    for depth in (2, 12):  # with 40, gradients of 0 are looked into when there is time
        counts = []
        for monitored in (False, True):
            layers = [torch.nn.Linear(4, 4) for _ in range(depth)]
            options = {"forensics": forensics, "every": 10_000} if monitored else {}
            loop = None
            gc.collect()  # a monitor that is left has a hook in the next loop's steps, too
            loop = Loop(monitored, torch.nn.Sequential(*layers), **options)
            loop.steps("." * 25)
            counts.append(python_calls(loop))
        added.append(counts[1] - counts[0])
    assert added[0] == added[1] < 140


def said(loop, flags):
    """The findings of which each step warned, by the step's number."""
    warned = {}
    for number, flag in enumerate(flags, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FindingWarning)
            loop.step(flag)
        if caught:
            warned[number] = [str(each.message) for each in caught]
    return warned


@pytest.fixture
def looks_cost_nothing(monkeypatch):
    """Let a monitor look for findings as often as it may, however busy the machine is."""
    monkeypatch.setattr("gradscaler.diagnose._monitor.warning_filter.clock", lambda: 0.0)


@pytest.mark.usefixtures("looks_cost_nothing")
def test_a_finding_is_said_in_the_step_that_shows_it_and_again_when_it_is_ten_times_worse():
    warned = said(Loop(), "." * 20 + "!....!.!.." * 40)
    assert all(len(texts) == 1 for texts in warned.values())
    counts = [int(re.search(r"(\d+) of \d+ steps", text)[1]) for (text,) in warned.values()]
    assert counts[0] == 1
    assert all(10 * before <= after <= 12 * before for before, after in pairwise(counts))
    assert (min(warned), len(counts)) == (21, 3)


@pytest.mark.usefixtures("looks_cost_nothing")
def test_a_state_that_is_not_finite_is_said_before_the_streak_of_skips_is_long():
    loop = Loop()
    loop.steps("." * 12)
    state = loop.optimizer.state[loop.model[2].weight]
    state["exp_avg"][0, 3] = math.nan
    warned = said(loop, "." * 12)
    texts = [text for texts in warned.values() for text in texts]
    assert min(warned) <= 12
    assert any("exp_avg of 2.weight is Inf or NaN" in text for text in texts)
    assert any("No loss scale fixes this" in text for text in texts)


@pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")
def test_with_every_warning_in_continue_mode_nothing_is_said():
    assert said(Loop(on_stuck="continue"), ".!" * 40) == {}


@pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")
@pytest.mark.parametrize("reads_from", ["one model", "two models"])
def test_two_optimizers_with_accumulated_gradients_are_one_step_of_each_update(reads_from):
    """As in a GAN: each has its own losses, of two micro-batches, and there is one update."""
    models = [torch.nn.Sequential(torch.nn.Linear(4, 1), Probe()) for _ in range(2)]
    if reads_from == "one model":
        models[1] = models[0]
    scaler = GradScaler(init_scale=256.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    monitor = Monitor(scaler, torch.nn.ModuleList(models), every=3)
    for step in range(1, 13):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for part in range(2):
                with torch.autocast("cpu", torch.float16):
                    loss = model(torch.randn(8, 4)).float().mean()
                bad = step % 5 == 0 and part == 1 and model is models[1]
                scaler.scale(loss * (math.inf if bad else 1.0)).backward()
            scaler.step(optimizer)
        scaler.update()
    assert [step.step for step in monitor.history if step.skipped] == [5, 10]
    assert len(monitor.history) == 12
    assert "misuse" not in [finding.kind for finding in monitor.verdict.findings]
