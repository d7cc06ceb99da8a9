"""The runs that are reported on: a fixture, as test modules cannot import one another."""

from dataclasses import replace

import numpy as np
import pytest

from gradscaler import NonfiniteGradient
from tests.support import run_files

NAN = float("nan")
FIRST = -40  # the smallest exponent in the histograms


def _made_up_run(
    samples=10, parameters=6, stuck=0, every=100, names=None, dtype="float16", verdict=None
):
    """A run as a monitor would record it: warm-up skips, samples, and skips in a row at the end."""
    names = names or [f"encoder.{layer}.weight" for layer in range(parameters)]
    scale, skipped, kept = 65536.0, [], []
    for index in range(1, samples + 1):
        skips = tuple(range(index * every - 2, index * every)) if index % 3 == 1 else ()
        scale *= 1 if skips else 2
        scales = [((index - 1) * every + 1, scale)]
        for step in skips:
            scale /= 2
            scales.append((step + 1, scale))
        skipped += [run_files.skip(step, 2 * scale, 1.5, [_nonfinite(names[0])]) for step in skips]
        kept.append(_sample(index, every, scale, scales, skips, names, samples))
    steps = samples * every
    for step in range(steps + 1, steps + stuck + 1):
        skipped.append(run_files.skip(step, scale, NAN, [*map(_nonfinite, names)][:10], 3))
        scale /= 2
    verdicts = [run_files.verdict(steps + stuck, *verdict)] if verdict else []
    start = run_files.start(dtype=dtype, every=every)
    return run_files.run_of(start, *kept, *skipped, *verdicts)


def _nonfinite(name):
    return NonfiniteGradient(name, (64, 64), "float16", 12, 1, 51200.0)


def _sample(index, every, scale, scales, skips, names, samples):
    middle = -22 - 6 * index / samples  # gradients shrink in the course of a run
    rows = {name: _histogram(middle - 12 * row / len(names)) for row, name in enumerate(names)}
    whole = np.sum(list(rows.values()), axis=0)
    flushed, subnormal, normal = _shares(whole, scale)
    parameters = {
        name: run_files.parameter(0.1, *_shares(row, scale)[:2], 0.0, _bins(row))
        for name, row in rows.items()
    }
    return run_files.sample(
        index * every,
        scale,
        tuple(scales),
        every,
        skips,
        2.3 / index,
        3.0 * 0.9**index,
        run_files.shares(0.1, flushed, subnormal, normal, 0.0, 0.0),
        _bins(whole),
        parameters=parameters,
        worst=[*reversed(names)][:5],
    )


def _histogram(middle):
    exponents = np.arange(FIRST, 10)
    return np.round(1000 * np.exp(-(((exponents - middle) / 5) ** 2))).astype(int)


def _bins(counts):
    return FIRST, counts.tolist()


def _shares(counts, scale):
    exponents = np.arange(FIRST, 10) + np.log2(scale)
    parts = exponents < -25, (exponents >= -25) & (exponents < -14), exponents >= -14
    return [float(0.9 * counts[part].sum() / counts.sum()) for part in parts]


@pytest.fixture(scope="session")
def made_up_run():
    """Makes such a run; those of equal arguments are one, which nothing changes."""
    made = {}

    def make(**arguments):
        key = repr(sorted(arguments.items()))
        if key not in made:
            made[key] = _made_up_run(**arguments)
        return made[key]

    return make


@pytest.fixture
def save(path):
    """Writes a run to its file, and returns the file's path."""

    def save(run):
        path.unlink(missing_ok=True)
        return str(run_files.append_run(path, run))

    return save


@pytest.fixture
def save_ranks(tmp_path):
    """Writes the files of three ranks of four, which skip the same steps; returns their paths."""

    def save_ranks(at_fault):
        verdict = "floor", "What happened. What to try.", "w"
        run, paths = _made_up_run(samples=1, verdict=verdict), []
        for rank in range(3):
            start = replace(run.starts[0], rank=rank, world_size=4)
            skips, verdicts = run.skips, run.verdicts
            if rank != at_fault:
                skips = [replace(skip, nonfinite=()) for skip in skips]
                verdicts = [replace(run.verdicts[0], verdict="elsewhere", where=None)]
            lines = start, *run.samples, *skips, *verdicts
            paths.append(str(run_files.append(tmp_path / f"run.{rank}.jsonl", *lines)))
        return paths

    return save_ranks
