"""Losses of a script that makes no optimizer, and may move its weights by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from gradscaler._run_script.models import models_of
from gradscaler._run_script.voice import voice
from gradscaler.diagnose._findings.advice import of_result, seen_in
from gradscaler.diagnose._gradients.arrays import has_numbers
from gradscaler.diagnose._graph.call_origins import CallOrigins
from gradscaler.diagnose._graph.lines import Tracebacks
from gradscaler.diagnose._graph.nodes import in_order, is_leaf
from gradscaler.diagnose._graph.places import Places
from gradscaler.diagnose._graph.reader import GraphReader
from gradscaler.diagnose._monitor.models import one_model
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._record.thresholds import EXPLODED

_LOWER = "lower the rate of these updates, or clip the gradients before them."


class HandUpdates:
    """Looks for the first loss that is Inf or NaN, before each backward pass on a CPU.

    Attributes:
        cause: what was found; empty if nothing was.
        action: what to do.
    """

    def __init__(self) -> None:
        self._num_passes = 0
        self._finite: list[float] = []  # the first loss and the latest
        self.cause = self.action = ""
        self._is_told = False  # on the way

    def note(self, losses: Sequence[Any]) -> None:
        """Read the losses of a backward pass, and say once that one is Inf or NaN."""
        self._num_passes += 1
        for loss in losses:
            is_real = has_numbers(loss) and loss.is_floating_point()
            if self.cause or not is_real or loss.device.type != "cpu":
                continue
            value = float(loss.detach())
            if math.isfinite(value):
                self._finite[1:] = [value]
            else:
                self._tell(loss, value)

    def _tell(self, loss: Any, value: float) -> None:
        located, before = _origin_in(loss), ""
        first, last = (self._finite[0], self._finite[-1]) if self._finite else (0.0, 0.0)
        if has_grown := 0 < EXPLODED * abs(first) < abs(last):
            before = f", after it grew from {first:g} to {last:g}"
        parameter = None if located is None else located.bad_parameter
        seen = f", as {parameter} is itself Inf or NaN" if parameter else seen_in(located)
        advice = of_result(located)
        self.cause = (
            f"The loss is {value:g} in backward pass {self._num_passes}{seen}{before}. No "
            "optimizer is seen, so the script seems to move its weights by hand."
        )
        self.action = f"{_LOWER[0].upper()}{_LOWER[1:]}"
        if advice and not (has_grown or parameter):
            self.action = f"{advice[0].upper()}{advice[1:]}; or {_LOWER}"
        self._is_told = voice.tell(f"{self.cause} {self.action}")

    def conclude(self) -> bool:
        """Say the last word on what was found; False if nothing was."""
        if self.cause:
            voice.conclude(
                f"as said above: {self.cause}" if self._is_told else f"{self.cause} {self.action}"
            )
        return bool(self.cause)


def _origin_in(loss: Any) -> Located | None:
    """Where the Inf or NaN of a loss began, as far as its graph shows; it has no lines."""
    with suppress(Exception):
        nodes = in_order(loss)
        leaves = [node.variable for node in nodes if is_leaf(node)]
        stand_in: Any = SimpleNamespace(param_groups=[{"params": leaves}])
        places = Places(one_model(models_of([stand_in])))
        return GraphReader(nodes, Tracebacks(), places, CallOrigins(places)).forward(loss)
    return None
