"""Casts a model to 16 bits, and returns the float32 values that its parameters had."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch.nn.modules.batchnorm import _NormBase

from gradscaler._on_torch.processes import is_dtensor, is_flattened
from gradscaler.errors import ParameterError
from gradscaler.torch._weights.replicas import must_not_be_replicated

Chosen = Collection[str | type[torch.nn.Module]]
"""Classes of modules, and names of modules, parameters and buffers in a model."""

NORMS_WITH_STATISTICS: Chosen = (_NormBase,)
"""Batch norms and instance norms, which share their kernels."""


def cast(
    parameters: Iterable[torch.Tensor],
    model: torch.nn.Module | None,
    dtype: torch.dtype,
    kept: set[int],
    buffers: set[int],
) -> dict[torch.Tensor, torch.Tensor]:
    """Cast float32 parameters, and chosen float32 buffers of a model, in place.

    Args:
        parameters: the parameters to cast.
        model: the model, whose frozen parameters are cast too. Its other parameters are left to
            the optimizer that steps them.
        dtype: the 16-bit dtype to cast to.
        kept: the ids of parameters and buffers that are not cast.
        buffers: the ids of buffers that are cast, unless they are in ``kept``, too.

    Returns:
        The float32 values of each parameter that was cast and requires gradients. The tensors are
        the original ones, not copies.

    Raises:
        ParameterError: a parameter or the model cannot be cast.
    """
    own = [] if model is None else list(model.parameters())
    stepped = set(map(id, parameters))
    kept = kept | {id(p) for p in own if p.requires_grad and id(p) not in stepped}
    cast_parameters = {
        parameter: parameter.detach()
        for parameter in [*own, *parameters]
        if parameter.dtype is torch.float32 and id(parameter) not in kept
    }
    in_model = {id(each) for each in own}
    if model is not None:
        _must_hold(model, in_model, parameters)
    for parameter in cast_parameters:
        _must_be_castable(parameter, id(parameter) in in_model)
    if cast_parameters:
        must_not_be_replicated(cast_parameters)
    if model is not None:
        chosen = {id(each) for each in cast_parameters}
        chosen |= {id(each.grad) for each in cast_parameters if each.grad is not None}
        chosen |= {id(each) for each in model.buffers()} & buffers - kept

        def to_narrow(tensor: torch.Tensor) -> torch.Tensor:
            is_chosen = id(tensor) in chosen and tensor.dtype is torch.float32
            return tensor.to(dtype) if is_chosen else tensor

        model._apply(to_narrow)  # as model.half() does, so that modules can react to the cast
        if not in_model <= {id(each) for each in model.parameters()}:
            raise ParameterError(
                f"{type(model).__name__} has replaced its parameters in the cast, and an optimizer "
                "steps those that it was given: cast the model yourself, and give dtype=None"
            )
    for parameter in cast_parameters:
        if id(parameter) not in in_model:
            parameter.data = parameter.data.to(dtype)
    return {p: wide for p, wide in cast_parameters.items() if p.requires_grad}


def chosen_in(model: torch.nn.Module | None, argument: str, given: Chosen) -> set[int]:
    """The ids of the parameters and buffers that an argument, such as ``keep_fp32``, stands for.

    A module stands for everything that it holds.

    Raises:
        ParameterError: it is not a collection of names and classes, or a name is not in the model.
    """
    _must_be_names_and_classes(argument, given)
    if model is None:
        if {*given} - {*NORMS_WITH_STATISTICS}:
            raise ParameterError(
                f"{argument} is {given!r}, and parameters alone belong to no module: give the "
                "model, too, as in MasterWeights(torch.optim.AdamW, groups, model=model)"
            )
        return set()
    names = {name for name in given if isinstance(name, str)}
    types = tuple(kind for kind in given if not isinstance(kind, str))
    chosen: set[int] = set()
    known: set[str] = set()
    for name, module in model.named_modules():
        known.add(name)
        if name in names or isinstance(module, types):
            chosen |= {id(each) for each in (*module.parameters(), *module.buffers())}
    named: list[tuple[str, torch.Tensor]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    known |= {name for name, _ in named}
    chosen |= {id(tensor) for name, tensor in named if name in names}
    if unknown := sorted(names - known):
        raise ParameterError(
            f"{argument} names {unknown}, and the model has no such module, parameter or buffer"
        )
    return chosen


def _must_be_names_and_classes(argument: str, given: object) -> None:
    if (
        isinstance(given, (str, type))
        or not isinstance(given, Collection)
        or not all(isinstance(each, (str, type)) for each in given)
    ):
        raise ParameterError(
            f"{argument} must be a collection of names and classes of modules, as in "
            f"{argument}=['head', torch.nn.LayerNorm], got {given!r}"
        )


def _must_hold(
    model: torch.nn.Module, in_model: set[int], parameters: Iterable[torch.Tensor]
) -> None:
    """ParameterError if the model will not hold the parameters after the cast, or does not now."""
    if in_model and not in_model.intersection(map(id, parameters)):
        raise ParameterError(
            f"the model, {type(model).__name__}, holds none of the parameters that are to be "
            "stepped: a conversion or a wrapper may have replaced them, so collect them again from "
            "model.parameters()"
        )
    if torch.__future__.get_overwrite_module_params_on_conversion():
        raise ParameterError(
            "after torch.__future__.set_overwrite_module_params_on_conversion(True), a cast gives "
            "the model new parameters, which no optimizer steps: set it to False before you call "
            "MasterWeights"
        )


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
