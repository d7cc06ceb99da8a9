"""Optimizers that unscale and skip by themselves, from attributes or from an argument of ``step``.

In torch these are the fused ones. They have ``_step_supports_amp_scaling``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from gradscaler._eager.operations import Optimizer, Tensor
from gradscaler._eager.record import OptimizerRecord

_KNOWN_STEPS: WeakKeyDictionary[FunctionType, bool] = WeakKeyDictionary()


def step_with(
    optimizer: Optimizer,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    record: OptimizerRecord,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``optimizer.step`` with the two attributes, which an interrupt does not leave behind."""
    try:
        optimizer.grad_scale = grad_scale
        optimizer.found_inf = found_inf
        result = record.apply(optimizer.step, *args, **kwargs)
        del optimizer.grad_scale, optimizer.found_inf
    except BaseException:
        for name in ("grad_scale", "found_inf"):
            if hasattr(optimizer, name):
                delattr(optimizer, name)
        raise
    return result


def may_raise_after_its_kernel(optimizer: Optimizer) -> bool:
    """Whether an Exception of ``step`` may come after a kernel unscaled gradients."""
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", ())
    return bool(hooks) or len(optimizer.param_groups) > 1


def takes_grad_scaler(step: Callable[..., Any]) -> bool:
    """Whether a step method has a parameter of that name; inspecting takes as long as a step."""
    function = getattr(step, "__func__", step)
    takes = _KNOWN_STEPS.get(function) if isinstance(function, FunctionType) else None
    if takes is None:
        takes = "grad_scaler" in inspect.signature(step).parameters
        if isinstance(function, FunctionType):
            _KNOWN_STEPS[function] = takes
    return takes
