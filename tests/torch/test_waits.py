"""Nothing reads a scalar on the host in the code for accelerators, which would wait for the device.

tests/device/ shows the same on a device, where there is a compiler.
"""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradscaler import AmaxScale
from gradscaler.torch import GradScaler, flat_gradients


class NoReading(TorchDispatchMode):
    """Raises RuntimeError where the value of a tensor is read."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a scalar was read")
        return func(*args, **(kwargs or {}))


def iterate(model, optimizer, scaler, clip=False, factor=1.0):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(16, 4)).square().mean() * factor).backward()
    if clip:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.fixture
def off_the_host(monkeypatch):
    monkeypatch.setattr(GradScaler._operations, "on_host", lambda tensor: False)


def test_a_scalar_that_is_read_is_noticed():
    with NoReading(), pytest.raises(RuntimeError, match="a scalar was read"):
        torch.ones(()).item()


@pytest.mark.parametrize("flat", [False, True], ids=["", "flat"])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("make", [GradScaler, partial(GradScaler, policy=AmaxScale())])
def test_a_loop_with_a_fused_optimizer_reads_no_scalar(make, clip, flat, off_the_host):
    model, scaler = torch.nn.Linear(4, 2), make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if flat:
        flat_gradients(optimizer)
    iterate(model, optimizer, scaler)
    with NoReading():
        iterate(model, optimizer, scaler, clip)
        iterate(model, optimizer, scaler, clip, factor=float("inf"))
    assert [outcome.applied for outcome in scaler.history] == [True, True, False]
