"""Shortcuts that only the loop of a tiny layer notices, where Python takes most of the time.

Each gives what the long way gives, in the case of most steps, and None or False in all others. To
read the rest of the adapter, skip them.
"""

from __future__ import annotations

from typing import Any

import torch

from gradscaler.policies import DynamicScale, Policy, ScaleState, State, _checks


def counted(policy: Policy, state: State, found_inf: bool) -> State | None:
    """The next state where a step does nothing but add 1 to the finite steps, on the host.

    The rule takes three times as long for it.
    """
    if type(policy) is not DynamicScale or policy.growth_tiers or found_inf:
        return None
    count = state.finite_steps.item() + 1
    grows = count >= policy.growth_interval or count >= _checks.LONGEST_COUNT
    if grows or state.nonfinite_steps.item():
        return None
    return ScaleState(state.scale, count, state.nonfinite_steps)


def ordinary_gradients(optimizer: Any, allow_fp16: bool = True) -> list[torch.Tensor] | None:
    """The gradients, if nothing is to be done to any.

    All are there, dense, each in one piece of memory, without a graph and not to be refused. One
    loop looks at each tensor once: to fetch it takes longer than all that is asked of it.
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
    """Whether tensors are real, of one device and dtype, and at the beginning of their storages.

    Most gradients are. Those of one buffer are not, but for its first.
    """
    device, dtype = tensors[0].device, tensors[0].dtype
    if dtype.is_complex:
        return False
    for tensor in tensors:
        if tensor.storage_offset() or tensor.dtype is not dtype or tensor.device != device:
            return False
    return True
