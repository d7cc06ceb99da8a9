"""Normalizations by the statistics of their start, of a copy or by momentum=0, and look-alikes."""

import copy

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel

from gradscaler.diagnose import Monitor, read_run
from gradscaler.torch import GradScaler
from tests.support.steps import take_step

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


class Net(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.bn = nn.BatchNorm1d(8, **settings)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.bn(self.body(x)).relu())


def average(mean, model, decay=0.9):
    for own, other in zip(mean.parameters(), model.parameters(), strict=True):
        own.data.mul_(decay).add_(other.data, alpha=1 - decay)


def nothing(*_):
    pass


def verdict_on(model, others=(), after_step=nothing, scaler=None, path=None):
    """The verdict on a training of 20 steps, after which all of these models are evaluated."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(scaler, model, path=path, tell=[].append)
    for _ in range(20):
        x = torch.randn(8, 4)
        loss = mse_loss(model(x), x[:, :1])
        optimizer.zero_grad()
        take_step(loss, optimizer, scaler)
        after_step()
    for each in (model, *others):
        each.eval()
        with torch.no_grad():
            each(torch.randn(8, 4))
    monitor.close()
    return monitor.verdict


@pytest.mark.parametrize("has_scaler", [False, True])
def test_an_average_of_the_parameters_alone_is_told(has_scaler, tmp_path):
    model, path = Net(), tmp_path / "run.jsonl"
    mean = copy.deepcopy(model).requires_grad_(False)
    scaler = GradScaler("cpu", init_scale=8.0) if has_scaler else None
    verdict = verdict_on(model, [mean], lambda: average(mean, model), scaler, path=path)
    assert verdict.kind == "misuse"
    assert verdict.where == "bn"
    assert "a second Net normalizes in bn by the statistics of its start (0 and 1)" in verdict.text
    assert read_run(path).verdict == verdict


def test_layers_with_a_momentum_of_0_are_told():
    model = nn.Sequential(Net(momentum=0), nn.BatchNorm1d(1, momentum=0.0))
    verdict = verdict_on(model)
    assert verdict.kind == "misuse"
    assert verdict.where == "0.bn"
    assert "momentum=0 keeps the running statistics of 2 layers (0.bn first)" in verdict.text


def of_another_start(model):
    """A second model of the same class, which nothing trains."""
    return [Net().requires_grad_(False)], nothing


def of_all_of_a_model(model):
    mean = copy.deepcopy(model).requires_grad_(False)
    return [mean], lambda: mean.load_state_dict(model.state_dict())


def of_one_that_is_in_training_mode(model):
    """A teacher, whose own batches move its statistics."""
    mean = copy.deepcopy(model).requires_grad_(False)

    def teach():
        average(mean, model)
        mean(torch.randn(8, 4))

    return [mean], teach


def of_the_beginning(model):
    return [copy.deepcopy(model).requires_grad_(False)], nothing


def of_one_that_is_trained_by_itself(model):
    """It is in evaluation mode from the start, as are some fine-tunings."""
    other = copy.deepcopy(model).eval()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(20):
        x = torch.randn(8, 4)
        mse_loss(other(x), x[:, :1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [other], nothing


def of_an_averaged_model(model):
    mean = AveragedModel(model).requires_grad_(False)  # which copies the buffers
    return [mean], lambda: mean.update_parameters(model)


@pytest.mark.parametrize(
    "others",
    [
        of_another_start,
        of_all_of_a_model,
        of_one_that_is_in_training_mode,
        of_the_beginning,
        of_one_that_is_trained_by_itself,
        of_an_averaged_model,
    ],
)
def test_a_second_model_that_has_its_statistics_or_no_training_is_not_told(others):
    model = Net()
    assert verdict_on(model, *others(model)).kind == "normal"


@pytest.mark.parametrize("settings", [{"track_running_stats": False}, {"momentum": None}, {}])
def test_layers_that_keep_no_statistics_or_new_ones_are_not_told(settings):
    assert verdict_on(Net(**settings)).kind == "normal"


def test_layers_that_are_frozen_with_real_statistics_are_not_told():
    model = Net()
    model(torch.randn(64, 4))
    model.bn.momentum = 0.0
    assert verdict_on(model).kind == "normal"


def test_layers_that_no_batch_has_passed_are_not_told():
    model = nn.ModuleDict({"used": nn.Linear(4, 1), "spare": nn.BatchNorm1d(4, momentum=0)})
    model.forward = lambda x: model["used"](x)
    assert verdict_on(model).kind == "normal"


def test_a_network_that_is_never_evaluated_is_not_told():
    model = Net(momentum=0)
    model.eval = nothing
    assert verdict_on(model).kind == "normal"
