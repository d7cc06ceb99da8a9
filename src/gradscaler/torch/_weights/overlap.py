"""Finds parameters that share memory, of which each step would keep the update of one only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch

from gradscaler._on_torch.processes import to_local
from gradscaler.errors import ParameterError


def must_not_overlap(parameters: Iterable[torch.Tensor], names: Mapping[int, str]) -> None:
    """Refuse different parameters with elements in the same memory, if one of them is trained.

    Natively, each of them is stepped after the other in this memory. Here, a cast separates them,
    and parameters of 16 bits are widened side by side.

    Args:
        parameters: the parameters. The same one may come again.
        names: the names of some of them, by id.

    Raises:
        ParameterError: two of them overlap.
    """
    in_storage: defaultdict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    own = {id(parameter): parameter for parameter in parameters}
    for parameter in own.values():
        (local,) = to_local([parameter.detach()])
        if local.layout is torch.strided and local.numel():
            address = local.untyped_storage().data_ptr()
            in_storage[address, local.element_size()].append(parameter)
    for (address, _), alike in in_storage.items():
        # Memory at 0 is that of meta tensors, and what FSDP has freed.
        if address and len(alike) > 1 and any(parameter.requires_grad for parameter in alike):
            _must_not_overlap(alike, names)


def _must_not_overlap(alike: list[torch.Tensor], names: Mapping[int, str]) -> None:
    local = dict(zip(map(id, alike), to_local([p.detach() for p in alike]), strict=True))
    bounds = {key: _bounds(tensor) for key, tensor in local.items()}
    if all(end <= begin for (_, end), (begin, _) in pairwise(sorted(bounds.values()))):
        return
    # Slices of columns lie between each other, and share nothing.
    taken = torch.zeros(max(end for _, end in bounds.values()), dtype=torch.bool, device="cpu")
    for i, parameter in enumerate(alike):
        tensor = local[id(parameter)]
        elements = taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if elements.any():
            others = [p for p in alike[:i] if _overlap(bounds[id(p)], bounds[id(parameter)])]
            raise ParameterError(
                f"two parameters share memory, {_name(others[-1], names)} and "
                f"{_name(parameter, names)}, so that each would undo the other's step: use one "
                "parameter in both places, as in head.weight = embedding.weight"
            )
        elements.fill_(True)


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """The first element of a tensor in its storage, and the end."""
    begin = int(tensor.storage_offset())
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + int(last) + 1


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return first[0] < second[1] and second[0] < first[1]


def _name(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    unnamed = f"one of shape {tuple(parameter.shape)}"
    return repr(names[id(parameter)]) if id(parameter) in names else unnamed
