"""Scaling, unscaling and checking gradients: compiled, and called from either mode.

A sparse gradient, which only graph mode makes, is represented by its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import mindspore
from mindspore import Tensor, ops
from mindspore.common.sparse_tensor import RowTensorInner

F = TypeVar("F", bound=Callable[..., Any])

_HALF = (mindspore.float16, mindspore.bfloat16)


def compiled(function: F) -> F:
    """The function as ``mindspore.jit`` compiles it, for the backend that every device has."""
    return mindspore.jit(function, backend="ms_backend")  # type: ignore[no-any-return]


def scaled(scale: Any, value: Any) -> Any:
    """``value * scale`` in the value's dtype; halves are multiplied in float32, and rounded once.

    The scale itself may be out of a half's range where the product is not.
    """
    if value.dtype in _HALF:
        return (value.astype(mindspore.float32) * scale).astype(value.dtype)
    return value * scale.astype(value.dtype)


@ops.constexpr  # type: ignore[untyped-decorator] # MindSpore has no types
def on_cpu() -> bool:
    """Whether MindSpore computes on the CPU, known when it compiles."""
    return bool(mindspore.get_context("device_target") == "CPU")


_unscale = ops.MultitypeFuncGraph("unscale")


@_unscale.register("Tensor", "Tensor")  # type: ignore[untyped-decorator]
def unscaled(scale: Any, grad: Any) -> Any:
    """``grad / scale``, as :func:`scaled` by the reciprocal."""
    return scaled(ops.reciprocal(scale), grad)


@_unscale.register("Tensor", "RowTensor")  # type: ignore[untyped-decorator]
def _unscaled_rows(scale: Any, grad: Any) -> Any:
    return RowTensorInner(grad.indices, unscaled(scale, grad.values), grad.dense_shape)


_finite = ops.MultitypeFuncGraph("finite")


@_finite.register("Tensor")  # type: ignore[untyped-decorator]
def _is_finite(grad: Any) -> Any:
    if grad.dtype in _HALF:
        grad = grad.astype(mindspore.float32)
    if grad.size == 0 or grad.dtype not in (mindspore.float32, mindspore.float64):
        return ops.isfinite(grad).all()
    # 0 for what is finite and NaN for what is not, summed by a matrix product: MindSpore's CPU
    # computes that on all cores, and other sums on one.
    zeros = (grad - grad).reshape((1, -1))
    return ops.isfinite(ops.matmul(zeros, zeros.reshape((-1, 1)))).reshape(())


@_finite.register("RowTensor")  # type: ignore[untyped-decorator]
def _rows_are_finite(grad: Any) -> Any:
    return _is_finite(grad.values)


_map = ops.HyperMap()


@compiled
def unscale_all(scale: Any, *grads: Any) -> Any:
    """The gradients divided by the scale, in a tuple."""
    return _map(ops.partial(_unscale, scale), grads)


@compiled
def every_finite(*grads: Any) -> Any:
    """Whether all gradients are finite: a bool Tensor of shape ()."""
    finite = Tensor(True)
    for grad_is_finite in _map(_finite, grads):
        finite = ops.logical_and(finite, grad_is_finite)
    return finite


def all_finite(inputs: Any) -> Any:
    """Whether all elements of all tensors are finite: in place of ``mindspore.amp.all_finite``.

    Off the CPU that is what is called: Ascend's float16 may saturate, and keeps a flag instead.

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
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, list)):
        raise TypeError("inputs must be a tensor, or a tuple or list of tensors")
    if not on_cpu():
        return mindspore.amp.all_finite(inputs)
    for value in inputs:
        if not isinstance(value, Tensor):
            raise TypeError("inputs must hold tensors alone")
    return every_finite(*inputs)


def as_flag(value: Any) -> Any:
    """A bool Tensor of shape (), from a bool or from one of shape (1,) too."""
    if isinstance(value, bool):
        return Tensor(value)
    return value.reshape(())
