"""Train on handwritten digits in fp16, on any backend of Keras; stop, and resume.

    KERAS_BACKEND=jax python examples/keras_digits.py --checkpoint run.keras --resume

The script saves every 10 epochs. If you kill it, even while it saves, the same command resumes from
the last save. One run can also resume from the file of another:

    KERAS_BACKEND=jax python examples/keras_digits.py --epochs 50 --checkpoint half.keras
    KERAS_BACKEND=jax python examples/keras_digits.py --epochs 100 --resume half.keras

Either way, training ends with the same bits as if it had never stopped.

The loss is a mean of squares and the units are sigmoids, so most gradients are too small for fp16:
with ``--scale 1`` the network learns nothing at all. ``model.fit`` needs no change but the
optimizer. ``--loop`` replaces ``fit`` by a step that is written by hand for each backend. It ends
with the same numbers.
"""

from __future__ import annotations

import argparse
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.utils import shuffle

from gradscaler.keras import LossScaleOptimizer

BATCH = 500
WIDTH = 64
HIDDEN_LAYERS = 4
TRAINING_IMAGES = 1500  # of 1797

Step = Callable[[Any, Any], Any]
"""Trains on images and targets, and returns the loss."""

mean_square = keras.losses.MeanSquaredError()


def main(argv: list[str] | None = None) -> None:
    """Train up to a number of epochs, from the start or from a checkpoint."""
    arguments = parse(argv)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    pixels, digits = shuffle(*load_digits(return_X_y=True), random_state=0)
    images, targets = (pixels / 16).astype("float32"), np.eye(10, dtype="float32")[digits]

    model, epoch = load(arguments.resume) if arguments.resume else (new_model(arguments.scale), 0)
    step = STEPS[keras.backend.backend()](model) if arguments.loop else None

    print(" epoch    loss  accuracy     scale  steps")
    while epoch < arguments.epochs:
        # The order depends only on the epoch, so a resumed run sees the same one.
        order = np.random.default_rng(epoch).permutation(TRAINING_IMAGES)
        training = images[order], targets[order]
        if step is None:
            history = model.fit(*training, batch_size=BATCH, shuffle=False, verbose=0)
            loss = history.history["loss"][0]
        else:
            loss = looped_epoch(step, *training)
        epoch += 1
        last = epoch == arguments.epochs
        if epoch % 10 == 0 or last:
            guesses = model.predict(images[TRAINING_IMAGES:], verbose=0).argmax(1)
            right = float((guesses == digits[TRAINING_IMAGES:]).mean())
            scale = float(model.optimizer.loss_scale)
            steps = int(model.optimizer.iterations.numpy())  # without skipped steps
            print(f"{epoch:6} {loss:7.4f} {right:9.1%} {scale:9.0f} {steps:6}")
        if arguments.checkpoint and (epoch % arguments.save_every == 0 or last):
            save(arguments.checkpoint, model, epoch)


def new_model(scale: float | None) -> Any:
    """A network and an optimizer that scales the loss, by ``scale`` if it is given."""
    hidden = [dense(WIDTH, "sigmoid") for _ in range(HIDDEN_LAYERS)]  # an image has 64 pixels, too
    guess = dense(10, "softmax", "float32")
    model = keras.Sequential([keras.Input((WIDTH,)), *hidden, guess])
    adam = keras.optimizers.Adam(0.01)
    if scale is None:
        optimizer = LossScaleOptimizer(adam, initial_scale=2.0**20, dynamic_growth_steps=20)
    else:
        optimizer = LossScaleOptimizer(adam, dynamic=False, initial_scale=scale)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, mean_square)
    return model


def dense(size: int, activation: str, dtype: str | None = None) -> Any:
    """A layer whose weights are uniform in ±1 / sqrt(inputs)."""
    weights = keras.initializers.RandomUniform(-(WIDTH**-0.5), WIDTH**-0.5)
    return keras.layers.Dense(size, activation, kernel_initializer=weights, dtype=dtype)


def looped_epoch(step: Step, images: Any, targets: Any) -> float:
    """Train on all images once, and return the mean loss."""
    losses = [
        float(step(images[start : start + BATCH], targets[start : start + BATCH]))
        for start in range(0, len(images), BATCH)
    ]
    return sum(losses) / len(losses)


def tensorflow_step(model: Any) -> Step:
    """A step in a graph that is traced once."""
    import tensorflow as tf

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator] # TensorFlow is untyped
    def step(images: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mean_square(targets, model(images, training=True))
            scaled_loss = model.optimizer.get_scaled_loss(loss)
        scaled = tape.gradient(scaled_loss, model.trainable_variables)
        gradients = model.optimizer.get_unscaled_gradients(scaled)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        model.optimizer.apply_gradients(pairs)
        return loss

    return lambda images, targets: step(tf.constant(images), tf.constant(targets))


def jax_step(model: Any) -> Step:
    """A step in a compiled pure function, whose results are then assigned to the variables."""
    import jax

    parameters, state = model.trainable_variables, model.optimizer.variables

    def scaled_loss(values: Any, scaling: Any, images: Any, targets: Any) -> tuple[Any, Any]:
        guesses, _ = model.stateless_call(values, [], images, training=True)
        loss = mean_square(targets, guesses)
        with keras.StatelessScope(state_mapping=list(zip(state, scaling, strict=True))):
            return model.optimizer.scale_loss(loss), loss

    @jax.jit
    def pure_step(values: Any, scaling: Any, images: Any, targets: Any) -> tuple[Any, Any, Any]:
        gradients, loss = jax.grad(scaled_loss, has_aux=True)(values, scaling, images, targets)
        values, scaling = model.optimizer.stateless_apply(scaling, gradients, values)
        return values, scaling, loss

    def step(images: Any, targets: Any) -> Any:
        old = [[variable.value for variable in part] for part in (parameters, state)]
        *new, loss = pure_step(*old, images, targets)
        for part, values in zip((parameters, state), new, strict=True):
            for variable, value in zip(part, values, strict=True):
                variable.assign(value)
        return loss

    return step


def torch_step(model: Any) -> Step:
    """A step of ``backward`` and then ``apply``, which unscales."""
    import torch

    def step(images: Any, targets: Any) -> Any:
        model.zero_grad()
        loss = mean_square(torch.tensor(targets), model(torch.tensor(images), training=True))
        model.optimizer.scale_loss(loss).backward()
        parameters = model.trainable_variables
        with torch.no_grad():
            model.optimizer.apply([each.value.grad for each in parameters], parameters)
        return loss.detach()

    return step


STEPS = {"tensorflow": tensorflow_step, "jax": jax_step, "torch": torch_step}


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
        model = keras.models.load_model(path)
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
