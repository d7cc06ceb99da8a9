"""Loops of TensorFlow that fail in step 13, by a cause each; prints digests of all variables.

A loop is eager, compiled, or mixed: it steps eagerly by the gradients of a compiled function.
"""

import hashlib
import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import gradscaler.keras

CASES = [
    (keras, "healthy", "compiled"),
    (keras, "root", "eager"),
    (tf_keras, "root", "eager"),
    (keras, "logarithm", "compiled"),
    (tf_keras, "batch", "mixed"),
    (keras, "constant", "compiled"),
    (keras, "root scaled", "eager"),
    (tf_keras, "root scaled", "eager"),
    (keras, "root scaled", "compiled"),
    (tf_keras, "root scaled", "compiled"),
]


def loss_of(outputs, x, case):
    loss = tf.reduce_mean(outputs**2)
    if "root" in case:
        return loss + tf.sqrt(tf.reduce_sum(((outputs - outputs[0]) * tf.reduce_sum(x)) ** 2))
    if case == "logarithm":
        return loss - tf.math.log(tf.reduce_sum(tf.abs(x)) + 0 * tf.reduce_sum(outputs))
    if case == "constant":  # no variable is behind it
        return loss - tf.math.log(tf.reduce_sum(tf.abs(x)))
    return loss


def train(package, case, mode):
    package.utils.set_random_seed(0)
    is_scaled = "scaled" in case
    package.mixed_precision.set_global_policy("mixed_float16" if is_scaled else "float32")
    layers = package.layers
    model = package.Sequential(
        [
            package.Input((4,)),
            layers.Dense(8, "tanh"),
            layers.Dropout(0.2),
            layers.Dense(1, dtype="float32"),
        ]
    )
    optimizer = package.optimizers.Adam(1e-2)
    if is_scaled:
        is_ours = mode == "compiled" and package is keras
        scalers = gradscaler.keras if is_ours else package.mixed_precision
        optimizer = scalers.LossScaleOptimizer(optimizer)
    traces = []

    def scale(loss):
        return (
            optimizer.get_scaled_loss(loss) if package is tf_keras else optimizer.scale_loss(loss)
        )

    def gradients_of(x):
        traces.extend([x] * (not tf.executing_eagerly()))
        with tf.GradientTape() as tape:
            noise = tf.random.normal(x.shape) * tf.reduce_max(abs(x))
            loss = loss_of(model(x + noise, training=True), x, case)
            scaled = scale(loss) if is_scaled else loss
        found = tape.gradient(scaled, model.trainable_variables)
        if is_scaled and package is tf_keras:
            found = optimizer.get_unscaled_gradients(found)
        return loss, found

    def step(x):
        loss, found = gradients_of(x)
        optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))
        return {"loss": loss}

    if mode == "compiled":
        step = tf.function(step)
    if mode == "mixed":
        gradients_of = tf.function(gradients_of)
    data = np.random.default_rng(0).standard_normal((24, 16, 4)).astype("float32")
    for number, batch in enumerate(data):
        if number in (12, 14, 16) and case != "healthy":
            batch = batch * 0 if case != "batch" else np.where(batch > 2, np.nan, batch)
        step(tf.constant(batch))
    state = optimizer.variables
    state = state() if callable(state) else state
    values = b"".join(np.asarray(each).tobytes() for each in [*model.variables, *state])
    return hashlib.sha256(values).hexdigest()[:16], len(traces)


for package, case, mode in CASES:
    print(package.__name__, case, mode, *train(package, case, mode), tf.random.normal([]).numpy())
