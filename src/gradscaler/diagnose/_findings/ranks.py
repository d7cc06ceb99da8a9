"""Reads a run from its file, or from the files of several ranks: finds the rank at fault."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from gradscaler.diagnose._findings.run import Run
from gradscaler.diagnose._record.checks import shown
from gradscaler.diagnose._record.finding import Verdict
from gradscaler.diagnose._record.kinds import KINDS, kind_of
from gradscaler.diagnose._record.lines import BadStep, Skip
from gradscaler.diagnose._record.reader import read

_COMPARE = "explain each run by itself, or compare them: python -m gradscaler compare A B"
_SEVERITY = tuple(KINDS)
_BLAMELESS = "elsewhere", "normal"  # the verdict of a rank that did nothing wrong


def read_run(path: str | Path, *others: str | Path) -> Run:
    """Read a run file, or the files of several ranks of one run.

    An incomplete last line, left by a writer that was killed, is ignored. For several files, the
    result is the run of the rank at fault. Its verdict covers all ranks, and its attribute
    ``ranks`` holds every run by rank.

    A rank whose verdict names a cause of skipped steps goes before the others. Among several such
    ranks, the one at fault is the rank whose gradients were first to hold an Inf or a NaN in the
    latest streak of skips. A tie goes to the rank with the fewest skips whose loss is finite or
    unknown; then to the most severe verdict: parameter, divergence, activations, loss, nan, floor,
    state, data; then to the lowest rank. If ranks used different scales or skipped different steps,
    the verdict begins with these differences, and its kind is ``"ranks"``.

    Raises:
        ValueError: a file is not a valid run, or the files do not belong together. The message is
            one line that names the file, the number of the line and the mistake.
        OSError: a file cannot be read.
    """
    if not others:
        return read(Path(path), Run)
    return _of_ranks([(str(each), read(Path(each), Run)) for each in (path, *others)])


class RunOfRanks(Run):
    """The run of the rank at fault, with a verdict on all ranks."""

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict of the rank at fault, with the rank's number.

        If the ranks differ, the text begins with the differences.
        """
        rank = self.starts[-1].rank
        own, differences = self.ranks[rank].verdict, _differences(self.ranks)
        kind = "ranks" if differences else own.kind
        return Verdict(kind, f"{differences}rank {rank}: {own.text}", own.where)

    @cached_property
    def latest(self) -> Run:
        """The latest run in the file of the rank at fault."""
        return self.ranks[self.starts[-1].rank].latest


def _of_ranks(files: Sequence[tuple[str, Run]]) -> Run:
    """Combine the runs of several ranks, each with its file's name, into that of the one at fault.

    Raises:
        ValueError: the runs are not from different ranks that train together.
    """
    path_of: dict[int, str] = {}
    first, reference = files[0][0], files[0][1].starts[-1]
    for path, run in files:
        start = run.starts[-1]
        for name in ("framework", "dtype", "world_size", "policy"):
            own, other = getattr(start, name), getattr(reference, name)
            if own != other:
                raise ValueError(
                    f"{path}: {name} is {shown(own)}, but in {first} it is {shown(other)}: several "
                    f"files are those of the ranks of one run; {_COMPARE}"
                )
        if start.world_size == 1:
            raise ValueError(
                f"{path}: its process trained alone, so it is not a rank of a run: {_COMPARE}"
            )
        if start.rank in path_of:
            other = path_of[start.rank]
            raise ValueError(
                f"{path}: is of rank {start.rank}, as {other} is: give one file of each rank; "
                f"{_COMPARE}"
            )
        path_of[start.rank] = path
    runs = sorted((run for _, run in files), key=_order)
    ranks = {run.starts[-1].rank: run for run in runs}
    run = runs[0]
    lines = run.starts, run.samples, run.skips, run.verdicts, run.watched, run.bad_steps
    return RunOfRanks(*lines, ranks=ranks)


def _order(run: Run) -> tuple[int, float, int, int, int]:
    """The sort key that puts the rank at fault first; see :func:`gradscaler.diagnose.read_run`."""
    kind, start = run.verdict.kind, run.starts[-1]
    severity = _SEVERITY.index(kind) if kind in _SEVERITY else len(_SEVERITY)
    since = run.nonfinite_since - start.step
    # Ranks that average their gradients all get NaN gradients. Only the culprit's loss is NaN too.
    failed: tuple[Skip | BadStep, ...] = (*run.skips, *run.bad_steps)
    num_finite = sum(step.loss is None or math.isfinite(step.loss) for step in failed)
    innocence = 2 if kind in _BLAMELESS else int(not kind_of(kind).explains_skips)
    return innocence, since, num_finite, severity, start.rank


def _differences(ranks: Mapping[int, Run]) -> str:
    """Sentences on where ranks first differ from the lowest rank; empty if they do not.

    Steps are compared from each rank's latest start up to its last sample, because the files of a
    killed run may end at different steps.
    """
    (lowest, reference), *others = ((rank, _Course(run)) for rank, run in sorted(ranks.items()))
    scales = [(*found, rank) for rank, c in others if (found := reference.other_scale(c))]
    skips = [(*skip, rank) for rank, c in others if (skip := reference.other_skip(c))]
    text = ""
    if scales:
        step, scale, other_scale, rank = min(scales)
        text += (
            f"Ranks hold different loss scales from step {step + reference.start} on: "
            f"{scale:g} on rank {lowest}, {other_scale:g} on rank {rank}. "
        )
    if skips:
        step, is_others, rank = min(skips)
        one, other = (rank, lowest) if is_others else (lowest, rank)
        step += reference.start
        text += f"Step {step} was skipped on rank {one}, and not on rank {other}. "
    if text:
        text += (
            "Let all ranks decide together (in PyTorch, GradScaler(group=...)), and load the same "
            "checkpoint on each. "
        )
    return text


class _Course:
    """A rank's scales and skips from its latest start to its last sample, numbered from step 1."""

    def __init__(self, run: Run) -> None:
        self.start = start = run.starts[-1].step
        self.length = max((sample.step for sample in run.samples), default=start) - start
        self.scales = {step - start: s for step, s in run.scales.items() if step > start}
        self.skipped = {step - start for step in run.skipped if step > start}

    def other_scale(self, other: _Course) -> tuple[int, float, float] | None:
        """The first step at which another rank's scale differs, and both scales."""
        own_scale = other_scale = None
        for step in sorted(self.scales.keys() | other.scales.keys()):
            own_scale = self.scales.get(step, own_scale)
            other_scale = other.scales.get(step, other_scale)
            if own_scale is None or other_scale is None or step > min(self.length, other.length):
                continue
            if own_scale != other_scale:
                return step, own_scale, other_scale
        return None

    def other_skip(self, other: _Course) -> tuple[int, bool] | None:
        """The first step that only one rank skipped, and whether that rank is ``other``."""
        length = min(self.length, other.length)
        step = min((s for s in self.skipped ^ other.skipped if s <= length), default=None)
        return None if step is None else (step, step in other.skipped)
