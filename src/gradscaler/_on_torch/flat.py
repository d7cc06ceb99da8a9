"""Gradients side by side in memory, so that operations take them as one tensor."""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from gradscaler._torch_like.operations import parameters_of

_dtype_of = attrgetter("dtype")


class FlatGradients:
    """The buffers that hold a model's gradients, made by :func:`flat_gradients`.

    Attributes:
        buffers: a one-dimensional tensor for each dtype and device.
    """

    def __init__(self, buffers: list[torch.Tensor], handles: list[RemovableHandle]) -> None:
        self.buffers = buffers
        self._handles = handles

    def remove(self) -> None:
        """Put no more gradients into the buffers. Gradients that are there stay.

        The memory is freed once the gradients are None and this object is deleted.
        """
        self.buffers = []
        for handle in self._handles:
            handle.remove()


class _IntoPlace:
    """A parameter's hook that moves each new gradient to its place in a buffer."""

    def __init__(self, place: torch.Tensor) -> None:
        self.place = place

    def __call__(self, parameter: torch.Tensor) -> None:
        grad, place = parameter.grad, self.place
        if grad is place or grad is None:
            return
        if type(grad) is not torch.Tensor or grad.is_sparse or grad.requires_grad:
            return
        if _alike(grad, place):
            parameter.grad = place.copy_(grad)


def _alike(grad: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether a gradient still has the dtype, device, shape and strides of its place.

    The model may have changed since :func:`flat_gradients`. A fused optimizer reads a gradient's
    memory in the order of its parameter's, so with other strides it would take one element for
    another. The stride of a dimension of size 1 does not matter.
    """
    if (grad.dtype, grad.device, grad.shape) != (place.dtype, place.device, place.shape):
        return False
    return grad.stride() == place.stride() or all(
        own == other
        for own, other, size in zip(grad.stride(), place.stride(), grad.shape, strict=True)
        if size > 1
    )


def flat_gradients(model_or_optimizer: torch.nn.Module | torch.optim.Optimizer) -> FlatGradients:
    """Keep gradients side by side in memory, so that a scaler takes them as one tensor.

    After this call, a backward pass leaves each ``parameter.grad`` in a buffer that all parameters
    of its dtype and device share. Gradients keep their values, shapes and strides. A parameter
    that gets no gradient still has None. The buffers are as large as the gradients; the operating
    system allocates no pages that were never written.

    Frozen parameters, sparse gradients, DTensors, FSDP1's flat parameters, and gradients of
    ``create_graph=True`` are left alone. So are parameters whose dtype, device, shape or layout has
    changed since this call. Call it after moving the model to its device, dtype and memory format.
    Call it again after unfreezing parameters: those that have a place keep it.

    After ``zero_grad(set_to_none=True)``, the next backward pass makes new gradients, which are
    then copied into the buffer. After ``zero_grad(set_to_none=False)``, it adds to the gradients in
    the buffer. Either way the next gradient overwrites this one: clone a gradient to keep it.

    Args:
        model_or_optimizer: the owner of the parameters. The buffers follow its order; an
            optimizer's own order is the fastest for its steps.

    Returns:
        The buffers, with a method ``remove()`` that undoes this call.

    Raises:
        TypeError: the argument is neither a module nor an optimizer.
        ValueError: a parameter of a lazy module has no shape yet.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    >>> flat = flat_gradients(model)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> [buffer.shape for buffer in flat.buffers]
    [torch.Size([19])]
    >>> model[1].bias.grad, flat.buffers[0][-1]
    (tensor([2.]), tensor(2.))
    """
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in _parameters(model_or_optimizer):
        if _can_lie_flat(parameter):
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    buffers, handles = [], []
    for (dtype, device), parameters in groups.items():
        sizes = [parameter.numel() for parameter in parameters]
        buffer = _empty(sum(sizes), dtype, device)
        for parameter, piece in zip(parameters, buffer.split(sizes), strict=True):
            # Autograd gives a gradient its parameter's strides, unless those leave gaps or overlap.
            strides = torch.empty_like(parameter, device="meta").stride()
            layer = _IntoPlace(piece.as_strided(parameter.shape, strides))
            layer(parameter)
            handles.append(parameter.register_post_accumulate_grad_hook(layer))
        buffers.append(buffer)
    return FlatGradients(buffers, handles)


def _parameters(model_or_optimizer: torch.nn.Module | torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters, each once."""
    if isinstance(model_or_optimizer, torch.nn.Module):
        parameters: list[torch.Tensor] = list(model_or_optimizer.parameters())
    elif hasattr(model_or_optimizer, "param_groups"):
        parameters = parameters_of(model_or_optimizer)
    else:
        raise TypeError(
            "flat_gradients() takes a torch.nn.Module or an optimizer, got "
            f"{type(model_or_optimizer).__name__}"
        )
    if any(map(is_lazy, parameters)):
        raise ValueError(
            "a lazy module's parameters have no shape yet: run the model once before "
            "flat_gradients()"
        )
    return list({id(parameter): parameter for parameter in parameters}.values())


def _can_lie_flat(parameter: torch.Tensor) -> bool:
    """Whether a parameter gets whole, dense gradients, and has no place in a buffer yet."""
    hooks: Any = parameter._post_accumulate_grad_hooks or {}
    return (
        parameter.requires_grad
        and type(parameter.detach()) is torch.Tensor
        and not getattr(parameter, "_fsdp_flattened", False)
        and not any(isinstance(hook, _IntoPlace) for hook in hooks.values())
    )


def _empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialized buffer.

    On the CPU, NumPy allocates it: NumPy asks for huge pages, which are read a tenth faster.
    """
    if device.type != "cpu" or size == 0:  # NumPy's empty arrays have no stride that fits
        return torch.empty(size, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(size * dtype.itemsize, np.uint8)).view(dtype)


def side_by_side(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Join tensors that lie side by side in memory; return as few tensors as possible.

    Tensors of one storage and dtype that follow one another without a gap become one
    one-dimensional view, in whatever order they are given. All others are returned as they are.
    """
    offsets = list(map(torch.Tensor.storage_offset, tensors))
    if not any(offsets) or set(map(type, tensors)) != {torch.Tensor}:
        return tensors  # each has its own storage, as after most backward passes
    dtypes = set(map(_dtype_of, tensors))
    if len(dtypes) > 1:
        return [
            tensor
            for dtype in dtypes
            for tensor in side_by_side([tensor for tensor in tensors if tensor.dtype == dtype])
        ]
    starts, sizes = map(torch.Tensor.data_ptr, tensors), map(torch.Tensor.numel, tensors)
    dense = None
    if not all(map(torch.Tensor.is_contiguous, tensors)):
        dense = tuple(map(_is_dense, tensors))
    runs = _runs(tuple(starts), tuple(sizes), tuple(offsets), tensors[0].itemsize, dense)
    return tensors if runs is None else [_joined(tensors, run) for run in runs]


@lru_cache(maxsize=8)  # most gradients have the addresses of the step before
def _runs(
    starts: tuple[int, ...],
    sizes: tuple[int, ...],
    offsets: tuple[int, ...],
    itemsize: int,
    dense: tuple[bool, ...] | None,
) -> list[list[int]] | None:
    """The runs of tensors that follow one another in memory, by index; None if no two do.

    Args:
        starts: the tensors' addresses.
        sizes: their numbers of elements.
        offsets: the distance of each from the beginning of its storage, in elements.
        itemsize: the bytes of an element.
        dense: whether each fills its memory without gaps; None if all do.
    """
    begin, count = np.array(starts, np.uint64), np.array(sizes, np.uint64)
    end = begin + count * np.uint64(itemsize)
    storage = begin - np.array(offsets, np.uint64) * np.uint64(itemsize)
    order = np.argsort(begin, kind="stable")
    here, there = order[:-1], order[1:]
    follows = (begin[there] == end[here]) & (storage[there] == storage[here])
    follows &= count[here] > 0
    if dense is not None:
        are_dense = np.array(dense)
        follows &= are_dense[here] & are_dense[there]
    if not follows.any():
        return None
    return [run.tolist() for run in np.split(order, np.flatnonzero(~follows) + 1)]


def _joined(tensors: list[torch.Tensor], run: list[int]) -> torch.Tensor:
    first, last = tensors[run[0]], tensors[run[-1]]
    if first is last:
        return first
    start = first.storage_offset()
    return last.as_strided((last.storage_offset() + last.numel() - start,), (1,), start)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, contiguous or in ``channels_last``."""
    return tensor.is_contiguous() or (
        tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
