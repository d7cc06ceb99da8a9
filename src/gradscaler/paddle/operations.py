"""The tensor operations of Paddle that the engine is written in.

A step of Paddle's reads found_inf on the host in any case, and reading a tensor costs more than
the whole rule, so the state is kept there: a NumPy float32 and two ints.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
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
    return _scale_tensor(float(scale), paddle.float32, paddle.get_device())


@lru_cache(maxsize=16)
def _scale_tensor(scale: float, dtype: Any, device: str) -> Tensor:
    return paddle.full([1], scale, dtype=dtype)


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
            by_dtype.setdefault(grad.dtype, []).append(grad)
    return by_dtype


def unscale_(optimizer: Any, scale: np.float32) -> dict[str, Tensor]:
    """Divide the gradients by ``scale`` in place; one flag of shape [1], or none without any."""
    flag = None
    for dtype, grads in gradients(optimizer).items():
        if dtype in _HALF and grads[0].place.is_cpu_place():  # has no kernel for these
            found = (
                paddle.stack([~paddle.isfinite(grad).all() for grad in grads]).any().reshape([1])
            )
            for grad in grads:
                grad.scale_(1.0 / float(scale))
        else:
            scale_dtype = paddle.float64 if dtype == paddle.float64 else paddle.float32
            divisor = _scale_tensor(float(scale), scale_dtype, paddle.get_device())
            _, found = _C_ops.check_finite_and_unscale_(grads, divisor)
        flag = found if flag is None else _C_ops.bitwise_or(flag, found)
    return {} if flag is None else {"found_inf": flag}


@paddle.no_grad()  # type: ignore[untyped-decorator] # Paddle's is not typed
def total_norm(optimizer: Any, norm_type: float) -> Tensor:
    grads = [grad for group in gradients(optimizer).values() for grad in group]
    if not grads:
        return paddle.zeros([])
    norm = paddle.linalg.vector_norm
    norms = [norm(grad.astype("float32"), norm_type) for grad in grads]
    return norm(paddle.stack(norms), norm_type)


def clip_coefficient(max_norm: float, norm: Tensor) -> Tensor:
    return paddle.clip(max_norm / (norm + 1e-6), max=1.0)


@paddle.no_grad()  # type: ignore[untyped-decorator] # Paddle's is not typed
def multiply_gradients_(optimizer: Any, factor: Tensor) -> None:
    for grads in gradients(optimizer).values():
        for grad in grads:
            grad.scale_(float(factor))


def clear_gradients(optimizer: Any) -> None:
    for parameter in parameters_of(optimizer):
        parameter.clear_gradient(False)


def snapshot(optimizer: Any) -> Callable[[], None]:
    parameters = parameters_of(optimizer)
    values = [parameter.clone().detach() for parameter in parameters]
    names = ("_accumulators", "_master_weights", "state")  # the last is LBFGS's
    saved = {name: copying.deepcopy(getattr(optimizer, name, None)) for name in names}

    def restore() -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.set_value(value)
        for name, value in saved.items():
            if value is not None:
                setattr(optimizer, name, value)

    return restore


def enable_grad() -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = paddle.enable_grad()
    return context
