"""Parameters that an optimizer holds and no module does, such as a learned temperature."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from gradscaler.diagnose import Monitor
from tests.support.marked_lines import lines_marked_in

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
line_with = lines_marked_in(__file__)


class Training:
    """A network, and a weight of its loss in no module; a step of the latter may be a failure."""

    def __init__(self, of_its_own=False):
        self.net, self.weight = nn.Linear(4, 4), nn.Parameter(torch.zeros(2))
        own = [self.weight]
        self.optimizers = [torch.optim.SGD([*self.net.parameters(), *own], lr=1e-3)]
        if of_its_own:
            self.optimizers = [torch.optim.SGD(each, lr=1e-3) for each in (own, self.parameters)]

    @property
    def parameters(self):
        return list(self.net.parameters())

    def train(self, failing, steps=30):
        for step in range(1, steps + 1):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            weight = self.weight * 0 if step == failing else self.weight + 1
            norm = weight.square().sum().sqrt()  # norm
            (self.net(torch.randn(8, 4)).square().mean() + norm).backward()
            for optimizer in self.optimizers:
                optimizer.step()


@pytest.mark.parametrize("failing", [1, 2, 7, 20])
def test_a_gradient_of_nan_is_seen_in_its_first_step(failing):
    training, told = Training(), []
    monitor = Monitor(model=training.net, tell=told.append)
    training.train(failing)
    monitor.close()
    assert (monitor.bad_step, told[0].kind) == (failing, "nan")
    assert told[0].where == "group 0, parameter 2"
    if failing > 1:  # the optimizer is not known before its first step
        assert f"the gradient of sqrt at {line_with('norm')}" in told[0].cause


def test_an_optimizer_of_such_parameters_alone_is_watched_if_it_is_given():
    training, told = Training(of_its_own=True), []
    monitor = Monitor(model=training.net, optimizers=training.optimizers, tell=told.append)
    training.train(failing=7)
    monitor.close()
    assert (monitor.bad_step, told[0].kind) == (7, "nan")


def test_a_healthy_training_with_such_parameters_is_normal():
    training, told = Training(), []
    monitor = Monitor(model=training.net, tell=told.append)
    training.train(failing=None, steps=120)
    monitor.close()
    assert (monitor.verdict.kind, told) == ("normal", [])
