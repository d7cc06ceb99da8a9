"""The 2-norm of many float32 tensors on the CPU: read once, in reads of a size that suits it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from gradscaler.operations import Tensor

_ROW = 2**14  # elements
_MANY_ROWS = 16 * _ROW  # so many that reading them row by row is worth the calls
_SMALL = 2**13  # elements
_COPIED = 2**16  # elements at a time, and not above 1 % of all
_WORTH_COPYING = 8  # tensors at a time


def norm_on_cpu(framework: Any, tensors: list[Tensor]) -> Tensor:
    """The 2-norm of all elements together, a scalar tensor; 0 for no tensors.

    Large tensors are read row by row: one long float32 sum is slower there, and wrong by 1e-3 for
    some ten million elements. Many small ones of one shape are copied side by side, some at a
    time: a call takes longer than copying one does.
    """
    vector_norm, stack = framework.linalg.vector_norm, framework.stack
    norms: list[Tensor] = []
    one_by_one: list[Tensor] = []
    small: defaultdict[Any, list[Tensor]] = defaultdict(list)
    elements = 0
    for tensor in tensors:
        size = tensor.numel()
        elements += size
        if size >= _MANY_ROWS and tensor.is_contiguous():
            flat = tensor.view(-1)
            end = size // _ROW * _ROW
            norms.append(vector_norm(flat[:end].view(-1, _ROW), dim=1))
            one_by_one += [flat[end:]] if end < size else []
        elif 0 < size <= _SMALL:
            small[tensor.shape].append(tensor)
        else:
            one_by_one.append(tensor)
    at_once = min(_COPIED, elements // 100)
    for shape, alike in small.items():
        count = min(len(alike), at_once // alike[0].numel())
        together = len(alike) // count * count if count >= _WORTH_COPYING else 0
        one_by_one += alike[together:]
        if together:
            buffer = alike[0].new_empty((count, *shape))
            rows = buffer.view(count, -1)
            for i in range(0, together, count):
                stack(alike[i : i + count], out=buffer)
                norms.append(vector_norm(rows, dim=1))
    if one_by_one:
        norms.append(stack(list(framework._foreach_norm(one_by_one))))
    if not norms:
        return framework.zeros(())
    return vector_norm(framework.cat(norms))
