"""Casts a model to 16 bits, and returns the float32 values that its parameters had."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gradscaler._on_torch.processes import is_dtensor, is_flattened
from gradscaler.errors import ParameterError
from gradscaler.torch._weights.replicas import must_not_be_replicated

Kept = Collection[str | type[torch.nn.Module]]


def cast(
    parameters: Iterable[torch.Tensor],
    model: torch.nn.Module | None,
    dtype: torch.dtype,
    kept: set[int],
) -> dict[torch.Tensor, torch.Tensor]:
    """Cast float32 parameters, and a model's float32 buffers, in place.

    Args:
        parameters: the parameters to cast.
        model: the model, whose frozen parameters are cast too. Its other parameters are left to
            the optimizer that steps them, with the buffers of modules that have no others.
        dtype: the 16-bit dtype to cast to.
        kept: the ids of parameters and buffers that are not cast.

    Returns:
        The float32 values of each parameter that was cast and requires gradients. The tensors are
        the original ones, not copies.

    Raises:
        ParameterError: a parameter or the model cannot be cast.
    """
    own = [] if model is None else list(model.parameters())
    kept = kept | _left_to_others(model, parameters)
    cast_parameters = {
        parameter: parameter.detach()
        for parameter in [*own, *parameters]
        if parameter.dtype is torch.float32 and id(parameter) not in kept
    }
    in_model = {id(each) for each in own}
    for parameter in cast_parameters:
        _must_be_castable(parameter, id(parameter) in in_model)
    if cast_parameters:
        must_not_be_replicated(cast_parameters)
    if model is not None:
        chosen = {id(each) for each in cast_parameters}
        chosen |= {id(each.grad) for each in cast_parameters if each.grad is not None}
        chosen |= {id(each) for each in model.buffers() if id(each) not in kept}

        def to_narrow(tensor: torch.Tensor) -> torch.Tensor:
            is_chosen = id(tensor) in chosen and tensor.dtype is torch.float32
            return tensor.to(dtype) if is_chosen else tensor

        model._apply(to_narrow)  # as model.half() does, so that modules can react to the cast
    for parameter in cast_parameters:
        if id(parameter) not in in_model:
            parameter.data = parameter.data.to(dtype)
    return {p: wide for p, wide in cast_parameters.items() if p.requires_grad}


def kept_by(model: torch.nn.Module | None, keep_fp32: Kept) -> set[int]:
    """The ids of the parameters and buffers that an optimizer's ``keep_fp32`` stands for.

    It has classes of modules, and names of modules, parameters and buffers in the model. A module
    stands for everything that it holds.

    Raises:
        ParameterError: it is not a collection of these, or a name is not in the model.
    """
    _must_be_names_and_classes(keep_fp32)
    names = {name for name in keep_fp32 if isinstance(name, str)}
    types = tuple(kind for kind in keep_fp32 if not isinstance(kind, str))
    if model is None:
        if names or set(types) - {_BatchNorm}:
            raise ParameterError(
                f"keep_fp32 is {keep_fp32!r}, and parameters alone belong to no module: give the "
                "model, too, as in MasterWeights(torch.optim.AdamW, groups, model=model)"
            )
        return set()
    kept: set[int] = set()
    known: set[str] = set()
    for name, module in model.named_modules():
        known.add(name)
        if name in names or isinstance(module, types):
            kept |= {id(each) for each in (*module.parameters(), *module.buffers())}
    named: list[tuple[str, torch.Tensor]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    known |= {name for name, _ in named}
    kept |= {id(tensor) for name, tensor in named if name in names}
    if unknown := sorted(names - known):
        raise ParameterError(
            f"keep_fp32 names {unknown}, and the model has no such module, parameter or buffer"
        )
    return kept


def _must_be_names_and_classes(keep_fp32: object) -> None:
    if (
        isinstance(keep_fp32, (str, type))
        or not isinstance(keep_fp32, Collection)
        or not all(isinstance(each, (str, type)) for each in keep_fp32)
    ):
        raise ParameterError(
            "keep_fp32 must be a collection of names and classes of modules, as in "
            f"keep_fp32=['head', torch.nn.LayerNorm], got {keep_fp32!r}"
        )


def _left_to_others(model: torch.nn.Module | None, parameters: Iterable[torch.Tensor]) -> set[int]:
    """The ids of the parameters and buffers of a model that another optimizer may step."""
    if model is None:
        return set()
    stepped = set(map(id, parameters))
    left = {id(p) for p in model.parameters() if p.requires_grad} - stepped
    if not left:
        return left
    buffers: set[int] = set()
    for module in model.modules():
        trained = {id(p) for p in module.parameters() if p.requires_grad}
        if trained and trained <= left:
            buffers.update(map(id, module.buffers()))
    return left | buffers


def _must_be_castable(parameter: torch.Tensor, is_in_model: bool) -> None:
    if is_flattened(parameter):
        raise ParameterError(
            "FullyShardedDataParallel has flattened a parameter, which cannot be cast any more: "
            "cast the model before it is wrapped, and give dtype=None"
        )
    if is_dtensor(parameter) and not is_in_model:
        raise ParameterError(
            "a sharded parameter can only be cast with its module: give the model, too, as in "
            "MasterWeights(torch.optim.AdamW, groups, model=model)"
        )
    if parameter.grad is not None and not is_in_model:
        raise ParameterError(
            "a parameter that has a gradient cannot be cast: call zero_grad() before"
        )


def must_not_be_wide(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse parameters that are all float64, as after ``model.double()``.

    Raises:
        ParameterError: nothing would be cast.
    """
    if {parameter.dtype for parameter in parameters} == {torch.float64}:
        raise ParameterError(
            "MasterWeights casts float32 parameters, and all of these are float64: call "
            "model.float() before, or give dtype=None to step them in float64"
        )
