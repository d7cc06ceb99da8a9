"""The loss scaling of an engine of DeepSpeed's, which announces what a scaler would announce."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gradscaler.outcome import Observer, StepOutcome
from gradscaler.policies import DynamicScale, FixedScale

Engine = Any


class EngineScaler:
    """Announces the losses and the steps of an engine, as a scaler of ours does.

    The engine says whether it has applied a step, and at which scale. Its optimizer shows neither:
    it is not called where gradients overflow, and its weights are copies, which under ZeRO 3 are
    there in its step alone. Nor are there gradients after a backward pass that could be read.

    Attributes:
        model: the model of the engine.
        policy: the rule of the scale.
        scale: the present scale.
    """

    framework, is_enabled = "torch", True

    def __init__(self, engine: Engine) -> None:
        self.model = engine.module
        self.scale = float(engine.optimizer.loss_scale)
        is_dynamic = engine.fp16_enabled() and engine.dynamic_loss_scale()
        rule: Callable[..., Any] = DynamicScale.deepspeed
        given = engine.dynamic_loss_scale_args() or {} if is_dynamic else {"scale": self.scale}
        self.policy = (rule if is_dynamic else FixedScale)(**given)
        self._observers: list[Observer] = []

    @staticmethod
    def announces(engine: Engine) -> bool:
        """Whether only an engine itself can say which of its steps were applied."""
        is_split = engine.zero_optimization_stage() == 3
        has_scale = hasattr(engine.optimizer, "loss_scale")
        return bool(has_scale and (is_split or engine.fp16_enabled()))

    @property
    def observed(self) -> EngineScaler:
        """The scaling, as observers see it."""
        return self

    @property
    def state(self) -> EngineScaler:
        """The state, which is the scale alone."""
        return self

    def last_steps(self) -> list[tuple[Any, StepOutcome]]:
        """No steps, as none can be missed."""
        return []

    def is_mixed(self, optimizer: object) -> bool:
        """False, as no gradient can be read."""
        return False

    def total_norm(self, optimizer: object) -> float:
        """NaN, as no gradient can be read."""
        return math.nan

    def add_observer(self, observer: Observer) -> None:
        """Announce all calls to an observer from now on."""
        self._observers.append(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Announce nothing more to an observer."""
        if observer in self._observers:
            self._observers.remove(observer)

    def scaled(self, loss: object) -> None:
        """Announce a loss before its backward pass."""
        for each in self._observers[:]:
            each.scaled(loss)

    def stepping(self, engine: Engine) -> None:
        """Announce that the engine's optimizer steps, or skips its step."""
        for each in self._observers[:]:
            each.stepping(engine.optimizer, None)

    def stepped(self, engine: Engine) -> None:
        """Announce what the engine has done."""
        outcome = StepOutcome(self.scale, not engine.was_step_applied())
        self.scale = float(engine.optimizer.loss_scale)
        for each in self._observers[:]:
            each.stepped(engine.optimizer, outcome)
            each.updating()
            each.updated()
