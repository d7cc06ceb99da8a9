"""What several test modules need, handed to them as fixtures: they cannot import one another.

The backend is KERAS_BACKEND's: one a process.
"""

import keras
import numpy as np
import pytest

import gradscaler.keras

BACKEND = keras.backend.backend()

if BACKEND == "tensorflow":
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )


def pytest_collection_modifyitems(items):
    for item in items:
        # NumPy 2 on Keras' variables and on Keras' own use of them
        item.add_marker(
            pytest.mark.filterwarnings(
                "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
            )
        )


def _numpy(value):
    return np.asarray(keras.ops.convert_to_numpy(value))


def _drive(optimizer, variables, steps, compiled=True):
    """Apply gradients step by step, as the trainer of the backend does; the scale after each."""
    if not optimizer.built:
        optimizer.build(variables)
    steps = [
        [None if g is None else keras.ops.convert_to_tensor(g) for g in grads] for grads in steps
    ]
    scales = []
    if BACKEND == "jax":
        import jax

        apply = jax.jit(optimizer.stateless_apply) if compiled else optimizer.stateless_apply
        for grads in steps:
            values = [v.value for v in variables]
            values, state = apply([v.value for v in optimizer.variables], grads, values)
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
            for variable, value in zip(optimizer.variables, state, strict=True):
                variable.assign(value)
            scales.append(float(_numpy(optimizer.dynamic_scale)))
        return scales
    apply = optimizer.apply
    if BACKEND == "tensorflow" and compiled:
        apply = tf.function(lambda grads: optimizer.apply(grads, variables))
    else:
        apply = lambda grads: optimizer.apply(grads, variables)  # noqa: E731
    for grads in steps:
        apply(grads)
        scales.append(float(_numpy(optimizer.dynamic_scale)))
    return scales


def _everything(optimizer, variables):
    """All that a step may change, to the bit, by name."""
    everything = [*variables, *optimizer.variables]
    return [(v.name, str(v.dtype), _numpy(v).tobytes()) for v in everything]


@pytest.fixture(scope="session")
def numpy():
    return _numpy


@pytest.fixture(scope="session")
def drive():
    return _drive


@pytest.fixture(scope="session")
def everything():
    return _everything


@pytest.fixture(scope="session")
def native():
    return keras.optimizers.LossScaleOptimizer


@pytest.fixture(scope="session")
def ours():
    return gradscaler.keras.LossScaleOptimizer


@pytest.fixture
def variables():
    values = np.random.default_rng(0).normal(size=6).astype("float32")
    return [
        keras.Variable(values[:4].reshape(2, 2), name="kernel"),
        keras.Variable(values[4:], name="bias"),
    ]
