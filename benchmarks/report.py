"""Write ``RESULTS.md`` and a page for each framework from the JSON of all benchmarks.

    python benchmarks/report.py

``make bench`` and ``make bench-gpu`` run it at the end. It needs Matplotlib. The pages are
``docs/benchmarks/FRAMEWORK.md``.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import paired
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from gradscaler.diagnose.report._picture import png_of

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "benchmarks"
NAMES = {
    "torch": "PyTorch",
    "jax": "JAX",
    "keras": "Keras 3",
    "tf_keras": "Keras 2",
    "paddle": "Paddle",
    "mindspore": "MindSpore",
    "tensorplay": "TensorPlay",
}
OTHER_WEIGHTS = "torch_master_weights", "torch_weights"  # compare no scaler with a native one
SECTIONS = {  # the headings on a page; any other benchmark is of a whole step
    "torch_curves": "By the number and the size of tensors",
    "torch_distributed": "Two processes",
    "torch_gpu": "On a GPU",
    "torch_large": "Large models and many tensors, with an idle optimizer",
    "torch_loop": "A whole loop of a small model",
    "torch_master_weights": "Weights in 16 bits, beside float32 ones",
    "torch_monitor": "With a monitor",
    "torch_weights": "A training step with weights in 16 bits",
    "torch_run": "Under gradscaler run",
    "keras_optimizer.jax": "On JAX",
    "keras_optimizer.tensorflow": "On TensorFlow",
    "keras_optimizer.torch": "On PyTorch",
}
WORDS = (  # patterns in the benchmarks' names of workloads, and the words on the pages
    (r"^compile (.*)", r"\1, compilation"),
    (r"^(100 steps of .*)", r"\1, with a monitor"),
    (r"^\w+: (import|construct)", r"\1"),
    (r"\b(\d[\d,]*) of (64x64)", r"\1 tensors of \2"),
    (r"\bIdleOptimizer\b", "idle optimizer"),
    (r": (\w+) to unscaled(.*)", r"\2: \1 against no scaling"),
    (r": (\w+) to (flax|jmp)(.*)", r"\3: \1 against \2"),
    (r"^jax,", "JAX,"),
    (r"^tensorflow,", "TensorFlow,"),
    (r"^torch,", "PyTorch,"),
)
# Rows of a section whose names share one of these have a panel of their own.
KINDS = ", compilation", ", added to fused AdamW", ", with a monitor"
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#777777"  # Okabe and Ito's


class Row(NamedTuple):
    """A measurement of the first page, its name there, and whether it is in the table."""

    benchmark: str
    workload: str
    shown: str
    in_table: bool = True


# These rows show what users do: a whole step of a large and of a small model, with each framework's
# usual scaler. They are not chosen by their results: the page lists every slower workload below.
HEADLINE = (
    Row(
        "torch_scaler",
        "GPT-2 small, scaling and clipping, added to fused AdamW",
        "GPT-2 small, fused AdamW: added by scaling and clipping",
    ),
    Row(
        "torch_scaler",
        "GPT-2 small, scaling, added to fused AdamW",
        "GPT-2 small, fused AdamW: added by scaling",
    ),
    Row("torch_scaler", "GPT-2 small, AdamW", "GPT-2 small, AdamW: scaling and step"),
    Row(
        "torch_scaler",
        "one 16x16 linear, IdleOptimizer",
        "one tiny layer: scaling alone",
        in_table=False,
    ),
    Row(
        "torch_distributed",
        "2 processes, 20 of 64x64",
        "two processes, 20 small tensors (native: FSDP's scaler)",
    ),
    Row(
        "jax_scaler",
        "transformer, 2 blocks of 128: GradScaler to flax",
        "transformer, compiled step (native: flax)",
    ),
    Row(
        "jax_scaler",
        "transformer, 2 blocks of 128: GradScaler to unscaled",
        "transformer, compiled step (native: no scaling)",
        in_table=False,
    ),
    Row(
        "keras_optimizer.tensorflow",
        "tensorflow, graph: 50 layers of 64",
        "50 small layers, TensorFlow graph",
    ),
    Row("tf_keras_optimizer", "new Adam: 50 layers of 64", "50 small layers"),
    Row("paddle_scaler", "GPT-2 small, SGD", "GPT-2 small, SGD: scaling and step"),
    Row("mindspore_scaler", "2 layers of 1024, compiled, step", "2 wide layers, compiled step"),
    Row("tensorplay_scaler", "GPT-2 small, SGD", "GPT-2 small, SGD: scaling and step"),
)
METHOD = """\
"Ours" is gradscaler. "Native" is the framework's own scaler, unless the row names something else.
They take turns on the same gradients or the same network, in one run, on the CPU. A ratio is the
time of ours divided by that of native: below 1, gradscaler takes less time. It is the median of the
paired repetitions, with the interval that holds the true median with 95 % confidence. In the
figures, blue is faster, orange is slower, and for grey no difference is certain. An idle optimizer
does nothing, so its rows measure scaling alone. `make bench` repeats all measurements.
"""
NOTES = {
    "torch": """"Added to fused AdamW" is the time beyond the median of its bare step. "Clipping" is
by the norm, in both. With two processes, "native" is FSDP's `ShardedGradScaler`. With a monitor,
"native" is gradscaler without a monitor; under `gradscaler run`, it is the script by itself. With
weights in 16 bits, "ours" is `MasterWeights`, and "native" is PyTorch's scaler and the same AdamW
on float32 weights. For a training step with them, "native" is float32 weights under autocast.
""",
    "jax": """JAX has no scaler of its own: "native" is flax's, jmp's or the step without scaling,
as the row says. "Compilation" is the time to compile the step, once in a run.

The goals are 1.05 of the time of the unscaled step for the MLPs, 1.01 for the transformer, and 1.25
of its time to compile. Only the transformer's steps meet theirs. Without any check, and so without
ever skipping, the steps of two of the MLPs take 1.05 and 1.32, and compile in 1.4. That is the time
to scale, to unscale and to choose between the new state and the old (`jax_compiled.py`, with
donated state). [Speed](../speed.md) compares two ways to choose.

""",
}
IMPORTS = """\
For an import, "native" is the framework and the module of its own scaler, and "ours" is both of
these and the adapter.
"""
ELSEWHERE = """
## On another machine

A ratio is a figure of one machine. Rows of GPT-2 small and of other large tensors measure how fast
memory is read. They change little where memory and processor slow down together.

Rows of one layer and of many small tensors measure calls from Python, and so does a constructor.
They get better where a call is slow and gradscaler makes fewer calls than native, and worse where
it makes more. Each page says what one call (`call`, of NumPy on one element) and one reading
(`reading`, of memory that no cache holds) cost where its figures were made.
"""
NOT_RUN = """
## GPU

Not measured, because there was no GPU. None of these figures apply to a GPU; `make bench-gpu`
measures one.
"""

WEIGHTS_PAGE = HERE.parent / "docs" / "weights.md"
WEIGHTS_HEADING = (
    *("Weights, optimizer", "Time of a step", "On another machine"),
    *("Bytes per weight", "At the highest point"),
)

Results = dict[str, tuple[dict[str, Any], list[paired.Comparison]]]


def read_results(folder: str = "results") -> Results:
    """The setting and the measurements of each benchmark."""
    results: Results = {}
    for path in sorted((HERE / folder).glob("*.json")):
        measured = json.loads(path.read_text())
        comparisons = [
            paired.Comparison(each["workload"], each["ours_s"], each["native_s"])
            for each in measured["results"]
        ]
        results[path.stem] = measured["setting"], comparisons
    return results


def framework_of(benchmark: str) -> str:
    """The framework that a benchmark's file is named after."""
    name = benchmark.removeprefix("imports_").removeprefix("run_loops_")
    return max((each for each in NAMES if name.startswith(each)), key=len)


def readable(workload: str) -> str:
    """A workload's name in the words of the pages."""
    for written, shown in WORDS:
        workload = re.sub(written, shown, workload)
    return workload


def section_of(benchmark: str) -> str:
    """The heading of a benchmark on its framework's page."""
    if benchmark.startswith("imports_"):
        return "Import and constructor"
    if benchmark.startswith("run_loops_"):
        return SECTIONS["torch_run"]
    return SECTIONS.get(benchmark, "A step")


def headline(results: Results) -> list[tuple[Row, paired.Comparison]]:
    """The rows of the first page, with their measurements.

    Raises:
        KeyError: a row's workload was not measured.
    """
    found = {(name, each.workload): each for name, (_, rows) in results.items() for each in rows}
    return [(row, found[row.benchmark, row.workload]) for row in HEADLINE]


Panel = tuple[str, list[tuple[str, paired.Comparison]]]
OPAQUE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
PANEL = 4.6  # inches: narrow, so that a phone shows the text at about its size


def headline_panels(results: Results) -> list[Panel]:
    """The rows of the first page, in a panel for each framework."""
    rows = [(framework_of(row.benchmark), row.shown, each) for row, each in headline(results)]
    return [
        (title, [(shown, each) for framework, shown, each in rows if framework == name])
        for name, title in NAMES.items()
    ]


def panels_of(results: Results, framework: str) -> list[Panel]:
    """The rows of a framework's page, in panels for each section and kind."""
    panels: dict[str, list[tuple[str, paired.Comparison]]] = {}
    for name in sorted(results, key=_place):
        if framework_of(name) == framework and not name.startswith("imports_"):
            for each in results[name][1]:
                title, shown = placed(section_of(name), readable(each.workload))
                if each.ratio > 0:  # the axis is logarithmic
                    panels.setdefault(title, []).append((shown, each))
    return list(panels.items())


def placed(section: str, workload: str) -> tuple[str, str]:
    """The title of a workload's panel, and the workload's name in it."""
    kind = next((kind for kind in KINDS if kind in workload), "")
    title = section if kind[2:].capitalize() == section else section + kind
    return title, workload.replace(kind, "")


def draw_panels(panels: list[Panel]) -> Figure:
    """Draw a point for each ratio, below its name, and a line for its interval."""
    rows = [each for _, part in panels for _, each in part]
    ends = [end for each in rows for end in each.interval]
    least, most = max(min(*ends, 0.8), 2**-5), max(*ends, 1.25)
    heights = [len(part) + 0.3 for _, part in panels]
    height = 0.3 * sum(heights) + 0.6 * len(panels) + 0.4
    figure = Figure(figsize=(PANEL, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)
    for axes, (title, part) in zip(grid[:, 0], panels, strict=True):
        axes.set_title(fill(title, 50), loc="left", fontsize=10, fontweight="bold")
        for place, (name, each) in enumerate(part):
            low, high = each.interval
            colour = ORANGE if low > 1 else BLUE if high < 1 else GREY
            axes.plot([max(low, least), high], [place, place], color=colour, alpha=0.6)
            axes.plot(each.ratio, place, "o", color=colour, markersize=4)
            style: dict[str, Any] = {
                "transform": axes.get_yaxis_transform(),
                "fontsize": 8,
                "va": "center",
            }
            axes.text(0, place - 0.42, name, bbox=OPAQUE, **style)  # no line strikes it through
            axes.text(1, place, f"{each.ratio:.2f}", ha="right", color=colour, **style)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_ylim(len(part) - 0.6, -0.9)
        axes.set_yticks([])
        axes.set_xscale("log", base=2)
        axes.set_xlim(least / 1.05, most * (most / least) ** 0.2)  # room for the numbers
        axes.tick_params(labelbottom=True, labelsize=8)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right", "left"]].set_visible(False)
    grid[-1, 0].set_xlabel("time of gradscaler / time of native", fontsize=9)
    return figure


def draw_curves(comparisons: list[paired.Comparison]) -> Figure:
    """Draw time against the number of tensors, and against bytes."""
    figure = Figure(figsize=(PANEL, 2 * PANEL / 2.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    counts, sizes = figure.subplots(2)
    points = []
    for each in comparisons:
        tensors, megabytes = re.findall(r"([\d,]+) (?:tensors|MB)", each.workload)
        points.append((int(tensors.replace(",", "")), int(megabytes.replace(",", "")), each))
    _draw_curve(counts, [(t, each) for t, mb, each in points if mb == 64], "tensors, 64 MB in all")
    _draw_curve(
        sizes, [(mb, each) for t, mb, each in points if t == 100 and mb != 64], "MB, in 100 tensors"
    )
    counts.legend(frameon=False)
    return figure


def charts(results: Results) -> dict[Path, Figure]:
    """All charts, by the paths of their files."""
    return {
        HERE / "headline.png": draw_panels(headline_panels(results)),
        PAGES / "torch_curves.png": draw_curves(results["torch_curves"][1]),
        **{PAGES / f"{name}.png": draw_panels(panels_of(results, name)) for name in NAMES},
    }


def _draw_curve(axes: Axes, points: list[tuple[int, paired.Comparison]], label: str) -> None:
    for name, colour in (("ours", BLUE), ("native", "#555555")):
        medians = [1e3 * statistics.median(getattr(each, name)) for _, each in points]
        shown = [median if median > 0 else math.nan for median in medians]
        axes.loglog([x for x, _ in points], shown, "o-", color=colour, label=name)
    axes.set_xlabel(label)
    axes.set_ylabel("added time, ms")
    axes.grid(alpha=0.3)


def named(comparisons: list[tuple[str, paired.Comparison]]) -> str:
    """A table of comparisons under other names."""
    return paired.table(
        [paired.Comparison(name, each.ours, each.native) for name, each in comparisons]
    )


def first_page(results: Results) -> str:
    """``RESULTS.md``: a paragraph, ten rows, the figure, and every slower workload."""
    rows = headline(results)
    every = [
        (name, each)
        for name, (_, comparisons) in results.items()
        for each in comparisons
        if not name.startswith("imports_") and name not in OTHER_WEIGHTS
    ]
    faster = sum(each.interval[1] < 1 for _, each in every)
    slower = [(name, each) for name, each in every if each.interval[0] > 1]
    clipping, small = rows[0][1], rows[4][1]
    weights = sorted(each.ratio for each in results[OTHER_WEIGHTS[0]][1])
    bare = sum(each.workload.endswith("to unscaled") for _, each in slower)
    added = [_added_by_import(each) for each in _imports(results)]
    alone = "All" if bare == len(slower) else f"{bare} of the"
    paragraph = f"""
        Of {len(every)} workloads, gradscaler takes less time than native in {faster} and more in
        {len(slower)}; in the others, no difference is certain. It gains most if it reads the
        gradients once while native reads them three times: with fused AdamW on GPT-2 small, scaling
        and clipping add {clipping.ratio:.2f} of the time that PyTorch's scaler adds. It gains less
        if processes wait for one another: two processes with 20 small tensors take
        {small.ratio:.2f} of the time of FSDP's scaler. {alone} {len(slower)} slower
        workloads compare a JAX step with one without scaling. The adapters add {min(added):.0f} to
        {max(added):.0f} ms to the import of their frameworks.
    """
    text = f"# Benchmarks\n\n{fill(' '.join(paragraph.split()), 100)}\n\n"
    shown = [
        (f"{NAMES[framework_of(row.benchmark)]}: {row.shown}", each)
        for row, each in rows
        if row.in_table
    ]
    text += f"{named(shown)}\n\n{METHOD}\n![Ours against native, by framework](headline.png)\n"
    text += "\n## What is slower\n\nEvery workload whose interval lies above 1:\n\n"
    text += named(
        [(f"{NAMES[framework_of(name)]}: {readable(each.workload)}", each) for name, each in slower]
    )
    text += (
        "\n\nEvery import is slower, too, because it imports the framework and gradscaler. Most\n"
        "constructors are slower because they check parameters. A step of 16-bit weights takes\n"
        f"{weights[0]:.1f} to {weights[-1]:.1f} of the time of one of float32 weights. The pages "
        "below list these.\n\n"
    )
    text += "## All measurements\n\n"
    for framework, name in NAMES.items():
        text += f"- [{name}](../docs/benchmarks/{framework}.md)\n"
    return text + ELSEWHERE + ("" if "torch_gpu" in results else NOT_RUN)


def _imports(results: Results) -> list[paired.Comparison]:
    return [
        each
        for _, comparisons in results.values()
        for each in comparisons
        if each.workload.endswith(": import")
    ]


def _added_by_import(each: paired.Comparison) -> float:
    pairs = zip(each.ours, each.native, strict=True)
    return statistics.median(1e3 * (ours - native) for ours, native in pairs)


def framework_page(results: Results, framework: str) -> str:
    """The page of one framework: every measurement, and its setting."""
    mine = {name: each for name, each in results.items() if framework_of(name) == framework}
    text = f"# {NAMES[framework]}: benchmarks\n\n{METHOD}\n{NOTES.get(framework, '')}{IMPORTS}\n"
    text += f"![Median ratios, with intervals]({framework}.png)\n"
    for name in sorted(mine, key=_place):
        rows = [(readable(each.workload), each) for each in mine[name][1]]
        text += f"\n## {section_of(name)}\n\n{named(rows)}\n"
        if name == "torch_curves":
            text += "\n![What scaling and clipping add to a fused step, by the number of tensors "
            text += "and by their bytes](torch_curves.png)\n"
    if framework == "torch":
        text += "\n[The profile](../profile.md) says where the time of a step goes.\n"
    text += "\n## Made with\n\n"
    for name in sorted(mine, key=_place):
        setting = ", ".join(f"{key} {value}" for key, value in mine[name][0].items())
        text += f"- {section_of(name)} (`{name}`): {setting}\n"
    return text


def weights_table() -> str:
    """The table on docs/weights.md: time and memory of each way to keep weights."""
    folders = HERE / "results", HERE / "results" / "other"
    machines = [json.loads((each / "torch_weights.json").read_text()) for each in folders]
    ratios = [
        {each["workload"]: f"{each['ratio']:.2f}" for each in machine["results"]}
        for machine in machines
    ]
    rows = [
        (way, *(each.get(way, "1") for each in ratios), *map(str, bytes_per_weight))
        for way, bytes_per_weight in machines[0]["bytes"].items()
    ]
    return paired.aligned([WEIGHTS_HEADING, *rows])


def with_table(page: str, table: str) -> str:
    """A page with a table in place of the one that has the same heading."""
    (column, *_) = table.partition("\n")
    first, second = (re.escape(cell.strip()) for cell in column.split("|")[1:3])
    return re.sub(rf"\| {first} +\| +{second} \|[^\n]*(\n\|[^\n]*)*", lambda _: table, page)


def _place(benchmark: str) -> tuple[bool, bool]:
    """Steps come first on a page, and imports last."""
    return benchmark.startswith("imports_"), benchmark in SECTIONS


def main() -> None:
    """Write the pages and the charts."""
    results = read_results()
    (HERE / "RESULTS.md").write_text(first_page(results))
    PAGES.mkdir(exist_ok=True)
    for framework in NAMES:
        (PAGES / f"{framework}.md").write_text(framework_page(results, framework))
    WEIGHTS_PAGE.write_text(with_table(WEIGHTS_PAGE.read_text(), weights_table()))
    for path, figure in charts(results).items():
        path.write_bytes(png_of(figure))


if __name__ == "__main__":
    main()
