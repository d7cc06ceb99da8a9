"""The gradients of Paddle's optimizers, and ways to unscale them and to step."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import paddle
from paddle.amp.grad_scaler import OptimizerState

from gradscaler._eager.gradients import Gradients
from gradscaler._eager.operations import FoundInf, Optimizer, Tensor
from gradscaler._eager.stepping import StepCall
from gradscaler.paddle import _operations

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


class SteppingScaler(Protocol):
    """The parts of a scaler through which it shares found_inf."""

    _cache_found_inf: bool | None
    _temp_found_inf_value_false: Tensor


class OwnUnscaler:
    """Unscales by Paddle's operations.

    Args:
        optimizer: the optimizer that owns the gradients.
        is_plain: whether unscaling does nothing else. Fleet's replacement shares found_inf, too.
    """

    def __init__(self, optimizer: Optimizer, is_plain: bool) -> None:
        self._optimizer, self.is_plain = optimizer, is_plain

    def unscale_(self, inverse: np.float32) -> FoundInf:
        return _operations.unscale_(self._optimizer, inverse)

    def check(self) -> FoundInf:
        return _operations.check(self._optimizer)


class ByStep:
    """Steps by ``optimizer.step``, and shares found_inf as Paddle's own scaler does.

    Distributed optimizers read found_inf from an auxiliary variable of the optimizer, and set it if
    another process found an overflow. Wrappers around a scaler read its ``_cache_found_inf``.
    """

    takes_scaled = False
    method = "step"

    def __init__(self, scaler: SteppingScaler) -> None:
        self._scaler = scaler

    def step(self, call: StepCall) -> Any:
        scaler, optimizer, gradients = self._scaler, call.optimizer, call.gradients
        scaler._cache_found_inf = gradients.have_overflowed
        if not gradients.found_inf:
            return None
        result = None
        if not scaler._cache_found_inf:
            gradients.multiply()
            shares_flag = hasattr(optimizer, "_set_auxiliary_var")
            if shares_flag:
                optimizer._set_auxiliary_var("found_inf", self._unset_flag_for(optimizer))
            result = gradients.apply(getattr(optimizer, self.method), call.args, call.kwargs)
            if shares_flag:  # the optimizer may have found an overflow on another process
                flag = optimizer._get_auxiliary_var("found_inf")
                scaler._cache_found_inf = _operations.is_set(flag)
        gradients.found_inf = {"found_inf": scaler._cache_found_inf}  # on the host now
        gradients.overflowed = scaler._cache_found_inf
        return result

    def _unset_flag_for(self, optimizer: Optimizer) -> Tensor | bool:
        """The unset flag for an optimizer: a tensor, or False for Paddle's own optimizers.

        Paddle's own would convert the tensor to False, which takes as long as a small step. On an
        XPU they need the tensor, to ask whether it is distributed.
        """
        own = type(optimizer).__module__.startswith("paddle.optimizer.")
        plain = own and "xpu" not in paddle.device.get_device()
        return False if plain else self._scaler._temp_found_inf_value_false


class ByMinimize(ByStep):
    """Steps by ``optimizer.minimize``."""

    method = "minimize"

    def step(self, call: StepCall) -> Any:
        result = super().step(call)
        optimizer, gradients = call.optimizer, call.gradients
        if gradients.found_inf and not gradients.have_overflowed:
            return result
        # The return value of minimize() without its step: no operators, and the gradients.
        if not hasattr(optimizer, "backward"):
            return None, None
        return [], optimizer.backward(*call.args, **call.kwargs)
