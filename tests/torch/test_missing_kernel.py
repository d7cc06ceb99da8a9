"""A dtype that the framework's own kernel does not know, as bfloat16 on CUDA."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradscaler.torch import GradScaler

KERNEL = "_amp_foreach_non_finite_check_and_unscale_"
VALUES = [0.5, -8.0, 3.0]


@pytest.fixture
def refusals(monkeypatch):
    """The calls of the kernel that it refused: from here on, all of bfloat16."""
    kernel, refused = getattr(torch, KERNEL), []

    def without_bfloat16(grads, found_inf, inv_scale):
        if grads[0].dtype is torch.bfloat16:
            refused.append(len(grads))
            raise NotImplementedError(f"\"{KERNEL}cuda\" not implemented for 'BFloat16'")
        kernel(grads, found_inf, inv_scale)

    monkeypatch.setattr(torch, KERNEL, without_bfloat16)
    monkeypatch.setattr(GradScaler._operations, "_without_kernel", set())
    return refused


def training(values, dtype=torch.bfloat16):
    parameter = torch.nn.Parameter(torch.ones(len(values), dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = GradScaler(init_scale=8.0)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter, optimizer, scaler


def unscaled(values, dtype=torch.bfloat16):
    parameter, optimizer, scaler = training(values, dtype)
    scaler.unscale_(optimizer)
    (flag,) = scaler._found_inf_per_device(optimizer).values()
    return parameter.grad.tolist(), flag.item()


def test_it_is_unscaled_as_by_the_kernel(refusals):
    assert unscaled(VALUES) == unscaled(VALUES, torch.float32) == ([0.0625, -1.0, 0.375], 0.0)
    assert refusals == [1]


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_it_is_checked_as_by_the_kernel(bad, refusals):
    grad, flag = unscaled([8.0, bad, 16.0])
    assert (grad[0], grad[2], flag) == (1.0, 2.0, 1.0)
    assert refusals


def test_the_kernel_is_asked_once(refusals):
    for _ in range(3):
        unscaled(VALUES)
    assert refusals == [1]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_taken_or_skipped(fused, refusals):
    for bad, moved in ((1.0, True), (torch.inf, False)):
        parameter, _, scaler = training([8.0, bad])
        optimizer = torch.optim.AdamW([parameter], lr=0.5, fused=fused)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step(optimizer).applied is moved
        assert torch.equal(parameter, torch.ones_like(parameter)) is not moved
    assert refusals


LARGEST = torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, LARGEST), (torch.float64, 1e300)])
def test_large_finite_gradients_are_no_overflow(dtype, large, monkeypatch):
    """The squares of these do not fit their dtype."""

    def missing(*args):
        raise NotImplementedError(f"The operator '{KERNEL}' is not currently implemented for it")

    monkeypatch.setattr(torch, KERNEL, missing)
    monkeypatch.setattr(GradScaler._operations, "_without_kernel", set())
    grad, flag = unscaled([large, -large], dtype)
    assert (grad, flag) == ([large / 8, -large / 8], 0.0)
    assert unscaled([large, torch.nan], dtype)[1] == 1.0


@pytest.mark.parametrize("bad", [1.0, torch.inf])
def test_an_empty_gradient_is_nothing_to_check(bad, refusals):
    parameters = [torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in (0, 1)]
    scaler, optimizer = GradScaler(init_scale=8.0), torch.optim.SGD(parameters)
    scaler.scale(torch.ones(()))
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, bad)
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).applied is (bad == 1.0)
    assert refusals == [2]


class Recorded(TorchDispatchMode):
    """Counts operations, but not those that take views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def calls(count):
    """How many operations unscale this many gradients."""
    parameters = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(count)]
    scaler, optimizer = GradScaler(init_scale=8.0), torch.optim.SGD(parameters)
    scaler.scale(torch.ones(()))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with Recorded() as recorded:
        scaler.unscale_(optimizer)
    return recorded.count


def test_many_gradients_take_no_more_calls_than_one(refusals):
    calls(1)  # asks the kernel
    assert calls(50) == calls(1) > 0


def test_other_errors_of_the_kernel_are_raised(monkeypatch):
    def broken(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, KERNEL, broken)
    _, optimizer, scaler = training(VALUES)
    with pytest.raises(RuntimeError, match="out of memory"):
        scaler.unscale_(optimizer)
