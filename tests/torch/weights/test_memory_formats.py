"""A parameter, its gradient and its state may have different orders of memory.

Fused kernels read all of them in order, so a step gives all of them the order of the parameter.
"""

import copy

import pytest
import torch
from torch import nn

from gradscaler.torch import MasterWeights

STORES = ("float32", "remainder16")
VALUES = torch.randn(16, 4, 3, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[{}, {"fused": True}], ids=["not fused", "fused"])
def optimizer_of(request):
    """An optimizer of one parameter, by the store and the parameter's dtype."""

    def make(parameter, store, dtype=torch.bfloat16):
        options = {"lr": 0.1, "store": store, "dtype": dtype, **request.param}
        return MasterWeights(torch.optim.AdamW, [parameter], **options)

    return make


def step(optimizer, parameter, as_parameter=True):
    grad = VALUES.cos().to(parameter.dtype)
    parameter.grad = torch.empty_like(parameter).copy_(grad) if as_parameter else grad
    optimizer.step()


def in_order(parameter, memory_format):
    parameter.data = parameter.data.contiguous(memory_format=memory_format)


@pytest.fixture
def expected(optimizer_of):
    """The float32 values after four steps in one order of memory, by the store and dtype."""

    def values(*arguments):
        parameter = nn.Parameter(VALUES.clone())
        optimizer = optimizer_of(parameter, *arguments)
        for _ in range(4):
            step(optimizer, parameter)
        return optimizer.wide(parameter)

    return values


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_gradient_has_another_order_than_its_parameter(dtype, optimizer_of, expected):
    parameter = nn.Parameter(VALUES.to(memory_format=torch.channels_last))
    optimizer = optimizer_of(parameter, "float32", dtype)
    for _ in range(4):
        step(optimizer, parameter, as_parameter=False)
    assert torch.equal(optimizer.wide(parameter), expected("float32", dtype))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_model_is_given_another_order_after_some_steps(store, steps, optimizer_of, expected):
    parameter = nn.Parameter(VALUES.clone())
    optimizer = optimizer_of(parameter, store)
    for number in range(4):
        if number == steps:
            in_order(parameter, torch.channels_last)
        step(optimizer, parameter)
    assert torch.equal(optimizer.wide(parameter), expected(store))


@pytest.mark.parametrize("store", STORES)
def test_a_state_dict_has_the_order_of_another_model(store, optimizer_of, expected):
    other, parameter = nn.Parameter(VALUES.clone()), nn.Parameter(VALUES.clone())
    in_order(parameter, torch.channels_last)
    others, optimizer = (optimizer_of(each, store) for each in (other, parameter))
    for _ in range(2):
        step(others, other)
    parameter.data.copy_(other)
    optimizer.load_state_dict(copy.deepcopy(others.state_dict()))
    for _ in range(2):
        step(optimizer, parameter)
    assert torch.equal(optimizer.wide(parameter), expected(store))
