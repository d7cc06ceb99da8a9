"""Gradients whose elements share memory, as those of an expanded tensor do."""

import pytest
import torch

from gradscaler.torch import GradScaler


def expanded(size):
    return torch.full((1,), 3.0 * 1024).expand(size)


def windows(size):
    return torch.arange(1024.0, 1024.0 + size // 2 + 2).as_strided((2, size // 2), (1, 1))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("calls", ["step", "unscale_ step", "clip_grad_norm_ step"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("size", [100, 20_000])
@pytest.mark.parametrize("make", [expanded, windows])
def test_it_steps_as_a_whole_gradient_does(make, size, fused, calls, kind):
    weights = []
    for gradient in (make(size), make(size).contiguous()):
        weight = torch.nn.Parameter(torch.ones(gradient.shape))
        weight.grad = gradient
        optimizer = kind([weight], lr=0.5, fused=fused)
        scaler = GradScaler(init_scale=1024.0)
        scaler.scale(torch.zeros(()))
        for call in calls.split():
            getattr(scaler, call)(optimizer, *([1.0] if "clip" in call else []))
        assert scaler.last_step(optimizer).applied
        weights.append(weight)
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], torch.ones_like(weights[0]))


def test_torch_s_own_scaler_refuses_an_expanded_one():
    weight = torch.nn.Parameter(torch.ones(100))
    weight.grad = expanded(100)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(RuntimeError, match="single memory location"):
        scaler.step(torch.optim.SGD([weight]))


def test_a_gradient_with_gaps_stays_where_it_is():
    buffer = torch.full((4, 6), 1024.0)
    weight = torch.nn.Parameter(torch.ones(4, 3))
    weight.grad = buffer[:, ::2]
    scaler = GradScaler(init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD([weight]))
    assert torch.equal(buffer, torch.tensor([1.0, 1024.0] * 3).expand(4, 6))


@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_gradient_in_another_order_of_memory_is_taken(fused, clip):
    shape = (8, 300, 10, 10)
    order = {"memory_format": torch.channels_last}
    weight = torch.nn.Parameter(torch.zeros(shape).contiguous(**order))
    weight.grad = torch.full(shape, 1024.0).contiguous(**order)
    scaler = GradScaler(init_scale=1024.0)
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler.scale(torch.zeros(()))
    if clip:
        scaler.clip_grad_norm_(optimizer, 1e9)
    scaler.step(optimizer)
    assert torch.equal(weight, -torch.ones(shape))
