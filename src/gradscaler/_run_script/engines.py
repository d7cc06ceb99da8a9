"""Engines of DeepSpeed, which scale their losses, and skip steps, by themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gradscaler._run_script.undo import replace
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._monitor.by_identity import ByIdentity
from gradscaler.diagnose._monitor.engine_scaler import EngineScaler


class Engines:
    """Lets the scalers of engines announce their losses and steps.

    Args:
        begin: called with a scaler before each of its losses.
        ended: called with it after each of its steps.
    """

    def __init__(
        self, begin: Callable[[EngineScaler], None], ended: Callable[[EngineScaler], None]
    ) -> None:
        self._begin, self._ended = begin, ended
        self._scalers = ByIdentity[EngineScaler | None]()  # None where others see the steps

    def watch(self) -> None:
        """Watch DeepSpeed's engines from now on."""
        kind = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
        see_loss, see_step = guarded(self._see_loss), guarded(self._see_step)
        see_stepped = guarded(self._see_stepped)
        step = kind.step

        def before(method: Any) -> Any:
            @in_place_of(method)
            def announced(engine: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
                see_loss(engine, loss)
                return method(engine, loss, *args, **kwargs)

            return announced

        @in_place_of(step)
        def stepped(engine: Any, *args: Any, **kwargs: Any) -> Any:
            num_before = getattr(engine, "global_steps", None)
            see_step(engine)
            result = step(engine, *args, **kwargs)
            if getattr(engine, "global_steps", None) != num_before:
                see_stepped(engine)
            return result

        for name in ("backward", "scale"):
            if hasattr(kind, name):  # an older engine has no scale()
                replace(kind, name, before(getattr(kind, name)))
        replace(kind, "step", stepped)

    def _see_loss(self, engine: Any, loss: Any) -> None:
        if engine not in self._scalers:
            announces = EngineScaler.announces(engine)
            self._scalers[engine] = EngineScaler(engine) if announces else None
        if (scaler := self._scalers.get(engine, None)) is not None:
            self._begin(scaler)
            scaler.scaled(loss)

    def _see_step(self, engine: Any) -> None:
        scaler = self._scalers.get(engine, None)
        if scaler is not None and engine.is_gradient_accumulation_boundary():
            scaler.stepping(engine)

    def _see_stepped(self, engine: Any) -> None:
        if (scaler := self._scalers.get(engine, None)) is not None:
            scaler.stepped(engine)
            self._ended(scaler)
