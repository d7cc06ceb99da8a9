"""What the figures and the terminal say where not all is drawn, or nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from gradscaler.diagnose._run.run import Run

_MOST_ROWS = 1000  # of parameters in a figure


def every_nth(names: Collection[str], kept: Collection[str] = ()) -> list[str]:
    """At most 1,000 of the names, in their order, and those to keep."""
    every = math.ceil(len(names) / _MOST_ROWS)
    return [name for row, name in enumerate(names) if row % every == 0 or name in kept]


def rows_drawn(num_names: int) -> str:
    """Which parameters have a row; empty if all have."""
    every = math.ceil(num_names / _MOST_ROWS)
    return f" One in {every:,} of the {num_names:,} parameters has a row." if every > 1 else ""


def no_points(name: str, points: Mapping[int, float]) -> str:
    """Why a curve has no point; empty if it has one."""
    if not points:
        return f"No {name} was recorded."
    if any(map(math.isfinite, points.values())):
        return ""
    where = f"all {len(points):,} steps" if len(points) > 1 else "the one step"
    return f"The {name} is NaN or Inf at {where} where it was seen."


def no_gradients(run: Run) -> str:
    """Why no gradient can be placed by its size; empty if one can."""
    if any(each.shares and each.histogram and any(each.histogram.counts) for each in run.samples):
        return ""
    shares = run.shares.values()
    if not shares:
        return f"No gradients were sampled in {run.num_steps:,} steps."
    what = "zero, NaN or Inf"
    if all(share.zero == 1 for share in shares):
        what = "zero"
    elif all(share.nonfinite == 1 for share in shares):
        what = "NaN or Inf"
    samples = f"all {len(shares):,} samples" if len(shares) > 1 else "the one sample"
    return f"All gradients are {what} in {samples}."


def later_samples(run: Run, step: int) -> str:
    """What is said of samples after the one of a step that is drawn; empty if there are none."""
    later = sum(found > step for found in run.shares)
    if not later:
        return ""
    samples = f"the {later:,} later samples" if later > 1 else "the later sample"
    return f" In {samples} all gradients are zero, NaN or Inf."
