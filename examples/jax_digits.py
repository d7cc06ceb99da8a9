"""Train on handwritten digits in fp16; stop, and resume as if nothing had happened.

    python examples/jax_digits.py --checkpoint run.msgpack --resume

The script saves every 50 steps. If you kill it, even while it saves, the same command resumes from
the last save. One run can also resume from the file of another:

    python examples/jax_digits.py --steps 150 --checkpoint half.msgpack
    python examples/jax_digits.py --steps 300 --resume half.msgpack

Either way, training ends with the same bits as if it had never stopped.

The loss is a mean of squares and the units are sigmoids, so most gradients are too small for fp16:
with --no-scaling the network learns nothing at all.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import serialization
from sklearn.datasets import load_digits
from sklearn.utils import shuffle

from gradscaler import DynamicScale, FixedScale
from gradscaler.jax import loss_scaled

BATCH = 500
WIDTH = 64
HIDDEN_LAYERS = 4
TRAINING_IMAGES = 1500  # of 1797

Params = list[dict[str, jax.Array]]


class State(NamedTuple):
    """All that the next step depends on.

    Attributes:
        params: weights and biases, float32.
        optimizer: the optimizer's state, the loss scale included.
        step: steps taken or skipped.
        skipped: how many were skipped.
    """

    params: Params
    optimizer: Any
    step: Any
    skipped: Any


def main(argv: list[str] | None = None) -> None:
    """Train up to a number of steps, from the start or from a checkpoint."""
    arguments = parse(argv)
    pixels, digits = shuffle(*load_digits(return_X_y=True), random_state=0)
    images, labels = jnp.array(pixels / 16, dtype=jnp.float32), jnp.array(digits)

    # The run is short, so the scale should grow soon.
    policy = DynamicScale(growth_interval=20) if arguments.scaling else FixedScale(1.0)
    schedule = optax.exponential_decay(0.01, transition_steps=1, decay_rate=0.999)
    optimizer = loss_scaled(optax.adamw(schedule), policy)
    params = init(jax.random.key(0))
    state = State(params, optimizer.init(params), step=0, skipped=0)
    if arguments.resume:
        state = load(arguments.resume, state)

    print("  step    loss  accuracy     scale  skipped")
    while state.step < arguments.steps:
        loss, state = train_step(optimizer, state, images[:TRAINING_IMAGES], labels)
        last = state.step == arguments.steps
        if state.step % 50 == 0 or last:
            right = accuracy(state.params, images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:])
            scale = state.optimizer.scaler.loss_scale
            print(f"{state.step:6} {loss:7.4f} {right:9.1%} {scale:9.0f} {state.skipped:8}")
        if arguments.checkpoint and (state.step % arguments.save_every == 0 or last):
            save(arguments.checkpoint, state)


@functools.partial(jax.jit, static_argnums=0)
def train_step(optimizer: Any, state: State, images: Any, labels: Any) -> tuple[Any, State]:
    """Return the loss of one batch, and the state after its step or skip."""
    key = jax.random.fold_in(jax.random.key(1), state.step)
    batch = jax.random.randint(key, (BATCH,), 0, len(images))

    def scaled_loss(params: Params) -> tuple[Any, Any]:
        guesses = jax.nn.softmax(forward(params, images[batch]).astype(jnp.float32))
        loss = ((guesses - jax.nn.one_hot(labels[batch], 10)) ** 2).mean()
        return state.optimizer.scaler.scale(loss), loss

    grads, loss = jax.grad(scaled_loss, has_aux=True)(state.params)
    updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    skipped = state.skipped + ~optimizer_state.grads_finite
    return loss, State(params, optimizer_state, state.step + 1, skipped)


def init(key: Any) -> Params:
    """Weights uniform in ±1 / sqrt(inputs), and biases of zero."""
    sizes = [WIDTH] * (HIDDEN_LAYERS + 1) + [10]  # an image has 64 pixels, too
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {
            "weight": jax.random.uniform(key, shape, minval=-1, maxval=1) / shape[0] ** 0.5,
            "bias": jnp.zeros(shape[1]),
        }
        for key, *shape in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def forward(params: Params, images: Any) -> Any:
    """The network's outputs in fp16, before the softmax."""
    values = images.astype(jnp.float16)
    *hidden, last = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    for layer in hidden:
        values = jax.nn.sigmoid(values @ layer["weight"] + layer["bias"])
    return values @ last["weight"] + last["bias"]


@jax.jit
def accuracy(params: Params, images: Any, labels: Any) -> Any:
    """The share of images that the network gets right."""
    return (forward(params, images).argmax(1) == labels).mean()


def save(path: Path, state: State) -> None:
    """Write the state.

    The new file replaces the old one only once it is complete, so a kill leaves one of them whole.
    """
    temporary = path.with_stem(f"{path.stem}.tmp")
    with temporary.open("wb") as file:
        file.write(serialization.to_bytes(state))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load(path: Path, state: State) -> State:
    """Return the state in a checkpoint, which has the structure of ``state``."""
    try:
        restored: State = serialization.from_bytes(state, path.read_bytes())
        shapes = (jax.tree.map(jnp.shape, tree) for tree in (restored, state))
        if len(set(map(str, shapes))) > 1:
            raise ValueError("the shapes differ")
    except Exception as error:  # a damaged file may fail anywhere
        sys.exit(f"{path} is missing, damaged, or not a checkpoint of such a run: {error!r}")
    return restored


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits in fp16.")
    parser.add_argument(
        "--steps", type=int, default=300, help="train up to this step (%(default)s)"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="save the run here")
    parser.add_argument(
        "--save-every",
        type=int,
        default=50,
        metavar="N",
        help="save after every N steps, and at the end (%(default)s)",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=True,
        metavar="FILE",
        help="resume from FILE; without FILE, from --checkpoint if it exists",
    )
    parser.add_argument(
        "--no-scaling", dest="scaling", action="store_false", help="do not scale the loss"
    )
    arguments = parser.parse_args(argv)
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
