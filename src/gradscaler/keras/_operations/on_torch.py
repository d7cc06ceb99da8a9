"""Gradients and steps on PyTorch, also with many processes.

Keras' variables may be the DTensors of a module that ``fully_shard`` has split, in a
``keras.layers.TorchModuleWrapper``. The processes that hold their parts decide together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from gradscaler._keras_like.wrapper import (
    Loss,
    Optimizer,
    ScaledOptimizer,
    Tape,
    Tensor,
    Variable,
    state_of,
)
from gradscaler._on_torch.compile import keep_out_of_graphs
from gradscaler._on_torch.operations import TorchOperations
from gradscaler._on_torch.processes import (
    Part,
    Vote,
    group_of,
    is_distributed,
    is_dtensor,
    is_flattened,
    to_local,
)
from gradscaler.errors import ParameterError

_operations = TorchOperations()
keep_out_of_graphs()


def all_finite(gradients: list[Tensor | None]) -> Tensor:
    """Whether no gradient holds an Inf or a NaN. For a DTensor: in this process's part."""
    # If any value is Inf or NaN, an extreme is. Extremes take a tenth of the time of a mask.
    parts = to_local([torch.as_tensor(each) for each in gradients if each is not None])
    values = [part._values() if part.is_sparse else part for part in parts]
    given = [value for value in values if value.numel()]
    extremes = [extreme for gradient in given for extreme in torch.aminmax(gradient)]
    return torch.stack(extremes or [torch.zeros(())]).isfinite().all()


def largest(gradients: list[Tensor | None]) -> Tensor:
    """The largest magnitude of the gradients, a float32 scalar. For a DTensor: of this part."""
    parts = to_local([torch.as_tensor(each) for each in gradients if each is not None])
    values = [part.coalesce()._values() if part.is_sparse else part for part in parts]
    maxima = [value.abs().max().float() for value in values if value.numel()]
    return torch.stack(maxima).max() if maxima else torch.zeros(())


def multiply(loss: Tensor, scale: Tensor) -> Tensor:
    """The loss times the scale, in float32 or wider."""
    return torch.multiply(_widened(keras.ops.convert_to_tensor(loss)), scale)


def divide(gradient: Tensor, scale: Tensor) -> Tensor:
    """The gradient divided by the scale, in its own dtype."""
    gradient = keras.ops.convert_to_tensor(gradient)
    return torch.divide(_widened(gradient), scale).to(gradient.dtype)


def _widened(tensor: Tensor) -> Tensor:
    """A tensor in float32 or wider. PyTorch would cast the scale to float16, and may overflow."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def apply_if_finite(
    optimizer: ScaledOptimizer,
    apply: Callable[..., None],
    gradients: list[Tensor | None],
    variables: list[Variable],
    amax: Tensor | None,
) -> None:
    """Apply if all gradients are finite, on all processes that hold parts of the variables.

    The host reads the flag once.
    """
    finite = all_finite(gradients)
    if is_distributed():
        has_gradients = any(grad is not None for grad in gradients)
        finite, amax = _agreed(optimizer, finite, has_gradients, amax)
    if finite:
        apply(gradients, variables)
    optimizer._move_scale(~finite, amax)


def _agreed(
    optimizer: ScaledOptimizer, finite: Tensor, has_gradients: bool, amax: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Whether all gradients are finite, and the largest, over the processes that decide together.

    These are the processes that hold parts of the variables.

    Raises:
        ParameterError: it is unknown which processes these are.
        ScaleMismatchError: the processes hold different scales or counters.
    """
    values = [variable.value for variable in optimizer._trainable_variables]
    if any(map(is_flattened, values)):
        raise ParameterError(
            "Keras' optimizers cannot tell which processes hold the shards of parameters that "
            "FullyShardedDataParallel flattened: shard the module with "
            "torch.distributed.fsdp.fully_shard"
        )
    group = group_of(Part([{"params": values}]))
    if group is None:
        return finite, amax
    vote = optimizer.__dict__.setdefault("_vote", Vote(_operations))
    scale = optimizer._scale.detach()
    found_inf = {scale.device: (~finite).float()} if has_gradients else {}
    counts = [variable.value for variable in optimizer._moved[1:]]
    state = state_of(optimizer.policy, [scale, *counts])
    flags, amax = vote.agree(group, state, found_inf, amax)
    return (_operations.combine([flags], scale.device) == 0 if flags else finite), amax


def gradients(
    loss: Loss,
    scale_loss: Callable[[Tensor], Tensor],
    variables: Callable[[], list[Variable]],
    tape: Tape | None,
) -> tuple[list[Tensor | None], list[Variable]]:
    """The gradients and variables of a loss, which is a function or a tensor."""
    if tape is not None:
        raise ValueError("PyTorch records gradients without a tape: leave tape out")
    scaled_loss = scale_loss(loss() if callable(loss) else loss).sum()
    found = variables()
    if not found:
        return [], []
    values = [variable.value for variable in found]
    if is_distributed():  # processes exchange gradients only if they go to .grad
        for value in values:
            value.grad = None
        scaled_loss.backward()
        return [value.grad for value in values], found
    return list(torch.autograd.grad(scaled_loss, values, allow_unused=True)), found


def check_compiled(scale: Variable) -> None:
    """Do nothing: compiled code reads the variable in each step."""


def build(optimizer: Optimizer, variables: list[Variable]) -> None:
    """Build the inner optimizer, with its own variables split as the model's are.

    A momentum of a DTensor, for example, becomes a DTensor with the same placement.
    """
    add_variable = optimizer.add_variable_from_reference

    def add_split_variable(reference_variable: Variable, *args: Any, **kwargs: Any) -> Variable:
        added = add_variable(reference_variable, *args, **kwargs)
        value = reference_variable.value
        if is_dtensor(value) and not is_dtensor(added.value):
            from torch.distributed.tensor import distribute_tensor

            # Each process has the whole value, so without a source rank this is no collective.
            split = distribute_tensor(
                added.value.detach(), value.device_mesh, value.placements, src_data_rank=None
            )
            added._value = torch.nn.Parameter(split, requires_grad=False)
        return added

    optimizer.__dict__["add_variable_from_reference"] = add_split_variable
    try:
        optimizer.build(variables)
    finally:
        del optimizer.__dict__["add_variable_from_reference"]
