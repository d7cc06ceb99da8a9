"""The 2-norm of many float32 tensors on the CPU: read once, in reads of a size that suits it."""

from __future__ import annotations

from typing import Any

from gradscaler._eager.operations import Tensor
from gradscaler._eager.small_tensors import batches_of_small

_ROW = 2**14  # elements
_MANY_ROWS = 16 * _ROW  # so many that reading them row by row is worth the calls


def norm_on_cpu(framework: Any, tensors: list[Tensor]) -> Tensor:
    """The 2-norm of all elements together, a scalar tensor; 0 for no tensors.

    Large tensors are read row by row: one long float32 sum is slower there, and wrong by 1e-3 for
    some ten million elements. Many small ones are copied side by side first.
    """
    vector_norm, stack = framework.linalg.vector_norm, framework.stack
    norms: list[Tensor] = []
    whole: list[Tensor] = []
    batches, others = batches_of_small(tensors)
    for tensor in others:
        size = tensor.numel()
        if size >= _MANY_ROWS and not tensor.is_contiguous():  # in memory's order it may be
            order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
            tensor = tensor.permute(order)
        if size < _MANY_ROWS or not tensor.is_contiguous():
            whole.append(tensor)
            continue
        flat = tensor.view(-1)
        end = size // _ROW * _ROW
        norms.append(vector_norm(flat[:end].view(-1, _ROW), dim=1))
        whole += [flat[end:]] if end < size else []
    if batches:
        memory = tensors[0].new_empty((max(len(b) * b[0].numel() for b in batches),))
    for batch in batches:
        rows = memory[: len(batch) * batch[0].numel()].view(len(batch), -1)
        stack(batch, out=rows.view(-1, *batch[0].shape))
        norms.append(vector_norm(rows, dim=1))
    if whole:
        norms.append(stack(list(framework._foreach_norm(whole))))
    if not norms:
        return framework.zeros((), dtype=framework.float32, device="cpu")
    return vector_norm(framework.cat(norms))
