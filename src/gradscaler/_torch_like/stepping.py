"""Ways to step an optimizer other than by a plain ``optimizer.step()``.

PyTorch's fused optimizers unscale and skip by themselves: they have ``_step_supports_amp_scaling``.
They read their attributes ``grad_scale`` and ``found_inf``, or take the scaler as an argument,
which is deprecated. A subclass or a user may also have replaced ``_maybe_opt_step``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from gradscaler._eager.gradients import Gradients
from gradscaler._eager.iteration import Iteration
from gradscaler._eager.operations import Optimizer, Tensor
from gradscaler._eager.stages import Stage
from gradscaler._eager.stepping import StepCall
from gradscaler._torch_like.operations import TorchLikeOperations

_KNOWN_STEPS: WeakKeyDictionary[FunctionType, bool] = WeakKeyDictionary()


class SteppingScaler(Protocol):
    """The parts of a scaler that stepping a fused optimizer uses."""

    _iteration: Iteration

    def _showing(self, scale: Tensor, /) -> AbstractContextManager[None]: ...

    def unscale_(self, optimizer: Optimizer, /) -> None: ...

    def _check_inf_per_device(self, optimizer: Optimizer, /) -> object: ...


class ByReplacement:
    """Steps by the ``_maybe_opt_step`` of a subclass or a user."""

    takes_scaled = False

    def __init__(self, maybe_opt_step: Callable[..., object]) -> None:
        self._maybe_opt_step = maybe_opt_step

    def step(self, call: StepCall) -> Any:
        gradients = call.gradients
        # The method does not clip. Without clipping, only the method reads the flags.
        if gradients.clip_coefficient is not None and not gradients.have_overflowed:
            gradients.multiply()
        gradients.overflowed = None  # it may change the flags
        return self._maybe_opt_step(call.optimizer, gradients, *call.args, **call.kwargs)


class ByArgument:
    """Steps an optimizer that takes the scaler as an argument, and calls it back."""

    takes_scaled = True

    def __init__(self, scaler: SteppingScaler) -> None:
        self._scaler = scaler

    def step(self, call: StepCall) -> Any:
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument, grad_scaler=: "
            "let the optimizer read its attributes grad_scale and found_inf",
            FutureWarning,
            stacklevel=4,
        )
        kwargs = {**call.kwargs, "grad_scaler": self._scaler}
        with self._scaler._showing(call.gradient_scale.scale):  # the optimizer asks for it
            return call.gradients.apply(call.optimizer.step, call.args, kwargs)


class ByAttributes:
    """Steps an optimizer that reads the scale and the flag from two attributes of its own.

    An optimizer with an attribute ``clip_coefficient`` gets that too, and multiplies the gradients
    as ``unscale_`` would.

    This waits for the device only in a first step that the optimizer must not skip by itself.
    """

    takes_scaled = True

    def __init__(self, scaler: SteppingScaler, operations: TorchLikeOperations) -> None:
        self._scaler, self._operations = scaler, operations

    def step(self, call: StepCall) -> Any:
        scaler, operations = self._scaler, self._operations
        optimizer, gradients, scale = call.optimizer, call.gradients, call.gradient_scale.scale
        if gradients.stage is Stage.SCALED:
            scaler._check_inf_per_device(optimizer)
            gradients = scaler._iteration.find_or_record(gradients)
        if operations.on_host(scale):  # on a device, reading the flag would wait
            gradients.overflowed = gradients.have_overflowed
        if gradients.overflowed and gradients.stage is Stage.MEASURED:
            self._unscale_skipped(optimizer, gradients)
        grad_scale = self._grad_scale(optimizer, gradients, scale)
        is_finite = gradients.overflowed is False
        if not gradients.found_inf or (
            not is_finite
            and operations.first_step_must_be_finite(optimizer)
            and gradients.have_overflowed
        ):
            if hasattr(optimizer, "grad_scale"):
                del optimizer.grad_scale  # it was set for this step only
            return None
        if not gradients.is_scaled:  # else the kernel clips while it unscales
            gradients.multiply()
        flag = None
        if not (is_finite and operations.may_omit_flag(optimizer)):
            flag = operations.combine([gradients.found_inf], scale.device)
        try:
            call = call._replace(gradients=gradients)
            return _step_with(call, grad_scale, flag)
        except BaseException as error:
            is_interrupt = not isinstance(error, Exception)
            if not gradients.result and (is_interrupt or _may_raise_after_its_kernel(optimizer)):
                gradients.interrupt()  # the kernel may have unscaled some
            raise

    def _unscale_skipped(self, optimizer: Optimizer, gradients: Gradients) -> None:
        """Unscale for a step that the optimizer will skip, unless that would widen gradients."""
        if not hasattr(optimizer, "widen_gradients_"):
            self._scaler.unscale_(optimizer)
        gradients.clip_coefficient = None

    def _grad_scale(
        self, optimizer: Optimizer, gradients: Gradients, scale: Tensor
    ) -> Tensor | None:
        """The divisor for the kernel: scale / clip coefficient * the user's own ``grad_scale``."""
        if not gradients.is_scaled:
            return getattr(optimizer, "grad_scale", None)
        grad_scale = gradients.scale = scale.clone()
        takes_both = hasattr(optimizer, "clip_coefficient")
        if gradients.clip_coefficient is not None and not takes_both:
            grad_scale = grad_scale / gradients.clip_coefficient
        if hasattr(optimizer, "grad_scale"):
            grad_scale = grad_scale * optimizer.grad_scale
        return grad_scale


def takes_grad_scaler(step: Callable[..., object]) -> bool:
    """Whether a step method has a parameter ``grad_scaler``.

    The answer is cached, because inspecting a signature takes as long as a step.
    """
    function = getattr(step, "__func__", step)
    takes = _KNOWN_STEPS.get(function) if isinstance(function, FunctionType) else None
    if takes is None:
        takes = "grad_scaler" in inspect.signature(step).parameters
        if isinstance(function, FunctionType):
            _KNOWN_STEPS[function] = takes
    return takes


def _step_with(call: StepCall, grad_scale: Tensor | None, found_inf: Tensor | None) -> Any:
    """Call ``optimizer.step`` with the attributes set, and delete them whatever happens."""
    optimizer, gradients = call.optimizer, call.gradients
    try:
        optimizer.grad_scale = grad_scale
        optimizer.found_inf = found_inf
        if hasattr(optimizer, "clip_coefficient"):
            optimizer.clip_coefficient = gradients.clip_coefficient
        result = gradients.apply(optimizer.step, call.args, call.kwargs)
        del optimizer.grad_scale, optimizer.found_inf
        optimizer.__dict__.pop("clip_coefficient", None)
    except BaseException:
        for name in ("grad_scale", "found_inf", "clip_coefficient"):
            optimizer.__dict__.pop(name, None)
        raise
    return result


def _may_raise_after_its_kernel(optimizer: Optimizer) -> bool:
    """Whether ``step`` may raise an Exception after a kernel has unscaled gradients."""
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", ())
    return bool(hooks) or len(optimizer.param_groups) > 1
