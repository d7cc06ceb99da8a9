"""The tensor operations of PyTorch that the engine is written in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gradscaler.torch_like.operations import TorchLikeOperations, parameters_of


class TorchOperations(TorchLikeOperations):
    """Adds sparse and complex gradients."""

    def __init__(self) -> None:
        super().__init__(torch, _group_tensors_by_device_and_dtype)

    def gradients(self, optimizer: Any, allow_fp16: bool = True) -> list[torch.Tensor]:
        """The dense tensors that hold the optimizer's gradients.

        A sparse gradient is represented by its values. If it is float16 they are coalesced first:
        a sum of duplicates may overflow.
        """
        grads: list[torch.Tensor] = super().gradients(optimizer, allow_fp16)
        if any(grad.is_sparse for grad in grads):
            grads = _values(optimizer, coalesce=False)
        return grads

    def grouped(
        self, tensors: list[torch.Tensor]
    ) -> Iterator[tuple[torch.device, list[torch.Tensor]]]:
        """The tensors in lists of one device and dtype each, complex ones by their real views."""
        for device, group in super().grouped(tensors):
            yield device, [_real_view(t) for t in group] if group[0].is_complex() else group

    def gradients_to_measure(self, optimizer: Any) -> list[torch.Tensor]:
        """The same, sparse ones coalesced and complex ones as they are, measured by magnitude."""
        grads: list[torch.Tensor] = super().gradients(optimizer)
        if any(grad.is_sparse for grad in grads):
            grads = _values(optimizer, coalesce=True)
        return grads


def _values(optimizer: Any, coalesce: bool) -> list[torch.Tensor]:
    """The optimizer's gradients, sparse ones by their values."""
    values = []
    for parameter in parameters_of(optimizer):
        grad = parameter.grad
        if grad is None:
            continue
        if grad.is_sparse:
            if coalesce or grad.dtype is torch.float16:
                parameter.grad = grad = grad.coalesce()
            grad = grad._values()
        values.append(grad)
    return values


def _real_view(grad: torch.Tensor) -> torch.Tensor:
    """A real view of a complex gradient; of a conjugated one the conjugate, as finite and as large.

    Scaling either by a real number scales both.
    """
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)
