"""Losses that are Inf or NaN, and that no backward pass takes."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from gradscaler.diagnose import Monitor, read_run
from gradscaler.torch import GradScaler
from tests.support.marked_lines import lines_marked_in

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
line_with = lines_marked_in(__file__)


class Training:
    """A training under a monitor with a file, which tells findings to a list."""

    def __init__(self, path, has_scaler=False):
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = GradScaler("cpu", init_scale=8.0) if has_scaler else None
        self.told = []
        self.monitor = Monitor(self.scaler, self.model, path=path, tell=self.told.append)

    def loss(self, shift=100.0):
        return torch.sqrt(self.model(torch.randn(8, 4)) + shift).mean()  # root

    def step(self, loss):
        self.optimizer.zero_grad()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()


@pytest.fixture(params=[False, True], ids=["no scaler", "scaler"])
def training(request, tmp_path):
    made = Training(tmp_path / "run.jsonl", request.param)
    for _ in range(3):
        made.step(made.loss())
    yield made
    made.monitor.close()


def verdicts_of(training, path):
    training.monitor.close()
    return training.monitor.verdict, read_run(path).verdict


def test_it_is_told_with_its_operation_and_line_and_the_file_says_the_same(training, tmp_path):
    training.monitor.leave_out(training.loss(-100.0))
    ours, of_file = verdicts_of(training, tmp_path / "run.jsonl")
    assert ours.text == of_file.text
    assert f"by sqrt at {line_with('root')}" in ours.text
    assert "so the loss of step 4 is nan, and no backward pass took it" in ours.text
    assert "Its weights are lost" not in ours.text
    assert [each.text for each in training.told] == [ours.findings[0].text]
    assert training.monitor.bad_step is None
    assert read_run(tmp_path / "run.jsonl").num_steps == 3


def test_only_the_first_of_many_is_told(training, tmp_path):
    for _ in range(20):
        training.monitor.leave_out(training.loss(-100.0))
        training.step(training.loss())
    training.monitor.close()
    assert len(training.told) == len(read_run(tmp_path / "run.jsonl").bad_steps) == 1


def test_a_finite_one_and_one_that_a_backward_pass_has_taken_are_none(training):
    training.monitor.leave_out(training.loss())
    bad = training.loss(-100.0)
    training.optimizer.zero_grad()
    whole = bad if training.scaler is None else training.scaler.scale(bad)
    whole.backward()
    told = len(training.told)
    training.monitor.leave_out(bad)
    assert len(training.told) == told


def test_a_step_that_is_applied_later_is_the_graver_one(tmp_path):
    training = Training(tmp_path / "run.jsonl")
    training.step(training.loss())
    training.monitor.leave_out(training.loss(-100.0))
    training.step(training.loss(-100.0))
    ours, of_file = verdicts_of(training, tmp_path / "run.jsonl")
    assert ours.text == of_file.text
    assert "so step 2 was applied with gradients of Inf or NaN" in ours.text
    assert training.monitor.bad_step == 2


def test_one_after_the_monitor_has_closed_is_ignored(training):
    training.monitor.close()
    training.monitor.leave_out(training.loss(-100.0))
    assert training.told == []


def test_one_without_a_graph_is_told_without_a_place(training):
    training.monitor.leave_out(training.loss(-100.0).detach())
    (told,) = training.told
    assert "loss is itself nan, so no backward pass took it in step 4." in told.cause
    assert told.line is None
