"""The one reading of float32 gradients, against a float64 norm, however they are laid out."""

import math

import pytest
import torch

from gradscaler._torch_like.norm import norm_on_cpu

SHAPES = {
    "none": [],
    "one": [(3, 5)],
    "without elements": [(0,), (4, 0)] * 20,
    "scalars": [()] * 2000,
    "many of one shape": [(64, 64)] * 203,
    "many of three shapes": [(64, 64), (64,), (3, 5, 7)] * 300,
    "many beside a large one": [(2**18 + 5,), *[(16,)] * 1000],
    "rows exactly": [(2**8, 2**11)],
    "large, and not in order": [(2**9, 2**9)],
}


def tensors_of(shapes, transposed=False):
    torch.manual_seed(0)
    return [torch.randn(shape).mT if transposed else torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_the_norm_is_that_of_float64(shapes):
    tensors = tensors_of(shapes, transposed=shapes == SHAPES["large, and not in order"])
    exact = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
    norm = norm_on_cpu(torch, tensors)
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    assert norm.item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("size", [1, 2**16 - 1, 2**16, 2**16 + 1, 2**18 + 5])
def test_the_last_element_counts(size):
    tensor = torch.zeros(size)
    tensor[-1] = 3.0
    assert norm_on_cpu(torch, [tensor]).item() == 3.0


LARGEST_ERROR = {
    "one of 17 million": [(2**24 + 5,)],
    "64 of 2^16 - 1": [(2**16 - 1,)] * 64,
    "20,000 of one shape": [(16,)] * 20_000,
}


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1.1])
@pytest.mark.parametrize("shapes", LARGEST_ERROR.values(), ids=LARGEST_ERROR)
def test_equal_values_are_off_by_no_more_than_the_bound(shapes, value):
    """Every addition rounds in the same direction then, which is the worst there is."""
    tensors = [torch.full(shape, value) for shape in shapes]
    count = sum(tensor.numel() for tensor in tensors)
    exact = tensors[0].view(-1)[0].double().item() * math.sqrt(count)
    assert norm_on_cpu(torch, tensors).item() == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("shapes", LARGEST_ERROR.values(), ids=LARGEST_ERROR)
def test_random_values_are_right_to_a_millionth(shapes):
    tensors = tensors_of(shapes)
    exact = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
    assert norm_on_cpu(torch, tensors).item() == pytest.approx(exact, rel=1e-6)


def test_a_large_tensor_in_another_order_of_memory_is_as_exact():
    torch.manual_seed(0)
    tensor = torch.randn(64, 64, 32, 32)
    exact = tensor.double().norm().item()
    other = tensor.contiguous(memory_format=torch.channels_last)
    assert norm_on_cpu(torch, [other]).item() == pytest.approx(exact, rel=1e-6)
    assert torch.linalg.vector_norm(other).item() != pytest.approx(exact, rel=1e-6)  # torch's own


def test_the_defaults_for_new_tensors_do_not_matter():
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        norm = norm_on_cpu(torch, [])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert (norm.device.type, norm.dtype, norm.item()) == ("cpu", torch.float32, 0.0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"none", "without elements"}))
def test_a_non_finite_value_is_seen_in_each_tensor(name, value):
    tensors = tensors_of(SHAPES[name])
    for place in {0, len(tensors) // 2, len(tensors) - 1}:
        last = tensors[place].view(-1)[-1:]
        before = last.clone()
        last.fill_(value)
        assert not math.isfinite(norm_on_cpu(torch, tensors).item())
        last.copy_(before)
    assert math.isfinite(norm_on_cpu(torch, tensors).item())
