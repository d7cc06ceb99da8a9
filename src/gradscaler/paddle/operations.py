"""The tensor operations of Paddle that the engine is written in.

A step of Paddle's reads found_inf on the host in any case, and reading a tensor costs more than
the whole rule, so the state is kept there: a NumPy float32 and two ints.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import paddle
from paddle import _C_ops

from gradscaler.operations import FoundInf
from gradscaler.policies import Policy, ScaleState

Tensor = Any

_HALF = (paddle.float16, paddle.bfloat16)


def is_tensor(value: object) -> bool:
    return isinstance(value, paddle.Tensor)


def scale_tensor(scale: float) -> Tensor:
    """The scale as Paddle's own scaler keeps it: float32, of shape [1], on the current device."""
    return paddle.full([1], float(scale), dtype="float32")


def multiply(output: Tensor, scale: np.float32) -> Tensor:
    return output * scale_tensor(scale)


def place(state: ScaleState, device: Any) -> ScaleState:
    return state


def read(state: ScaleState) -> ScaleState:
    return state


def advance(policy: Policy, state: ScaleState, found_infs: list[FoundInf]) -> ScaleState:
    return policy.update(state, any(map(any_set, found_infs)))


def copy(state: ScaleState) -> ScaleState:
    return state


def any_set(found_inf: FoundInf) -> bool:
    return any(map(bool, found_inf.values()))


def parameters_of(optimizer: Any) -> list[Tensor]:
    """The optimizer's parameters, in the order of its groups."""
    groups = getattr(optimizer, "_param_groups", None)
    if groups and isinstance(groups[0], dict):
        return [parameter for group in groups for parameter in group["params"]]
    return list(optimizer._parameter_list or ())


def gradients(optimizer: Any) -> dict[Any, list[Tensor]]:
    """The optimizer's gradients by dtype."""
    by_dtype: dict[Any, list[Tensor]] = {}
    for parameter in parameters_of(optimizer):
        grad = parameter._grad_ivar()
        if grad is not None:
            if grad.is_selected_rows():
                raise NotImplementedError(
                    f"the gradient of {parameter.name} is sparse: Paddle cannot unscale it"
                )
            by_dtype.setdefault(grad.dtype, []).append(grad)
    return by_dtype


@paddle.no_grad()
def unscale_(optimizer: Any, scale: np.float32) -> dict[str, Tensor]:
    """Divide the gradients by ``scale`` in place; one flag of shape [1], or none without any."""
    flag = None
    for dtype, grads in gradients(optimizer).items():
        on_cpu = grads[0].place.is_cpu_place()
        # The kernel takes any gradient for a contiguous one, and has none for halves on the CPU.
        fit = [g for g in grads if g.is_contiguous() and not (dtype in _HALF and on_cpu)]
        rest = [g for g in grads if not g.is_contiguous() or (dtype in _HALF and on_cpu)]
        founds = []
        if rest:
            founds.append(
                paddle.stack([~paddle.isfinite(g).all() for g in rest]).any().reshape([1])
            )
            for grad in rest:
                if dtype in _HALF:
                    _multiply_half_(grad, 1.0 / float(scale))
                else:
                    grad.scale_(1.0 / float(scale))
        if fit:
            scale_dtype = paddle.float64 if dtype == paddle.float64 else paddle.float32
            divisor = paddle.full([1], float(scale), dtype=scale_dtype)
            founds.append(_C_ops.check_finite_and_unscale_(fit, divisor)[1])
        for found in founds:
            flag = found if flag is None else _C_ops.bitwise_or(flag, found)
    return {} if flag is None else {"found_inf": flag}


def _multiply_half_(grad: Tensor, factor: float) -> None:
    """Multiply in float32 and round once: the factor itself may be out of a half's range."""
    grad.set_value(grad.astype("float32").scale(factor).astype(grad.dtype))


@paddle.no_grad()  # type: ignore[untyped-decorator] # Paddle's is not typed
def total_norm(optimizer: Any, norm_type: float) -> Tensor:
    grads = [grad for group in gradients(optimizer).values() for grad in group]
    if not grads:
        return paddle.zeros([])
    norm = paddle.linalg.vector_norm
    wide = "float64" if any(g.dtype == paddle.float64 for g in grads) else "float32"
    norms = [norm(grad.astype(wide), norm_type) for grad in grads]
    return norm(paddle.stack(norms), norm_type)


def clip_coefficient(max_norm: float, norm: Tensor) -> Tensor:
    return paddle.clip(max_norm / (norm + 1e-6), max=1.0)


@paddle.no_grad()  # type: ignore[untyped-decorator] # Paddle's is not typed
def multiply_gradients_(optimizer: Any, factor: Tensor) -> None:
    for grads in gradients(optimizer).values():
        for grad in grads:
            if grad.dtype in _HALF:
                _multiply_half_(grad, float(factor))
            else:
                grad.scale_(float(factor))


def clear_gradients(optimizer: Any) -> None:
    for parameter in parameters_of(optimizer):
        parameter.clear_gradient(False)


def _copied(value: Any, tensors: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """Containers copied, their tensors kept, and remembered with their values."""
    if isinstance(value, paddle.Tensor):
        tensors.setdefault(id(value), (value, value.detach().clone()))
        return value
    if isinstance(value, dict):
        twin = copying.copy(value)
        twin.update((key, _copied(item, tensors)) for key, item in value.items())
        return twin
    if isinstance(value, (list, set)):
        return type(value)(_copied(item, tensors) for item in value)
    return value


def snapshot(optimizer: Any) -> Callable[[], None]:
    tensors: dict[int, tuple[Tensor, Tensor]] = {}
    for parameter in parameters_of(optimizer):
        _copied(parameter, tensors)
    saved = {
        name: _copied(value, tensors)
        for name, value in vars(optimizer).items()
        if isinstance(value, (dict, list, set))
        and name not in ("_parameter_list", "_param_groups", "_params")
    }

    def restore() -> None:
        vars(optimizer).update(saved)
        for tensor, value in tensors.values():
            tensor.set_value(value)

    return restore


def enable_grad() -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = paddle.enable_grad()
    return context
