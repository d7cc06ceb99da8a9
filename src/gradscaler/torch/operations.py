"""The tensor operations of PyTorch that the engine is written in."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch
from torch.nn.utils import get_total_norm

# A tensor list by device and dtype: in C++, and what torch's own foreach optimizers use.
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gradscaler.operations import FoundInf
from gradscaler.policies import Policy, ScaleState

CPU = torch.device("cpu")


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def multiply(output: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return output * on_device(scale, output.device)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``; the check costs less than a ``to`` that has nothing to do."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def place(state: ScaleState, device: torch.device) -> ScaleState:
    scale, *counters = state
    return ScaleState(
        torch.full((), float(scale), dtype=torch.float32, device=device),
        *(torch.full((), count, dtype=torch.int32, device=device) for count in counters),
    )


def read(state: ScaleState) -> ScaleState:
    return ScaleState(*(tensor.item() for tensor in state))


def assign(state: ScaleState, values: ScaleState) -> None:
    for tensor, value in zip(state, values, strict=True):
        tensor.fill_(value.item() if hasattr(value, "item") else value)


def copy(state: ScaleState) -> ScaleState:
    return ScaleState(*(tensor.clone() for tensor in state))


def advance(policy: Policy, state: ScaleState, found_infs: list[FoundInf]) -> None:
    if state.scale.device == CPU:  # reading costs nothing here, and a tensor operation does
        assign(state, policy.update(read(state), any(map(any_set, found_infs))))
        return
    found_inf = combine(found_infs, state.scale.device) != 0
    moved = policy.update(state, found_inf, torch.where)
    for tensor, value in zip(state, moved, strict=True):
        tensor.copy_(value)


def any_set(found_inf: FoundInf) -> bool:
    return any(flag.item() for flag in found_inf.values())


def combine(found_infs: list[FoundInf], device: torch.device) -> torch.Tensor:
    flags = [on_device(flag, device) for found_inf in found_infs for flag in found_inf.values()]
    return reduce(torch.maximum, flags)


def gradients(
    optimizer: torch.optim.Optimizer, allow_fp16: bool = True, coalesce: bool = False
) -> list[torch.Tensor]:
    """The dense tensors that hold the optimizer's gradients, to be read or changed in place.

    A sparse gradient is represented by its values. They are coalesced first if it is float16,
    because a sum of duplicates may overflow, or if ``coalesce`` says so. A complex gradient is
    represented by its real view.

    Raises:
        ValueError: a gradient is float16 and ``allow_fp16`` is False.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    if not allow_fp16:
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.dtype is torch.float16:
                raise ValueError(
                    "Attempting to unscale FP16 gradients. The gradient of "
                    f"{name_of(parameter, optimizer)} is float16: keep the parameters in float32 "
                    "and run the forward pass under torch.autocast, or construct "
                    "GradScaler(allow_fp16_gradients=True)"
                )
    if any(grad.is_sparse for grad in grads):
        grads = [
            _values(parameter, coalesce) for parameter in parameters if parameter.grad is not None
        ]
    return [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]


def _values(parameter: torch.Tensor, coalesce: bool) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None
    if not grad.is_sparse:
        return grad
    if grad.dtype is torch.float16 or coalesce:
        parameter.grad = grad = grad.coalesce()
    return grad._values()


def name_of(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> str:
    """The parameter's name if the optimizer was given names, else its place in it."""
    for g, group in enumerate(optimizer.param_groups):
        for i, other in enumerate(group["params"]):
            if other is parameter:
                names = group.get("param_names")
                place = repr(names[i]) if names else f"{i} of parameter group {g}"
                return f"parameter {place}, shape {tuple(parameter.shape)},"
    raise LookupError("not one of the optimizer's parameters")


def grouped(tensors: list[torch.Tensor]) -> Iterator[tuple[torch.device, list[torch.Tensor]]]:
    """The tensors in lists of one device and dtype each, the device beside it."""
    by_device_and_dtype: Any = _group_tensors_by_device_and_dtype([tensors])  # type: ignore[list-item] # list is invariant
    for (device, _), ((group,), _) in by_device_and_dtype.items():
        yield device, group


def unscale_(
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    """Multiply the gradients by ``inv_scale`` in place, and flag each device's non-finite ones.

    ``found_inf`` is what the flags start from.
    """
    flags: dict[torch.device, torch.Tensor] = {}
    with torch.no_grad():
        for device, grads in grouped(gradients(optimizer, allow_fp16)):
            if device not in flags:
                flags[device] = found_inf.to(device, non_blocking=True, copy=True)
            torch._amp_foreach_non_finite_check_and_unscale_(
                grads, flags[device], on_device(inv_scale, device)
            )
    return flags


def first_step_must_be_finite(optimizer: torch.optim.Optimizer) -> bool:
    # Fused SGD allocates its momentum without a value, which a skipped first step never writes.
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] != 0 and "momentum_buffer" not in optimizer.state[parameter]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )


@torch.no_grad()
def total_norm(optimizer: torch.optim.Optimizer, norm_type: float) -> torch.Tensor:
    return get_total_norm(gradients(optimizer, coalesce=True), norm_type)


def clip_coefficient(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@torch.no_grad()
def multiply_gradients_(optimizer: torch.optim.Optimizer, factor: torch.Tensor) -> None:
    for device, grads in grouped(gradients(optimizer)):
        torch._foreach_mul_(grads, on_device(factor, device))


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def snapshot(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = [parameter.detach().clone() for parameter in parameters]
    state = {key: copying.deepcopy(value) for key, value in optimizer.state.items()}
    options: list[dict[str, Any]] = [
        {key: copying.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]

    def restore() -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, saved in zip(optimizer.param_groups, options, strict=True):
            group.update(saved)

    return restore


enable_grad = torch.enable_grad
