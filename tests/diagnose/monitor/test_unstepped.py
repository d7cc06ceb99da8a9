"""Backward passes that fail, and that a script without a scaler takes no step after."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

import torch
from torch import nn

from gradscaler.__main__ import main
from gradscaler.diagnose import Monitor, read_run
from tests.support.marked_lines import lines_marked_in

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
line_with = lines_marked_in(__file__)


class Training:
    """A training whose iterations fail where it is told so, by the log of 0 or by an Inf."""

    def __init__(self, fails, by_batch=False):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.fails, self.by_batch = fails, by_batch
        self.losses = []

    def backward(self, number):
        inputs = torch.randn(8, 4)
        if self.by_batch and number in self.fails:
            inputs[3, 1] = torch.inf
        outputs = self.model(inputs)  # model
        share = outputs.sigmoid() * (number not in self.fails or self.by_batch)
        loss = -share.log().mean()  # log
        loss.backward()
        self.losses.append(loss)

    def has_nan(self):
        gradients = [p.grad for p in self.model.parameters()]
        return not all(bool(each.isfinite().all()) for each in gradients)


def guarded(training, number):
    training.optimizer.zero_grad()
    training.backward(number)
    norm = nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    if norm.isfinite():
        training.optimizer.step()


def tried(training, number):
    try:
        training.backward(number)
        if training.has_nan():
            raise FloatingPointError
        training.optimizer.step()
    except FloatingPointError:
        pass
    finally:
        training.optimizer.zero_grad(set_to_none=False)


def by_its_loss(training, number):
    training.backward(number)
    if training.losses[-1].isfinite():
        training.optimizer.step()
    training.optimizer.zero_grad()


def zeroed_after_a_step(training, number):
    training.backward(number)
    if not training.has_nan():
        training.optimizer.step()
        training.optimizer.zero_grad()


def accumulated(training, number):
    for _ in range(4):
        training.backward(number)
    if not training.has_nan():
        training.optimizer.step()
    training.optimizer.zero_grad()


def with_copies(training, number):
    """The optimizer holds float32 values of its own, and gets gradients by hand."""
    parameters = list(training.model.parameters())
    if number == 1:
        training.copies = [nn.Parameter(p.detach().clone()) for p in parameters]
        training.optimizer = torch.optim.SGD(training.copies, lr=0.01)
    training.backward(number)
    is_bad = training.has_nan()
    for copy, parameter in zip(training.copies, parameters, strict=True):
        copy.grad, parameter.grad = parameter.grad, None
    if not is_bad:
        training.optimizer.step()
        for copy, parameter in zip(training.copies, parameters, strict=True):
            parameter.data.copy_(copy.detach())
    training.optimizer.zero_grad()


def watched(training, iterate, path, steps=60, model=None):
    told = []
    monitor = Monitor(model=model or training.model, path=path, tell=told.append)
    for number in range(1, steps + 1):
        iterate(training, number)
    monitor.close()
    assert read_run(path).verdict == monitor.verdict
    return monitor, told


LOOPS = guarded, tried, by_its_loss, zeroed_after_a_step, accumulated


@pytest.mark.parametrize("iterate", LOOPS)
def test_failures_that_go_on_are_counted_and_located(iterate, path, capsys):
    monitor, told = watched(Training(range(7, 61)), iterate, path)
    assert [step.skipped for step in monitor.history] == [False] * 6 + [True] * 54
    verdict = monitor.verdict
    assert f"by log at {line_with('log')}" in verdict.text
    count = "54 of 60 losses were NaN or Inf, and no step was taken since step 6"
    assert count in verdict.text
    assert ("nothing has zeroed" in verdict.text) == (iterate is zeroed_after_a_step)
    assert verdict.kind in [each.kind for each in told]
    assert main(["explain", str(path)]) == 0
    said = " ".join([str(verdict), *map(str, told), capsys.readouterr().out]).lower()
    said = said.replace("gradscaler", "").replace("skipped  ", "")  # the figure's name of them
    assert [word for word in ("scale", "skip", "policy", "no harm") if word in said] == []


def test_an_optimizer_of_copies_of_the_parameters_leaves_steps_out_too(path):
    training = Training(range(7, 61))
    parameters = list(training.model.parameters())
    copies = nn.ParameterList([p.detach().clone() for p in parameters])
    optimizer = torch.optim.SGD(copies, lr=0.01)

    def step(training, number):
        training.backward(number)
        is_bad = training.has_nan()
        for copy, parameter in zip(copies, parameters, strict=True):
            copy.grad, parameter.grad = parameter.grad, None
        if not is_bad:
            optimizer.step()
        optimizer.zero_grad()

    monitor, _ = watched(training, step, path, model=copies)
    assert "54 of 60 losses were NaN or Inf, and no step was taken since" in monitor.verdict.text


def test_gradients_that_one_optimizer_leaves_are_not_those_that_another_applies(path):
    first, second = Training(range(7, 61)), Training(())
    models = nn.ModuleList([first.model, second.model])

    def step(_, number):
        guarded(first, number)
        guarded(second, number)

    monitor, _ = watched(first, step, path, model=models)
    assert monitor.bad_step is None
    assert "54 of 120 steps, every 2 steps" in monitor.verdict.text
    assert "zeroed" not in monitor.verdict.text


@pytest.mark.parametrize("iterate", LOOPS[:3])
def test_failures_now_and_then_are_data(iterate, path):
    monitor, _ = watched(Training(range(5, 60, 5)), iterate, path)
    found = monitor.verdict.findings[0]
    assert found.kind == "data"
    assert found.cause.startswith("The script left out 11 of 60 steps, every 5 steps")
    assert f"first seen in log at {line_with('log')}" in found.cause


def test_a_single_failure_does_no_harm(path):
    monitor, told = watched(Training([30]), guarded, path)
    assert told == []
    assert monitor.verdict.kind == "normal"
    assert "left out 1 of 60 steps, and the loss itself was NaN or Inf in" in monitor.verdict.text


def test_a_failure_with_which_the_training_ends_is_told(path):
    monitor, told = watched(Training([60]), guarded, path)
    assert "1 of 60 losses was NaN or Inf, and no step was taken since step 59" in told[0].cause
    assert f"by log at {line_with('log')}" in told[0].cause
    assert told[0] == monitor.verdict.findings[0]


def test_a_run_in_which_no_step_is_taken_has_a_verdict(path):
    monitor, _ = watched(Training(range(61)), guarded, path, steps=12)
    assert "12 of 12 losses were NaN or Inf, and no step was taken." in monitor.verdict.text


def test_finite_losses_that_no_step_follows_are_counted(path):
    training = Training(())

    def step(training, number):
        training.optimizer.zero_grad()
        training.backward(number)
        if number <= 6:  # as by a norm that overflows, or by a limit of it
            training.optimizer.step()

    monitor, _ = watched(training, step, path)
    assert "no step after step 6: 54 calls of backward() followed" in monitor.verdict.text


def test_an_inf_in_the_batch_that_the_loss_does_not_show_is_told_with_its_row(path):
    monitor, _ = watched(Training(range(5, 61, 5), by_batch=True), guarded, path)
    found = monitor.verdict.findings[0]
    assert "in row 3 of 8 before the forward pass of 0 (Linear), first seen" in found.cause
    assert f"in matmul at {line_with('model')}, though the loss is finite" in found.cause
