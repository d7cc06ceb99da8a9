"""Draw the pictures of docs/loss_scaling.md, from a real backward pass and from the rule itself.

make pictures     # these, and those of the report and the demo
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gradscaler import DynamicScale
from gradscaler.diagnose import exponents
from gradscaler.diagnose.report._picture import png_of
from gradscaler.policies import ScaleState

HERE = Path(__file__).parent
# Okabe and Ito's palette, which colour-blind readers can tell apart.
RED, YELLOW, BLUE = "#D55E00", "#E69F00", "#0072B2"
SMALLEST, SMALLEST_NORMAL, LARGEST = -24, -14, 16  # log2 of fp16's limits
SCALE = 2.0**16
LAYERS = 8


def gradients() -> np.ndarray:
    """All weight gradients of eight sigmoid layers of 64 units, in float64.

    The loss is the mean of the squared outputs, for 256 inputs from a normal distribution. Weights
    are uniform, as PyTorch draws them.
    """
    random = np.random.default_rng(0)
    weights = [random.uniform(-0.125, 0.125, (64, 64)) for _ in range(LAYERS)]
    layers = [random.normal(size=(256, 64))]
    for weight in weights:
        layers.append(1 / (1 + np.exp(-layers[-1] @ weight)))
    signal = 2 * layers[-1] / layers[-1].size
    found = []
    for weight, below, above in zip(
        weights[::-1], layers[-2::-1], layers[:0:-1], strict=True
    ):
        signal = signal * above * (1 - above)
        found.append(below.T @ signal)
        signal = signal @ weight.T
    return np.concatenate([each.ravel() for each in found])


def training(steps: int = 300) -> tuple[list[float], list[float], list[int]]:
    """The scale of each step, the largest scale that fits it, and the steps that are skipped.

    The largest gradient drifts, as it does in a training. A step overflows if its scale is above
    the largest scale that fits.
    """
    random = np.random.default_rng(1)
    drift = np.cumsum(random.normal(0, 0.12, steps)) + random.normal(
        0, 0.15, steps
    )
    fits = 2.0 ** (13.4 + drift - drift.mean())
    policy = DynamicScale(init_scale=2.0**16, growth_interval=20)
    state: ScaleState = policy.init()
    scales, skipped = [], []
    for step in range(steps):
        scales.append(float(state.scale))
        found_inf = scales[-1] > fits[step]
        if found_inf:
            skipped.append(step)
        state = policy.update(state, found_inf)
    return scales, fits.tolist(), skipped


def draw_range(axes: Axes, values: np.ndarray, scale: float) -> None:
    """Draw the exponents of gradients times a scale, and where fp16 ends."""
    logs = np.log2(np.abs(values[values != 0]) * scale)
    bins = np.arange(-40, 20)
    for low, high, colour, label in (
        (-99, SMALLEST - 1, RED, "flushed to zero"),
        (SMALLEST - 1, SMALLEST_NORMAL, YELLOW, "subnormal: loses bits"),
        (SMALLEST_NORMAL, LARGEST, BLUE, "represented in full"),
    ):
        part = logs[(logs >= low) & (logs < high)]
        axes.hist(part, bins=bins.tolist(), color=colour, label=label)
    axes.axvspan(LARGEST, 19, color="#999999", alpha=0.3)
    axes.text(
        LARGEST - 0.4,
        axes.get_ylim()[1] * 0.9,
        "overflow ",
        ha="right",
        fontsize=8,
    )
    axes.set_xlim(-40, 19)
    axes.set_xlabel("exponent of the gradient, log2")
    axes.set_yticks([])
    name = "no scale" if scale == 1 else f"scale $2^{{{int(np.log2(scale))}}}$"
    flushed, subnormal = shares(values, scale)
    axes.set_title(
        f"{name}: {flushed:.0%} flushed, {subnormal:.0%} subnormal", fontsize=10
    )


def shares(values: np.ndarray, scale: float) -> tuple[float, float]:
    """The share of scaled gradients that fp16 flushes to zero, and the share that loses bits."""
    counted = exponents(
        {"all": values.astype(np.float32)}, dtype="float16", scale=scale
    )
    return counted.total.flushed, counted.total.subnormal


def figures() -> dict[str, Figure]:
    """Both figures, by the names of their files."""
    values = gradients()
    figure = Figure(figsize=(10, 3.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, scale in zip(
        figure.subplots(1, 2, sharey=True), (1.0, SCALE), strict=True
    ):
        draw_range(axes, values, scale)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.axes[0].legend(
        frameon=False,
        fontsize=8,
        loc="center right",
        bbox_to_anchor=(0.94, 0.5),
    )
    drawn = {"range.png": figure}

    scales, fits, skipped = training()
    figure = Figure(figsize=(10, 3.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(
        fits,
        color="#999999",
        linewidth=1,
        label="largest scale that fits the step",
    )
    axes.step(
        range(len(scales)), scales, color=BLUE, where="post", label="loss scale"
    )
    axes.plot(
        skipped,
        [scales[i] for i in skipped],
        "x",
        color=RED,
        label="skipped step",
    )
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return {**drawn, "scale.png": figure}


def main(folder: Path = HERE / "pictures") -> None:
    """Draw both pictures into a folder."""
    for name, figure in figures().items():
        (folder / name).write_bytes(png_of(figure))


if __name__ == "__main__":
    main()
