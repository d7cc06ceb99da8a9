"""Optimizers that take 16-bit gradients and widen them to float32 themselves, in their step.

Such an optimizer has a method ``widen_gradients_()``, for code that changes gradients before the
step. It also has an attribute ``clip_coefficient``: its step multiplies the gradients by that
coefficient and by 1/scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsFloat

import torch

from gradscaler._eager.iteration import owner_of
from gradscaler._eager.operations import FoundInf
from gradscaler._torch_like.operations import TorchLikeOperations

_NARROW = torch.float16, torch.bfloat16
_ON_CPU = 2**20  # elements that are widened at once, which fit into a cache
_ELSEWHERE = 2**25


def widens(optimizer: object) -> bool:
    """Whether an optimizer is of this kind, or a part of one, or a trainer's wrapper around one."""
    return hasattr(owner_of(optimizer), "widen_gradients_") or getattr(optimizer, "widens", False)


def measure(
    operations: TorchLikeOperations, grads: list[torch.Tensor], scale: torch.Tensor
) -> tuple[torch.Tensor, SupportsFloat, torch.Tensor, FoundInf] | None:
    """Like ``Operations.measure``, with the results that float32 copies of the gradients give.

    A few gradients are copied at a time; none is changed.
    """
    if not all(
        grad.device == scale.device and grad.dtype in (*_NARROW, torch.float32) for grad in grads
    ):
        return None
    used, inverse = operations.inverse(scale)
    if operations.on_host(scale) and float(used) < 1:  # squares of scaled gradients might underflow
        return None
    norms, flags = [], []
    for copies in _copies(grads, _ON_CPU if operations.on_host(scale) else _ELSEWHERE):
        measured = operations.norm_and_flag(copies)
        if measured is None:
            return None
        norms.append(measured[0])
        flags.append(measured[1])
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    found_inf = {scale.device: operations.largest(flags, scale.device)} if grads else {}
    return (norm * inverse).float(), used, inverse, found_inf


def total_norm(grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of gradients; 16-bit ones are measured by float32 copies."""
    sized = [grad.detach() for grad in grads if grad.numel()]
    if not sized:
        return torch.tensor(0.0)
    norms = [
        norm.to(sized[0].device)
        for copies in _copies(sized, _ON_CPU if sized[0].is_cpu else _ELSEWHERE)
        for norm in (torch.linalg.vector_norm(copy, norm_type) for copy in copies)
    ]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def _copies(grads: list[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """All gradients in float32, in lists of no more than ``size`` elements, or of one gradient."""
    copies: list[torch.Tensor] = []
    total = 0
    for grad in grads:
        if copies and total + grad.numel() > size:
            yield copies
            copies, total = [], 0
        copies.append(grad.float() if grad.dtype in _NARROW else grad)
        total += grad.numel()
    yield copies
