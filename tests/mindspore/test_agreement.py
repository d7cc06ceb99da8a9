"""Manager, update cell and functional scaler follow one rule, bit for bit, on every trace."""

import mindspore
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor

from gradscaler import DynamicScale
from gradscaler.mindspore import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
)
from tests.support.chosen import examples

POLICIES = {
    "parameters": (2.0**10, 3, 2),
    "mindspore": DynamicScale.mindspore(2.0**10, 2, 3),
    "a factor that float32 rounds": DynamicScale.mindspore(2.0**10, 1.1, 2),
    "a third": DynamicScale.mindspore(1000.1, 3, 1),
    "bounds": DynamicScale(8.0, growth_interval=1, min_scale=2.0, max_scale=20.0),
    "largest": DynamicScale(2.0**126, growth_interval=1),
    "smallest": DynamicScale(2.0**-125, growth_interval=3),
    "hysteresis": DynamicScale(64.0, growth_interval=2, hysteresis=2),
    "ratios": DynamicScale(64.0, 4.0, 0.25, growth_interval=2, hysteresis=2),
    "apex": DynamicScale.apex(64.0, growth_interval=2, hysteresis=3),
    "megatron": DynamicScale.megatron(64.0, growth_interval=2, hysteresis=3),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_all_three_move_the_scale_as_the_policy_does(mode, policy):
    args, kwargs = ((), {"policy": policy})
    if isinstance(policy, tuple):
        args, kwargs, policy = policy, {}, DynamicScale.mindspore(*policy)
    scaler = DynamicLossScaler(*args, **kwargs)
    cell = DynamicLossScaleUpdateCell(*args, **kwargs)
    scale = Parameter(Tensor(cell.get_loss_scale(), mindspore.float32))
    owned = [scale, *cell.get_parameters(), scaler.scale_value, scaler.counter]
    if policy.hysteresis > 1:
        owned.append(scaler.nonfinite_steps)
    initial = [parameter.asnumpy().copy() for parameter in owned]

    @given(overflows=st.lists(st.booleans(), max_size=15))
    @example([False, False, True, False, False, False, False, True, True])
    @example([True, True, False, True, False, False, False, True, True, True])
    @settings(max_examples=examples(10))
    def compare(overflows):
        for parameter, value in zip(owned, initial, strict=True):
            parameter.set_data(Tensor(value))
        manager = DynamicLossScaleManager(*args, **kwargs)
        state = policy.init()
        for overflow in overflows:
            manager.update_loss_scale(overflow)
            cell(scale, Tensor(overflow))
            scaler.adjust(Tensor(not overflow))
            state = policy.update(state, overflow)
            assert type(state.scale) is np.float32
            assert manager.get_loss_scale() == state.scale
            assert scale.asnumpy() == scaler.scale_value.asnumpy() == state.scale
            assert scaler.counter.asnumpy() == state.finite_steps
            for parameter in (scaler.scale_value, scale):
                assert str(parameter.dtype) == "Float32"

    compare()
