"""A replay of a failing step that the user records, which locates its first Inf or NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from gradscaler.diagnose._locate.jaxpr import locate_jax
from gradscaler.diagnose._locate.locate import locate
from gradscaler.diagnose._monitor.step_log import StepLog
from gradscaler.diagnose._operations.rows import canonical
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._record.step import Step
from gradscaler.diagnose._record.thresholds import REPLAYED_SKIP, SUSPICIOUS_SKIPS
from gradscaler.diagnose._seams.keras import is_keras
from gradscaler.policies import Scalar

Replay = Callable[[], Sequence[Any]]

# A replay runs primitive by primitive, and may take minutes. A failure that three replays do not
# show again comes from what they leave out, such as random numbers or parameters that have moved.
MOST_IN_VAIN = 3


class Replays:
    """Replays failing steps until one is located.

    Attributes:
        located: the origin of the first Inf or NaN in the latest streak of failing steps; None if
            unknown.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        # How many more replays may show nothing, of steps that failed (True) or may have.
        self._num_left = {True: MOST_IN_VAIN, False: MOST_IN_VAIN}
        self._has_failed = False
        self._num_unexplained = 0  # skips after an applied step, since the scale last grew
        self._num_in_a_row = 0
        self._last = Step(log.counts.step, math.inf, skipped=True)  # that was looked at
        self.located: Located | None = None

    def must_know(self, scalar: Scalar) -> bool:
        """Whether to read each step at once, to replay it if it fails.

        On a device this waits for the step, so nothing is read at once before a first failure.
        """
        has_failed = _is_on_host(scalar) or self._has_failed
        may_have_failed = _is_on_host(scalar) or self._num_unexplained >= SUSPICIOUS_SKIPS
        left = self._num_left
        return bool(has_failed and left[True]) or bool(may_have_failed and left[False])

    def see_latest(self, replay: Replay) -> None:
        """Replay the log's latest step if it failed, or may have."""
        latest = self._log.history[-1]
        new = takewhile(lambda step: step.step > self._last.step, reversed(self._log.history))
        for step in reversed(list(new)):
            self._see(step)
        has_failed = self._log.has_failed(latest) or self._log.needs_verdict
        if not (latest.skipped or latest.has_bad_loss):
            self.located = None
        elif self._num_left[has_failed] and self._is_wanted(latest):
            self._locate(replay, has_failed)

    def locate(self, replay: Replay) -> Located | None:
        """Locate the failure of a step by its replay, unless three replays have shown nothing."""
        self.located = None
        if self._num_left[True]:
            self._locate(replay, has_failed=True)
        return self.located

    def _see(self, step: Step) -> None:
        before, self._last = self._last, step
        self._has_failed |= self._log.has_failed(step)
        if step.scale > before.scale:
            self._num_unexplained = 0
        self._num_unexplained += step.skipped and not before.skipped
        self._num_in_a_row = self._num_in_a_row + 1 if step.skipped else 0

    def _is_wanted(self, latest: Step) -> bool:
        """Whether the latest step is the first failure, or decides a verdict without a place."""
        is_again = self._num_unexplained >= SUSPICIOUS_SKIPS or self._num_in_a_row == REPLAYED_SKIP
        is_suspicious = is_again and latest.nonfinite is None
        # NaN without Inf in the very first steps may be an overflow yet, which a replay rules out.
        is_failure = self._log.has_failed(latest) or latest.is_hopeless or is_suspicious
        is_first = self._log.counts.evidence.watched is None and is_failure
        return is_first or (self._log.needs_verdict and self.located is None)

    def _locate(self, replay: Replay, has_failed: bool) -> None:
        """Locate the failure; if that raises, warn, and replay no more: the training goes on."""
        self._num_left[has_failed] -= 1
        try:
            found = located_in(*replay())
        except Exception as error:
            self._num_left = dict.fromkeys(self._num_left, 0)
            self._log.teller.warn_of_replay(error)
            return
        if found is not None:
            self.located, self._num_left[has_failed] = found, MOST_IN_VAIN
            self._log.add_watched(found)


def located_in(first: Any, *rest: Any) -> Located | None:
    """Locate in a function of JAX and its arguments, or in a model and its closure."""
    methods = "named_modules", "cells_and_names"  # of PyTorch and MindSpore
    is_model = is_keras(first) or any(hasattr(first, method) for method in methods)
    find: Callable[..., Located | None] = locate if is_model else locate_jax
    found = find(first, *rest)
    if found is not None and found.is_auxiliary:
        return None  # it is not why a step fails
    if found is None or found.operation is None:
        return found
    return replace(found, operation=canonical(found.operation))


def _is_on_host(scalar: Any) -> bool:
    """Whether reading a scalar of any of the frameworks, or of Python, waits for no device."""
    devices = getattr(scalar, "devices", None)  # JAX's
    if callable(devices):
        return all(device.platform == "cpu" for device in devices())
    if hasattr(scalar, "asnumpy"):  # MindSpore's
        return str(scalar.device).startswith("CPU")
    device = getattr(scalar, "device", None)
    if isinstance(device, str):  # TensorFlow's, such as "/job:localhost/replica:0/device:CPU:0"
        return "CPU" in device
    return bool(getattr(scalar, "is_cpu", True))  # PyTorch's
