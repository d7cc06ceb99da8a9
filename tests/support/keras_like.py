"""Keras 3 or Keras 2, whichever GRADSCALER_FRAMEWORK names, under the names that both share.

Keras 3 runs on the backend that KERAS_BACKEND names: one a process.
"""

import functools
import importlib
import os

import numpy as np
import pytest

from tests.support import xla

FRAMEWORK = os.environ["GRADSCALER_FRAMEWORK"]
KERAS_3 = FRAMEWORK == "keras"
keras = importlib.import_module(FRAMEWORK)
BACKEND = keras.backend.backend()
LossScaleOptimizer = importlib.import_module(f"gradscaler.{FRAMEWORK}").LossScaleOptimizer
NATIVE = keras.mixed_precision.LossScaleOptimizer
NAMED = {"name": "wrapper"} if KERAS_3 else {}  # tf-keras' wrappers have the inner one's name
FINITE = [np.ones((2, 2), "float32"), np.ones(2, "float32")]
OVERFLOW = [np.full((2, 2), np.inf, "float32"), np.ones(2, "float32")]
IMAGES = np.random.default_rng(0).random((96, 8)).astype("float32")
LABELS = IMAGES[:, :3].argmax(1)

if BACKEND == "tensorflow":
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )

if BACKEND == "jax":
    # Set before JAX starts, and for the processes of examples: threads change the last bits.
    os.environ["XLA_FLAGS"] = xla.flags(devices=4)

if KERAS_3:
    Variable, tensor = keras.Variable, keras.ops.convert_to_tensor
else:
    Variable, tensor = tf.Variable, tf.convert_to_tensor


@functools.cache
def mirrored():
    """The strategy of two replicas; a second one would abort the collectives of the first."""
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])


def numpy(value):
    return np.array(keras.ops.convert_to_numpy(value) if KERAS_3 else value)


def dtype(value):
    return keras.backend.standardize_dtype(value.dtype) if KERAS_3 else value.dtype.name


def scale_of(optimizer):
    """The loss scale of gradscaler's or Keras' own wrapper, as a float."""
    return float(numpy(optimizer.dynamic_scale) if KERAS_3 else optimizer.loss_scale)


def stepper(optimizer, variables, compiled=True):
    """A function that passes gradients to the optimizer as the backend's trainer does."""
    if not KERAS_3:
        optimizer.get_scaled_loss(tf.constant(1.0))  # without these two calls, it would warn
        optimizer.get_unscaled_gradients([])

        def step(grads):
            optimizer.apply_gradients(list(zip(grads, variables, strict=True)))

        return tf.function(step) if compiled else step
    optimizer.scale_loss(1.0)  # without this call, it would warn
    if not optimizer.built:
        optimizer.build(variables)
    if BACKEND != "jax":
        step = lambda grads: optimizer.apply(grads, variables)  # noqa: E731
        return tf.function(step) if BACKEND == "tensorflow" and compiled else step
    import jax

    pure = jax.jit(optimizer.stateless_apply) if compiled else optimizer.stateless_apply

    def step(grads):
        old = [v.value for v in optimizer.variables], grads, [v.value for v in variables]
        values, state = pure(*old)
        for variable, value in zip(
            [*variables, *optimizer.variables], [*values, *state], strict=True
        ):
            variable.assign(value)

    return step


def drive(optimizer, variables, steps, compiled=True):
    """Apply these gradients of the unscaled loss, step by step; return the scale after each."""
    step = stepper(optimizer, variables, compiled)
    scales = []
    for grads in steps:
        scale = np.float32(scale_of(optimizer) if KERAS_3 else 1)  # Keras 3 divides by it
        step([None if grad is None else tensor(grad * scale) for grad in grads])
        scales.append(scale_of(optimizer))
    return scales


def everything(optimizer, variables):
    """All that a step may change, to the bit."""
    kept = optimizer.variables  # a method of the legacy family
    kept = [*variables, *(kept() if callable(kept) else kept)]
    if not KERAS_3 and optimizer.dynamic:
        kept += [optimizer.loss_scale, optimizer.dynamic_counter]
    return [(dtype(value), numpy(value).tobytes()) for value in kept]


def trained(optimizer, epochs=2, **arguments):
    """A small classifier after a training in float16, and its losses."""
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        layers = [
            keras.layers.Dense(8, "relu", name="hidden"),
            keras.layers.Dense(3, dtype="float32", name="logits"),
        ]
        model = keras.Sequential([keras.Input((8,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss, **arguments)
        history = model.fit(IMAGES, LABELS, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return model, history.history["loss"]


@pytest.fixture
def variables():
    values = np.random.default_rng(0).normal(size=6).astype("float32")
    return [
        Variable(values[:4].reshape(2, 2), name="kernel"),
        Variable(values[4:], name="bias"),
    ]


@pytest.fixture(params=["new"] if KERAS_3 else ["new", "legacy"])
def family(request):
    """The module of a family of optimizers."""
    return keras.optimizers if request.param == "new" else keras.optimizers.legacy
