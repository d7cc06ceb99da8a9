"""Modules that are called in each step, and that no loss reaches."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from gradscaler.diagnose import Monitor, read_run

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.first(hidden), self.second(hidden)


def total(model, inputs, step):
    first, second = model(inputs)
    return first.square().mean() + second.square().mean()


def one_term(model, inputs, step):
    first, second = model(inputs)
    losses = {"first": first.square().mean(), "second": second.square().mean()}
    return losses["first"]


def detached(model, inputs, step):
    first, second = model(inputs)
    return (first + second.detach()).square().mean()


def one_a_step(model, inputs, step):
    return model(inputs)[step % 2].square().mean()


def not_called(model, inputs, step):
    return model.first(model.body(inputs).relu()).square().mean()


def under_no_grad(model, inputs, step):
    hidden = model.body(inputs).relu()
    with torch.no_grad():
        target = model.second(hidden)
    return (model.first(hidden) - target).square().mean()


def slope(model, inputs, step):
    """The loss of a derivative, which the bias of the last layer leaves as it is."""
    inputs.requires_grad_()
    out = model.first(model.body(inputs).tanh()).sum()
    return (torch.autograd.grad(out, inputs, create_graph=True)[0] - 0.1).square().mean()


def verdict_on(loss_of, path, freeze=False):
    model = Net()
    model.second.requires_grad_(not freeze)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model=model, path=path) as monitor:
        for step in range(120):
            optimizer.zero_grad()
            loss_of(model, torch.randn(8, 4), step).backward()
            optimizer.step()
    assert read_run(path).verdict == monitor.verdict
    return monitor.verdict


@pytest.mark.parametrize("loss_of", [one_term, detached])
def test_a_head_that_is_called_and_left_out_of_the_loss_is_named(loss_of, path):
    verdict = verdict_on(loss_of, path)
    assert verdict.kind == "normal"
    assert "second is called, and the loss leaves out what it makes: if unused and" in verdict.text
    assert "Nothing wrong was seen" not in verdict.text


@pytest.mark.parametrize(
    ("loss_of", "freeze", "those"),
    [
        (total, False, "unused"),  # the module that has it is called, and the loss reaches it
        (one_a_step, False, "unused"),
        (one_term, True, "unused"),
        (not_called, False, "unused and 2 more"),
        (under_no_grad, False, "unused and 2 more"),
        (slope, True, "unused and 1 more"),
    ],
)
def test_a_head_that_is_not_in_the_graph_or_not_trained_is_not(loss_of, freeze, those, path):
    text = verdict_on(loss_of, path, freeze).text
    assert f"If {those} should be trained, look for what keeps the loss from them" in text
