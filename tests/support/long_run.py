"""Writes the file of a long run, and measures the time and memory of a command on it.

``python tests/support/long_run.py run.jsonl`` writes a million steps with a sample at each 100.
``python tests/support/long_run.py run.jsonl explain run.jsonl`` then runs ``gradscaler explain``
and prints its seconds of CPU time and its largest memory.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path


def write_long_run(
    path: Path, steps: int = 1_000_000, every: int = 100, parameters: int = 20, growth: int = 2000
) -> Path:
    """Write a run whose scale grows each ``growth`` steps, which the next step skips."""
    rng = random.Random(0)
    start = {
        "framework": "torch",
        "dtype": "float16",
        "every": every,
        "step": 0,
        "policy": {"name": "DynamicScale"},
    }
    scale, names = 2.0**14, [f"layers.{number}.weight" for number in range(parameters)]
    with path.open("w") as file:

        def write(kind: str, **fields: object) -> None:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")

        write("start", gradscaler=1, **start, time="2026-01-01T00:00:00+00:00")
        for last in range(every, steps + 1, every):
            first = last - every + 1
            skips = [step for step in range(first, last + 1) if step % growth == 0]
            scales = [[first, scale]]
            for step in skips:
                scales += [[step, 2 * scale], [step + 1, scale]]
                gradient = [names[0], [8, 8], "float16", 1, 0, 5e4]
                fields = ("name", "shape", "dtype", "num_inf", "num_nan", "largest_finite")
                nonfinite = [dict(zip(fields, gradient, strict=True))]
                write("skip", step=step, scale=2 * scale, loss=1.0, nonfinite=nonfinite, more=0)
            shares = {"zero": 0.0, "flushed": 0.01, "subnormal": 0.04}
            counts = [rng.randrange(1, 5000) for _ in range(30)]
            write(
                "sample",
                step=last,
                scale=2 * scale if last in skips else scale,
                scales=[pair for pair in scales if pair[0] <= last],
                steps=every,
                skips=skips,
                loss=None,
                norm=rng.uniform(0.5, 2),
                shares={**shares, "normal": 0.95, "overflow": 0.0, "nonfinite": 0.0},
                histogram=[-31, counts],
                parameters={
                    name: {**shares, "nonfinite": 0.0, "histogram": [-31, counts[row % 9 :]]}
                    for row, name in enumerate(names)
                },
                worst=names[:5],
                losses=[rng.uniform(1, 3) for _ in range(every)],
                largest=rng.uniform(0.3, 0.9),
            )
    return path


def main() -> None:
    """Write a file, or measure a command on it."""
    path, *arguments = sys.argv[1:]
    if not arguments:
        write_long_run(Path(path))
        return
    import resource  # not on Windows

    status = subprocess.run([sys.executable, "-m", "gradscaler", *arguments]).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    memory = used.ru_maxrss / 1024  # Linux counts KiB
    print(f"{used.ru_utime:.1f} s, {memory:.0f} MB, status {status}", file=sys.stderr)


if __name__ == "__main__":
    main()
