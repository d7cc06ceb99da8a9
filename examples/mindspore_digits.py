"""Train on handwritten digits in fp16 with MindSpore, on any of its devices; stop, and resume.

    python examples/mindspore_digits.py --checkpoint run.ckpt --resume

The script saves every 10 epochs. If you kill it, even while it saves, the same command resumes from
the last save. One run can also resume from the file of another:

    python examples/mindspore_digits.py --epochs 50 --checkpoint half.ckpt
    python examples/mindspore_digits.py --epochs 100 --resume half.ckpt

Either way, training ends with the same bits as if it had never stopped.

The loss is a mean of squares and the units are sigmoids, so most gradients are too small for fp16:
with ``--scale 1`` the network learns nothing at all. ``mindspore.Model`` trains the cell that
``build_train_network`` returns, also on the CPU. ``--loop`` uses no ``Model``, but compiles a step
that unscales and checks the gradients itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, amp, nn
from mindspore.dataset import NumpySlicesDataset
from sklearn.datasets import load_digits
from sklearn.utils import shuffle

from gradscaler.mindspore import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    FixedLossScaleManager,
    StaticLossScaler,
    all_finite,
    build_train_network,
)

BATCH = 500
WIDTH = 64
HIDDEN_LAYERS = 4
TRAINING_IMAGES = 1500  # of 1797
SCALE = 2.0**24, 2, 50  # scale, factor, window: the run is short, so the scale should grow soon

Outputs = list[tuple[float, float]]
"""The loss and the loss scale of each step."""


def main(argv: list[str] | None = None) -> None:
    """Train up to a number of epochs, from the start or from a checkpoint."""
    arguments = parse(argv)
    mindspore.set_seed(0)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    pixels, digits = shuffle(*load_digits(return_X_y=True), random_state=0)
    images = (pixels / 16).astype(np.float32)
    targets = np.eye(10, dtype=np.float32)[digits]
    training = images[:TRAINING_IMAGES], targets[:TRAINING_IMAGES]
    data = NumpySlicesDataset(training, ["image", "target"], shuffle=False).batch(BATCH)

    layers: list[Any] = []
    for _ in range(HIDDEN_LAYERS):
        layers += [nn.Dense(WIDTH, WIDTH), nn.Sigmoid()]  # an image has 64 pixels, too
    network = nn.SequentialCell(*layers, nn.Dense(WIDTH, 10), nn.Softmax())
    optimizer = nn.Adam(network.trainable_params(), learning_rate=0.01)
    train = with_loop if arguments.loop else with_model
    epoch_of, parameters = train(network, optimizer, arguments.scale)
    epoch = load(arguments.resume, parameters) if arguments.resume else 0

    print(" epoch    loss  accuracy     scale  steps")
    while epoch < arguments.epochs:
        losses, scales = zip(*epoch_of(data), strict=True)
        epoch += 1
        last = epoch == arguments.epochs
        if epoch % 10 == 0 or last:
            guesses = network(Tensor(images[TRAINING_IMAGES:])).asnumpy().argmax(1)
            right = (guesses == digits[TRAINING_IMAGES:]).mean()
            steps = int(optimizer.global_step.asnumpy()[0])  # without skipped steps
            loss = np.mean(losses)
            print(f"{epoch:6} {loss:7.4f} {right:9.1%} {scales[-1]:9.0f} {steps:6}")
        if arguments.checkpoint and (epoch % arguments.save_every == 0 or last):
            save(arguments.checkpoint, parameters, epoch)


class Record(mindspore.train.Callback):  # type: ignore[misc] # untyped base
    """Keeps what each step of ``Model.train`` returned."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: Outputs = []

    def on_train_step_end(self, run_context: Any) -> None:
        """Called after each step."""
        loss, _, scale = run_context.original_args().net_outputs
        self.outputs.append((float(loss), float(scale)))


def with_model(
    network: Any, optimizer: Any, scale: float | None
) -> tuple[Callable[[Any], Outputs], list[Any]]:
    """Train with ``mindspore.Model``: return one epoch, and what a checkpoint keeps."""
    manager = DynamicLossScaleManager(*SCALE) if scale is None else FixedLossScaleManager(scale)
    step = build_train_network(
        network, optimizer, nn.MSELoss(), level="O2", loss_scale_manager=manager
    )
    model = mindspore.Model(step)

    def epoch(data: Any) -> Outputs:
        record = Record()
        model.train(1, data, callbacks=record, dataset_sink_mode=False)
        return record.outputs

    # A fixed scale comes from the command line, not from the checkpoint.
    kept = step if scale is None else optimizer
    return epoch, list(kept.get_parameters())


def with_loop(
    network: Any, optimizer: Any, scale: float | None
) -> tuple[Callable[[Any], Outputs], list[Any]]:
    """Train with a loop: return the same two."""
    scaler = DynamicLossScaler(*SCALE) if scale is None else StaticLossScaler(scale)
    half, mean_square = amp.auto_mixed_precision(network, "O2"), nn.MSELoss()

    def scaled_loss(images: Any, targets: Any) -> Any:
        return scaler.scale(mean_square(half(images), targets))

    loss_and_gradients = mindspore.value_and_grad(scaled_loss, None, optimizer.parameters)

    @mindspore.jit  # type: ignore[untyped-decorator]
    def step(images: Any, targets: Any) -> Any:
        loss, gradients = loss_and_gradients(images, targets)
        loss, gradients = scaler.unscale((loss, gradients))
        finite = all_finite(gradients)
        if finite:
            optimizer(gradients)
        scaler.adjust(finite)
        return loss

    def epoch(data: Any) -> Outputs:
        outputs = []
        for images, targets in data.create_tuple_iterator():
            loss = step(images, targets)
            outputs.append((float(loss), float(scaler.scale_value)))
        return outputs

    state = [scaler.scale_value, scaler.counter] if scale is None else []
    return epoch, [*optimizer.get_parameters(), *state]


def save(path: Path, parameters: list[Any], epoch: int) -> None:
    """Write the parameters, and the number of epochs they were trained for.

    The new file replaces the old one only once it is complete, so a kill leaves one of them whole.
    """
    saved = [{"name": parameter.name, "data": parameter} for parameter in parameters]
    temporary = path.with_stem(f"{path.stem}.tmp")
    mindspore.save_checkpoint(saved, str(temporary), append_dict={"epoch": epoch})
    with temporary.open("rb") as file:  # MindSpore's files are read-only
        os.fsync(file.fileno())
    temporary.replace(path)


def load(path: Path, parameters: list[Any]) -> int:
    """Restore the parameters that ``save`` wrote, and return their number of epochs."""
    try:
        values = mindspore.load_checkpoint(str(path))
        for parameter in parameters:
            parameter.set_data(values[parameter.name])
        return int(values["epoch"])
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        sys.exit(f"{path} is missing, damaged, or not a checkpoint of such a run: {error!r}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits in fp16.")
    parser.add_argument(
        "--epochs", type=int, default=100, help="train up to this epoch (%(default)s)"
    )
    parser.add_argument("--scale", type=float, help="use this fixed loss scale")
    parser.add_argument("--loop", action="store_true", help="train with a loop, not Model.train")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="save the run here, in a .ckpt file"
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
    if arguments.checkpoint and arguments.checkpoint.suffix != ".ckpt":
        parser.error("--checkpoint: the name of a checkpoint ends in .ckpt")
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
