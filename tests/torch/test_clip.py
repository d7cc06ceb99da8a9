"""clip_grad_norm_ in PyTorch only: its kinds of gradients, and how often each is read or copied."""

import itertools
import math
from collections import Counter

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from gradscaler.torch import GradScaler
from tests.support.eager import library

INF = math.inf


def test_nothing_is_read_from_the_device(asking_optimizer):
    parameter = torch.nn.Parameter(torch.ones(3, device="meta"))
    optimizer = asking_optimizer([parameter])
    scaler = GradScaler()
    scaler.scale(parameter.sum()).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert norm.device.type == "meta"


# Gradients of every kind.


def unscaled_and_clipped(parameters, gradients, *clip):
    """Norm and gradients as torch clips gradients that never were scaled."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = clip_grad_norm_(parameters, *clip)
    return norm, [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
def test_float16_gradients_are_clipped_where_they_are_allowed(norm_type):
    dtypes = [torch.float16, torch.float32]
    parameters = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in dtypes]
    gradients = [torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype) for dtype in dtypes]
    norm, clipped = unscaled_and_clipped(parameters, gradients, 0.5, norm_type)
    optimizer = torch.optim.SGD(parameters)
    optimizer.zero_grad()
    scaler = GradScaler(init_scale=64.0, allow_fp16_gradients=True)
    library.backward(scaler, parameters, gradients)
    torch.testing.assert_close(scaler.clip_grad_norm_(optimizer, 0.5, norm_type), norm)
    scaler.step(optimizer)
    torch.testing.assert_close([parameter.grad for parameter in parameters], clipped)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, INF])
def test_complex_gradients_are_clipped_by_their_magnitudes(norm_type, dtype):
    parameters = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2)]
    gradients = [torch.tensor([3 + 4j, 1 - 1j], dtype=dtype), torch.tensor([2j, -3], dtype=dtype)]
    norm, clipped = unscaled_and_clipped(parameters, gradients, 0.5, norm_type)
    scaler = GradScaler(init_scale=8.0)
    scaler.scale(torch.ones(()))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = 8.0 * gradient
    optimizer = torch.optim.SGD(parameters)
    torch.testing.assert_close(scaler.clip_grad_norm_(optimizer, 0.5, norm_type), norm)
    scaler.step(optimizer)
    torch.testing.assert_close([parameter.grad for parameter in parameters], clipped)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
def test_sparse_gradients_are_clipped_as_the_dense_ones_they_stand_for(norm_type):
    """Row 1 occurs twice, so its gradients add up."""
    weight = torch.nn.Parameter(torch.ones(4, 2))
    scaler = GradScaler()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    rows = torch.nn.functional.embedding(torch.tensor([1, 3, 1]), weight, sparse=True)
    factors = torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, -2.0]])
    scaler.scale((rows * factors).sum()).backward()
    assert weight.grad.is_sparse
    dense = torch.tensor([[0.0, 0.0], [6.0, 0.0], [0.0, 0.0], [3.0, -4.0]])
    norm, clipped = unscaled_and_clipped(
        [torch.nn.Parameter(torch.ones(4, 2))], [dense], 0.5, norm_type
    )
    torch.testing.assert_close(scaler.clip_grad_norm_(optimizer, 0.5, norm_type), norm)
    scaler.step(optimizer)
    torch.testing.assert_close(weight.grad.to_dense(), clipped[0])
    torch.testing.assert_close(weight.detach(), 1.0 - 0.1 * clipped[0])


def test_the_norm_of_millions_of_gradients_is_exact_to_float32():
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(2**22 + 5))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), GradScaler(init_scale=2.0**16)
    gradient = torch.randn(parameter.shape)
    scaler.scale((parameter * gradient).sum()).backward()
    norm = scaler.clip_grad_norm_(optimizer, 1.0).item()
    exact = gradient.double().norm().item()
    assert norm == pytest.approx(exact, rel=1e-6)
    assert get_total_norm([gradient]).item() != pytest.approx(exact, rel=1e-6)  # torch's own


# One reading of the gradients.


class Calls(TorchDispatchMode):
    """Counts the operations on lists of tensors."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(params=["SGD", "foreach Adam", "fused AdamW"])
def optimizer(request, parameters):
    return library.optimizers[request.param](parameters)


def test_clipping_reads_the_gradients_once_and_step_multiplies_them_once_or_not_at_all(
    optimizer, scaler, parameters, finite
):
    until_step = Counter()
    optimizer.register_step_pre_hook(lambda *_: until_step.update(calls.counts))
    library.backward(scaler, parameters, finite)
    with Calls() as calls:
        scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert until_step["_foreach_norm"] == 1
    assert until_step["_foreach_mul_"] == (0 if optimizer.defaults["fused"] else 1)
    assert until_step["_amp_foreach_non_finite_check_and_unscale_"] == 0


def test_a_skipped_step_leaves_gradients_unscaled_as_torch_s_sequence_does(
    optimizer, scaler, parameters, overflowed
):
    library.backward(scaler, parameters, overflowed)
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    assert library.exact([parameter.grad for parameter in parameters]) == library.exact(overflowed)


@pytest.mark.parametrize("value", [INF, -INF, math.nan])
def test_a_fused_step_skips_what_is_found_in_large_gradients_and_in_small(value):
    for overflowing in (0, 1):
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((200, 100), (4,))]
        optimizer = torch.optim.AdamW(parameters, fused=True)
        scaler = GradScaler()
        scaler.scale(sum(parameter.sum() for parameter in parameters)).backward()
        parameters[overflowing].grad.view(-1)[3] = value
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step(optimizer).skipped
        assert scaler.get_scale() == 2.0**15
        assert all((parameter == 0).all() for parameter in parameters)


@pytest.mark.parametrize(
    ("first", "second", "finite"), [(3e38, 3e38, True), (INF, -INF, False), (3e38, -INF, False)]
)
def test_a_fused_step_is_not_skipped_for_a_sum_that_overflows(first, second, finite):
    parameter = torch.nn.Parameter(torch.zeros(200, 100))
    optimizer, scaler = torch.optim.AdamW([parameter], fused=True), GradScaler(init_scale=1.0)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.zeros_like(parameter)
    parameter.grad[0, 0], parameter.grad[-1, -1] = first, second
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).applied == finite


MANY = {
    "large": [(1000, 1000)],
    "small": [(64, 64)] * 2000,
    "small of two shapes": [(64, 64), (64, 65)] * 1000,
}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("value", [1.0, INF])
@pytest.mark.parametrize("shapes", MANY.values(), ids=MANY)
def test_no_copy_of_the_gradients_is_made(clip, value, shapes):
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer, scaler = torch.optim.SGD(parameters, fused=True), GradScaler()

    def iteration():
        scaler.scale(torch.ones(()))
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        parameters[-1].grad[0, 0] = value
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
        scaler.update()
        return profiled

    iteration()
    events = iteration().profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert max(itertools.accumulate(changes)) < sum(p.nbytes for p in parameters) / 100
