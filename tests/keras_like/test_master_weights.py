"""Keras' own master weights: float32 variables, by ``mixed_float16``, under gradscaler's class."""

import numpy as np
import pytest

from tests.support.keras_like import LossScaleOptimizer, dtype, keras, numpy

STEPS, STEP = 16, 2.0**-14  # float16 is spaced by 2**-11 below 1


def after_training(policy, inner, batches):
    """A layer of ones whose gradients are the means of batches, and the optimizer."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype=policy)
    model = keras.Sequential([keras.Input((4,)), layer])
    optimizer = LossScaleOptimizer(inner, initial_scale=8.0)
    model.compile(optimizer=optimizer, loss=lambda targets, outputs: outputs)
    for batch in batches:
        model.train_on_batch(batch, np.zeros((8, 1), "float32"))
    return layer, optimizer


ONES = [np.ones((8, 4), "float32")] * STEPS
OVERFLOW = np.full((8, 4), np.inf, "float32")


def test_with_mixed_float16_steps_below_the_spacing_of_float16_add_up(family):
    layer, optimizer = after_training("mixed_float16", family.SGD(STEP), ONES)
    assert dtype(layer.kernel) == "float32"
    assert layer.compute_dtype == "float16"
    assert (numpy(layer.kernel) == 1 - STEPS * STEP).all()
    assert int(optimizer.iterations) == STEPS


def test_with_float16_they_are_lost(family):
    layer, optimizer = after_training("float16", family.SGD(STEP), ONES)
    assert dtype(layer.kernel) == "float16"
    assert (numpy(layer.kernel) == 1).all()
    assert int(optimizer.iterations) == STEPS


@pytest.mark.parametrize("inner", ["SGD", "Adam"])
def test_a_skipped_step_leaves_the_float32_variables_bit_for_bit(family, inner):
    batches = ONES[:3]
    plain, _ = after_training("mixed_float16", getattr(family, inner)(STEP), batches)
    skipping, optimizer = after_training(
        "mixed_float16", getattr(family, inner)(STEP), [*batches, OVERFLOW]
    )
    assert numpy(skipping.kernel).tobytes() == numpy(plain.kernel).tobytes()
    assert float(optimizer.loss_scale) == 4.0
