"""A monitor of a loop without a scaler waits for the device only at samples."""

import pytest
import torch
from torch import nn

from gradscaler.diagnose import Monitor
from tests.support import device

EVERY = 7  # the first sample


def training(**options):
    """A model, an optimizer, and a monitor of them."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)
    model = nn.Sequential(*layers).to(device.NAME)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    told = []
    return model, optimizer, Monitor(model=model, tell=told.append, every=EVERY, **options), told


def iterate(model, optimizer, bad=False):
    optimizer.zero_grad()
    outputs = model(torch.ones(16, 4).to(device.NAME))
    (outputs * (0.0 if bad else 1.0)).square().sum(1).sqrt().mean().backward()
    optimizer.step()


def test_a_step_without_a_sample_waits_for_nothing(tmp_path):
    model, optimizer, monitor, told = training(path=tmp_path / "run.jsonl")
    with device.forbidden_reads():
        for _ in range(EVERY - 1):
            iterate(model, optimizer)
    before = device.reads()
    iterate(model, optimizer)
    assert device.reads() > before
    assert len(monitor.history) == EVERY
    assert all(step.loss is not None for step in monitor.history)
    assert (monitor.verdict.kind, told) == ("normal", [])
    monitor.close()


def test_a_bad_step_is_told_with_its_gradients_though_they_are_gone():
    model, optimizer, monitor, told = training()
    for step in range(1, 6):
        iterate(model, optimizer, bad=step == 4)
    monitor.close()
    assert monitor.bad_step == 4
    (finding,) = told
    assert finding.kind == "nan"
    assert finding.steps == (4,)
    assert "The gradient of 0.weight is NaN" in finding.cause
    assert "sqrt" in finding.cause


def test_a_bad_step_of_a_training_that_leaves_it_out_is_not_told():
    model, optimizer, monitor, told = training()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "step", lambda: None)
        iterate(model, optimizer, bad=True)
    for _ in range(5):
        iterate(model, optimizer)
    monitor.close()
    assert (monitor.bad_step, told) == (None, [])
