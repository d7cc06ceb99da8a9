"""Train on handwritten digits in fp16; stop, and resume as if nothing had happened.

    python examples/torch_digits.py --steps 500 --checkpoint half.pt
    python examples/torch_digits.py --steps 1000 --resume half.pt

These two end with the same bits as one run of 1000 steps. The network is deep and its units are
sigmoids, so most gradients are too small for fp16: without a scaler it learns nothing at all.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from torch import nn

from gradscaler.torch import GradScaler

BATCH = 256
WIDTH = 64
HIDDEN_LAYERS = 6
TRAINING_IMAGES = 1500  # of 1797


def main(argv: list[str] | None = None) -> None:
    """Train up to a number of steps, from the start or from a checkpoint."""
    arguments = parse(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # decides the first weights, and which images each step sees

    pixels, digits = shuffle(*load_digits(return_X_y=True), random_state=0)
    images = torch.tensor(pixels / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits, device=device)

    layers: list[nn.Module] = []
    for _ in range(HIDDEN_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Sigmoid()]  # an image has 64 pixels, too
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(device)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9995)
    scaler = GradScaler(growth_interval=100)  # a short run: try a higher scale soon
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    step, skipped = load(arguments.resume, parts) if arguments.resume else (0, 0)

    print("  step    loss  accuracy     scale  skipped")
    while step < arguments.steps:
        batch = torch.randint(TRAINING_IMAGES, (BATCH,)).to(device)
        with torch.autocast(device, dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])

        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.last_step(optimizer).applied:
            scheduler.step()
        else:
            skipped += 1

        step += 1
        if step % 50 == 0 or step == arguments.steps:
            right = accuracy(model, images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:])
            print(f"{step:6} {loss:7.3f} {right:9.1%} {scaler.get_scale():9.0f} {skipped:8}")

    if arguments.checkpoint:
        save(arguments.checkpoint, parts, step, skipped)


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of images that the model, in fp16, gets right."""
    with torch.no_grad(), torch.autocast(images.device.type, dtype=torch.float16):
        return float((model(images).argmax(1) == labels).float().mean())


def save(path: Path, parts: dict[str, Any], step: int, skipped: int) -> None:
    """Write all that the next step depends on, the random numbers to come included."""
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**states, "rng": torch.get_rng_state(), "step": step, "skipped": skipped}, path)


def load(path: Path, parts: dict[str, Any]) -> tuple[int, int]:
    """Put back what ``save`` wrote; the steps taken, and how many of them were skipped."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        torch.set_rng_state(checkpoint["rng"])
        return int(checkpoint["step"]), int(checkpoint["skipped"])
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        sys.exit(f"cannot read the checkpoint {path}: {error.strerror}")
    except Exception as error:  # a damaged file may fail anywhere on the way
        sys.exit(f"{path} is damaged, or no checkpoint of this script: {type(error).__name__}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits in fp16.")
    parser.add_argument(
        "--steps", type=int, default=1000, help="train up to this step (%(default)s)"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="save here at the end")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on from this checkpoint")
    arguments = parser.parse_args(argv)
    if arguments.checkpoint and not arguments.checkpoint.absolute().parent.is_dir():
        parser.error(f"--checkpoint: there is no folder {arguments.checkpoint.parent}")
    return arguments


if __name__ == "__main__":
    main()
