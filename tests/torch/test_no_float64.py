"""Devices without float64: they are asked, and train as others do."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradscaler import AmaxScale
from gradscaler._torch_like import float64
from gradscaler._torch_like.float64 import has_float64
from gradscaler.torch import GradScaler, MasterWeights
from tests.support.no_float64 import no_float64

INF = float("inf")
FACTORS = [1.0, 3.0, INF, 2.0, INF, 1.0]
KERNEL = "_amp_foreach_non_finite_check_and_unscale_"


def train(make, max_norm=None, fused=True):
    """The weights, the scale and the norms of a few steps."""
    torch.manual_seed(0)
    model, scaler = torch.nn.Linear(4, 2), make(init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=fused)
    norms = []
    for factor in FACTORS:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).square().mean() * factor).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            norms.append(norm.item())
        scaler.step(optimizer)
        scaler.update()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return weights, scaler.get_scale(), norms


native = partial(torch.amp.GradScaler, "cpu")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_it_trains_there_as_torch_s_scaler_does_on_the_cpu(max_norm, fused):
    expected = train(native, max_norm=max_norm, fused=fused)
    with no_float64():
        found = train(GradScaler, max_norm=max_norm, fused=fused)
    assert found[:2] == expected[:2]
    assert found[2] == pytest.approx(expected[2], nan_ok=True)


def test_the_scaler_asks_a_device_once():
    with no_float64() as device:
        train(GradScaler, max_norm=0.1)
        assert device.refused == 1


def test_clipping_there_needs_no_unscale_before_it():
    def clipped():
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer, scaler = torch.optim.SGD([parameter], 1.0), GradScaler(init_scale=1024.0)
        scaler.scale((parameter * torch.tensor([3.0, 4.0])).sum()).backward()
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        return norm.item(), parameter.tolist()

    with no_float64():
        norm, moved = clipped()
    assert norm == pytest.approx(5.0)
    assert moved == pytest.approx([-0.6, -0.8])


def test_the_largest_gradient_is_measured_there():
    with no_float64():
        _, scale, _ = train(lambda **_: GradScaler(policy=AmaxScale(init_scale=1024.0)))
    assert scale == train(lambda **_: GradScaler(policy=AmaxScale(init_scale=1024.0)))[1]


def test_a_closure_s_large_gradients_are_checked_there():
    def evaluated():
        parameter = torch.nn.Parameter(torch.ones(2**14 + 1))
        optimizer = torch.optim.SGD([parameter], 0.5)
        scaler, factors = GradScaler(init_scale=1024.0), iter([INF, 1.0])

        def closure():
            optimizer.zero_grad()
            loss = parameter.sum() * next(factors)
            scaler.scale(loss).backward()
            return loss

        scaler.step(optimizer, closure)
        scaler.update()
        return parameter.tolist(), scaler.get_scale()

    with no_float64():
        found = evaluated()
    assert found == ([0.5] * (2**14 + 1), 512.0)


@pytest.mark.parametrize("bad", [1.0, INF])
def test_a_dtype_that_the_kernel_lacks_is_checked_there(bad, monkeypatch):
    def missing(*args):
        raise NotImplementedError(f"\"{KERNEL}\" not implemented for 'BFloat16'")

    monkeypatch.setattr(torch, KERNEL, missing)
    monkeypatch.setattr(GradScaler._operations, "_without_kernel", set())
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer, scaler = torch.optim.SGD([parameter], 1.0), GradScaler(init_scale=8.0)
    with no_float64():
        scaler.scale((parameter * torch.tensor([1.0, bad])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step(optimizer).applied is (bad == 1.0)


def test_master_weights_step_there_as_elsewhere():
    def trained():
        parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = MasterWeights(torch.optim.SGD, [parameter], lr=2.0**-10)
        scaler = GradScaler(init_scale=1024.0)
        for _ in range(8):
            optimizer.zero_grad()
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return parameter.tolist()

    with no_float64():
        found = trained()
    assert found == trained() == [1.0 - 8 * 2.0**-10] * 4


def test_a_device_that_refuses_float64_by_a_type_error_has_none(monkeypatch):
    def refused(tensor):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr(float64, "_known", {})
    monkeypatch.setattr(torch.Tensor, "double", refused)
    assert not has_float64(torch, torch.device("cpu"))


def test_a_fake_tensor_says_nothing_about_the_device():
    with no_float64():
        with FakeTensorMode():
            has_float64(torch, torch.device("cpu"))
        assert not has_float64(torch, torch.device("cpu"))


def test_the_cpu_and_meta_have_float64():
    assert has_float64(torch, torch.device("cpu"))
    assert has_float64(torch, torch.device("meta"))
