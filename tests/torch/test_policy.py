"""Torch's own kernel of the rule, which moves the scale on a device."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradscaler import DynamicScale, ScaleState
from gradscaler._on_torch.operations import TorchOperations, _is_torch_s
from gradscaler.policies._checks import LARGEST_SCALE


@given(
    scale=st.floats(2.0**-126, LARGEST_SCALE, width=32),
    finite_steps=st.one_of(st.integers(0, 5), st.just(2**31 - 1)),
    growth_factor=st.sampled_from([1.5, 2.0, 2.0**100]),
    backoff_factor=st.sampled_from([0.5, 0.75, 2.0**-100]),
    growth_interval=st.sampled_from([1, 2, 4, 2**40]),
    min_scale=st.sampled_from([2.0**-126, 1.0]),
    found_inf=st.booleans(),
)
def test_torch_s_kernel_between_bounds_is_the_rule(
    scale, finite_steps, growth_factor, backoff_factor, growth_interval, min_scale, found_inf
):
    policy = DynamicScale(
        2.0**16, growth_factor, backoff_factor, growth_interval, min_scale=min_scale
    )
    operations, cpu = TorchOperations(), torch.device("cpu")
    state = ScaleState(np.float32(max(scale, min_scale)), finite_steps, 0)
    placed = operations.place(state, cpu)
    assert _is_torch_s(policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "on_host", lambda tensor: False)
        kernel = Mock(wraps=torch._amp_update_scale_)
        patch.setattr(torch, "_amp_update_scale_", kernel)
        moved = operations.next_state(policy, placed, [{cpu: operations.scalar(found_inf, cpu)}])
    assert kernel.call_count == 1
    assert operations.read(moved) == policy.update(state, found_inf)


def test_torch_s_kernel_knows_no_growth_by_tiers():
    policy = DynamicScale(0.5, growth_interval=9, growth_tiers=((1.0, 1),))
    operations, cpu = TorchOperations(), torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "on_host", lambda tensor: False)
        placed = operations.place(policy.init(), cpu)
        moved = operations.next_state(policy, placed, [{cpu: operations.scalar(False, cpu)}])
    assert moved.scale == 1.0
