"""Train on handwritten digits in fp16 with Keras 2; save, and go on from there.

    python examples/tf_keras_digits.py --epochs 10 --checkpoint half.keras
    python examples/tf_keras_digits.py --epochs 10 --resume half.keras

The network is deep and its units are sigmoids, so many gradients are too small for fp16: compare
``--scale 1``. ``model.fit`` needs no change but the optimizer. ``--loop`` does without ``fit``: a
step by hand, which ends with the same numbers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf
import tf_keras
from sklearn.datasets import load_digits
from sklearn.utils import shuffle

from gradscaler.tf_keras import LossScaleOptimizer

BATCH = 50
WIDTH = 64
HIDDEN_LAYERS = 6
TRAINING_IMAGES = 1500  # of 1797

cross_entropy = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def main(argv: list[str] | None = None) -> None:
    """Train for a number of epochs, from the start or from a saved model."""
    arguments = parse(argv)
    tf_keras.utils.set_random_seed(0)
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    pixels, digits = shuffle(*load_digits(return_X_y=True), random_state=0)
    images, labels = (pixels / 16).astype("float32"), digits.astype("int32")
    training = images[:TRAINING_IMAGES], labels[:TRAINING_IMAGES]
    held_out = images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:]

    model = load(arguments.resume) if arguments.resume else new_model(arguments.scale)
    step = compiled_step(model) if arguments.loop else None

    print(" epoch    loss  accuracy     scale  steps")
    for epoch in range(1, arguments.epochs + 1):
        if step is None:
            history = model.fit(*training, batch_size=BATCH, shuffle=False, verbose=0)
            loss = history.history["loss"][0]
        else:
            batches = tf.data.Dataset.from_tensor_slices(training).batch(BATCH)
            losses = [float(step(*batch)) for batch in batches]
            loss = sum(losses) / len(losses)
        right = float((model.predict(held_out[0], verbose=0).argmax(1) == held_out[1]).mean())
        scale = float(model.optimizer.loss_scale)
        steps = int(model.optimizer.iterations)  # in Keras 2, skipped ones count
        print(f"{epoch:6} {loss:7.3f} {right:9.1%} {scale:9.0f} {steps:6}")

    if arguments.checkpoint:
        model.save(arguments.checkpoint)


def new_model(scale: float | None) -> Any:
    """A network, and an optimizer that scales its loss; by a fixed factor, if there is one."""
    layers = [tf_keras.layers.Dense(WIDTH, "sigmoid") for _ in range(HIDDEN_LAYERS)]
    logits = tf_keras.layers.Dense(10, dtype="float32")
    model = tf_keras.Sequential([tf_keras.Input((WIDTH,)), *layers, logits])  # 64 pixels, too
    adam = tf_keras.optimizers.Adam(0.01)
    if scale is None:
        optimizer = LossScaleOptimizer(adam, initial_scale=2.0**20, dynamic_growth_steps=100)
    else:
        optimizer = LossScaleOptimizer(adam, dynamic=False, initial_scale=scale)
    model.compile(optimizer, cross_entropy)
    return model


def compiled_step(model: Any) -> Any:
    """A step on a batch of images and labels, which returns the loss; a graph, traced once."""

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator] # TensorFlow's is not typed
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = cross_entropy(labels, model(images, training=True))
            scaled_loss = model.optimizer.get_scaled_loss(loss)
        scaled = tape.gradient(scaled_loss, model.trainable_variables)
        gradients = model.optimizer.get_unscaled_gradients(scaled)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        model.optimizer.apply_gradients(pairs)
        return loss

    return step


def load(path: Path) -> Any:
    """A saved model: the optimizer's scale and counter come with it."""
    try:
        model = tf_keras.models.load_model(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path} is damaged, or no model of this script: {type(error).__name__}")
    if not isinstance(model.optimizer, LossScaleOptimizer):
        sys.exit(f"{path} was not saved by this script: it has no LossScaleOptimizer")
    return model


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits in fp16.")
    parser.add_argument("--epochs", type=int, default=20, help="to train for (%(default)s)")
    parser.add_argument("--scale", type=float, help="a fixed loss scale, in place of a moving one")
    parser.add_argument("--loop", action="store_true", help="train by a loop, not by model.fit")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="save here, as .keras")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on from this model")
    arguments = parser.parse_args(argv)
    if arguments.checkpoint and arguments.checkpoint.suffix != ".keras":
        parser.error("--checkpoint: the name of a saved model ends in .keras")
    if arguments.checkpoint and not arguments.checkpoint.absolute().parent.is_dir():
        parser.error(f"--checkpoint: there is no folder {arguments.checkpoint.parent}")
    return arguments


if __name__ == "__main__":
    main()
