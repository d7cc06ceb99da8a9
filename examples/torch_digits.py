"""Train on handwritten digits in fp16; stop, and resume as if nothing had happened.

    python examples/torch_digits.py --checkpoint run.pt --resume

The script saves every 50 steps. If you kill it, even while it saves, the same command resumes from
the last save. One run can also resume from the file of another:

    python examples/torch_digits.py --steps 150 --checkpoint half.pt
    python examples/torch_digits.py --steps 300 --resume half.pt

Either way, training ends with the same bits as if it had never stopped.

The loss is a mean of squares and the units are sigmoids, so most gradients are too small for fp16:
with --no-scaling the network learns nothing at all.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from torch import nn

from gradscaler.torch import GradScaler

BATCH = 500
WIDTH = 64
HIDDEN_LAYERS = 4
TRAINING_IMAGES = 1500  # of 1797


def main(argv: list[str] | None = None) -> None:
    """Train up to a number of steps, from the start or from a checkpoint."""
    arguments = parse(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # decides the first weights, and which images each step sees

    pixels, digits = shuffle(*load_digits(return_X_y=True), random_state=0)
    images = torch.tensor(pixels / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits, device=device)
    targets = nn.functional.one_hot(labels, 10).float()

    layers: list[nn.Module] = []
    for _ in range(HIDDEN_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Sigmoid()]  # an image has 64 pixels, too
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(device)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999)
    # The run is short, so the scale should grow soon.
    scaler = GradScaler(device, growth_interval=20, enabled=arguments.scaling)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    step, skipped = load(arguments.resume, parts) if arguments.resume else (0, 0)

    print("  step    loss  accuracy     scale  skipped")
    while step < arguments.steps:
        batch = torch.randint(TRAINING_IMAGES, (BATCH,)).to(device)
        with torch.autocast(device, dtype=torch.float16):
            probabilities = model(images[batch]).float().softmax(1)
            loss = nn.functional.mse_loss(probabilities, targets[batch])

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
            print(f"{step:6} {loss:7.4f} {right:9.1%} {scaler.get_scale():9.0f} {skipped:8}")
        if arguments.checkpoint and (step % arguments.save_every == 0 or last):
            save(arguments.checkpoint, parts, step, skipped)


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of images that the model, in fp16, gets right."""
    with torch.no_grad(), torch.autocast(images.device.type, dtype=torch.float16):
        return float((model(images).argmax(1) == labels).float().mean())


def save(path: Path, parts: dict[str, Any], step: int, skipped: int) -> None:
    """Write all that the next step depends on, with the state of the random numbers.

    The new file replaces the old one only once it is complete, so a kill leaves one of them whole.
    """
    states = {name: part.state_dict() for name, part in parts.items()}
    rng = torch.get_rng_state()
    temporary = path.with_stem(f"{path.stem}.tmp")
    with temporary.open("wb") as file:
        torch.save({**states, "rng": rng, "step": step, "skipped": skipped}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load(path: Path, parts: dict[str, Any]) -> tuple[int, int]:
    """Restore what ``save`` wrote; return the steps taken and how many of them were skipped."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        torch.set_rng_state(checkpoint["rng"])
        return int(checkpoint["step"]), int(checkpoint["skipped"])
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        sys.exit(f"cannot read the checkpoint {path}: {error.strerror}")
    except Exception as error:  # a damaged file may fail anywhere
        sys.exit(f"{path} is damaged, or not a checkpoint of this script: {type(error).__name__}")


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
    torch.set_num_threads(1)  # the matrices are too small for more
    main()
