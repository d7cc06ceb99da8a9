"""Optimizers that unscale and skip by themselves, and a ``_maybe_opt_step`` that users replace.

In torch the former are the fused ones, which have ``_step_supports_amp_scaling``. They read two
attributes, ``grad_scale`` and ``found_inf``, or, as PyTorch deprecates, take the scaler itself.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from gradscaler._eager.gradients import Gradients, Scaling
from gradscaler._eager.operations import Optimizer, Tensor
from gradscaler._eager.stages import Stage
from gradscaler._torch_like.operations import TorchLikeOperations

_KNOWN_STEPS: WeakKeyDictionary[FunctionType, bool] = WeakKeyDictionary()


class ByReplacement:
    """Steps by a ``_maybe_opt_step`` that a subclass or a user has put in place of ours."""

    takes_scaled = False

    def __init__(self, maybe_opt_step: Callable[..., Any]) -> None:
        self._maybe_opt_step = maybe_opt_step

    def step(
        self,
        optimizer: Optimizer,
        gradients: Gradients,
        scaling: Scaling,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        # Here, as it does not know of clipping. Otherwise it alone reads the flags.
        if gradients.clip_coefficient is not None and not gradients.have_overflowed:
            gradients.multiply()
        gradients.overflowed = None  # it may change the flags
        return self._maybe_opt_step(optimizer, gradients, *args, **kwargs)


class ByArgument:
    """Steps an optimizer that takes the scaler as an argument, and calls it back."""

    takes_scaled = True

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def step(
        self,
        optimizer: Optimizer,
        gradients: Gradients,
        scaling: Scaling,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument, grad_scaler=: "
            "let the optimizer read its attributes grad_scale and found_inf",
            FutureWarning,
            stacklevel=4,
        )
        scaler = self._scaler
        in_force = scaler._state
        scaler._state = gradients.made_with or in_force  # which it asks for the scale
        try:
            return gradients.apply(optimizer.step, args, {**kwargs, "grad_scaler": scaler})
        finally:
            scaler._state = in_force


class ByAttributes:
    """Steps an optimizer that reads the scale and the flag from two attributes of its own.

    Nothing waits for the device, but for a first step that must not be skipped on it.
    """

    takes_scaled = True

    def __init__(self, scaler: Any, operations: TorchLikeOperations) -> None:
        self._scaler, self._operations = scaler, operations

    def step(
        self,
        optimizer: Optimizer,
        gradients: Gradients,
        scaling: Scaling,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        scaler, operations = self._scaler, self._operations
        if gradients.stage is Stage.SCALED:
            scaler._check_inf_per_device(optimizer)
            gradients = scaler._iteration.kept(gradients)
        if operations.on_host(scaling.scale):  # on a device, nothing waits for the flag
            gradients.overflowed = gradients.have_overflowed
        if gradients.overflowed and gradients.are_measured:
            scaler.unscale_(optimizer)  # for the optimizer will skip, and leave them scaled
            gradients.clip_coefficient = None
        grad_scale = self._grad_scale(optimizer, gradients, scaling)
        is_finite = gradients.overflowed is False
        if not gradients.found_inf or (
            not is_finite
            and operations.first_step_must_be_finite(optimizer)
            and gradients.have_overflowed
        ):
            if hasattr(optimizer, "grad_scale"):
                del optimizer.grad_scale  # which is for one step alone
            return None
        if not gradients.is_scaled:  # else the kernel does it, in the pass that it makes anyway
            gradients.multiply()
        flag = None
        if not (is_finite and operations.needs_no_unset_flag(optimizer)):
            flag = operations.combine([gradients.found_inf], scaling.scale.device)
        try:
            return _step_with(optimizer, grad_scale, flag, gradients, args, kwargs)
        except BaseException as error:
            is_interrupt = not isinstance(error, Exception)
            if not gradients.result and (is_interrupt or _may_raise_after_its_kernel(optimizer)):
                gradients.interrupt()  # the kernel may have unscaled some
            raise

    def _grad_scale(
        self, optimizer: Optimizer, gradients: Gradients, scaling: Scaling
    ) -> Tensor | None:
        """What the kernel divides by: the scale, and what clipping and the user put in."""
        if not gradients.is_scaled:
            return getattr(optimizer, "grad_scale", None)
        grad_scale = gradients.scale = scaling.scale.clone()
        if gradients.clip_coefficient is not None:
            grad_scale = grad_scale / gradients.clip_coefficient
        if hasattr(optimizer, "grad_scale"):
            grad_scale = grad_scale * optimizer.grad_scale
        return grad_scale


def takes_grad_scaler(step: Callable[..., Any]) -> bool:
    """Whether a step method has a parameter of that name; inspecting takes as long as a step."""
    function = getattr(step, "__func__", step)
    takes = _KNOWN_STEPS.get(function) if isinstance(function, FunctionType) else None
    if takes is None:
        takes = "grad_scaler" in inspect.signature(step).parameters
        if isinstance(function, FunctionType):
            _KNOWN_STEPS[function] = takes
    return takes


def _step_with(
    optimizer: Optimizer,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    gradients: Gradients,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``optimizer.step`` with the two attributes, which an interrupt does not leave behind."""
    try:
        optimizer.grad_scale = grad_scale
        optimizer.found_inf = found_inf
        result = gradients.apply(optimizer.step, args, kwargs)
        del optimizer.grad_scale, optimizer.found_inf
    except BaseException:
        for name in ("grad_scale", "found_inf"):
            if hasattr(optimizer, name):
                delattr(optimizer, name)
        raise
    return result


def _may_raise_after_its_kernel(optimizer: Optimizer) -> bool:
    """Whether an Exception of ``step`` may come after a kernel unscaled gradients."""
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", ())
    return bool(hooks) or len(optimizer.param_groups) > 1
