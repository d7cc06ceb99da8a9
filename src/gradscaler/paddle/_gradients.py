"""The engine's gradients, readable as Paddle's dict; and the type of Paddle's optimizers."""

from __future__ import annotations

from typing import Any, Protocol

from paddle.amp.grad_scaler import OptimizerState

from gradscaler._eager.gradients import Gradients

_STAGES = {
    "READY": OptimizerState.INIT,
    "UNSCALED": OptimizerState.UNSCALED,
    "STEPPED": OptimizerState.STEPPED,
}


class PaddleGradients(Gradients):
    """Gradients that can be read and written like the dict that Paddle keeps for an optimizer."""

    def __getitem__(self, key: str) -> OptimizerState:
        if key != "state":
            raise KeyError(key)
        return _STAGES[self.framework_stage]

    def __setitem__(self, key: str, value: OptimizerState) -> None:
        if key != "state":
            raise KeyError(key)
        self.framework_stage = next(name for name, state in _STAGES.items() if state is value)


class PaddleOptimizer(Protocol):
    """An optimizer of Paddle's, or a wrapper around one, such as fleet's."""

    def step(self) -> Any:
        """Update the parameters."""

    def minimize(self, *args: Any, **kwargs: Any) -> Any:
        """Collect the gradients, and update the parameters."""
