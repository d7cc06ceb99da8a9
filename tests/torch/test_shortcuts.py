"""A shortcut gives what the long way gives, or nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradscaler import DynamicScale, FixedScale, ScaleState
from gradscaler._on_torch import shortcuts
from gradscaler._on_torch.operations import TorchOperations
from gradscaler._torch_like.operations import TorchLikeOperations

OPERATIONS = TorchOperations()
LONGEST = 2**31 - 1

policies = st.builds(
    DynamicScale,
    growth_interval=st.integers(1, 5) | st.just(2**40),
    hysteresis=st.integers(1, 3),
    growth_tiers=st.sampled_from([(), ((2.0**10, 2),)]),
) | st.just(FixedScale(8.0))


@given(policies, st.integers(0, 6) | st.integers(LONGEST - 2, LONGEST - 1), st.integers(0, 2))
def test_a_step_that_only_counts_is_counted_as_the_rule_does(policy, finite, nonfinite):
    state = OPERATIONS.place(ScaleState(policy.init().scale, finite, nonfinite), "cpu")
    for found_inf in (False, True):
        counted = shortcuts.counted(policy, state, found_inf)
        if counted is not None:
            moved = TorchLikeOperations.next_on_host(OPERATIONS, policy, state, found_inf, ())
            assert list(map(float, counted)) == list(map(float, moved))
    is_early = type(policy) is DynamicScale and not policy.growth_tiers and not nonfinite
    is_early = is_early and finite + 1 < min(policy.growth_interval, LONGEST)
    assert (shortcuts.counted(policy, state, False) is not None) == is_early


UNUSUAL = {
    "none": None,
    "sparse": torch.ones(2, 2).to_sparse(),
    "in a graph": torch.ones(2, 2, requires_grad=True),
    "expanded": torch.ones(()).expand(2, 2),
    "transposed": torch.ones(2, 2).t(),
    "a subclass": torch.nn.Parameter(torch.ones(2, 2), requires_grad=False),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_gradients_that_need_something_are_not_ordinary(name):
    parameters = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(2, 2)
    ordinary = shortcuts.ordinary_gradients(optimizer)
    assert [id(grad) for grad in ordinary] == [id(p.grad) for p in parameters]
    parameters[1].grad = UNUSUAL[name]
    assert shortcuts.ordinary_gradients(optimizer) is None


def test_float16_gradients_are_ordinary_where_they_are_allowed():
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    parameter.grad = torch.ones(2, dtype=torch.float16)
    optimizer = torch.optim.SGD([parameter])
    assert shortcuts.ordinary_gradients(optimizer, allow_fp16=False) is None
    assert len(shortcuts.ordinary_gradients(optimizer)) == 1


def test_tensors_are_one_group_where_the_long_way_makes_one():
    buffer = torch.ones(4)
    for tensors in (
        [torch.ones(2), torch.ones(3)],
        [torch.ones(2), torch.ones(3, dtype=torch.float64)],
        [torch.ones(2, dtype=torch.complex64)] * 2,
        [buffer[:2], buffer[2:]],
    ):
        groups = OPERATIONS.grouped(tensors)
        if shortcuts.are_one_group(tensors):
            assert [len(group) for _, group in groups] == [len(tensors)]
    assert shortcuts.are_one_group([torch.ones(2), torch.ones(3)])
    assert not shortcuts.are_one_group([buffer[:2], buffer[2:]])
