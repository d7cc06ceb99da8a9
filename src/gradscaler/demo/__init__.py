"""The demo: fp16 training that fails without loss scaling, and works with it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

from gradscaler._frameworks import require

for _package in ("torch", "matplotlib", "rich", "sklearn"):
    require(_package, "demo", "torch", "demo")

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gradscaler.demo._figure import draw
from gradscaler.demo._training import MODES, Photographs, Run, train
from gradscaler.diagnose import read_run, report


def run(
    seeds: Sequence[int], steps: int, output: Path, device: str, threads: Sequence[int]
) -> list[Run]:
    """Train with each number of threads, from each seed, in each mode.

    Print the tables, draw the picture ``output``, and write beside it the report on the first
    training with loss scaling.
    """
    console = Console()
    record, page = output.with_suffix(".jsonl"), output.with_suffix(".html")
    record.unlink(missing_ok=True)  # a monitor would append to it
    photographs = Photographs.load(device)
    columns = (
        TextColumn("{task.description:<17}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
    )
    runs: list[Run] = []
    with Progress(*columns, console=console) as progress, ExitStack() as finally_:
        finally_.callback(torch.set_num_threads, torch.get_num_threads())
        total = steps * len(seeds) * len(threads)
        tasks = {mode: progress.add_task(mode, total=total, loss=float("nan")) for mode in MODES}
        for count, seed, mode in product(threads, seeds, MODES):
            torch.set_num_threads(count)
            advance = partial(progress.update, tasks[mode], advance=1)
            watched = record if len(runs) + 1 == len(MODES) else None
            runs.append(train(mode, photographs, seed, steps, advance, watched))
    console.print(_summary(runs))
    if len(runs) > len(MODES):
        console.print(_every_run(runs))
    console.print(
        "Explained: the share of the variance of a held-out part of a photograph that the "
        "autoencoder restores. Flushed to zero: the share of weight gradients that fp16 computes "
        "as 0, of those that are not 0 in fp32 at the same weights and on the same batch.",
        style="dim",
    )
    draw(runs[: len(MODES) * len(seeds)], photographs.held_out.cpu().numpy(), output)
    report.write(read_run(record), page)
    console.print(f"The picture is in {output}", soft_wrap=True)
    report_is = f"The report on the first run with gradscaler is in {page}, made from {record}"
    console.print(report_is, soft_wrap=True)
    return runs


def _summary(runs: list[Run]) -> Table:
    """A row for each mode, over all its runs."""
    table = Table(title="Photographs, a sigmoid autoencoder of 8 layers")
    table.add_column("", no_wrap=True)
    for heading in ("explained", "flushed to zero", "last scale", "skipped steps", "seconds"):
        table.add_column(heading, justify="right")
    for mode in MODES:
        alike = [run for run in runs if run.mode == mode]
        table.add_row(
            mode,
            _range([_percent(run.explained) for run in alike], "{:.1f} %"),
            f"{_percent(np.mean([run.flushed_share for run in alike]).item()):.1f} %",
            _range([np.log2(run.scales[-1]) for run in alike if run.scales], "2^{:.0f}"),
            _range([run.skipped for run in alike if run.scales], "{:.0f}"),
            f"{np.mean([run.seconds for run in alike]):.1f}",
        )
    return table


def _percent(share: float) -> float:
    """A share in percent, rounded to one digit; never -0.0."""
    return round(100 * share, 1) + 0.0


def _range(values: Sequence[float], form: str) -> str:
    """The smallest and the largest value, or the only one."""
    shown = [form.format(value) for value in (min(values), max(values))] if values else ["-"]
    return " to ".join(dict.fromkeys(shown))


def _every_run(runs: list[Run]) -> Table:
    """A row for each seed and number of threads."""
    table = Table(title="Explained variance, each run")
    for heading in ("seed", "threads", *MODES):
        table.add_column(heading, justify="right")
    for i in range(0, len(runs), len(MODES)):
        alike = runs[i : i + len(MODES)]
        shares = [f"{_percent(run.explained):.1f} %" for run in alike]
        table.add_row(str(alike[0].seed), str(alike[0].threads), *shares)
    return table
