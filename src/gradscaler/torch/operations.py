"""The tensor operations of PyTorch that the engine is written in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

# A tensor list by device and dtype: in C++, and what torch's own foreach optimizers use.
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gradscaler.torch_like.operations import (
    TorchLikeOperations,
    fp16_gradient_error,
    parameters_of,
)


class TorchOperations(TorchLikeOperations):
    """Adds sparse and complex gradients."""

    def gradients(
        self, optimizer: Any, allow_fp16: bool = True, coalesce: bool = False
    ) -> list[torch.Tensor]:
        """The dense tensors that hold the optimizer's gradients.

        A sparse gradient is represented by its values. If it is float16 they are coalesced first:
        a sum of duplicates may overflow. A complex gradient is represented by its real view.
        """
        parameters = parameters_of(optimizer)
        grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
        if not allow_fp16 and torch.float16 in {grad.dtype for grad in grads}:
            raise fp16_gradient_error(optimizer, next(filter(_has_fp16_gradient, parameters)))
        if any(grad.is_sparse for grad in grads):
            with_grad = [parameter for parameter in parameters if parameter.grad is not None]
            grads = [_values(parameter, coalesce) for parameter in with_grad]
        if any(grad.is_complex() for grad in grads):
            grads = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
        return grads

    def grouped(
        self, tensors: list[torch.Tensor]
    ) -> Iterable[tuple[torch.device, list[torch.Tensor]]]:
        """The tensors in lists of one device and dtype each, the device beside it."""
        by_device_and_dtype: Any = _group_tensors_by_device_and_dtype([tensors])  # type: ignore[list-item] # list is invariant
        for (device, _), ((group,), _) in by_device_and_dtype.items():
            yield device, group

    def first_step_must_be_finite(self, optimizer: Any) -> bool:
        """Fused SGD allocates momentum without a value, which a skipped first step never writes."""
        return isinstance(optimizer, torch.optim.SGD) and any(
            group["momentum"] != 0 and "momentum_buffer" not in optimizer.state[parameter]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )


def _has_fp16_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.dtype is torch.float16


def _values(parameter: torch.Tensor, coalesce: bool) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None
    if not grad.is_sparse:
        return grad
    if grad.dtype is torch.float16 or coalesce:
        parameter.grad = grad = grad.coalesce()
    return grad._values()
