"""Gradients that lie side by side in memory: laying them so, and taking them as one tensor."""

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
    """What :func:`flat_gradients` returns.

    Attributes:
        buffers: one tensor of one dimension for each dtype and device.
    """

    def __init__(self, buffers: list[torch.Tensor], handles: list[RemovableHandle]) -> None:
        self.buffers = buffers
        self._handles = handles

    def remove(self) -> None:
        """Lay no further gradients into the buffers; those that are there stay.

        The memory is free once the gradients are None and this object is gone.
        """
        self.buffers = []
        for handle in self._handles:
            handle.remove()


class _Layer:
    """Moves a parameter's new gradient to its place in a buffer; a hook of the parameter."""

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
    """Whether a gradient is laid out as its place is; not where the model was changed since.

    A fused optimizer reads a gradient in the order of its parameter's memory, so a place with
    strides of another order would hand it each element in another's stead. The stride of a
    dimension of size 1 says nothing.
    """
    if (grad.dtype, grad.device, grad.shape) != (place.dtype, place.device, place.shape):
        return False
    return grad.stride() == place.stride() or all(
        own == other
        for own, other, size in zip(grad.stride(), place.stride(), grad.shape, strict=True)
        if size > 1
    )


def flat_gradients(model_or_optimizer: torch.nn.Module | torch.optim.Optimizer) -> FlatGradients:
    """Let gradients lie side by side, so that a scaler takes them as one tensor.

    From now on a backward pass leaves each ``parameter.grad`` in a buffer that all parameters of
    its dtype and device share. Values, shapes and strides are what they were. A parameter that
    gets no gradient has none. The buffers are as large as the gradients; of memory that was never
    written to, the system gives none.

    Left alone are frozen parameters, sparse gradients, DTensors, FSDP1's flat parameters, and
    gradients of ``create_graph=True``, and those of parameters whose dtype, device, shape or layout
    you changed since. Call it after the model was moved to its device, dtype and memory format,
    and again after you unfroze parameters: those that have a place keep it.

    A gradient that ``zero_grad(set_to_none=True)`` dropped is copied into the buffer once the next
    backward pass has made it. ``zero_grad(set_to_none=False)`` keeps it there, and the backward
    pass adds to it. Either way the next gradient overwrites the one before: clone what you keep.

    Args:
        model_or_optimizer: whose parameters; an optimizer's order of them serves its steps best.

    Returns:
        The buffers, and a way to end it, ``remove()``.

    Raises:
        TypeError: the argument is neither a module nor an optimizer.
        ValueError: a parameter has no shape yet: it is one of a lazy module.

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
            # A gradient has its parameter's strides, unless those leave gaps or overlap.
            strides = torch.empty_like(parameter, device="meta").stride()
            layer = _Layer(piece.as_strided(parameter.shape, strides))
            layer(parameter)
            handles.append(parameter.register_post_accumulate_grad_hook(layer))
        buffers.append(buffer)
    return FlatGradients(buffers, handles)


def _parameters(model_or_optimizer: Any) -> list[torch.Tensor]:
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
    """Whether a parameter gets dense gradients, as a whole, and has no place for them yet."""
    hooks: Any = parameter._post_accumulate_grad_hooks or {}
    return (
        parameter.requires_grad
        and type(parameter.detach()) is torch.Tensor
        and not getattr(parameter, "_fsdp_flattened", False)
        and not any(isinstance(hook, _Layer) for hook in hooks.values())
    )


def _empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer; NumPy asks for huge pages, which are read a tenth faster than PyTorch's memory."""
    if device.type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(size * dtype.itemsize, np.uint8)).view(dtype)


def side_by_side(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same elements in as few tensors as their memory allows.

    Tensors of one storage and dtype that follow one another without a gap, in whatever order they
    are given, become one tensor of one dimension, a view of them. All others stay as they are.
    """
    offsets = list(map(torch.Tensor.storage_offset, tensors))
    if not any(offsets) or set(map(type, tensors)) != {torch.Tensor}:
        return tensors  # each in a storage of its own, as a backward pass leaves them
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


@lru_cache(maxsize=8)  # gradients mostly lie where they lay in the step before
def _runs(
    starts: tuple[int, ...],
    sizes: tuple[int, ...],
    offsets: tuple[int, ...],
    itemsize: int,
    dense: tuple[bool, ...] | None,
) -> list[list[int]] | None:
    """Which tensors follow one another, each run in the order of memory; None if none do.

    Args:
        starts: their addresses.
        sizes: their numbers of elements.
        offsets: their distances from the beginning of their storage, in elements.
        itemsize: bytes of an element.
        dense: whether each fills one piece of memory; None if all do.
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
    """Whether a tensor's elements fill one piece of memory, in the usual orders of dimensions."""
    return tensor.is_contiguous() or (
        tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
