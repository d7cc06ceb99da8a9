"""The command line's side of ``simulate``: parses policies, and shows replays as a report."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose.report._content import Content, Course, Headline, Table
from gradscaler.diagnose.report._words import number, percent, shown
from gradscaler.diagnose.simulate._replay import Replay
from gradscaler.policies import DynamicScale, OwnPolicy, Policy

HEADINGS = ("policy", "skipped", "flushed", "lost", "subnormal", "back after", "at most", "at last")

_PRESETS = tuple(
    name
    for kind in DynamicScale.__mro__
    for name, found in vars(kind).items()
    if isinstance(found, classmethod)
)
_CLASSES = {kind.__name__: kind for kind in sorted(get_args(OwnPolicy), key=str)}
NAMES = (*_PRESETS, *_CLASSES)
"""The names that a policy can be given by."""
_MAKERS: dict[str, Callable[..., Policy]] = {
    **{f"DynamicScale.{name}": getattr(DynamicScale, name) for name in _PRESETS},
    **{name: getattr(DynamicScale, name) for name in _PRESETS},
    **_CLASSES,
}


def policy_of(text: str) -> Policy:
    """Make a policy from the name of a preset or a class, or from a call of it with literals.

    A preset may also be written as in Python, such as ``DynamicScale.paddle()``. The text is only
    parsed, never run as code.

    Raises:
        ValueError: the text is something else, or the policy rejects its parameters.

    >>> policy_of("AmaxScale(margin=10)").margin
    10
    >>> policy_of("torch(1024.0, growth_interval=100)").init_scale
    1024.0
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        make = _MAKERS[ast.unparse(call.func)]
        positional = [ast.literal_eval(value) for value in call.args]
        named: dict[Any, Any] = {key.arg: ast.literal_eval(key.value) for key in call.keywords}
    except (SyntaxError, ValueError, KeyError, RecursionError, MemoryError):
        raise ValueError(
            f"{text!r} is not a policy: write one of {', '.join(NAMES)}, or one of them with "
            "numbers as parameters, such as AmaxScale(margin=10)"
        ) from None
    try:
        return make(*positional, **named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text}: {error}") from None


def content_of_replays(
    replays: Mapping[str, Replay], title: str = "Policies side by side"
) -> Content:
    """The report on replays: a summary of the trace, the table, and each policy's course."""
    replay = next(iter(replays.values()))
    is_bad = replay.trace.is_bad
    spikes = sum(not is_bad[start:stop].all() for start, stop, _ in replay.spikes)
    text = (
        f"Steps: {is_bad.size:,}. Bad batches, non-finite at any scale: {int(is_bad.sum()):,}. "
        f"Spikes of large gradients: {spikes:,}. Flushed: gradients rounded to zero. Lost, "
        "subnormal: shares of their magnitude. Back after, at most: steps until the scale is back "
        "after bad batches or a spike, median and most."
    )
    table = Table("What each policy would have done", HEADINGS, rows_of(replays), names=0)
    courses = {name: _course_of(replay) for name, replay in replays.items()}
    return Content(Headline("good", title), text, [table], "", courses, None, [])


def rows_of(replays: Mapping[str, Replay]) -> list[tuple[str, ...]]:
    """A row of texts for each replay, with the columns of ``HEADINGS``.

    ``flushed`` is a share of the gradients; ``lost`` and ``subnormal`` are shares of the sum of
    their magnitudes. ``back after`` is the median number of steps until the scale is back after bad
    batches or a spike; ``at most`` is the largest such number. ``at last`` is the last scale.
    """
    return [
        (
            shown(name),
            f"{replay.num_skipped:,}",
            *map(_share, (replay.mean(f"flushed{what}") for what in ("", "_magnitude"))),
            _share(replay.mean("subnormal_magnitude")),
            *_recovery(replay),
            number(float(replay.scales[-1])),
        )
        for name, replay in replays.items()
    ]


def _course_of(replay: Replay) -> Course:
    """The course of a replay, with the magnitude that it flushed in each step it did not skip."""
    lost = _turns(100 * replay.flushed_magnitude)
    curves = {
        "Flushed magnitude, %": {n: share for n, share in lost.items() if not math.isnan(share)}
    }
    skipped = (np.flatnonzero(replay.skipped) + 1).tolist()
    steps = replay.trace.num_steps
    return Course(steps, _turns(replay.scales), skipped, curves, {}, "float16")


def _turns(values: NDArray[Any]) -> dict[int, float]:
    """The values by step; a value equal to both its neighbours is left out."""
    differs = np.diff(values) != 0
    kept = np.flatnonzero(np.r_[True, differs] | np.r_[differs, True])
    return dict(zip((kept + 1).tolist(), values[kept].tolist(), strict=True))


def _recovery(replay: Replay) -> tuple[str, str]:
    """The median and the largest number of steps to recover; ``"never"`` without a recovery."""
    steps = sorted(math.inf if s.recovery is None else s.recovery for s in replay.spikes)
    if not steps:
        return "-", "-"
    middle, most = (
        "never" if math.isinf(value) else f"{value:,.0f}"
        for value in (steps[len(steps) // 2], steps[-1])
    )
    return middle, most


def _share(value: float) -> str:
    return "-" if math.isnan(value) else percent(value)
