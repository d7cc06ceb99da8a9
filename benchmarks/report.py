"""Gather the JSON of all benchmarks in ``RESULTS.md``, a chart of ratios and a chart of curves.

    python benchmarks/report.py

``make bench`` and ``make bench-gpu`` run it at the end. It needs Matplotlib.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import paired
from matplotlib.axes import Axes

HERE = Path(__file__).parent
CURVES = "torch_curves"
HEAD = """# Benchmarks

gradscaler ("ours") and each framework's own scaler ("native") take turns on the same gradients or
the same network, in one run. A ratio below 1 means that gradscaler takes less time. The table shows
the median of the paired repetitions, and the interval that holds the true median with 95 %
confidence. `make bench` makes all of it again.

"Added to fused AdamW" is the time beyond the median of its bare step. For `torch_distributed`,
"native" is FSDP's `ShardedGradScaler`. For `torch_monitor`, "native" is gradscaler without a
monitor. For an import, "native" is the framework and the module of its own scaler, and "ours" is
that and the adapter. "Clipping" is by the norm, in both.

![Median ratios, with intervals](results.png)

What scaling and clipping add to a fused step, by the number of tensors and by their bytes:

![Curves](curves.png)
"""
NOT_RUN = """
## GPU

Not run, because there was no GPU. Nothing here applies to a GPU; `make bench-gpu` measures one.
"""

Results = dict[str, tuple[dict[str, Any], list[paired.Comparison]]]


def read_results() -> Results:
    """Return the setting and the measurements of each benchmark."""
    results: Results = {}
    for path in sorted((HERE / "results").glob("*.json")):
        measured = json.loads(path.read_text())
        comparisons = [
            paired.Comparison(each["workload"], each["ours_s"], each["native_s"])
            for each in measured["results"]
        ]
        results[path.stem] = measured["setting"], comparisons
    return results


def draw_ratios(results: Results, path: Path) -> None:
    """Draw a point for each ratio, and a line for its interval."""
    rows = [
        (name, each)
        for name, (_, comparisons) in results.items()
        for each in comparisons
        if each.ratio > 0 and not each.workload.startswith("compile")
    ][::-1]
    figure, axes = plt.subplots(figsize=(9, 0.2 * len(rows) + 1.2), layout="constrained")
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in rows))}
    for place, (name, each) in enumerate(rows):
        low, high = each.interval
        axes.plot([max(low, 2**-5), high], [place, place], color=colours[name], alpha=0.5)
        axes.plot(each.ratio, place, "o", color=colours[name], markersize=4)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{name}: {each.workload}" for name, each in rows], size=7)
    axes.set_ylim(-1, len(rows))
    axes.set_xscale("log", base=2)
    axes.set_xlim(2**-5, 2**4)
    axes.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("time of gradscaler / time of the other (below 1: gradscaler is faster)")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_curves(comparisons: list[paired.Comparison], path: Path) -> None:
    """Draw time against the number of tensors, and against bytes."""
    figure, (counts, sizes) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    points = []
    for each in comparisons:
        tensors, megabytes = re.findall(r"([\d,]+) (?:tensors|MB)", each.workload)
        points.append((int(tensors.replace(",", "")), int(megabytes.replace(",", "")), each))
    _draw_curve(counts, [(t, each) for t, mb, each in points if mb == 64], "tensors, 64 MB in all")
    _draw_curve(
        sizes, [(mb, each) for t, mb, each in points if t == 100 and mb != 64], "MB, in 100 tensors"
    )
    counts.set_ylabel("added time, ms")
    counts.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_curve(axes: Axes, points: list[tuple[int, paired.Comparison]], label: str) -> None:
    for name, colour in (("ours", "#0072B2"), ("native", "#555555")):
        medians = [1e3 * statistics.median(getattr(each, name)) for _, each in points]
        shown = [median if median > 0 else math.nan for median in medians]
        axes.loglog([x for x, _ in points], shown, "o-", color=colour, label=name)
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)


def imports(results: Results) -> str:
    """Return a table of what the adapters add to the import of their frameworks."""
    lines = ["## Beyond the framework's own import", ""]
    lines += ["| adapter | median difference, ms | 95 % interval |", "| --- | ---: | ---: |"]
    for _, comparisons in results.values():
        for each in comparisons:
            framework, _, what = each.workload.partition(": ")
            if what == "import":
                pairs = zip(each.ours, each.native, strict=True)
                added = [1e3 * (ours - native) for ours, native in pairs]
                low, high = paired.median_interval(added)
                median = statistics.median(added)
                lines.append(f"| {framework} | {median:.0f} | {low:.0f} to {high:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table and the charts."""
    mpl.use("Agg")
    results = read_results()
    draw_ratios(results, HERE / "results.png")
    if CURVES in results:
        draw_curves(results[CURVES][1], HERE / "curves.png")
    rows = [
        dataclasses.replace(each, workload=f"{name}: {each.workload}")
        for name, (_, comparisons) in results.items()
        for each in comparisons
    ]
    text = f"{HEAD}\n{paired.table(rows)}\n\n{imports(results)}\n"
    text += (HERE / "profile.md").read_text()
    if "torch_gpu" not in results:
        text += NOT_RUN
    text += "\n## Made with\n\n"
    for name, (setting, _) in results.items():
        text += f"- {name}: {', '.join(f'{key} {value}' for key, value in setting.items())}\n"
    (HERE / "RESULTS.md").write_text(text)


if __name__ == "__main__":
    main()
