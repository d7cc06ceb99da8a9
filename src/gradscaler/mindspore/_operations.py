"""Compiled functions that scale, unscale and check gradients, in graph mode and PyNative mode.

A sparse gradient, which only graph mode makes, is represented by its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from threading import RLock
from typing import Any, TypeAlias, TypeVar

import mindspore
from mindspore import Tensor, ops
from mindspore.common.sparse_tensor import RowTensorInner

Tensors: TypeAlias = "Tensor | Sequence[Tensor]"

F = TypeVar("F", bound=Callable[..., Any])

# Computed in float32: the scale itself may be out of float16's range.
_HALF = (mindspore.float16, mindspore.bfloat16)
_LARGE = 2**16  # elements

_native_all_finite = mindspore.amp.all_finite  # kept, because a user may replace it by ours


_one_thread = RLock()


def in_turn(function: F) -> F:
    """``function``, run by one thread at a time, because MindSpore's executor fails in several.

    Its compiler reads ``function`` itself: it unwraps functions.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _one_thread:
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def compiled(function: F) -> F:
    """``mindspore.jit`` of a function, with the backend that every device supports."""
    return in_turn(mindspore.jit(function, backend="ms_backend"))  # type: ignore[no-any-return]


def scaled(scale: Tensor, value: Tensor) -> Tensor:
    """``value * scale`` in the value's dtype.

    Values of half precision are multiplied in float32 and rounded once, because the scale itself
    may be out of float16's range.
    """
    if value.dtype in _HALF:
        return (value.astype(mindspore.float32) * scale).astype(value.dtype)
    return value * scale.astype(value.dtype)


@ops.constexpr  # type: ignore[untyped-decorator] # MindSpore has no types
def on_cpu() -> bool:
    """Whether MindSpore computes on the CPU; a constant in compiled code."""
    return bool(mindspore.get_context("device_target") == "CPU")


_unscale = ops.MultitypeFuncGraph("unscale")


@_unscale.register("Tensor", "Tensor")  # type: ignore[untyped-decorator]
def unscaled(scale: Tensor, grad: Tensor) -> Tensor:
    """``grad / scale`` in the gradient's dtype, computed as :func:`scaled` by 1/scale."""
    return scaled(ops.reciprocal(scale), grad)


@_unscale.register("Tensor", "RowTensor")  # type: ignore[untyped-decorator]
def _unscaled_rows(scale: Tensor, grad: Tensor) -> Tensor:
    return RowTensorInner(grad.indices, unscaled(scale, grad.values), grad.dense_shape)


_zero_if_finite = ops.MultitypeFuncGraph("zero_if_finite")


@_zero_if_finite.register("Tensor")  # type: ignore[untyped-decorator]
def _zero_if_all_finite(grad: Tensor) -> Tensor:
    """A float32 scalar: 0 if all elements are finite, else 1 or NaN."""
    if grad.size == 0 or not grad.is_floating_point():
        return 1 - ops.isfinite(grad).all().astype(mindspore.float32)
    if grad.dtype in _HALF:
        grad = grad.astype(mindspore.float32)
    zeros = grad - grad  # NaN at every Inf and NaN
    if grad.size < _LARGE:
        return zeros.sum().astype(mindspore.float32)
    # A matrix product is the only sum that MindSpore computes on all cores of a CPU.
    zeros = zeros.reshape((1, -1))
    return ops.matmul(zeros, zeros.reshape((-1, 1))).reshape(()).astype(mindspore.float32)


@_zero_if_finite.register("RowTensor")  # type: ignore[untyped-decorator]
def _zero_if_rows_finite(grad: Tensor) -> Tensor:
    return _zero_if_all_finite(grad.values)


_map = ops.HyperMap()


@compiled
def unscale_all(scale: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
    """The gradients divided by the scale, in a tuple."""
    return _map(ops.partial(_unscale, scale), grads)  # type: ignore[no-any-return]


@compiled
def every_finite(*grads: Tensor) -> Tensor:
    """Whether all gradients are finite: a bool Tensor of shape ()."""
    total = Tensor(0.0, mindspore.float32)
    for zero in _map(_zero_if_finite, grads):  # a comprehension compiles in quadratic time
        total = total + zero
    return total == 0


def all_finite(inputs: Tensors) -> Tensor:
    """Whether all elements of all tensors are finite: a drop-in for ``mindspore.amp.all_finite``.

    On devices other than the CPU this calls MindSpore's function, because Ascend's float16 may
    saturate and set a flag instead.

    Args:
        inputs: a tuple or list of tensors, of any real dtype and shape; or one tensor.

    Returns:
        A bool Tensor of shape (); True for no tensors.

    Raises:
        TypeError: ``inputs`` is anything else.

    >>> from mindspore import Tensor
    >>> bool(all_finite((Tensor([1.0, 2.0]), Tensor(float("inf")))))
    False
    """
    inputs = _as_tensors(inputs)
    return every_finite(*inputs) if on_cpu() else _native_all_finite(inputs)


_largest = ops.MultitypeFuncGraph("largest")


@_largest.register("Tensor")  # type: ignore[untyped-decorator]
def _largest_of(grad: Tensor) -> Tensor:
    if grad.size == 0 or not grad.is_floating_point():
        return Tensor(0.0, mindspore.float32)
    if grad.dtype in _HALF:
        grad = grad.astype(mindspore.float32)
    return grad.abs().max().astype(mindspore.float32)


@_largest.register("RowTensor")  # type: ignore[untyped-decorator]
def _largest_of_rows(grad: Tensor) -> Tensor:
    return _largest_of(grad.values)


@compiled
def largest(*grads: Tensor) -> Tensor:
    """The largest magnitude of all gradients: a float32 Tensor of shape ()."""
    found = Tensor(0.0, mindspore.float32)
    for each in _map(_largest, grads):
        found = ops.maximum(found, each)
    return found


def amax(inputs: Tensors) -> Tensor:
    """The largest magnitude of unscaled gradients, for a policy that needs it.

    Pass it to ``DynamicLossScaler.adjust``, or to ``process_loss_scale`` in a train step. Tensors
    that are not floating do not count. Of a sparse gradient, the values count.

    Args:
        inputs: a tuple or list of tensors, of any real dtype and shape; or one tensor.

    Returns:
        A float32 Tensor of shape (); 0 for no tensors.

    Raises:
        TypeError: ``inputs`` is anything else.

    >>> from mindspore import Tensor
    >>> print(amax((Tensor([1.0, -2.5]), Tensor(0.5))))
    2.5
    """
    return largest(*_as_tensors(inputs))


def _as_tensors(inputs: Tensors) -> Tensors:
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, list)):
        raise TypeError("inputs must be a tensor, or a tuple or list of tensors")
    for value in inputs:
        if not isinstance(value, Tensor):
            raise TypeError("inputs must hold only tensors")
    return inputs


def as_amax(value: Tensor | float | None, wanted: int) -> Tensor | None:
    """A float32 Tensor of shape () from a number or a Tensor of one element; or TypeError.

    Args:
        value: the largest gradient. It may be None if it is not ``wanted``.
        wanted: whether the policy needs it. If not, the result is None.
    """
    if not wanted:
        return None
    if value is None:
        raise TypeError(
            "the policy needs the largest gradient: pass gradscaler.mindspore.amax(grads) after "
            "the flag; if amax_interval is above 1, pass 0.0 in the steps in which the policy does "
            "not need it. gradscaler.mindspore.TrainOneStepWithLossScaleCell does both by itself"
        )
    if isinstance(value, (int, float)):
        value = Tensor(value, mindspore.float32)
    if not isinstance(value, Tensor) or value.size != 1:
        raise TypeError("amax must be a number, or a Tensor of one element")
    return value.reshape(()).astype(mindspore.float32)


def as_flag(value: Tensor | bool) -> Tensor:
    """A bool Tensor of shape (), from a bool or a bool Tensor of shape () or (1,); or TypeError."""
    if isinstance(value, bool):
        return Tensor(value)
    if not isinstance(value, Tensor) or value.dtype != mindspore.bool_ or value.size != 1:
        raise TypeError("the flag must be a bool, or a bool Tensor of shape () or (1,)")
    return value.reshape(())
