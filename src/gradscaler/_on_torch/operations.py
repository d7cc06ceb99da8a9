"""The engine's tensor operations for PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsFloat, TypeGuard

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gradscaler._eager.iteration import owner_of
from gradscaler._eager.operations import FoundInf, Optimizer
from gradscaler._on_torch import shortcuts, widening
from gradscaler._on_torch.compile import is_compiling
from gradscaler._on_torch.flat import side_by_side
from gradscaler._on_torch.processes import placed, to_local
from gradscaler._torch_like.operations import TorchLikeOperations, parameters_of
from gradscaler.policies import DynamicScale, Policy, State, _checks


class TorchOperations(TorchLikeOperations):
    """Adds sparse and complex gradients, DTensors, and the kernel of torch's rule."""

    def __init__(self) -> None:
        super().__init__(torch, _group_tensors_by_device_and_dtype)

    def gradients(self, optimizer: Optimizer, allow_fp16: bool = True) -> list[torch.Tensor]:
        """The dense tensors that hold the optimizer's gradients.

        A sparse gradient is represented by its values. If it is float16 it is coalesced first,
        because a sum of duplicates may overflow. A gradient whose elements share memory, such as an
        expanded tensor, is replaced by a copy: multiplying it in place would multiply some elements
        twice, and a fused optimizer would write past its end. A DTensor is represented by this
        process's part.
        """
        ordinary = shortcuts.ordinary_gradients(optimizer, allow_fp16)
        if ordinary is not None:
            return ordinary
        grads = to_local(super().gradients(optimizer, allow_fp16))
        return grads if _are_contiguous(grads) else to_local(_values(optimizer, coalesce=False))

    def grouped(self, tensors: list[torch.Tensor]) -> list[tuple[torch.device, list[torch.Tensor]]]:
        """The tensors in lists of one device and dtype, each list with its device.

        Tensors that lie side by side in memory are joined, and complex ones are viewed as real.
        """
        if tensors and shortcuts.are_one_group(tensors):
            return [(tensors[0].device, tensors)]
        # Joined first: one large tensor takes one kernel, many small ones take many.
        # Gradients in one buffer, as DDP and flat_gradients keep them, become one tensor here.
        groups = super().grouped(side_by_side(tensors))
        for i, (device, group) in enumerate(groups):
            if group[0].is_complex():
                groups[i] = device, [_real_view(tensor) for tensor in group]
        return groups

    def gradients_to_measure(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """Like ``gradients``, but with sparse gradients coalesced.

        DTensors are first placed as their parameters are, which reduces partial sums.
        """
        ordinary = shortcuts.ordinary_gradients(optimizer)
        if ordinary is not None:
            return ordinary
        grads = super().gradients(optimizer)
        if not _are_contiguous(to_local(grads)):
            grads = _values(optimizer, coalesce=True)
        return to_local(placed(optimizer, grads))

    def unscale_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor | None = None,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale the gradients, in float32 if the optimizer would widen them in its step."""
        _widen_gradients(optimizer)
        return super().unscale_(optimizer, inv_scale, found_inf, allow_fp16)

    def multiply_gradients_(self, optimizer: Optimizer, factor: torch.Tensor) -> None:
        """Multiply the gradients, in float32 as in ``unscale_``."""
        _widen_gradients(optimizer)
        super().multiply_gradients_(optimizer, factor)

    def measure(
        self, optimizer: Optimizer, scale: torch.Tensor
    ) -> tuple[torch.Tensor, SupportsFloat, torch.Tensor, FoundInf] | None:
        """Measure the norm, in float32 if the optimizer widens its gradients."""
        if not widening.widens(optimizer):
            return super().measure(optimizer, scale)
        return widening.measure(self, self.gradients_to_measure(optimizer), scale)

    def total_norm(self, optimizer: Optimizer, norm_type: float) -> torch.Tensor:
        """The norm of the gradients as they are, in float32 as in ``measure``."""
        if widening.widens(optimizer):
            return widening.total_norm(self.gradients_to_measure(optimizer), norm_type)
        norm: torch.Tensor = super().total_norm(optimizer, norm_type)
        return norm

    def may_omit_flag(self, optimizer: Optimizer) -> bool:
        """Whether a finite step may leave out the optimizer's flag.

        A compiled step may not: its first overflow, which has a flag, would compile it again.
        """
        return super().may_omit_flag(optimizer) and not is_compiling()

    def can_watch(self, scaled: torch.Tensor) -> bool:
        """Whether a hook on this tensor sees its backward pass; not if ``scale`` is traced."""
        return not torch.compiler.is_compiling() and super().can_watch(scaled)

    def current_gradients(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """The dense tensors that hold the gradients now; of a DTensor, this process's part."""
        return to_local(super().current_gradients(optimizer))

    def values(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that hold the values of parameters; of a DTensor, this process's part."""
        return super().values(to_local(parameters))

    def next_on_host(
        self,
        policy: Policy,
        state: State,
        found_inf: bool,
        amaxes: Sequence[torch.Tensor],
    ) -> State:
        """The next state, which in most steps is found without asking the policy."""
        counted = shortcuts.counted(policy, state, found_inf)
        return counted or super().next_on_host(policy, state, found_inf, amaxes)

    def next_on_device(
        self,
        policy: Policy,
        state: State,
        found_infs: list[FoundInf],
        amaxes: Sequence[torch.Tensor],
    ) -> State:
        """The next state, by torch's kernel if the policy is torch's rule."""
        if not _is_torch_s(policy):
            return super().next_on_device(policy, state, found_infs, amaxes)
        # The kernel grows only when the count equals the interval, and lets the scale sink to 0:
        # hence the two clamps. It works in place, so it gets copies: an interrupt changes nothing.
        growth_interval = min(policy.growth_interval, _checks.LONGEST_COUNT)
        scale = state.scale.clone()
        finite_steps = state.finite_steps.clamp(max=growth_interval - 1)
        torch._amp_update_scale_(
            scale,
            finite_steps,
            self.combine(found_infs, scale.device),
            policy.growth_factor,
            policy.backoff_factor,
            growth_interval,
        )
        return state._replace(scale=scale.clamp_(min=policy.min_scale), finite_steps=finite_steps)


def _is_torch_s(policy: Policy) -> TypeGuard[DynamicScale]:
    """Whether a policy is torch's rule, apart from the floor of the scale.

    The kernel multiplies by float64 factors, so both must be float32 values for equal products.
    """
    return (
        type(policy) is DynamicScale
        and policy.hysteresis == 1
        and policy.max_scale == _checks.LARGEST_SCALE
        and not policy.growth_tiers
        and all(_checks.in_float32(f) == f for f in (policy.growth_factor, policy.backoff_factor))
    )


def _widen_gradients(optimizer: Optimizer) -> None:
    """Turn the gradients into float32 ones, if the optimizer can (see ``widening``)."""
    owner = owner_of(optimizer)
    if hasattr(owner, "widen_gradients_"):
        owner.widen_gradients_()


def _are_contiguous(grads: list[torch.Tensor]) -> bool:
    """Whether all gradients are dense and contiguous."""
    return not any(grad.is_sparse or not grad.is_contiguous() for grad in grads)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements of a dense tensor may share memory."""
    extent = 1  # the elements that the dimensions so far span
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def _values(optimizer: Optimizer, coalesce: bool) -> list[torch.Tensor]:
    """The optimizer's gradients: the values of sparse ones, and copies of overlapping ones."""
    values = []
    for parameter in parameters_of(optimizer):
        grad = parameter.grad
        if grad is None:
            continue
        if grad.is_sparse:
            if coalesce or grad.dtype is torch.float16:
                parameter.grad = grad = grad.detach().coalesce()
            grad = grad._values()
        elif _overlaps(*to_local([grad])):
            # Fused optimizers need the parameter's layout.
            whole = torch.empty_like(parameter, dtype=grad.dtype, requires_grad=False)
            parameter.grad = grad = whole.copy_(grad.detach())
        values.append(grad.detach())
    return values


def _real_view(grad: torch.Tensor) -> torch.Tensor:
    """A real view of a complex gradient.

    A gradient that is a lazy conjugate has no real view, so its conjugate is viewed. Both share
    memory and magnitudes, so multiplying one by a real number multiplies both.
    """
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)
