"""Powers whose gradient is Inf or NaN though the loss is finite, as from the very first step."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from gradscaler.diagnose import Monitor
from tests.support.marked_lines import lines_marked_in

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
line_with = lines_marked_in(__file__)


class Pool(nn.Module):
    """A pooling that has a learned power, after units of which some are off for all inputs."""

    def __init__(self, pool):
        super().__init__()
        self.features, self.head = nn.Linear(6, 4), nn.Linear(4, 1)
        self.power, self.pool = nn.Parameter(torch.tensor(2.0)), pool

    def forward(self, inputs, is_bad):
        units = self.features(inputs).abs() + 0.1
        return self.head(self.pool(units * (1 - is_bad * torch.eye(4)[0]), self.power))


def pooled(units, power):
    means = units.pow(power).mean(0)
    return means.pow(1 / power)  # pooled


def root(units, _):
    return units.pow(0.5)  # root


def learned_of_negatives(units, power):
    return (0.05 - units).clamp(max=-0.01).pow(power)  # learned_of_negatives


def beside_a_square(units, power):
    squares = units.pow(torch.tensor(2.0)) + units.pow(power)
    return squares.sum(0).sqrt()  # beside_a_square


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("failing", [1, 2, 12])
@pytest.mark.parametrize("pool", [pooled, root, beside_a_square])
def test_a_power_at_0_is_named_in_the_step_that_fails_first(pool, failing, dtype):
    found, step = first_failure(pool, dtype, lambda step: step >= failing)
    assert step == failing
    assert (found.kind, found.line) == ("backward", line_with(pool.__name__))
    assert not found.is_likely


def test_a_learned_power_of_a_negative_number_is_named_in_the_first_step():
    found, step = first_failure(learned_of_negatives, torch.float32, lambda _: False)
    assert (step, found.operation) == (1, "pow")
    assert found.line == line_with("learned_of_negatives")


def first_failure(pool, dtype, is_bad):
    """The place of the first bad step that a monitor writes, and its number."""
    model = Pool(pool)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = Monitor(model=model, on_stuck="continue")
    for step in range(1, 15):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(torch.randn(5, 6), is_bad(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    monitor.close()
    line = monitor._log.counts.evidence.bad_step
    return line.located, line.step
