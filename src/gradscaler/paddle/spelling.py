"""The names of ``paddle.amp.GradScaler``: getters, setters, and the private ones.

The private names are those that Fleet, group-sharded training and PaddleNLP reach for.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import paddle
from paddle.amp.grad_scaler import OptimizerState

from gradscaler._eager.operations import Tensor
from gradscaler._eager.record import FRAMEWORK_STAGES, OptimizerRecord
from gradscaler._eager.scaler import EagerScaler
from gradscaler.policies import DynamicScale, ScaleState, checks
from gradscaler.policies.presets import PADDLE
from gradscaler.policies.spelling import changed

_STAGES = {
    "READY": OptimizerState.INIT,
    "UNSCALED": OptimizerState.UNSCALED,
    "STEPPED": OptimizerState.STEPPED,
}


class PaddleRecord(OptimizerRecord):
    """A record that also reads and writes like the dict that Paddle keeps."""

    def __getitem__(self, key: str) -> OptimizerState:
        if key != "state":
            raise KeyError(key)
        return _STAGES[self.framework_stage]

    def __setitem__(self, key: str, value: OptimizerState) -> None:
        if key != "state":
            raise KeyError(key)
        name = next(name for name, state in _STAGES.items() if state is value)
        self.stage = FRAMEWORK_STAGES[name]


class PaddleOptimizer(Protocol):
    """An optimizer of Paddle's, or a wrapper around one, such as Fleet's."""

    def step(self) -> Any:
        """Update the parameters."""

    def minimize(self, *args: Any, **kwargs: Any) -> Any:
        """Collect the gradients, and update the parameters."""


class PaddleSpelling(EagerScaler[paddle.Tensor, PaddleOptimizer]):
    """An eager scaler whose state goes by Paddle's names."""

    _policy: DynamicScale
    _use_dynamic_loss_scaling: bool
    _init_loss_scaling: float

    # Getters and setters.

    def is_enable(self) -> bool:
        """Whether loss scaling is on; if not, every call passes through."""
        return self._enabled

    def is_use_dynamic_loss_scaling(self) -> bool:
        """Whether the scale moves."""
        return self._enabled and self._use_dynamic_loss_scaling

    def get_init_loss_scaling(self) -> float:
        """The initial scale, or the one that was set or loaded last; 1.0 if scaling is disabled."""
        return self._init_loss_scaling if self._enabled else 1.0

    def set_init_loss_scaling(self, new_init_loss_scaling: float) -> None:
        """Set the scale itself.

        Raises:
            ValueError, TypeError: it cannot be a loss scale; nothing changes.
        """
        bounds = self._policy.min_scale, self._policy.max_scale
        scale = checks.loss_scale("new_init_loss_scaling", new_init_loss_scaling, *bounds)
        self._init_loss_scaling = scale
        self._set_state(self._host_state()._replace(scale=np.float32(scale)))

    def get_incr_ratio(self) -> float:
        """What growth multiplies the scale by."""
        return self._policy.growth_factor

    def set_incr_ratio(self, new_incr_ratio: float) -> None:
        """Grow by ``new_incr_ratio``, > 1, from now on."""
        self._change_policy(incr_ratio=new_incr_ratio)

    def get_decr_ratio(self) -> float:
        """What a backoff multiplies the scale by."""
        return self._policy.backoff_factor

    def set_decr_ratio(self, new_decr_ratio: float) -> None:
        """Back off by ``new_decr_ratio``, in (0, 1), from now on."""
        self._change_policy(decr_ratio=new_decr_ratio)

    def get_incr_every_n_steps(self) -> int:
        """Finite steps in a row before growth."""
        return self._policy.growth_interval

    def set_incr_every_n_steps(self, new_incr_every_n_steps: int) -> None:
        """Grow after this many finite steps from now on, those already taken included."""
        self._change_policy(incr_every_n_steps=new_incr_every_n_steps)

    def get_decr_every_n_nan_or_inf(self) -> int:
        """Non-finite steps before a backoff."""
        return self._policy.hysteresis

    def set_decr_every_n_nan_or_inf(self, new_decr_every_n_nan_or_inf: int) -> None:
        """Back off at this many non-finite steps from now on, those already taken included."""
        self._change_policy(decr_every_n_nan_or_inf=new_decr_every_n_nan_or_inf)

    # The private names.

    @property
    def _enable(self) -> bool:
        return self._enabled

    @_enable.setter
    def _enable(self, enable: bool) -> None:
        self._enabled = enable

    @property
    def _scale(self) -> Tensor:
        scale = self._scale_in_use(self._host_state())
        return paddle.full([1], float(scale), dtype="float32")

    @_scale.setter
    def _scale(self, scale: Tensor) -> None:
        self._set_state(self._host_state()._replace(scale=np.float32(scale.item())))

    @property
    def _incr_count(self) -> int:
        return int(self._host_state().finite_steps)

    @_incr_count.setter
    def _incr_count(self, count: int) -> None:
        self._set_state(self._host_state()._replace(finite_steps=count))

    @property
    def _decr_count(self) -> int:
        return int(self._host_state().nonfinite_steps)

    @_decr_count.setter
    def _decr_count(self, count: int) -> None:
        self._set_state(self._host_state()._replace(nonfinite_steps=count))

    _incr_ratio = property(get_incr_ratio, set_incr_ratio)
    _decr_ratio = property(get_decr_ratio, set_decr_ratio)
    _incr_every_n_steps = property(get_incr_every_n_steps, set_incr_every_n_steps)
    _decr_every_n_nan_or_inf = property(get_decr_every_n_nan_or_inf, set_decr_every_n_nan_or_inf)

    @property
    def _optimizer_states(self) -> Any:
        return self._records

    @_optimizer_states.setter
    def _optimizer_states(self, records: Any) -> None:
        self._records = records

    # Shared.

    def _set_state(self, state: ScaleState) -> None:
        self._initial_state = self._state = state

    def _change_policy(self, **changes: Any) -> None:
        self._policy = changed(self._policy, PADDLE, **changes)
