"""The tensor operations of PyTorch that the engine is written in."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gradscaler.torch_like.operations import TorchLikeOperations, parameters_of


class TorchOperations(TorchLikeOperations):
    """Adds sparse and complex gradients."""

    def __init__(self) -> None:
        super().__init__(torch, _group_tensors_by_device_and_dtype)

    def gradients(
        self, optimizer: Any, allow_fp16: bool = True, coalesce: bool = False
    ) -> list[torch.Tensor]:
        """The dense tensors that hold the optimizer's gradients.

        A sparse gradient is represented by its values. If it is float16 they are coalesced first:
        a sum of duplicates may overflow. A complex gradient is represented by its real view.
        """
        grads: list[torch.Tensor] = super().gradients(optimizer, allow_fp16)
        if any(grad.is_sparse for grad in grads):
            with_grad = [p for p in parameters_of(optimizer) if p.grad is not None]
            grads = [_values(parameter, coalesce) for parameter in with_grad]
        if any(grad.is_complex() for grad in grads):
            grads = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
        return grads


def _values(parameter: torch.Tensor, coalesce: bool) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None
    if not grad.is_sparse:
        return grad
    if grad.dtype is torch.float16 or coalesce:
        parameter.grad = grad = grad.coalesce()
    return grad._values()
