"""Train on handwritten digits in fp16; stop, and resume as if nothing had happened.

    python examples/tensorplay_digits.py --checkpoint run.pt --resume

The script saves every 50 steps. If you kill it, even while it saves, the same command resumes from
the last save. One run can also resume from the file of another:

    python examples/tensorplay_digits.py --steps 150 --checkpoint half.pt
    python examples/tensorplay_digits.py --steps 300 --resume half.pt

Either way, training ends with the same bits as if it had never stopped.

TensorPlay's autocast computes in fp16 on the CPU, too. The loss is a mean of squares and the
units are sigmoids, so most gradients are too small for fp16: with --no-scaling the network learns
nothing at all.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import tensorplay
from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from tensorplay import nn

from gradscaler.tensorplay import GradScaler

BATCH = 500
WIDTH = 64
HIDDEN_LAYERS = 4
TRAINING_IMAGES = 1500  # of 1797


def main(argv: list[str] | None = None) -> None:
    """Train up to a number of steps, from the start or from a checkpoint."""
    arguments = parse(argv)
    device = tensorplay.device("cuda" if tensorplay.cuda.is_available() else "cpu")
    tensorplay.manual_seed(0)  # decides the first weights, and which images each step sees

    pixels, digits = shuffle(*load_digits(return_X_y=True), random_state=0)
    images = tensorplay.tensor(pixels / 16, dtype=tensorplay.float32, device=device)
    labels = tensorplay.tensor(digits, device=device)
    targets = nn.functional.one_hot(labels, 10).to(tensorplay.float32)

    layers: list[Any] = []
    for _ in range(HIDDEN_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Sigmoid()]  # an image has 64 pixels, too
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(device)

    optimizer = tensorplay.optim.AdamW(model.parameters(), lr=0.01)  # type: ignore[no-untyped-call]
    scheduler = tensorplay.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999)
    # The run is short, so the scale should grow soon.
    scaler = GradScaler(device.type, growth_interval=20, enabled=arguments.scaling)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    step, skipped = load(arguments.resume, parts) if arguments.resume else (0, 0)

    print("  step    loss  accuracy     scale  skipped")
    while step < arguments.steps:
        batch = tensorplay.randint(0, TRAINING_IMAGES, (BATCH,)).to(device=device)
        with tensorplay.autocast(device.type, dtype=tensorplay.float16):
            probabilities = model(images[batch]).float().softmax(1)
            loss = (probabilities - targets[batch]).pow(2).mean()

        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.last_step(optimizer).applied:
            scheduler.step()
        else:
            skipped += 1

        step += 1
        last = step == arguments.steps
        if step % 50 == 0 or last:
            right = accuracy(model, images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:])
            print(f"{step:6} {loss.item():7.4f} {right:9.1%} {scaler.get_scale():9.0f} {skipped:8}")
        if arguments.checkpoint and (step % arguments.save_every == 0 or last):
            save(arguments.checkpoint, parts, step, skipped)


def accuracy(model: Any, images: Any, labels: Any) -> float:
    """The share of images that the model, in fp16, gets right."""
    device = images.device.type
    with tensorplay.no_grad(), tensorplay.autocast(device, dtype=tensorplay.float16):
        return float((model(images).argmax(1) == labels).float().mean().item())


def save(path: Path, parts: dict[str, Any], step: int, skipped: int) -> None:
    """Write all that the next step depends on, with the state of the random numbers.

    The new file replaces the old one only once it is complete, so a kill leaves one of them whole.
    """
    states = {name: part.state_dict() for name, part in parts.items()}
    rng = tensorplay.get_rng_state()
    temporary = path.with_stem(f"{path.stem}.tmp")
    with temporary.open("wb") as file:
        tensorplay.save({**states, "rng": rng, "step": step, "skipped": skipped}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load(path: Path, parts: dict[str, Any]) -> tuple[int, int]:
    """Restore what ``save`` wrote; return the steps taken and how many of them were skipped."""
    try:
        checkpoint = tensorplay.load(path, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        tensorplay.set_rng_state(checkpoint["rng"])
        return int(checkpoint["step"]), int(checkpoint["skipped"])
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        sys.exit(f"cannot read the checkpoint {path}: {error}")
    except Exception as error:  # a damaged file may fail anywhere
        sys.exit(f"{path} is damaged, or not a checkpoint of this script: {error!r}")


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
    if arguments.checkpoint and arguments.checkpoint.suffix != ".pt":
        parser.error("--checkpoint: TensorPlay needs a name that ends in .pt")
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
    tensorplay.set_num_threads(1)  # the matrices are too small for more
    main()
