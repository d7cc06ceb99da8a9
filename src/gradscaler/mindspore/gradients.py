"""Scaling, unscaling and checking gradients: compiled, and called from either mode.

A sparse gradient, which only graph mode makes, is represented by its values.
"""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Tensor, ops
from mindspore.common.sparse_tensor import RowTensorInner

_HALF = (mindspore.float16, mindspore.bfloat16)


def scaled(scale: Any, value: Any) -> Any:
    """``value * scale`` in the value's dtype; halves are multiplied in float32, and rounded once.

    The scale itself may be out of a half's range where the product is not.
    """
    if value.dtype in _HALF:
        return (value.astype(mindspore.float32) * scale).astype(value.dtype)
    return value * scale.astype(value.dtype)


_unscale = ops.MultitypeFuncGraph("unscale")


@_unscale.register("Tensor", "Tensor")
def unscaled(scale: Any, grad: Any) -> Any:
    """``grad / scale``, as :func:`scaled` by the reciprocal."""
    return scaled(ops.reciprocal(scale), grad)


@_unscale.register("Tensor", "RowTensor")
def _unscaled_rows(scale: Any, grad: Any) -> Any:
    return RowTensorInner(grad.indices, unscaled(scale, grad.values), grad.dense_shape)


_finite = ops.MultitypeFuncGraph("finite")


@_finite.register("Tensor")
def _is_finite(grad: Any) -> Any:
    if grad.dtype == mindspore.bfloat16:  # MindSpore's CPU cannot check these as they are
        grad = grad.astype(mindspore.float32)
    return ops.isfinite(grad).all()


@_finite.register("RowTensor")
def _rows_are_finite(grad: Any) -> Any:
    return _is_finite(grad.values)


_map = ops.HyperMap()


@mindspore.jit(backend="ms_backend")
def unscale_all(scale: Any, *grads: Any) -> Any:
    """The gradients divided by the scale, in a tuple."""
    return _map(ops.partial(_unscale, scale), grads)


@mindspore.jit(backend="ms_backend")
def _all_finite(*grads: Any) -> Any:
    finite = Tensor(True)
    for grad_is_finite in _map(_finite, grads):
        finite = ops.logical_and(finite, grad_is_finite)
    return finite


def all_finite(inputs: Any) -> Any:
    """Whether all elements of all tensors are finite: in place of ``mindspore.amp.all_finite``.

    Args:
        inputs: a tuple or list of tensors, of any real dtype and shape; or a tensor. It may be
            empty.

    Returns:
        A tensor of shape (), bool.

    >>> from mindspore import Tensor
    >>> bool(all_finite((Tensor([1.0, 2.0]), Tensor(float("inf")))))
    False
    """
    if isinstance(inputs, Tensor):
        return _all_finite(inputs)
    return _all_finite(*inputs)
