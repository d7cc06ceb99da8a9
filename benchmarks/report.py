"""Gathers the JSON of all benchmarks into ``RESULTS.md`` and a chart of the ratios.

    python benchmarks/report.py

``make bench`` runs it at the end. Needs Matplotlib.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import paired

HERE = Path(__file__).parent
GPU = HERE / "results" / "torch_gpu.json"
HEAD = """# Benchmarks

gradscaler beside each framework's own scaler: the same gradients or the same network, by turns, in
one run. A ratio below 1 means that gradscaler takes less time. Median of the paired repetitions,
and the interval that holds the true median with 95 % confidence. `make bench` makes all of it anew.

"Added to fused AdamW" is the time beyond a bare step of the optimizer, ours to theirs.

![Median ratios, with intervals](results.png)
"""
NOT_RUN = """
## GPU

Not run: there was no GPU at hand. Nothing here says anything about one.
"""


def comparisons(results: list[dict[str, Any]]) -> list[paired.Comparison]:
    """Those in a file."""
    return [paired.Comparison(r["workload"], r["ours_s"], r["native_s"]) for r in results]


def sections() -> Iterator[tuple[str, dict[str, Any], list[paired.Comparison]]]:
    """What each benchmark measured: its name, what it was made with, and the comparisons."""
    for path in sorted((HERE / "results").glob("*.json")):
        measured = json.loads(path.read_text())
        yield path.stem, measured["setting"], comparisons(measured["results"])


def chart(path: Path) -> None:
    """A point for each ratio, and a line for its interval."""
    rows = [(name, each) for name, _, measured in sections() for each in measured]
    rows = [(name, each) for name, each in rows if not each.workload.startswith("compile")]
    rows.reverse()
    figure, axes = plt.subplots(figsize=(9, 0.24 * len(rows) + 1.2), layout="constrained")
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in rows))}
    for place, (name, each) in enumerate(rows):
        axes.plot(each.interval, [place, place], color=colours[name], alpha=0.5)
        axes.plot(each.ratio, place, "o", color=colours[name], markersize=4)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{name}: {each.workload}" for name, each in rows], size=7)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("time of gradscaler / time of the other (below 1: gradscaler is faster)")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Write the tables and the chart."""
    text = HEAD
    for name, setting, measured in sections():
        made_with = ", ".join(f"{key} {value}" for key, value in setting.items())
        text += f"\n## {name}\n\n{made_with}\n\n{paired.table(measured)}\n"
    mpl.use("Agg")
    chart(HERE / "results.png")
    text += "\n" + (HERE / "profile.md").read_text()
    (HERE / "RESULTS.md").write_text(text if GPU.exists() else text + NOT_RUN)


if __name__ == "__main__":
    main()
