"""Batches of many small tensors, because a call takes longer than copying a small tensor."""

from __future__ import annotations

import math
from collections import defaultdict

from gradscaler._eager.operations import Tensor

_SMALL = 2**13  # elements
_LONGEST_BATCH = 2**17  # elements
_SHORTEST_BATCH = 8  # tensors

Shape = tuple[int, ...]


def small_by_shape(tensors: list[Tensor]) -> tuple[dict[Shape, list[Tensor]], list[Tensor]]:
    """Split off small tensors, in lists by shape, and return the others second.

    Fewer than 8 small tensors are not split off.
    """
    if len(tensors) < _SHORTEST_BATCH:
        return {}, tensors
    small: dict[Shape, list[Tensor]] = {}
    others: list[Tensor] = []
    for shape, alike in _by_shape(tensors).items():
        if 0 < math.prod(shape) <= _SMALL:
            small[shape] = alike
        else:
            others += alike
    few = sum(map(len, small.values())) < _SHORTEST_BATCH
    return ({}, tensors) if few else (small, others)


def batches_of_small(tensors: list[Tensor]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Split off small tensors in batches of one shape, and return the others second.

    All batches of a shape have the same length. A batch is less than 1 % of all elements, so a copy
    of it takes little memory.
    """
    if len(tensors) < _SHORTEST_BATCH:
        return [], tensors
    by_shape = _by_shape(tensors)
    elements = sum(math.prod(shape) * len(alike) for shape, alike in by_shape.items())
    longest = min(_LONGEST_BATCH, elements // 128)
    batches: list[list[Tensor]] = []
    others: list[Tensor] = []
    for shape, alike in by_shape.items():
        size = math.prod(shape)
        length = min(len(alike), longest // size) if 0 < size <= _SMALL else 0
        end = len(alike) // length * length if length >= _SHORTEST_BATCH else 0
        batches += [alike[i : i + length] for i in range(0, end, length)] if end else []
        others += alike[end:]
    return batches, others


def _by_shape(tensors: list[Tensor]) -> dict[Shape, list[Tensor]]:
    by_shape: defaultdict[Shape, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_shape[tuple(tensor.shape)].append(tensor)
    return by_shape
