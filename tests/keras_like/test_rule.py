"""Where the frameworks' own wrappers fall short of the rule."""

import numpy as np
import pytest

from gradscaler import DynamicScale, FixedScale
from tests.support.keras_like import (
    BACKEND,
    FINITE,
    KERAS_3,
    OVERFLOW,
    LossScaleOptimizer,
    drive,
    dtype,
    everything,
    numpy,
    tensor,
)

BOUNDED = DynamicScale(init_scale=64.0, min_scale=16.0, max_scale=128.0, growth_interval=1)
LEAST = 2.0**-126 if KERAS_3 else 1.0
SHAPES = pytest.mark.parametrize("shape", [(), (3,)])


@pytest.mark.parametrize(
    ("arguments", "steps", "scales"),
    [
        (
            {"initial_scale": 2.0**-124 if KERAS_3 else 4.0},
            [OVERFLOW] * 4,
            [LEAST * 2, LEAST, LEAST, LEAST],
        ),
        ({"initial_scale": 2.0**126, "dynamic_growth_steps": 1}, [FINITE] * 3, [2.0**127] * 3),
        (
            {"policy": BOUNDED},
            [OVERFLOW] * 3 + [FINITE] * 4,
            [32.0, 16.0, 16.0, 32.0, 64.0, 128.0, 128.0],
        ),
    ],
    ids=["by default not zero", "by default finite", "policy"],
)
def test_the_scale_stays_between_its_bounds(family, arguments, steps, scales, variables):
    """Traps 5 and 9: Keras 3's wrapper has no bounds, and a pytree does not carry them."""
    optimizer = LossScaleOptimizer(family.SGD(), **arguments)
    assert drive(optimizer, variables, steps) == scales


def test_a_counter_past_the_growth_steps_does_not_freeze_growth(family, variables):
    """Trap 3: a counter compared with == never meets a number that it has passed."""
    optimizer = LossScaleOptimizer(family.SGD(), initial_scale=8.0, dynamic_growth_steps=3)
    drive(optimizer, variables, [FINITE])
    optimizer.dynamic_counter.assign(10)
    assert drive(optimizer, variables, [FINITE]) == [16.0]


@pytest.mark.parametrize(
    "arguments", [{"dynamic": False, "initial_scale": 8.0}, {"policy": FixedScale(8.0)}]
)
def test_a_static_scale_skips_and_never_moves(family, arguments, variables):
    """tf-keras' wrapper applies gradients that overflowed."""
    optimizer = LossScaleOptimizer(family.SGD(1.0), **arguments)
    if KERAS_3:
        optimizer.build(variables)
        before = everything(optimizer, variables)
    values = [numpy(variable) for variable in variables]
    assert drive(optimizer, variables, [OVERFLOW] * 2) == [8.0] * 2
    assert all(map(np.array_equal, map(numpy, variables), values))
    if KERAS_3:
        assert everything(optimizer, variables) == before
    assert drive(optimizer, variables, [FINITE] * 2) == [8.0] * 2
    assert np.array_equal(numpy(variables[1]), values[1] - 2)
    assert float(optimizer.loss_scale) == 8.0
    assert int(optimizer.iterations) == (2 if KERAS_3 else 4)  # Keras 2 counts skipped steps


@pytest.mark.parametrize("reset", ["finite_step", "finite_step_only", "growth"])
def test_any_policy_moves_as_on_the_host(family, reset, variables, tmp_path):
    policy = DynamicScale(
        init_scale=1000.0,
        growth_factor=1.7,
        backoff_factor=0.3,
        growth_interval=3,
        hysteresis=2,
        hysteresis_reset=reset,
    )
    pattern = [*(np.random.default_rng(0).random(30) < 0.4), False, True]
    state, expected = policy.init(), []
    for found_inf in pattern:
        state = policy.update(state, bool(found_inf))
        expected.append(float(state.scale))
    optimizer, restored = (LossScaleOptimizer(family.SGD(), policy=policy) for _ in range(2))
    steps = [OVERFLOW if found_inf else FINITE for found_inf in pattern]
    assert drive(optimizer, variables, steps) == expected
    assert len(set(expected)) > 5
    assert state.nonfinite_steps == 1
    assert int(optimizer.dynamic_counter) == state.finite_steps
    if KERAS_3:
        assert int(optimizer.nonfinite_counter) == state.nonfinite_steps
        restored.build(variables)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        path = tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "checkpoint")
        tf.train.Checkpoint(optimizer=restored).restore(path).assert_existing_objects_matched()
        found = drive(restored, variables, [OVERFLOW])
        assert found == [float(policy.update(state, True).scale)]


def test_gradients_are_divided_by_the_scale_that_they_were_made_with(family, variables):
    """Trap 1: a scale that grows before gradients are unscaled halves them."""
    optimizer = LossScaleOptimizer(family.SGD(1.0), initial_scale=4.0, dynamic_growth_steps=1)
    start = numpy(variables[1])
    assert drive(optimizer, variables, [FINITE] * 2) == [8.0, 16.0]
    assert np.array_equal(numpy(variables[1]), start - np.float32(1) - np.float32(1))


@SHAPES
@pytest.mark.parametrize("given", ["float16", "bfloat16", "float32"])
def test_a_loss_is_scaled_in_float32(family, given, shape):
    """Trap 10: 3 * 2**17 is not a float16."""
    optimizer = LossScaleOptimizer(family.SGD(), initial_scale=2.0**17)
    loss = tensor(np.full(shape, 3.0), given)
    scaled = [optimizer.get_scaled_loss(loss), optimizer.get_scaled_loss(lambda: loss)()]
    if KERAS_3:
        scaled.append(optimizer.scale_loss(loss))
    for each in scaled:
        assert dtype(each) == "float32"
        assert (numpy(each) == 3 * 2.0**17).all()


@SHAPES
def test_gradients_are_unscaled_in_float32(family, shape):
    """2**30 is not a float16, nor is 2**-30: tf-keras makes every gradient 0."""
    optimizer = LossScaleOptimizer(family.SGD(), initial_scale=2.0**30)
    (grad,) = optimizer.get_unscaled_gradients([tensor(np.full(shape, 2.0**15), "float16")])
    assert dtype(grad) == "float16"
    assert (numpy(grad) == 2.0**-15).all()
