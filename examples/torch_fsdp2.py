"""Train on handwritten digits in fp16 with FSDP2; stop, and resume with more processes or fewer.

    torchrun --nproc-per-node 2 examples/torch_fsdp2.py --checkpoint run --resume

Each process holds a part of every parameter and takes a part of every batch. The scaler is
constructed as for one process. It finds the processes that hold the other parts, and all of them
step, or all of them skip.

The script saves every 50 steps. If you kill it, even while it saves, the same command resumes from
the last save, on any number of processes:

    torchrun --nproc-per-node 2 examples/torch_fsdp2.py --steps 150 --checkpoint run
    torchrun --nproc-per-node 3 examples/torch_fsdp2.py --steps 300 --checkpoint run --resume

The loss is a mean of squares and the units are sigmoids, so most gradients are too small for fp16:
with --no-scaling the network learns nothing at all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gradscaler.torch import GradScaler

BATCH = 500
WIDTH = 64
HIDDEN_LAYERS = 4
TRAINING_IMAGES = 1500  # of 1797
MAX_NORM = 0.01

# Parameters and gradients are fp16 in a layer, on the CPU too. Processes add gradients in fp32.
PRECISION = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)


def main(argv: list[str] | None = None) -> None:
    """Train up to a number of steps, from the start or from a checkpoint."""
    arguments = parse(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same first weights and the same batches in all processes

    pixels, digits = shuffle(*load_digits(return_X_y=True), random_state=0)
    images = torch.tensor(pixels / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits, device=device)
    targets = nn.functional.one_hot(labels, 10).float()

    hidden = [  # an image has 64 pixels, too
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()) for _ in range(HIDDEN_LAYERS)
    ]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, 10)).to(device)
    for module in [*model, model]:
        fully_shard(module, mp_policy=PRECISION)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = GradScaler() if arguments.scaling else GradScaler(enabled=False)
    step = skipped = 0
    if arguments.resume:
        step, skipped = load(arguments.resume, model, optimizer, scaler)

    if rank == 0:
        print("  step    loss  accuracy     scale  skipped")
    while step < arguments.steps:
        batch = torch.randint(TRAINING_IMAGES, (BATCH,))[rank::world].to(device)
        probabilities = model(images[batch]).float().softmax(1)
        squares = nn.functional.mse_loss(probabilities, targets[batch], reduction="sum")
        loss = squares / (BATCH * 10)  # this process' part of the mean

        optimizer.zero_grad()
        scaler.scale(loss * world).backward()  # FSDP divides the sum of gradients by world
        scaler.clip_grad_norm_(optimizer, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        skipped += not scaler.last_step(optimizer).applied

        step += 1
        last = step == arguments.steps
        if step % 50 == 0 or last:
            right = accuracy(model, images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:])
            loss = loss.detach()
            dist.all_reduce(loss)
            if rank == 0:
                print(f"{step:6} {loss:7.4f} {right:9.1%} {scaler.get_scale():9.0f} {skipped:8}")
        if arguments.checkpoint and (step % arguments.save_every == 0 or last):
            save(arguments.checkpoint, model, optimizer, scaler, step, skipped)


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of images that the model gets right; all processes compute it."""
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler
) -> dict[str, Any]:
    """All that the next step depends on; each process writes and reads its parts of parameters."""
    weights, moments = get_state_dict(model, optimizer)
    return {
        "model": weights,
        "optimizer": moments,
        "scaler": scaler.state_dict(),
        "rng": torch.get_rng_state(),
        "step": 0,
        "skipped": 0,
    }


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
    step: int,
    skipped: int,
) -> None:
    """Write a folder for this step, then remove those of other steps.

    The metadata is written last, so a kill leaves one folder whole.
    """
    state = {**state_of(model, optimizer, scaler), "step": step, "skipped": skipped}
    path = folder / f"step-{step}"
    state_dict_saver.save(state, checkpoint_id=path)
    if dist.get_rank() == 0:
        for other in set(folder.glob("step-*")) - {path}:
            shutil.rmtree(other)


def latest(folder: Path) -> Path | None:
    """The latest step whose save is complete."""
    complete = [metadata.parent for metadata in folder.glob("step-*/.metadata")]
    return max(complete, key=lambda path: int(path.name.partition("-")[2]), default=None)


def load(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler
) -> tuple[int, int]:
    """Restore the latest save; return the steps taken and how many of them were skipped."""
    path = latest(folder)
    if path is None:
        sys.exit(f"there is no checkpoint in {folder}")
    try:
        state = state_of(model, optimizer, scaler)
        state_dict_loader.load(state, checkpoint_id=path)
        weights, moments = state["model"], state["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        return int(state["step"]), int(state["skipped"])
    except (Exception, CheckpointException) as error:  # a damaged file may fail anywhere
        sys.exit(f"{path} is damaged, or not a checkpoint of this script: {type(error).__name__}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits in fp16 with FSDP2.")
    parser.add_argument(
        "--steps", type=int, default=300, help="train up to this step (%(default)s)"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save the run here")
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
        metavar="FOLDER",
        help="resume from FOLDER; without FOLDER, from --checkpoint if something was saved there",
    )
    parser.add_argument(
        "--no-scaling", dest="scaling", action="store_false", help="do not scale the loss"
    )
    arguments = parser.parse_args(argv)
    if arguments.save_every < 1:
        parser.error(f"--save-every must be at least 1, got {arguments.save_every}")
    if arguments.checkpoint and arguments.checkpoint.is_file():
        parser.error(f"--checkpoint: {arguments.checkpoint} is a file")
    if arguments.resume is True:
        if not arguments.checkpoint:
            parser.error("--resume: name a FOLDER, or a --checkpoint to resume from")
        arguments.resume = arguments.checkpoint if latest(arguments.checkpoint) else None
    return arguments


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are too small for more
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.barrier()  # a collective that gloo's threads still hold aborts the exit: pytorch#179291
    dist.destroy_process_group()
