"""The demo: fp16 training that fails without loss scaling, and works with it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from gradscaler.demo.figure import draw
from gradscaler.demo.training import MODES, Digits, Run, train
from gradscaler.diagnose import read_run, report


def run(seed: int, steps: int, output: Path, device: str) -> list[Run]:
    """Train in each mode with live progress, print the table, write the picture and the report."""
    console = Console()
    record, page = output.with_suffix(".jsonl"), output.with_suffix(".html")
    record.unlink(missing_ok=True)  # a monitor would go on with it
    digits = Digits.load(device)
    columns = (
        TextColumn("{task.description:<17}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )
    runs = []
    with Progress(*columns, console=console) as progress:
        tasks = [progress.add_task(mode, total=steps, loss=float("nan")) for mode in MODES]
        for mode, task in zip(MODES, tasks, strict=True):

            def advance(loss: float, task: int = task) -> None:
                progress.update(task, advance=1, loss=loss)  # type: ignore[arg-type] # a TaskID

            watched = record if mode == MODES[2] else None
            runs.append(train(mode, digits, seed, steps, advance, watched))
    console.print(_table(runs))
    console.print(
        "A gradient is flushed to zero where fp16 gives 0 and fp32, at the same weights and on the "
        f"same batch, does not; of weights, a mean over {len(runs[0].flushed)} points of the run.",
        style="dim",
    )
    draw(runs, output)
    report.write(read_run(record), page)
    console.print(f"The picture is in {output}", soft_wrap=True)
    console.print(f"A report on the last run is in {page}, made of {record}", soft_wrap=True)
    return runs


def _table(runs: list[Run]) -> Table:
    table = Table(title="Handwritten digits, a sigmoid network of 7 layers")
    table.add_column("")
    for heading in ("test accuracy", "flushed to zero", "final scale", "skipped steps", "seconds"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            run.mode,
            f"{run.accuracy:.1%}",
            f"{run.flushed_share:.1%}",
            f"{run.scales[-1]:,.0f}" if run.scales else "-",
            str(run.skipped) if run.scales else "-",
            f"{run.seconds:.1f}",
        )
    return table
