"""A monitor takes weights that stand still for a finding, but not where masters move."""

import pytest
import torch
from torch import nn

from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler, MasterWeights

STALLED = "stalled"


def plain(model):
    return torch.optim.SGD(model.half().parameters(), lr=1e-6)


def with_masters(model):
    return MasterWeights(torch.optim.SGD, model, lr=1e-6)


def findings(make_optimizer):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = make_optimizer(model)
    scaler = GradScaler(init_scale=64.0, allow_fp16_gradients=True)
    monitor = Monitor(scaler, model, every=5)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8).half()).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    found = [finding.kind for finding in monitor.verdict.findings]
    monitor.close()
    return found


@pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")
def test_weights_that_lose_their_updates_are_found():
    assert STALLED in findings(plain)


def test_weights_whose_updates_are_kept_are_not():
    assert STALLED not in findings(with_masters)
