"""Write the reports of docs/gallery.md, and print the page's list of them.

    python docs/gallery.py FOLDER

Each is on a short training, most of them from examples/torch_stuck.py. The build of the site calls
this, so the reports are those of today. Those of other frameworks are drawn from run files in
docs/gallery, which reports.py makes.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from gradscaler.diagnose import read_run, report
from gradscaler.diagnose._findings.run import Run
from gradscaler.diagnose._record.kinds import KINDS
from gradscaler.torch import GradScaler

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from reports import reports
from torch_stuck import TRAININGS, train

# Trains, with run files in a folder.
Recorder: TypeAlias = Callable[[Path], Run]

ENTRY = """\
## {headline}

[`{kind}`](stuck.md#{kind}): {story}

```text
{verdict}
```

<a href="gallery/{kind}.html">The report</a>
"""
OF_OTHERS = """\
### {title}

[The training, and its repair](reports.md#{name})

```text
{verdict}
```

<a href="gallery/{name}.html">The report</a>
"""


def restart(folder: Path) -> Run:
    """A run goes on with its weights, and with a new scaler."""
    logging.disable()  # of a file that holds two runs
    path, training = folder / "run.jsonl", TRAININGS["normal"]()
    train(lambda: training, path)
    train(
        lambda: training._replace(scaler=GradScaler(init_scale=2.0**20)), path
    )
    return read_run(path)


def ranks(folder: Path) -> Run:
    """Two ranks, each with a scaler that decides alone; some batches of one hold a NaN."""
    return read_run(*_on_ranks(folder, "normal", "data", together=False))


def elsewhere(folder: Path) -> Run:
    """Two ranks that decide together; the gradients of the other one are NaN."""
    return read_run(_on_ranks(folder, "normal", "nan", together=True)[0])


def _on_ranks(folder: Path, *names: str, together: bool) -> list[Path]:
    """The run files of ranks, each with another training."""
    arguments = folder, names, together
    start_processes(_train_rank, arguments, len(names), start_method="fork")
    return [folder / f"{rank}.jsonl" for rank in range(len(names))]


def _train_rank(
    rank: int, folder: Path, names: tuple[str, ...], together: bool
) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=len(names)
    )
    scaler = GradScaler(group=dist.group.WORLD if together else None)
    training = TRAININGS[names[rank]]()._replace(scaler=scaler, steps=100)
    train(lambda: training, folder / "{rank}.jsonl")
    dist.destroy_process_group()


def alone(kind: str) -> Recorder:
    """A training of the example."""

    def record(folder: Path) -> Run:
        train(TRAININGS[kind], folder / "run.jsonl")
        return read_run(folder / "run.jsonl")

    record.__doc__ = TRAININGS[kind].__doc__
    return record


def main(target: Path) -> None:
    """Write a report for each kind, the gravest first, and print its entry."""
    target.mkdir(parents=True, exist_ok=True)
    several = {each.__name__: each for each in (restart, ranks, elsewhere)}
    for kind, row in KINDS.items():
        record = several.get(kind) or alone(kind)
        with tempfile.TemporaryDirectory() as folder:
            run = record(Path(folder))
        report.write(run, target / f"{kind}.html")
        print(
            ENTRY.format(
                kind=kind,
                headline=row.headline,
                story=record.__doc__,
                verdict=run.verdict.text,
            )
        )
    print("## In other frameworks\n")
    for each in reports():
        if each.run.exists():
            run, name = read_run(each.run), each.run.stem
            report.write(run, target / f"{name}.html")
            text = run.verdict.text
            print(OF_OTHERS.format(title=each.title, name=name, verdict=text))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
