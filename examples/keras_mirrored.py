"""Train on handwritten digits in fp16 with Keras on TensorFlow, on several devices at once.

    KERAS_BACKEND=tensorflow python examples/keras_mirrored.py

``tf.distribute.MirroredStrategy`` gives each device a copy of the network and a part of each batch.
The devices here are parts of one CPU, so the script runs anywhere. On a machine with GPUs, create
``MirroredStrategy()`` without arguments.

There is one difference to training on one device: the network and its optimizer are created within
``strategy.scope()``. If a gradient overflows on any device, all devices skip the step, and the loss
scale is the same on each. ``--devices 1`` ends with the same numbers, up to rounding.

The loss is a mean of squares and the units are sigmoids, so most gradients are too small for fp16:
with ``--scale 1`` the network learns nothing at all.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.utils import shuffle

from gradscaler.keras import LossScaleOptimizer

BATCH = 500
WIDTH = 64
HIDDEN_LAYERS = 4
TRAINING_IMAGES = 1500  # of 1797


def main(argv: list[str] | None = None) -> None:
    """Train, and show the loss scale of each device at the end."""
    arguments = parse(argv)
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(arguments.devices)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    strategy = tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(arguments.devices)])
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    pixels, digits = shuffle(*load_digits(return_X_y=True), random_state=0)
    images, targets = (pixels / 16).astype("float32"), np.eye(10, dtype="float32")[digits]
    with strategy.scope():
        model = new_model(arguments.scale)

    print(" epoch    loss  accuracy     scale  steps")
    for epoch in range(1, arguments.epochs + 1):
        order = np.random.default_rng(epoch).permutation(TRAINING_IMAGES)
        history = model.fit(
            images[order], targets[order], batch_size=BATCH, shuffle=False, verbose=0
        )
        if epoch % 10 == 0 or epoch == arguments.epochs:
            guesses = model(images[TRAINING_IMAGES:]).numpy().argmax(1)
            right = float((guesses == digits[TRAINING_IMAGES:]).mean())
            loss = history.history["loss"][0]
            scale = float(model.optimizer.loss_scale)
            steps = int(model.optimizer.iterations.numpy())  # without skipped steps
            print(f"{epoch:6} {loss:7.4f} {right:9.1%} {scale:9.0f} {steps:6}")

    copies = strategy.experimental_local_results(model.optimizer.dynamic_scale.value)
    print("scale on each device:", *(f"{copy.numpy():.0f}" for copy in copies))


def new_model(scale: float | None) -> Any:
    """A network and an optimizer that scales the loss, by ``scale`` if it is given."""
    weights = keras.initializers.RandomUniform(-(WIDTH**-0.5), WIDTH**-0.5)
    hidden = [
        keras.layers.Dense(WIDTH, "sigmoid", kernel_initializer=weights.clone())
        for _ in range(HIDDEN_LAYERS)
    ]
    guess = keras.layers.Dense(10, "softmax", kernel_initializer=weights.clone(), dtype="float32")
    model = keras.Sequential([keras.Input((WIDTH,)), *hidden, guess])
    adam = keras.optimizers.Adam(0.01)
    if scale is None:
        optimizer = LossScaleOptimizer(adam, initial_scale=2.0**20, dynamic_growth_steps=20)
    else:
        optimizer = LossScaleOptimizer(adam, dynamic=False, initial_scale=scale)
    model.compile(optimizer, keras.losses.MeanSquaredError())
    return model


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits on many devices.")
    parser.add_argument("--devices", type=int, default=2, help="parts of the CPU (%(default)s)")
    parser.add_argument("--epochs", type=int, default=100, help="how long (%(default)s)")
    parser.add_argument("--scale", type=float, help="use this fixed loss scale")
    arguments = parser.parse_args(argv)
    if arguments.devices < 1:
        parser.error(f"--devices must be at least 1, got {arguments.devices}")
    if arguments.scale is not None and not 1 <= arguments.scale < 2.0**128:
        parser.error(f"--scale must be at least 1 and less than 2**128, got {arguments.scale}")
    return arguments


if __name__ == "__main__":
    main()
