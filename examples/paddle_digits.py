"""Train on handwritten digits in fp16; stop, and resume as if nothing had happened.

    python examples/paddle_digits.py --checkpoint run.pdckpt --resume

The script saves every 50 steps. If you kill it, even while it saves, the same command resumes from
the last save. One run can also resume from the file of another:

    python examples/paddle_digits.py --steps 150 --checkpoint half.pdckpt
    python examples/paddle_digits.py --steps 300 --resume half.pdckpt

Either way, training ends with the same bits as if it had never stopped.

Paddle cannot compute in fp16 on the CPU, so the layers below round numbers to fp16 and compute in
float32. The backward pass rounds the gradients too. The loss is a mean of squares and the units are
sigmoids, so most gradients are too small for fp16: with --no-scaling the network learns nothing at
all.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from sklearn.datasets import load_digits
from sklearn.utils import shuffle

from gradscaler.paddle import GradScaler

BATCH = 500
WIDTH = 64
HIDDEN_LAYERS = 4
TRAINING_IMAGES = 1500  # of 1797


def half(tensor: Any) -> Any:
    """Round to fp16; the backward pass rounds the gradient too."""
    return tensor.astype("float16").astype("float32")


class HalfLinear(nn.Linear):
    """A linear layer whose inputs, weights and outputs are numbers that fp16 can hold."""

    def forward(self, inputs: Any) -> Any:
        """``inputs @ weight + bias``."""
        return half(nn.functional.linear(half(inputs), half(self.weight), half(self.bias)))


def main(argv: list[str] | None = None) -> None:
    """Train up to a number of steps, from the start or from a checkpoint."""
    arguments = parse(argv)
    paddle.seed(0)  # decides the first weights, and which images each step sees

    pixels, digits = shuffle(*load_digits(return_X_y=True), random_state=0)
    images = paddle.to_tensor(pixels / 16, dtype="float32")
    labels = paddle.to_tensor(digits)
    targets = nn.functional.one_hot(labels, 10)

    weights = nn.initializer.Uniform(-(WIDTH**-0.5), WIDTH**-0.5)
    layers: list[nn.Layer] = []
    for _ in range(HIDDEN_LAYERS):
        layers += [HalfLinear(WIDTH, WIDTH, weights), nn.Sigmoid()]  # an image has 64 pixels, too
    model = nn.Sequential(*layers, HalfLinear(WIDTH, 10, weights))

    schedule = paddle.optimizer.lr.ExponentialDecay(0.01, gamma=0.999)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=model.parameters())
    scaler = GradScaler(arguments.scaling, incr_every_n_steps=20)  # a short run: grow it soon
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    step, skipped = load(arguments.resume, parts) if arguments.resume else (0, 0)

    print("  step    loss  accuracy     scale  skipped")
    while step < arguments.steps:
        batch = paddle.randint(0, TRAINING_IMAGES, [BATCH])
        guesses = nn.functional.softmax(model(images[batch]))
        loss = nn.functional.mse_loss(guesses, targets[batch])

        optimizer.clear_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.last_step(optimizer).applied:
            schedule.step()
        else:
            skipped += 1

        step += 1
        last = step == arguments.steps
        if step % 50 == 0 or last:
            right = accuracy(model, images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:])
            scale = scaler.scale(paddle.ones([])).item()
            print(f"{step:6} {loss.item():7.4f} {right:9.1%} {scale:9.0f} {skipped:8}")
        if arguments.checkpoint and (step % arguments.save_every == 0 or last):
            save(arguments.checkpoint, parts, step, skipped)


def accuracy(model: Any, images: Any, labels: Any) -> float:
    """The share of images that the model gets right."""
    with paddle.no_grad():
        return float((model(images).argmax(1) == labels).astype("float32").mean())


def save(path: Path, parts: dict[str, Any], step: int, skipped: int) -> None:
    """Write all that the next step depends on, with the state of the random numbers.

    The new file replaces the old one only once it is complete, so a kill leaves one of them whole.
    """
    checkpoint: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
    checkpoint.update(rng=paddle.get_rng_state(), step=step, skipped=skipped)
    temporary = path.with_stem(f"{path.stem}.tmp")
    paddle.save(checkpoint, str(temporary))
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def load(path: Path, parts: dict[str, Any]) -> tuple[int, int]:
    """Restore what ``save`` wrote; return the steps taken and how many of them were skipped."""
    try:
        checkpoint = paddle.load(str(path))
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        paddle.set_rng_state(checkpoint["rng"])
        return int(checkpoint["step"]), int(checkpoint["skipped"])
    except Exception as error:  # a damaged file may fail anywhere
        sys.exit(f"{path} is missing, damaged, or not a checkpoint of such a run: {error!r}")


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
