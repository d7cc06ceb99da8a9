"""Test claims about fp16 training on small networks, and write ``docs/evidence.md``.

    make evidence

Each experiment trains on the CPU, with several seeds. The results of all seeds go into
``evidence.json`` here, and ``evidence_page.py`` writes the page from that file.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import evidence_page, policies
from examples import torch_half_weights, torch_rl
from gradscaler import AmaxScale, DynamicScale, FixedScale, Policy
from gradscaler.demo._training import flushed_share
from gradscaler.torch import GradScaler

RESULTS = Path(__file__).parent / "evidence.json"
PAGE = Path(__file__).parents[1] / "docs" / "evidence.md"


class Settings(NamedTuple):
    """How many seeds, and how many steps each experiment trains."""

    seeds: int = 8
    weights: int = 300
    paths: int = 150
    scaling: int = 800
    overflow: int = 800
    bad_batches: int = 2000


Rows = dict[str, dict[str, float]]
"""The results of one seed: for each row of a table, its columns."""


class Run(NamedTuple):
    """Losses, scales, and whether the step was skipped, of each step."""

    losses: list[float]
    scales: list[float]
    skips: list[bool]

    @property
    def final(self) -> float:
        """The mean loss of the last twentieth."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 20) :])


def train(
    training: policies.Training, policy: Policy | None, steps: int, divisor: float = 1.0
) -> Run:
    """Train in fp16 with a policy, or in fp32 without one; ``divisor`` divides the loss."""
    scaler = GradScaler("cpu", policy=policy or FixedScale(1.0))
    run = Run([], [], [])
    for _ in range(steps):
        batch, target = next(training.batches)
        training.optimizer.zero_grad()
        loss = loss_of(training, batch, target, half=policy is not None)
        scaler.scale(loss / divisor).backward()
        scaler.step(training.optimizer)
        scaler.update()
        outcome = scaler.last_step(training.optimizer)
        run.losses.append(loss.item())
        run.scales.append(outcome.scale)
        run.skips.append(outcome.skipped)
    return run


def loss_of(
    training: policies.Training, batch: torch.Tensor, target: torch.Tensor, half: bool
) -> torch.Tensor:
    """The loss on a batch, with the network in fp16 or in fp32."""
    with torch.autocast("cpu", torch.float16, enabled=half):
        output = training.network(batch)
    return training.loss(output.float(), target)


def flushed(training: policies.Training, divisor: float) -> float:
    """The share of the gradients of one batch that fp16 flushes to zero at scale 1."""
    batch, target = next(training.batches)
    parameters = list(training.network.parameters())

    def gradients(half: bool) -> torch.Tensor:
        loss = loss_of(training, batch, target, half) / divisor
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])

    return flushed_share(gradients(half=False), gradients(half=True))


# The experiments, each for one seed.


def weights(seed: int, settings: Settings) -> Rows:
    """16-bit weights with and without a float32 master copy."""
    results = torch_half_weights.run(seed, settings.weights)
    return {way: result._asdict() for way, result in results.items()}


def paths(seed: int, settings: Settings, dtype: str) -> Rows:
    """Two numeric paths of one policy that learns by reinforcement learning."""
    steps = list(torch_rl.train(getattr(torch, dtype), settings.paths, seed))
    means = {
        name: statistics.fmean(getattr(step, name) for step in steps)
        for name in ("difference", "kl", "reward")
    }
    return {dtype: {**means, "skipped": sum(step.skipped for step in steps)}}


NETWORKS: dict[str, tuple[Callable[[int], policies.Training], float]] = {
    "autoencoder": (policies.autoencoder, 1.0),
    "transformer": (policies.transformer, 1.0),
    "transformer, loss / 2⁷": (policies.transformer, 2.0**7),
}


def scaling(seed: int, settings: Settings, name: str) -> Rows:
    """One network in fp32, in fp16 at scale 1, and in fp16 with the default policy."""
    make, divisor = NETWORKS[name]
    rules = {"fp32": None, "scale 1": FixedScale(1.0), "gradscaler": DynamicScale.torch()}
    row = {"flushed": flushed(make(seed), divisor)}
    for column, policy in rules.items():
        row[column] = train(make(seed), policy, settings.scaling, divisor).final
    return {name: row}


def overflow(seed: int, settings: Settings) -> Rows:
    """A transformer from a scale that is far too large, and then at the edge of overflow."""
    fp32 = train(policies.transformer(seed), None, settings.overflow)
    policy = DynamicScale(init_scale=2.0**32, growth_interval=50)
    fp16 = train(policies.transformer(seed), policy, settings.overflow)
    first = fp16.skips.index(False)
    streak = longest = 0
    for skipped in fp16.skips[first:]:
        streak = streak + 1 if skipped else 0
        longest = max(longest, streak)
    return {
        "run": {
            "first": first,
            "scale": fp16.scales[first],
            "later": sum(fp16.skips[first:]),
            "longest": longest,
            "last": fp16.scales[-1],
            "fp32": fp32.final,
            "fp16": fp16.final,
        }
    }


POLICIES: dict[str, Policy] = {
    "DynamicScale.torch()": DynamicScale.torch(),
    "DynamicScale.paddle()": DynamicScale.paddle(),
    "DynamicScale.keras()": DynamicScale.keras(),
    "DynamicScale.tf_keras()": DynamicScale.tf_keras(),
    "DynamicScale.mindspore()": DynamicScale.mindspore(),
    "DynamicScale.megatron()": DynamicScale.megatron(),
    "DynamicScale.deepspeed()": DynamicScale.deepspeed(),
    "AmaxScale()": AmaxScale(),
    "FixedScale(1024.0)": FixedScale(1024.0),
}
BAD = {"1 % NaN": (0.01, math.nan), "5 % NaN": (0.05, math.nan), "20 % NaN": (0.2, math.nan)}
BAD["5 % Inf"] = (0.05, math.inf)


def digits(seed: int, rate: float, bad: float) -> policies.Training:
    """An MLP, SGD, and digits to train; a share of the batches holds one bad value."""
    torch.manual_seed(seed)
    images, classes = policies.digits()
    network = policies.mlp()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    some = images[: policies.TRAINED], classes[: policies.TRAINED]
    batches = policies.drawn(*some, 32, seed, nan=rate)
    spoilt = ((batch.nan_to_num(bad), target) for batch, target in batches)
    return policies.Training(network, optimizer, spoilt, torch.nn.functional.cross_entropy)


def bad_batches(seed: int, settings: Settings, batches: str, policy: str) -> Rows:
    """The test accuracy, and the scale, after a training with bad batches."""
    rate, bad = BAD.get(batches, (0.0, math.nan))
    training = digits(seed, rate, bad)
    run = train(training, POLICIES.get(policy), settings.bad_batches)
    images, classes = policies.digits()
    with torch.no_grad():
        correct = training.network(images).argmax(1) == classes
    share = float(correct[policies.TRAINED :].float().mean())
    return {f"{policy}, {batches}": {"accuracy": share, "scale": run.scales[-1]}}


def jobs() -> dict[Callable[..., Rows], list[tuple[str, ...]]]:
    """Each experiment, and the arguments of its parts; parts run side by side."""
    bad = [(batches, policy) for policy in POLICIES for batches in BAD]
    return {
        weights: [()],
        paths: [("bfloat16",), ("float16",)],
        scaling: [(name,) for name in NETWORKS],
        overflow: [()],
        bad_batches: [("none", "fp32"), *bad],
    }


def measure(settings: Settings, executor: Executor) -> dict[str, Any]:
    """Run all experiments: the results by experiment, row and column, in the order of seeds."""
    started = [
        (experiment.__name__, executor.submit(experiment, seed, settings, *part))
        for experiment, parts in jobs().items()
        for part in parts
        for seed in range(settings.seeds)
    ]
    results: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    for name, future in started:
        for row, columns in future.result().items():
            for column, number in columns.items():
                numbers = results.setdefault(name, {}).setdefault(row, {}).setdefault(column, [])
                numbers.append(None if math.isnan(number) else number)  # JSON has no NaN
    return {"torch": torch.__version__.partition("+")[0], **settings._asdict(), "results": results}


def main() -> None:
    """Measure, and write the results and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="(%(default)s)")
    parser.add_argument(
        "--page", action="store_true", help="write the page again from the results, train nothing"
    )
    arguments = parser.parse_args()
    if not arguments.page:
        with ProcessPoolExecutor(
            arguments.processes,
            multiprocessing.get_context("spawn"),
            torch.set_num_threads,
            (1,),  # the matrices are too small for more
        ) as executor:
            results = measure(Settings(), executor)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(evidence_page.page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
