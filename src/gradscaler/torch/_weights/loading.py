"""Checks the entries of a loaded state dict, so that a wrong one changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gradscaler._on_torch.processes import to_local
from gradscaler.errors import ParameterError
from gradscaler.torch._weights.stores import KEYS

_DTYPES = {"master": torch.float32, "remainder": torch.int16, "rounding": torch.int64}


def numbers_of(groups: Iterable[Mapping[str, Any]]) -> dict[int | str, None]:
    """The numbers, or names, of the parameters in a state dict's groups, as an ordered set.

    Raises:
        ParameterError: one is there twice.
    """
    times = Counter(number for group in groups for number in group["params"])
    if repeated := [number for number, count in times.items() if count > 1]:
        raise ParameterError(
            f"the groups of the state dict repeat a parameter, {repeated[0]!r}, so it is unknown "
            "whose states these are: load a state dict that an optimizer saved"
        )
    return dict.fromkeys(times)


def entries_in(
    state: Mapping[str, Any], number: object, parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Copies of the entries in a parameter's loaded state, in a store's dtype and on its device.

    Raises:
        TypeError: an entry is not a dense tensor with values of the right kind.
        ParameterError: an entry has another shape than the parameter, or values out of range.
    """
    return {
        key: _entry(key, state[key], f"the state dict's {key!r} of parameter {number!r}", parameter)
        for key in KEYS
        if key in state
    }


def _entry(key: str, value: Any, name: str, parameter: torch.Tensor) -> torch.Tensor:
    must = f"{name} must be a dense {_DTYPES[key]} tensor with values"
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{must}, got {type(value).__name__}")
    if not _has_kind(key, value, parameter):
        raise TypeError(f"{must}, got {value.dtype}, {value.layout}, on {value.device}")
    (local,), (own,) = to_local([value]), to_local([parameter.detach()])
    shape = (2,) if key == "rounding" else tuple(own.shape)
    if tuple(local.shape) != shape:
        raise ParameterError(f"{name} must have the shape {shape}, got {tuple(local.shape)}")
    if key == "remainder" and not _fits(local):
        raise ParameterError(
            f"{name} must hold whole numbers from -32768 to 32767: load a state dict that "
            'MasterWeights saved with store="remainder16"'
        )
    device = value.device if key == "rounding" else parameter.device
    return value.to(device, _DTYPES[key], copy=True)


def _has_kind(key: str, value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a tensor has values, and a dtype that a store's entry can be copied from."""
    is_float, is_complex = value.is_floating_point(), value.is_complex()
    is_kind = {"master": is_float, "remainder": not is_complex}.get(key, not is_float)
    has_values = value.layout is torch.strided and (parameter.is_meta or not value.is_meta)
    return is_kind and not is_complex and has_values


def _fits(remainder: torch.Tensor) -> bool:
    """Whether int16 holds the values; a NaN differs from each."""
    return remainder.is_meta or torch.equal(remainder.to(torch.int16).double(), remainder.double())
