"""Train on handwritten digits in fp16, the optimizer's state sharded over two processes by fleet.

    python examples/paddle_fleet.py

Each process trains on its half of a batch, so gradients may overflow in one process only. Then all
processes skip the step, because with ``fleet.distributed_scaler`` they decide together. The script
needs only a CPU.

Paddle cannot compute in fp16 on the CPU, so the layers below round numbers to fp16 and compute in
float32. The backward pass rounds the gradients too, and most are too small for fp16: with
--no-scaling the network learns nothing at all.
"""

from __future__ import annotations

import argparse
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn
from sklearn.datasets import load_digits
from sklearn.utils import shuffle

from gradscaler.paddle import GradScaler

fleet: Any = dist.fleet  # parts of it have no types

PROCESSES = 2
BATCH = 250  # of each process
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
    """Start the processes, and wait for them."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits in two processes.")
    parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument(
        "--no-scaling", dest="scaling", action="store_false", help="do not scale the loss"
    )
    arguments = parser.parse_args(argv)
    dist.spawn(train, (arguments.steps, arguments.scaling), nprocs=PROCESSES)


def train(steps: int, scaling: bool) -> None:
    """Train in one of the processes; the first one prints."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "sharding_degree": PROCESSES}
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    rank = dist.get_rank()
    paddle.seed(rank)  # decides which images this process sees; fleet copies weights from the first

    pixels, digits = shuffle(*load_digits(return_X_y=True), random_state=0)
    images = paddle.to_tensor(pixels / 16, dtype="float32")
    labels = paddle.to_tensor(digits)
    targets = nn.functional.one_hot(labels, 10)

    weights = nn.initializer.Uniform(-(WIDTH**-0.5), WIDTH**-0.5)
    layers: list[nn.Layer] = []
    for _ in range(HIDDEN_LAYERS):
        layers += [HalfLinear(WIDTH, WIDTH, weights), nn.Sigmoid()]  # an image has 64 pixels, too
    network = nn.Sequential(*layers, HalfLinear(WIDTH, 10, weights))

    optimizer = paddle.optimizer.AdamW(0.01, parameters=network.parameters())
    model = fleet.distributed_model(network)
    optimizer = fleet.distributed_optimizer(optimizer)
    scaler = GradScaler(scaling, incr_every_n_steps=20)  # a short run: grow it soon
    scaler = fleet.distributed_scaler(scaler)

    here, skipped = 0, 0
    if rank == 0:
        print("  step    loss  accuracy     scale  skipped  overflowed here")
    for step in range(1, steps + 1):
        batch = paddle.randint(0, TRAINING_IMAGES, [BATCH])
        guesses = nn.functional.softmax(model(images[batch]))
        loss = nn.functional.mse_loss(guesses, targets[batch])

        optimizer.clear_grad()
        scaler.scale(loss).backward()
        here += not all(map(is_finite, network.parameters()))
        scaler.step(optimizer)
        scaler.update()
        skipped += not scaler.last_step(optimizer).applied

        if rank == 0 and (step % 50 == 0 or step == steps):
            right = accuracy(network, images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:])
            scale = scaler.scale(paddle.ones([])).item()
            print(f"{step:6} {loss.item():7.4f} {right:9.1%} {scale:9.0f} {skipped:8} {here:16}")


def is_finite(parameter: Any) -> bool:
    """Whether each element of its gradient is."""
    return bool(paddle.isfinite(parameter.grad).all())


def accuracy(model: Any, images: Any, labels: Any) -> float:
    """The share of images that the model gets right."""
    with paddle.no_grad():
        return float((model(images).argmax(1) == labels).astype("float32").mean())


if __name__ == "__main__":
    main()
