"""Every known rule on the same four recorded trainings, and two of the rules in real trainings.

    python benchmarks/policies.py

It trains four small networks in fp16 on the CPU with data of scikit-learn, and records at each step
the true gradients: those of the same batch and weights in fp32. Each rule is then replayed on these
traces by :mod:`gradscaler.diagnose.simulate`. Last, it trains an MLP with 5 % NaN batches to the
end, with torch's rule and with AmaxScale. It writes ``policies.json`` and ``policies.png`` here,
and prints the tables of ``docs/policies.md``. It needs PyTorch, scikit-learn and Matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from sklearn.datasets import load_digits, load_sample_images
from torch import nn

from gradscaler import AmaxScale, DynamicScale, FixedScale, Policy
from gradscaler.diagnose.report._words import power
from gradscaler.diagnose.simulate import Replay, Trace, replay
from gradscaler.diagnose.simulate._command import HEADINGS, rows_of
from gradscaler.torch import GradScaler

HERE = Path(__file__).parent
FIRST, BINS = -150, 180  # exponents of float32
SPIKE = slice(2500, 2530)
TRAINED = 1200  # digits; the others are for the test


# Rules that are no DynamicScale, each as its source describes it.


class Counted(NamedTuple):
    """A state: the scale, then the rule's counters."""

    scale: Any
    finite_steps: int
    nonfinite_steps: int
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Fairseq:
    """fairseq's ``DynamicLossScaler``: back off if ``tolerance`` of the steps overflowed.

    The share is of the steps since the scale last moved. The values are those of its first
    releases; today the tolerance is 0 unless a user sets it, which is torch's rule.
    """

    tolerance: float = 0.05
    window: int = 2000

    def init(self) -> Any:
        """128 is the first scale (--fp16-init-scale)."""
        return Counted(np.float32(128), 0, 0, (0.0,))  # values: steps since the last rescale

    def update(self, state: Any, found_inf: Any, where: Any = None) -> Any:
        """``finite_steps`` is since the last overflow; ``nonfinite_steps`` since a rescale."""
        scale, finite, bad, (steps,) = state
        steps += 1
        if found_inf:
            bad += 1
            if bad / steps >= self.tolerance:
                return Counted(scale / 2, 0, 0, (0.0,))
            return Counted(scale, 0, bad, (steps,))
        if finite + 1 == self.window:
            return Counted(scale * 2, 0, bad, (0.0,))
        return Counted(scale, finite + 1, bad, (steps,))


@dataclass(frozen=True)
class LogMax:
    """OpenSeq2Seq's ``LogMaxScaler``: a scale at which all but 0.1 % of the steps fit.

    It keeps a running mean (rate 0.99) and deviation (rate 0.999) of ``log2(amax)``, and the scale
    is ``2**(16 - mean - 3.09 * deviation)``, from 1 to 2**24. A non-finite step counts as 2**16 in
    place of the logarithm.
    """

    amax_interval: int = 1

    def init(self) -> Any:
        """1 is the first scale."""
        return Counted(np.float32(1), 0, 0, (0.0, 0.0, 0.0))

    def update(self, state: Any, found_inf: Any, where: Any = None, amax: Any = None) -> Any:
        """``finite_steps`` counts all steps, as the correction of the means needs."""
        steps = state.finite_steps + 1
        size = 2.0**16 if found_inf else math.log2(max(amax, 2.0**-126))
        terms = ((0.99, size), (0.999, size), (0.999, size * size))
        values = tuple(
            rate * value + (1 - rate) * term
            for value, (rate, term) in zip(state.values, terms, strict=True)
        )
        mean, slow_mean, slow_square = (
            value / (1 - rate**steps) for value, (rate, _) in zip(values, terms, strict=True)
        )
        deviation = math.sqrt(max(slow_square - slow_mean**2, 0.0))
        exponent = min(max(16 - mean - 3.09 * deviation, 0.0), 24.0)
        return Counted(np.float32(2.0**exponent), steps, 0, values)


@dataclass(frozen=True)
class Graphcore:
    """PopART's automatic loss scaling: halve or double in each step, by a histogram of gradients.

    If more than 1e-7 of the scaled gradients pass a sixteenth of the largest float16, the scale
    halves, else it doubles. With fewer than ten million gradients, one is enough, so the largest
    decides. These are its defaults.
    """

    amax_interval: int = 1

    def init(self) -> Any:
        """1 is the first scale."""
        return Counted(np.float32(1), 0, 0)

    def update(self, state: Any, found_inf: Any, where: Any = None, amax: Any = None) -> Any:
        """An overflow passes the threshold; its step is taken with clipped gradients there."""
        passes = found_inf or float(state.scale) * amax > 65504 / 16
        moved = state.scale / 2 if passes else state.scale * 2
        return Counted(np.clip(moved, np.float32(2.0**-126), np.float32(2.0**126)), 0, 0)


RULES: dict[str, Any] = {
    "torch": DynamicScale.torch(),
    "Paddle": DynamicScale.paddle(),
    "Keras 3": DynamicScale.keras(),
    "Keras 2": DynamicScale.tf_keras(),
    "MindSpore": DynamicScale.mindspore(),
    "Megatron": DynamicScale.megatron(),
    "DeepSpeed": DynamicScale.deepspeed(),
    "fairseq": Fairseq(),
    "icefall": DynamicScale(growth_tiers=((1.0, 100), (8.0, 400))),
    "LogMax": LogMax(),
    "Graphcore": Graphcore(),
    "AmaxScale": AmaxScale(),
}
DRAWN = {  # the line and the colour of each, which are Okabe and Ito's
    "torch": ("-", "#0072B2"),
    "Megatron": ("--", "#E69F00"),
    "fairseq": ("-.", "#009E73"),
    "LogMax": (":", "#000000"),
    "AmaxScale": ("-", "#D55E00"),
}


# Trainings.


class Training(NamedTuple):
    """A network, its batches, and its difficulty for a loss scale."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    factor: Callable[[int], float] = lambda _: 1.0  # of the learning rate, by step


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 digits of 64 pixels from 0 to 1, and their classes."""
    images, classes = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(classes)


def drawn(
    inputs: torch.Tensor, targets: torch.Tensor, size: int, seed: int, nan: float = 0.0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random batches without end; a share of them holds one NaN."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(inputs), (size,), generator=generator)
        batch = inputs[chosen].clone()
        if torch.rand((), generator=generator) < nan:
            batch.view(-1)[0] = math.nan
        yield batch, targets[chosen]


def mlp(width: int = 64) -> nn.Module:
    """Two hidden layers for the digits."""
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def nan_batches(seed: int) -> Training:
    """Digits, an MLP, SGD; 5 % of the batches hold a NaN."""
    torch.manual_seed(seed)
    network = mlp()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    batches = drawn(*digits(), 32, seed, nan=0.05)
    return Training(network, optimizer, batches, nn.functional.cross_entropy)


def autoencoder(seed: int) -> Training:
    """Patches of photographs, eight sigmoid layers, Adam: gradients over a wide range."""
    torch.manual_seed(seed)
    image = load_sample_images().images[0][: 4 * 106, : 4 * 160] / 255
    patches = image.reshape(106, 4, 160, 4, 3).swapaxes(1, 2).reshape(-1, 48)
    widths = (48, 128, 64, 32, 16, 32, 64, 128, 48)
    layers: list[nn.Module] = []
    for i in range(8):
        layers += [nn.Linear(widths[i], widths[i + 1]), nn.Sigmoid()]
    network = nn.Sequential(*layers)
    inputs = torch.tensor(patches, dtype=torch.float32)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    batches = drawn(inputs, inputs, 64, seed)
    return Training(network, optimizer, batches, nn.functional.mse_loss)


class Rows(nn.Module):
    """A transformer over the eight rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classify = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of the classes."""
        rows = self.encode(self.embed(images.reshape(-1, 8, 8)))
        return self.classify(rows.mean(dim=1))  # type: ignore[no-any-return]


def transformer(seed: int) -> Training:
    """Digits row by row, a transformer, AdamW: the gradients shrink as it learns them by heart."""
    torch.manual_seed(seed)
    network = Rows()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    batches = drawn(*digits(), 32, seed)
    return Training(network, optimizer, batches, nn.functional.cross_entropy)


def spike(seed: int) -> Training:
    """Digits, an MLP, SGD, and 10 times the learning rate for 30 steps."""
    training = nan_batches(seed)
    batches = drawn(*digits(), 32, seed)
    return training._replace(
        batches=batches, factor=lambda step: 10.0 if 400 <= step < 430 else 1.0
    )


TRAININGS = {
    "NaN batches": nan_batches,
    "autoencoder": autoencoder,
    "transformer": transformer,
    "spike": spike,
}


def record(training: Training, steps: int) -> Trace:
    """Train in fp16, and record the gradients of the same batches and weights in fp32.

    The training has a fixed scale, so that it favours no rule. The recorded largest magnitude of
    the backward pass includes the gradients of each module's output.
    """
    network, optimizer = training.network, training.optimizer
    outputs: list[float] = []

    def watch(_module: nn.Module, _inputs: Any, output: Any) -> None:
        output.register_hook(lambda gradient: outputs.append(float(gradient.abs().max())))

    for module in network.modules():
        if not list(module.children()):
            module.register_forward_hook(watch)
    scaler = GradScaler("cpu", policy=FixedScale(2.0**10))
    rates = [group["lr"] for group in optimizer.param_groups]
    largest, extreme, counts = np.zeros(steps), np.zeros(steps), np.zeros((steps, BINS))
    for step in range(steps):
        batch, target = next(training.batches)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * training.factor(step)
        outputs.clear()
        optimizer.zero_grad()
        training.loss(network(batch), target).backward()
        gradients = [p.grad.flatten() for p in network.parameters() if p.grad is not None]
        sizes = torch.cat(gradients).abs().double().numpy()
        nonzero = sizes[np.isfinite(sizes) & (sizes > 0)]
        largest[step] = nonzero.max(initial=0.0)
        extreme[step] = max(sizes.max(), *outputs) if np.isfinite(sizes).all() else math.inf
        bins = np.frexp(nonzero)[1] - 1 - FIRST
        counts[step] = np.bincount(np.clip(bins, 0, BINS - 1), minlength=BINS)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = network(batch)
        scaler.scale(training.loss(output.float(), target)).backward()
        scaler.step(optimizer)
        scaler.update()
    return Trace(largest, extreme, FIRST, counts)


def accuracy(policy: Policy, seed: int, steps: int) -> tuple[float, float]:
    """Train the MLP with 5 % NaN batches, and return its test accuracy and the last scale.

    The loop is written out here, and acts like any scaler.
    """
    torch.manual_seed(seed)
    images, classes = digits()
    network = mlp()
    parameters = list(network.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    batches = drawn(images[:TRAINED], classes[:TRAINED], 32, seed, nan=0.05)
    state: Any = policy.init()
    looks = hasattr(policy, "amax_interval")
    for _ in range(steps):
        batch, target = next(batches)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = network(batch)
        (nn.functional.cross_entropy(output.float(), target) * float(state.scale)).backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_div_(gradients, float(state.scale))
        amax = float(torch.stack([gradient.abs().max() for gradient in gradients]).max())
        found_inf = not math.isfinite(amax)
        if not found_inf:
            optimizer.step()
        told: dict[str, Any] = {"amax": amax} if looks else {}
        state = policy.update(state, found_inf, **told)
    with torch.no_grad():
        correct = network(images[TRAINED:]).argmax(dim=1) == classes[TRAINED:]
    return float(correct.float().mean()), float(state.scale)


HEADINGS_OF_RANDOM = (
    "trace",
    *(f"{rule}: {what}" for rule in ("torch", "AmaxScale") for what in ("skips", "back", "at")),
)


def random_rows(runs: int = 200) -> Iterator[tuple[str, ...]]:
    """Table rows about random traces, from seed 0, with torch's rule and then with AmaxScale.

    Each trace has a typical largest gradient between 2**-14 and 2**2, and lognormal noise.
    """
    generator = np.random.default_rng(0)

    def noise(steps: int, sigma: float) -> Any:
        typical = 2.0 ** generator.uniform(-14, 2, runs)
        return typical * np.exp(sigma * generator.standard_normal((steps, runs)))

    def moved(sizes: Any, within: float = 1.0, spiked: bool = False) -> tuple[str, ...]:
        """Under each rule: skips that a lower scale would avoid, recovery, and the last scale."""
        cells: list[str] = []
        for rule in ("torch", "AmaxScale"):
            policy: Any = RULES[rule]
            leaves = (np.full(runs, leaf, np.asarray(leaf).dtype) for leaf in policy.init())
            state = type(policy.init())(*leaves)
            scales, skips = [], 0
            for size in sizes:
                scales.append(state.scale)
                found_inf = ~(size * within * state.scale.astype(float) < 65520)
                skips += (found_inf & np.isfinite(size)).sum()
                looks = hasattr(policy, "amax_interval")
                told = {"amax": np.where(found_inf, 0, size)} if looks else {}
                state = policy.update(state, found_inf, np.where, **told)
            after = np.array(scales[SPIKE.stop :]) >= scales[SPIKE.start - 1]
            steps = np.where(after.any(axis=0), after.argmax(axis=0), np.inf)
            quantiles = [np.quantile(steps, q, method="higher") for q in (0.5, 0.9)]
            back = [f"{count:,.0f}" if np.isfinite(count) else "never" for count in quantiles]
            typical = np.nanmedian(np.where(np.isfinite(sizes), sizes, np.nan)[-500:], axis=0)
            last = round(np.median(np.log2(scales[-1] * typical)))
            cells += [f"{skips / runs:.1f}", ", ".join(back) if spiked else "-", power(2, last)]
        return tuple(cells)

    for share in (0.05, 0.3):
        sizes = noise(4000, 0.2)
        sizes[generator.random(sizes.shape) < share] = np.inf
        yield f"{share:.0%} NaN batches", *moved(sizes)
    for exponent in (8, 12, 16):
        sizes = noise(5000, 0.2)
        sizes[SPIKE] *= 2.0**exponent
        yield f"spike of {power(2, exponent)} for 30 steps", *moved(sizes, spiked=True)
    for sigma in (0.1, 0.5, 1.0):
        yield f"no events, noise of {sigma}", *moved(noise(10_000, sigma))
    sizes = noise(10_000, 0.2)
    sizes[250::500] *= 2.0**6
    yield "gradients 2⁶ larger every 500 steps", *moved(sizes)
    drift = 2.0 ** np.interp(np.arange(10_000), [0, 5000, 10_000], [0, -20, 0])
    yield "drift by 2⁻²⁰ and back", *moved(noise(10_000, 0.1) * drift[:, None])
    yield "activations' gradients 2¹² times larger", *moved(noise(8000, 0.2), 2.0**12)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Record, replay, train, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3000, help="of each trace (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the traces (%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"seed": arguments.seed, "steps": arguments.steps}
    replays: dict[str, dict[str, Replay]] = {}
    for name, make in TRAININGS.items():
        start = time.perf_counter()
        trace = record(make(arguments.seed), arguments.steps)
        seconds = time.perf_counter() - start
        replays[name] = {rule: replay(policy, trace) for rule, policy in RULES.items()}
        rows = rows_of(replays[name])
        results[name] = {"seconds": round(seconds, 1), "rows": rows}
        bad, spikes = int(trace.is_bad.sum()), len(replays[name]["torch"].spikes)
        print(
            f"\n### {name}: {bad} bad batches, {spikes} spikes\n\n{table(HEADINGS, rows)}",
            flush=True,
        )
    rows = list(random_rows())
    results["random"] = rows
    print(f"\n### Random traces\n\n{table(HEADINGS_OF_RANDOM, rows)}", flush=True)
    trained = {
        rule: [accuracy(RULES[rule], seed, 4000) for seed in range(3)]
        for rule in ("torch", "AmaxScale")
    }
    results["accuracy"] = trained
    headings = ("rule", "seed 0", "seed 1", "seed 2")
    rows = [
        (rule, *(f"{share:.3f} (scale 2^{math.log2(scale):.0f})" for share, scale in seeds))
        for rule, seeds in trained.items()
    ]
    print(f"\n### Trained with 5 % NaN batches\n\n{table(headings, rows)}")
    (HERE / "policies.json").write_text(json.dumps(results, indent=1) + "\n")
    description = {"Description": described(results)}  # for screen readers and for a test
    picture_of(replays).savefig(HERE / "policies.png", metadata=description)


def described(results: dict[str, Any]) -> str:
    """The tables of the four trainings, which describe their picture."""
    return "\n\n".join(table(HEADINGS, results[name]["rows"]) for name in TRAININGS)


def picture_of(replays: dict[str, dict[str, Replay]]) -> Figure:
    """The scale of some rules over the steps of each training."""
    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    for axes, (name, found) in zip(figure.subplots(2, 2).flat, replays.items(), strict=True):
        for rule, (line, colour) in DRAWN.items():
            axes.plot(np.log2(found[rule].scales), line, color=colour, label=rule)
        axes.set_title(f"{name}: loss scale", loc="left", fontsize=10, fontweight="bold")
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_formatter(lambda value, _: power(2, value))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(DRAWN))
    return figure


if __name__ == "__main__":
    main()
