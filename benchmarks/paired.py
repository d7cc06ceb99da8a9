"""Times rivals side by side in one run, with an interval for the ratio of their times.

In every benchmark here, gradscaler ("ours") and a framework's own scaler ("native") take turns on
the same tensors, so any other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import re
import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Comparison:
    """The times that two rivals take for the same work.

    Attributes:
        workload: the name of the work.
        ours: seconds of one call of gradscaler, a mean for each repetition.
        native: seconds of one call of the framework's own scaler, in the same repetitions.
    """

    workload: str
    ours: Sequence[float]
    native: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """Ours / native in each repetition; below 1, gradscaler is faster."""
        return [ours / native for ours, native in zip(self.ours, self.native, strict=True)]

    @property
    def ratio(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true median ratio lies, with 95 % confidence."""
        return median_interval(self.ratios)

    def as_dict(self) -> dict[str, Any]:
        """The summary and every measurement, for JSON."""
        return {
            "workload": self.workload,
            "ratio": self.ratio,
            "interval": self.interval,
            "ours_s": list(self.ours),
            "native_s": list(self.native),
        }


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """A confidence interval of the median that assumes nothing about the distribution.

    It runs from the k-th smallest to the k-th largest value. k is the largest for which the
    interval holds the median with at least that probability, ``1 - 2 * P(Binomial(n, 1/2) < k)``.
    (Hahn and Meeker, "Statistical Intervals", 1991, section 5.2.)

    Raises:
        ValueError: there are too few values for any such interval; 95 % takes 6.
    """
    n = len(values)
    k, outside = 0, 0.5**n  # outside = P(Binomial < k + 1)
    while 2 * outside <= 1 - confidence and k < n // 2:
        k += 1
        outside += math.comb(n, k) * 0.5**n
    if k == 0:
        raise ValueError(f"{n} values are too few for a {confidence:.0%} interval of their median")
    ordered = sorted(values)
    return ordered[k - 1], ordered[n - k]


def interleave(
    rivals: Mapping[str, Callable[[], object]],
    prepare: Callable[[], object] | Mapping[str, Callable[[], object]],
    repetitions: int,
    calls: int = 1,
    warm_up: int = 2,
) -> dict[str, list[float]]:
    """Time rivals by turns, in the opposite order in every second repetition.

    Args:
        rivals: the functions to time, by name.
        prepare: a function that is called before each call of a rival, outside of the measured
            time; or a mapping with one for each rival.
        repetitions: the number of measurements of each rival.
        calls: the number of calls in a measurement; short calls need many, because the clock is
            coarse.
        warm_up: the number of repetitions before those that count.

    Returns:
        By name, the mean seconds of a call in each repetition. The garbage collector is off
        during the measurements, as in ``timeit``.
    """
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    order = list(rivals)
    gc.collect()
    gc.disable()
    try:
        for _ in range(warm_up + repetitions):
            for name in order:
                total = 0.0
                prepare_it = prepare[name] if isinstance(prepare, Mapping) else prepare
                for _ in range(calls):
                    prepare_it()
                    start = perf_counter()
                    rivals[name]()
                    total += perf_counter() - start
                seconds[name].append(total / calls)
            order.reverse()
    finally:
        gc.enable()
    return {name: measured[warm_up:] for name, measured in seconds.items()}


def machine() -> dict[str, Any]:
    """The setting of a measurement, apart from versions of frameworks."""
    described: dict[str, Any] = {
        "platform": _platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    if hasattr(os, "getloadavg"):  # not on Windows
        described["load"] = round(os.getloadavg()[0], 2)
    return {**described, "call": duration(call_time()), "reading": f"{reading_speed():.3g} GB/s"}


def call_time(calls: int = 10_000) -> float:
    """Seconds of one call of a library's function from Python: of NumPy, on one element."""
    one = np.ones(1, np.float32)
    return min(timeit.repeat(lambda: np.multiply(one, 1.0, out=one), number=calls)) / calls


def reading_speed(elements: int = 2**25) -> float:
    """How many GB a second are read where a reduction reads memory that no cache holds."""
    values = np.ones(elements, np.float32)
    return values.nbytes / min(timeit.repeat(values.max, number=1)) / 1e9


def _platform() -> str:
    """The system, its version without the name of a build, and the processor's family."""
    version = re.match(r"[\d.]*\d", platform.release())
    parts = (platform.system(), version[0] if version else "", platform.machine())
    return "-".join(part for part in parts if part)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # on Linux the platform module does not know the model
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def table(comparisons: Sequence[Comparison]) -> str:
    """A Markdown table of comparisons: median times, median ratio, interval."""
    rows: list[tuple[str, ...]] = [("workload", "ours", "native", "ratio", "95 % interval")]
    for comparison in comparisons:
        low, high = comparison.interval
        rows.append(
            (
                comparison.workload,
                duration(statistics.median(comparison.ours)),
                duration(statistics.median(comparison.native)),
                f"{comparison.ratio:.3f}",
                f"{low:.3f} to {high:.3f}",
            )
        )
    return aligned(rows)


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table, with the heading in the first row and the names in the first column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ("-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:]))
    return "\n".join(
        "| " + " | ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]) + " |"
        for first, *others in (rows[0], rule, *rows[1:])
    )


def duration(seconds: float) -> str:
    """A duration with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def write_json(path: Path, setting: Mapping[str, Any], comparisons: Sequence[Comparison]) -> None:
    """Write every measurement and the setting that it was made in."""
    results = [comparison.as_dict() for comparison in comparisons]
    path.write_text(json.dumps({"setting": dict(setting), "results": results}, indent=2) + "\n")


def report(
    arguments: argparse.Namespace, setting: Mapping[str, Any], comparisons: Sequence[Comparison]
) -> None:
    """Print the setting and a table of the numbers, and write JSON if asked."""
    setting = {**machine(), **setting, "repetitions": arguments.repetitions}
    print(*(f"{name}: {value}" for name, value in setting.items()), sep="\n", end="\n\n")
    print(table(comparisons), end="\n\n", flush=True)
    if arguments.json:
        write_json(arguments.json, setting, comparisons)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line: the options of ``parser``, and those of every benchmark."""
    parser.add_argument(
        "--repetitions",
        type=int,
        default=50,
        help="measurements of each scaler and workload, at least 6 (%(default)s)",
    )
    parser.add_argument(
        "--quick",
        dest="repetitions",
        action="store_const",
        const=10,
        help="10 repetitions",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement here")
    arguments = parser.parse_args()
    if arguments.repetitions < 6:
        parser.error("--repetitions must be at least 6: fewer give no 95 % interval")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {arguments.json.parent}")
    return arguments
