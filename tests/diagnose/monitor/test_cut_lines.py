"""The line of a call that cuts parameters off from the loss."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gradscaler.diagnose import Monitor
from tests.support.marked_lines import lines_marked_in

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread", "nothing_was_compiled")
line_with = lines_marked_in(__file__)


class Net(nn.Module):
    """A network whose first layers weigh the input of the others."""

    def __init__(self, cut):
        super().__init__()
        self.query, self.key, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.cut = cut

    def forward(self, x):
        weights = (self.query(x) * self.key(x)).tanh()
        self.shown = weights.detach()  # only shown
        return self.out((1 + self.cut(weights)) * x)


def detached(weights):
    return weights.detach()  # detached


def as_numbers(weights):
    return torch.tensor(weights.tolist())


def as_a_number(weights):
    return 0.5 * weights.mean().item()


def verdict_on(cut):
    net = Net(cut)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Monitor(None, net, tell=[].append) as monitor:
        for _ in range(60):
            loss = cross_entropy(net(torch.randn(16, 6)), torch.randint(3, (16,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return monitor.verdict


def test_the_call_that_cuts_layers_off_is_named_with_its_line():
    found = verdict_on(detached).findings[0]
    line = line_with("detached")
    assert (found.kind, found.line) == ("dead", line)
    assert "4 of 6 parameters, query.weight first, have no gradient" in found.cause
    assert f"detach() at {line} cuts them off" in found.cause
    assert found.action.startswith("Unless it is meant, leave that call out")


@pytest.mark.parametrize("cut", [as_numbers, as_a_number], ids=lambda f: f.__name__)
def test_a_call_that_is_not_seen_is_looked_for(cut):
    found = verdict_on(cut).findings[0]
    assert "Look behind key for what cuts the graph" in found.action
    assert found.line is None
