"""What several test modules need, handed to them as fixtures: they cannot import one another."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

NATIVE = tf_keras.mixed_precision.LossScaleOptimizer


def _variables(optimizer):
    variables = optimizer.inner_optimizer.variables
    return (
        variables()
        if isinstance(optimizer.inner_optimizer, tf_keras.optimizers.legacy.Optimizer)
        else variables
    )


def _everything(optimizer, variables):
    """All that a step may change, to the bit."""
    scale = (
        []
        if optimizer.dynamic_counter is None
        else [optimizer.loss_scale, optimizer.dynamic_counter]
    )
    return [
        (value.dtype.name, value.numpy().tobytes())
        for value in [*variables, *_variables(optimizer), *scale]
    ]


def _drive(optimizer, variables, steps, compiled=True):
    """Apply unscaled gradients, step by step; the scale after each."""
    optimizer.get_scaled_loss(tf.constant(1.0))
    optimizer.get_unscaled_gradients([])

    def apply(grads):
        optimizer.apply_gradients(
            [(None if g is None else g, v) for g, v in zip(grads, variables, strict=True)]
        )

    run = tf.function(apply) if compiled else apply
    scales = []
    for grads in steps:
        run([tf.constant(g) for g in grads])
        scales.append(float(optimizer.loss_scale))
    return scales


@pytest.fixture(scope="session")
def native():
    return NATIVE


@pytest.fixture(scope="session")
def drive():
    return _drive


@pytest.fixture(scope="session")
def everything():
    return _everything


@pytest.fixture
def variables():
    values = np.random.default_rng(0).normal(size=6).astype("float32")
    return [tf.Variable(values[:4].reshape(2, 2)), tf.Variable(values[4:])]


@pytest.fixture(params=["new", "legacy"])
def family(request):
    """The module of one family of optimizers."""
    return tf_keras.optimizers if request.param == "new" else tf_keras.optimizers.legacy
