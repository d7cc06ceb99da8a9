"""Train on handwritten digits in fp16, on any backend of Keras; save, and go on from there.

    KERAS_BACKEND=jax python examples/keras_digits.py --epochs 10 --checkpoint half.keras
    KERAS_BACKEND=jax python examples/keras_digits.py --epochs 10 --resume half.keras

The network is deep and its units are sigmoids, so many gradients are too small for fp16: compare
``--scale 1``. ``model.fit`` needs no change but the optimizer. ``--loop`` does without ``fit``: a
step by hand, as one writes it for each backend, which ends with the same numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from sklearn.datasets import load_digits
from sklearn.utils import shuffle

from gradscaler.keras import LossScaleOptimizer

BATCH = 50
WIDTH = 64
HIDDEN_LAYERS = 6
TRAINING_IMAGES = 1500  # of 1797

Step = Callable[[Any, Any], Any]
"""Trains on images and labels, and returns the loss."""

cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def main(argv: list[str] | None = None) -> None:
    """Train for a number of epochs, from the start or from a saved model."""
    arguments = parse(argv)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    pixels, digits = shuffle(*load_digits(return_X_y=True), random_state=0)
    images, labels = (pixels / 16).astype("float32"), digits.astype("int32")
    training = images[:TRAINING_IMAGES], labels[:TRAINING_IMAGES]
    held_out = images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:]

    model = load(arguments.resume) if arguments.resume else new_model(arguments.scale)
    step = STEPS[keras.backend.backend()](model) if arguments.loop else None

    print(" epoch    loss  accuracy     scale  steps")
    for epoch in range(1, arguments.epochs + 1):
        if step is None:
            history = model.fit(*training, batch_size=BATCH, shuffle=False, verbose=0)
            loss = history.history["loss"][0]
        else:
            loss = looped_epoch(step, *training)
        right = float((model.predict(held_out[0], verbose=0).argmax(1) == held_out[1]).mean())
        scale = float(model.optimizer.loss_scale)
        steps = int(model.optimizer.iterations.numpy())  # skipped ones do not count
        print(f"{epoch:6} {loss:7.3f} {right:9.1%} {scale:9.0f} {steps:6}")

    if arguments.checkpoint:
        model.save(arguments.checkpoint)


def new_model(scale: float | None) -> Any:
    """A network, and an optimizer that scales its loss; by a fixed factor, if there is one."""
    layers = [keras.layers.Dense(WIDTH, "sigmoid") for _ in range(HIDDEN_LAYERS)]
    logits = keras.layers.Dense(10, dtype="float32")
    model = keras.Sequential(
        [keras.Input((WIDTH,)), *layers, logits]
    )  # an image has 64 pixels, too
    adam = keras.optimizers.Adam(0.01)
    if scale is None:
        optimizer = LossScaleOptimizer(adam, initial_scale=2.0**20, dynamic_growth_steps=100)
    else:
        optimizer = LossScaleOptimizer(adam, dynamic=False, initial_scale=scale)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, cross_entropy)
    return model


def looped_epoch(step: Step, images: Any, labels: Any) -> float:
    """Train on all images once; the mean loss."""
    losses = [
        float(step(images[start : start + BATCH], labels[start : start + BATCH]))
        for start in range(0, len(images), BATCH)
    ]
    return sum(losses) / len(losses)


def tensorflow_step(model: Any) -> Step:
    """A graph that is traced once."""
    import tensorflow as tf

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator] # TensorFlow's is not
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = cross_entropy(labels, model(images, training=True))
            scaled_loss = model.optimizer.get_scaled_loss(loss)
        scaled = tape.gradient(scaled_loss, model.trainable_variables)
        gradients = model.optimizer.get_unscaled_gradients(scaled)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        model.optimizer.apply_gradients(pairs)
        return loss

    return lambda images, labels: step(tf.constant(images), tf.constant(labels))


def jax_step(model: Any) -> Step:
    """A compiled pure function of all variables' values, which are put back after each step."""
    import jax

    parameters, state = model.trainable_variables, model.optimizer.variables

    def scaled_loss(values: Any, scaling: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        logits, _ = model.stateless_call(values, [], images, training=True)
        loss = cross_entropy(labels, logits)
        with keras.StatelessScope(state_mapping=list(zip(state, scaling, strict=True))):
            return model.optimizer.scale_loss(loss), loss

    @jax.jit
    def pure_step(values: Any, scaling: Any, images: Any, labels: Any) -> tuple[Any, Any, Any]:
        gradients, loss = jax.grad(scaled_loss, has_aux=True)(values, scaling, images, labels)
        values, scaling = model.optimizer.stateless_apply(scaling, gradients, values)
        return values, scaling, loss

    def step(images: Any, labels: Any) -> Any:
        old = [[variable.value for variable in part] for part in (parameters, state)]
        *new, loss = pure_step(*old, images, labels)
        for part, values in zip((parameters, state), new, strict=True):
            for variable, value in zip(part, values, strict=True):
                variable.assign(value)
        return loss

    return step


def torch_step(model: Any) -> Step:
    """Backward, and then ``apply``, which unscales."""
    import torch

    def step(images: Any, labels: Any) -> Any:
        model.zero_grad()
        loss = cross_entropy(torch.tensor(labels), model(torch.tensor(images), training=True))
        model.optimizer.scale_loss(loss).backward()
        parameters = model.trainable_variables
        with torch.no_grad():
            model.optimizer.apply([each.value.grad for each in parameters], parameters)
        return loss.detach()

    return step


STEPS = {"tensorflow": tensorflow_step, "jax": jax_step, "torch": torch_step}


def load(path: Path) -> Any:
    """A saved model: the optimizer's scale and counter come with it."""
    try:
        model = keras.models.load_model(path)
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
