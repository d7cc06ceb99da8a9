"""A replay of a failing step that the user records, which locates its first Inf or NaN."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from gradscaler.diagnose._locate.jaxpr import locate_jax
from gradscaler.diagnose._locate.locate import locate
from gradscaler.diagnose._monitor.step_log import StepLog
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._record.step import Step
from gradscaler.policies import Scalar

Replay = Callable[[], Sequence[Any]]

# A replay runs primitive by primitive, and may take minutes. A failure that three replays do not
# show again comes from what they leave out, such as random numbers or parameters that have moved.
_MOST_IN_VAIN = 3
# The names that users, and the advice, know.
_CALLED = {
    "conv_general_dilated": "conv",
    "convert_element_type": "to",
    "dot_general": "matmul",
    "erf_inv": "erfinv",
    "integer_pow": "pow",
    "reduce_sum": "sum",
}


class Replays:
    """Replays failing steps until one is located.

    Attributes:
        located: the origin of the first Inf or NaN in the latest streak of failing steps; None if
            unknown.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._num_left = _MOST_IN_VAIN
        self._has_failed = False
        self._seen = log.counts.step  # the last step that was looked at
        self.located: Located | None = None

    def must_know(self, scalar: Scalar) -> bool:
        """Whether to read each step at once, to replay it if it fails.

        On a device this waits for the step, so nothing is read at once before a first failure.
        """
        return bool(self._num_left) and (self._has_failed or _is_on_host(scalar))

    def see_latest(self, replay: Replay) -> None:
        """Replay the log's latest step if it failed."""
        latest = self._log.history[-1]
        new = takewhile(lambda step: step.step > self._seen, reversed(self._log.history))
        self._has_failed |= any(map(self._log.has_failed, new))
        self._seen = latest.step
        if not (latest.skipped or latest.has_bad_loss):
            self.located = None
        elif self._num_left and self._is_wanted(latest):
            self._locate(replay)

    def _is_wanted(self, latest: Step) -> bool:
        """Whether the latest step is the first failure, or decides a verdict without a place."""
        is_first = self._log.counts.evidence.watched is None and self._log.has_failed(latest)
        return is_first or (self._log.needs_verdict and self.located is None)

    def _locate(self, replay: Replay) -> None:
        """Locate the failure; if that raises, warn, and replay no more: the training goes on."""
        self._num_left -= 1
        try:
            found = _located(*replay())
        except Exception as error:
            self._num_left = 0
            what = f"replay is called no more, and the training continues: {error!r}"
            warnings.warn(RuntimeWarning(what), stacklevel=2)
            return
        if found is not None:
            self.located, self._num_left = found, _MOST_IN_VAIN
            self._log.add_watched(found, {})


def _located(first: Any, *rest: Any) -> Located | None:
    """Locate in a function of JAX and its arguments, or in a PyTorch model and its closure."""
    find: Callable[..., Located | None] = locate if hasattr(first, "named_modules") else locate_jax
    found = find(first, *rest)
    if found is None or found.operation is None:
        return found
    return replace(found, operation=_CALLED.get(found.operation, found.operation))


def _is_on_host(scalar: Any) -> bool:
    """Whether reading a scalar of JAX, PyTorch or Python waits for no device."""
    devices = getattr(scalar, "devices", None)  # JAX's
    if callable(devices):
        return all(device.platform == "cpu" for device in devices())
    return bool(getattr(scalar, "is_cpu", True))  # PyTorch's
