"""Train on handwritten digits in fp16 with Keras 2; stop, and resume.

    python examples/tf_keras_digits.py --checkpoint run.keras --resume

The script saves every 10 epochs. If you kill it, even while it saves, the same command resumes from
the last save. One run can also resume from the file of another:

    python examples/tf_keras_digits.py --epochs 50 --checkpoint half.keras
    python examples/tf_keras_digits.py --epochs 100 --resume half.keras

Either way, training ends with the same bits as if it had never stopped.

The loss is a mean of squares and the units are sigmoids, so most gradients are too small for fp16:
with ``--scale 1`` the network learns nothing at all. ``model.fit`` needs no change but the
optimizer. ``--loop`` replaces ``fit`` by a step written by hand. It ends with the same numbers.
"""

from __future__ import annotations

import argparse
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from sklearn.datasets import load_digits
from sklearn.utils import shuffle

from gradscaler.tf_keras import LossScaleOptimizer

BATCH = 500
WIDTH = 64
HIDDEN_LAYERS = 4
TRAINING_IMAGES = 1500  # of 1797

mean_square = tf_keras.losses.MeanSquaredError()


def main(argv: list[str] | None = None) -> None:
    """Train up to a number of epochs, from the start or from a checkpoint."""
    arguments = parse(argv)
    tf_keras.utils.set_random_seed(0)
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    pixels, digits = shuffle(*load_digits(return_X_y=True), random_state=0)
    images, targets = (pixels / 16).astype("float32"), np.eye(10, dtype="float32")[digits]

    model, epoch = load(arguments.resume) if arguments.resume else (new_model(arguments.scale), 0)
    step = compiled_step(model) if arguments.loop else None

    print(" epoch    loss  accuracy     scale  steps")
    while epoch < arguments.epochs:
        # The order depends only on the epoch, so a resumed run sees the same one.
        order = np.random.default_rng(epoch).permutation(TRAINING_IMAGES)
        training = images[order], targets[order]
        if step is None:
            history = model.fit(*training, batch_size=BATCH, shuffle=False, verbose=0)
            loss = history.history["loss"][0]
        else:
            batches = tf.data.Dataset.from_tensor_slices(training).batch(BATCH)
            losses = [float(step(*batch)) for batch in batches]
            loss = sum(losses) / len(losses)
        epoch += 1
        last = epoch == arguments.epochs
        if epoch % 10 == 0 or last:
            guesses = model.predict(images[TRAINING_IMAGES:], verbose=0).argmax(1)
            right = float((guesses == digits[TRAINING_IMAGES:]).mean())
            scale = float(model.optimizer.loss_scale)
            steps = int(model.optimizer.iterations)  # in Keras 2, skipped steps count
            print(f"{epoch:6} {loss:7.4f} {right:9.1%} {scale:9.0f} {steps:6}")
        if arguments.checkpoint and (epoch % arguments.save_every == 0 or last):
            save(arguments.checkpoint, model, epoch)


def new_model(scale: float | None) -> Any:
    """A network and an optimizer that scales the loss, by ``scale`` if it is given."""
    hidden = [dense(WIDTH, "sigmoid") for _ in range(HIDDEN_LAYERS)]  # an image has 64 pixels, too
    guess = dense(10, "softmax", "float32")
    model = tf_keras.Sequential([tf_keras.Input((WIDTH,)), *hidden, guess])
    adam = tf_keras.optimizers.Adam(0.01)
    if scale is None:
        optimizer = LossScaleOptimizer(adam, initial_scale=2.0**20, dynamic_growth_steps=20)
    else:
        optimizer = LossScaleOptimizer(adam, dynamic=False, initial_scale=scale)
    model.compile(optimizer, mean_square)
    return model


def dense(size: int, activation: str, dtype: str | None = None) -> Any:
    """A layer whose weights are uniform in ±1 / sqrt(inputs)."""
    weights = tf_keras.initializers.RandomUniform(-(WIDTH**-0.5), WIDTH**-0.5)
    return tf_keras.layers.Dense(size, activation, kernel_initializer=weights, dtype=dtype)


def compiled_step(model: Any) -> Any:
    """A step on a batch of images and targets, in a graph traced once; it returns the loss."""

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator] # TensorFlow is untyped
    def step(images: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = mean_square(targets, model(images, training=True))
            scaled_loss = model.optimizer.get_scaled_loss(loss)
        scaled = tape.gradient(scaled_loss, model.trainable_variables)
        gradients = model.optimizer.get_unscaled_gradients(scaled)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        model.optimizer.apply_gradients(pairs)
        return loss

    return step


def save(path: Path, model: Any, epoch: int) -> None:
    """Write the model, with its optimizer, loss scale and counters, and the epochs it has seen.

    The new file replaces the old one only once it is complete, so a kill leaves one of them whole.
    """
    temporary = path.with_stem(f"{path.stem}.tmp")
    model.save(temporary)
    with zipfile.ZipFile(temporary, "a") as archive:  # a .keras file is a zip file
        archive.writestr("epoch", str(epoch))
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def load(path: Path) -> tuple[Any, int]:
    """The model that ``save`` wrote, and the epochs it has seen."""
    try:
        with zipfile.ZipFile(path) as archive:
            epoch = int(archive.read("epoch"))
        model = tf_keras.models.load_model(path)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        sys.exit(f"cannot read the checkpoint {path}: {error.strerror}")
    except Exception as error:  # a damaged file may fail anywhere
        sys.exit(f"{path} is damaged, or not a model of this script: {type(error).__name__}")
    return model, epoch


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits in fp16.")
    parser.add_argument(
        "--epochs", type=int, default=100, help="train up to this epoch (%(default)s)"
    )
    parser.add_argument(
        "--scale",
        type=float,
        help="use this fixed loss scale (a resumed run keeps its own)",
    )
    parser.add_argument("--loop", action="store_true", help="train with a loop, not model.fit")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="save the run here, in a .keras file"
    )
    parser.add_argument(
        "--save-every",
        type=int,
        default=10,
        metavar="N",
        help="save after every N epochs, and at the end (%(default)s)",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=True,
        metavar="FILE",
        help="resume from FILE; without FILE, from --checkpoint if it exists",
    )
    arguments = parser.parse_args(argv)
    if arguments.scale is not None and not 1 <= arguments.scale < 2.0**128:
        parser.error(f"--scale must be at least 1 and less than 2**128, got {arguments.scale}")
    if arguments.checkpoint and arguments.checkpoint.suffix != ".keras":
        parser.error("--checkpoint: the name of a saved model ends in .keras")
    if arguments.save_every < 1:
        parser.error(f"--save-every must be at least 1, got {arguments.save_every}")
    if arguments.checkpoint and arguments.checkpoint.is_dir():
        parser.error(f"--checkpoint: {arguments.checkpoint} is a folder")
    if arguments.checkpoint and not arguments.checkpoint.absolute().parent.is_dir():
        parser.error(f"--checkpoint: there is no folder {arguments.checkpoint.parent}")
    if arguments.resume is True:
        if not arguments.checkpoint:
            parser.error("--resume: name a FILE, or a --checkpoint to resume from")
        arguments.resume = arguments.checkpoint if arguments.checkpoint.exists() else None
    return arguments


if __name__ == "__main__":
    main()
