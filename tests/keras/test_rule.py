"""Where Keras' wrapper falls short of the rule."""

import keras
import numpy as np
import pytest

from gradscaler import DynamicScale, FixedScale
from gradscaler.keras import LossScaleOptimizer

FINITE = [np.ones((2, 2), "float32"), np.ones(2, "float32")]
OVERFLOW = [np.full((2, 2), np.inf, "float32"), np.ones(2, "float32")]


def test_the_scale_does_not_sink_below_one(drive, variables):
    """Trap 5, and Keras 3 lost the floor that Keras 2 has."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=4.0)
    assert drive(optimizer, variables, [OVERFLOW] * 4) == [2.0, 1.0, 1.0, 1.0]


def test_the_scale_does_not_grow_to_inf(drive, variables):
    """Trap 5."""
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=2.0**126, dynamic_growth_steps=1
    )
    assert drive(optimizer, variables, [FINITE] * 3) == [2.0**127] * 3


def test_fewer_growth_steps_than_the_counter_do_not_freeze_growth(drive, variables):
    """Trap 3: a counter compared with == never meets a number that it has passed."""
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=8.0, dynamic_growth_steps=10
    )
    assert drive(optimizer, variables, [FINITE] * 4) == [8.0] * 4
    optimizer.dynamic_growth_steps = 3
    assert drive(optimizer, variables, [FINITE]) == [16.0]


def test_the_floor_outlives_the_variables_of_stateless_steps(drive, variables):
    """Trap 9: the bounds are no part of what goes through a pytree."""
    policy = DynamicScale(init_scale=64.0, min_scale=16.0, max_scale=128.0, growth_interval=1)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(), policy=policy)
    scales = drive(optimizer, variables, [OVERFLOW] * 3 + [FINITE] * 4)
    assert scales == [32.0, 16.0, 16.0, 32.0, 64.0, 128.0, 128.0]


def test_a_float16_loss_is_scaled_in_float32(numpy):
    """Trap 10: 3 * 2**16 is no float16."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0**16)
    loss = keras.ops.convert_to_tensor(3.0, "float16")
    for scaled in (optimizer.scale_loss(loss), optimizer.get_scaled_loss(loss)):
        assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
        assert numpy(scaled) == 3 * 2.0**16


@pytest.mark.parametrize("policy", [None, FixedScale(8.0)])
def test_a_static_scale_skips_and_never_moves(policy, drive, variables, everything):
    arguments = {"policy": policy} if policy else {"dynamic": False, "initial_scale": 8.0}
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), **arguments)
    optimizer.build(variables)
    before = everything(optimizer, variables)
    drive(optimizer, variables, [OVERFLOW] * 2)
    assert everything(optimizer, variables) == before
    value = np.array(keras.ops.convert_to_numpy(variables[1]))
    drive(optimizer, variables, [FINITE] * 2)
    assert np.array_equal(keras.ops.convert_to_numpy(variables[1]), value - 2 / 8)
    assert float(optimizer.loss_scale) == 8.0


@pytest.mark.parametrize("reset", ["finite_step", "finite_step_only", "growth"])
def test_any_policy_moves_as_on_the_host(reset, drive, variables):
    policy = DynamicScale(
        init_scale=1000.0,
        growth_factor=1.7,
        backoff_factor=0.3,
        growth_interval=3,
        hysteresis=2,
        hysteresis_reset=reset,
    )
    pattern = np.random.default_rng(0).random(30) < 0.4
    state, expected = policy.init(), []
    for found_inf in pattern:
        state = policy.update(state, bool(found_inf))
        expected.append(float(state.scale))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(), policy=policy)
    steps = [OVERFLOW if found_inf else FINITE for found_inf in pattern]
    assert drive(optimizer, variables, steps) == expected
    assert len(set(expected)) > 5
    assert int(optimizer.dynamic_counter) == state.finite_steps
    assert int(optimizer.nonfinite_counter) == state.nonfinite_steps


def test_gradients_are_divided_by_the_scale_that_they_were_made_with(drive, variables, numpy):
    """Trap 1: a scale that grows before gradients are unscaled halves them."""
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=4.0, dynamic_growth_steps=1
    )
    start = numpy(variables[1]).copy()
    scales = [4.0, *drive(optimizer, variables, [[g * 4 for g in FINITE]])]
    drive(optimizer, variables, [[g * np.float32(scales[-1]) for g in FINITE]])
    assert np.array_equal(numpy(variables[1]), start - np.float32(1) - np.float32(1))
