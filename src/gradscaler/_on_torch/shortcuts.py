"""Shortcuts that save time only for tiny models, where Python takes most of it.

In most steps each gives the result of the general code; in all others it gives None or False. The
rest of the adapter can be read without them.
"""

from __future__ import annotations

import torch

from gradscaler._eager.operations import Optimizer
from gradscaler.policies import DynamicScale, Policy, ScaleState, State, _checks


def counted(policy: Policy, state: State, found_inf: bool) -> State | None:
    """The next state, on the host, of a step that only adds 1 to the finite steps; else None.

    The policy takes three times as long to compute it.
    """
    if type(policy) is not DynamicScale or policy.growth_tiers or found_inf:
        return None
    count = state.finite_steps.item() + 1
    grows = count >= policy.growth_interval or count >= _checks.LONGEST_COUNT
    if grows or state.nonfinite_steps.item():
        return None
    return ScaleState(state.scale, count, state.nonfinite_steps)


def ordinary_gradients(optimizer: Optimizer, allow_fp16: bool = True) -> list[torch.Tensor] | None:
    """The gradients if each can be used as it is, else None.

    That holds if every parameter has one and all are dense, contiguous, without a graph, and not a
    float16 gradient that ``allow_fp16`` forbids. One loop checks all of this, because fetching a
    tensor takes longer than the checks.
    """
    grads = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if (
                type(grad) is not torch.Tensor
                or grad.is_sparse
                or grad.requires_grad
                or not grad.is_contiguous()
                or (grad.dtype is torch.float16 and not allow_fp16)
            ):
                return None
            grads.append(grad)
    return grads


def are_one_group(tensors: list[torch.Tensor]) -> bool:
    """Whether all tensors are real, have one device and dtype, and begin their storage.

    That holds for most gradients, but not for those that share a buffer.
    """
    device, dtype = tensors[0].device, tensors[0].dtype
    if dtype.is_complex:
        return False
    for tensor in tensors:
        if tensor.storage_offset() or tensor.dtype is not dtype or tensor.device != device:
            return False
    return True
