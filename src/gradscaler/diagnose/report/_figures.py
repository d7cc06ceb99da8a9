"""The figures of a run."""

from __future__ import annotations

from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose.report._by_size import by_size
from gradscaler.diagnose.report._over_time import over_time
from gradscaler.diagnose.report._style import Drawing
from gradscaler.diagnose.report._which_scale import which_scale


def drawings_of(run: Run) -> list[Drawing]:
    """The figures of a run that has steps."""
    if not run.num_steps:
        return []
    drawings = over_time(run), by_size(run), which_scale(run)
    return [drawing for drawing in drawings if drawing is not None]
