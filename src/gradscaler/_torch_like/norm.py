"""The 2-norm of many float32 tensors on the CPU, in one pass over them."""

from __future__ import annotations

from collections import defaultdict
from types import ModuleType

from gradscaler._eager.operations import Tensor

_ROW = 2**14  # elements
_MANY_ROWS = 4 * _ROW  # elements from which reading row by row saves more time than its call takes
_SMALL = 2**13  # elements up to which a call takes longer than reading the tensor
_MANY = 8  # tensors
_LONGEST_SUM = 2**10  # squares that one float32 accumulates at most


def norm_on_cpu(framework: ModuleType, tensors: list[Tensor]) -> Tensor:
    """The 2-norm of all elements together, a scalar tensor; 0 for no tensors.

    Large tensors are read row by row: one long float32 sum is slower, and off by 1e-3 for about ten
    million elements. If many small tensors have one shape, their squares are added up element by
    element, in one call on one thread. No sum has more than 2**16 squares, spread over the lanes of
    a vector register. So the relative error is at most 1e-4; equal values reach it, because all
    their roundings go in one direction, and it is about 1e-6 for others.
    """
    vector_norm, stack = framework.linalg.vector_norm, framework.stack
    norms: list[Tensor] = []
    whole: list[Tensor] = []
    small, others = _split(tensors)
    for alike in small:
        squares = alike[0].new_zeros(alike[0].shape)
        framework._foreach_addcmul_([squares] * len(alike), alike, alike)
        norms.append(squares.sum().sqrt().view(1))
    for tensor in others:
        size = tensor.numel()
        if size >= _MANY_ROWS and not tensor.is_contiguous():  # perhaps its dimensions are permuted
            order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
            tensor = tensor.permute(order)
        if size < _MANY_ROWS or not tensor.is_contiguous():
            whole.append(tensor)
            continue
        flat = tensor.view(-1)
        end = size // _ROW * _ROW
        norms.append(vector_norm(flat[:end].view(-1, _ROW), dim=1))
        whole += [flat[end:]] if end < size else []
    if whole:
        norms.append(stack(list(framework._foreach_norm(whole))))
    if not norms:
        return framework.zeros((), dtype=framework.float32, device="cpu")
    return vector_norm(framework.cat(norms))


def _split(tensors: list[Tensor]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Split off small tensors of which many have one shape, and return the others second.

    Each list of small tensors has one shape, and at most ``_LONGEST_SUM`` of them.
    """
    if len(tensors) < _MANY:
        return [], tensors
    by_shape: defaultdict[object, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_shape[tensor.shape].append(tensor)
    small: list[list[Tensor]] = []
    others: list[Tensor] = []
    for alike in by_shape.values():
        if len(alike) < _MANY or alike[0].numel() > _SMALL:
            others += alike
        else:
            small += [alike[i : i + _LONGEST_SUM] for i in range(0, len(alike), _LONGEST_SUM)]
    return small, others
