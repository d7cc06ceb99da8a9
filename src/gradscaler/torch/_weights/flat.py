"""Flat tensors: many small tensors in one memory, so that one operation takes them all.

An operation on a small tensor takes longer to begin than to compute.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import deepcopy
from itertools import accumulate
from operator import is_
from typing import Any, TypeGuard

import torch

from gradscaler._on_torch.processes import is_dtensor

State = dict[str, Any]


class Layout:
    """The shapes of tensors, and the place of each in flat memory that has them in their order.

    Args:
        tensors: the tensors. Where one has gaps in its memory, the flat memory has none.

    Attributes:
        size: the number of elements of all tensors.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        dense = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        self._shapes = [(tensor.shape, tensor.stride()) for tensor in dense]
        *self._begins, self.size = accumulate((tensor.numel() for tensor in dense), initial=0)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat tensor in the shape and memory order of each tensor."""
        first = flat.storage_offset()
        return [
            flat.as_strided(shape, stride, first + begin)
            for (shape, stride), begin in zip(self._shapes, self._begins, strict=True)
        ]

    def fits(self, tensors: list[torch.Tensor]) -> bool:
        """Whether tensors have these shapes and strides, and all the same dtype."""
        shapes = [(tensor.shape, tensor.stride()) for tensor in tensors]
        return shapes == self._shapes and len({tensor.dtype for tensor in tensors}) == 1

    def flat_of(self, tensors: list[torch.Tensor]) -> torch.Tensor | None:
        """The flat tensor that has tensors as its views; None if there is none."""
        first = tensors[0]
        address, width = first.data_ptr(), first.element_size()
        places = [address + width * begin for begin in self._begins]
        if places != list(map(torch.Tensor.data_ptr, tensors)) or not self.fits(tensors):
            return None
        end = width * (first.storage_offset() + self.size)
        if first.untyped_storage().nbytes() < end:  # other storages lie behind it
            return None
        return first.as_strided((self.size,), (1,))


class _Views:
    """A flat tensor, and its views that were found in the states of parameters."""

    def __init__(self, flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        self.flat, self._tensors = flat, tensors
        self._addresses = list(map(torch.Tensor.data_ptr, tensors))

    def is_of(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are the same tensors, and have not been given other memory since."""
        is_same = all(map(is_, tensors, self._tensors))
        return is_same and list(map(torch.Tensor.data_ptr, tensors)) == self._addresses


class Joined:
    """Parameters that are stepped as one flat parameter.

    Tensors in the states of the parameters are views of flat tensors, which the first step makes.

    Args:
        layout: the layout of the parameters, which are dense.
        count: the number of parameters.
    """

    def __init__(self, layout: Layout, count: int) -> None:
        self._layout = layout
        self._of_counts = Layout([torch.empty(())] * count)
        self._joined: dict[str, _Views] = {}

    def lend(self, states: list[State], keys: Iterable[str], entry: str) -> State | None:
        """The state of the flat parameter, with copies of counts of steps.

        Args:
            states: the state of each parameter. They have the same keys.
            keys: the keys to lend.
            entry: the last key, whose tensors may be replaced by joined copies, once. Other tensors
                are never replaced, because other code may hold them.

        Returns:
            None if the parameters' counts of steps differ, or tensors are not joined.
        """
        lent: State = {}
        for key in keys:
            values = [state[key] for state in states]
            first = values[0]
            if not isinstance(first, torch.Tensor):
                if not all(map(_is_plain, values)) or len(set(values)) > 1:
                    return None
                lent[key] = first
                continue
            joined = self._joined.get(key)
            if joined is None or not joined.is_of(values):
                # Memory that is joined already stays, as others may have views of it.
                may_move = key == entry and not any(map(_is_joined, values))
                joined = self._join(key, states, may_move=may_move)
            if joined is None:
                return None
            if first.dim():
                lent[key] = joined.flat
            elif len(set(joined.flat.tolist())) == 1:
                lent[key] = first.clone()
            else:
                return None
        return lent

    def join(self, states: list[State], without: Collection[str]) -> None:
        """Replace the tensors of all states by joined copies.

        Other processes may have tensors in shared memory, so those stay.

        Args:
            states: the state of each parameter.
            without: keys of tensors that stay.
        """
        for key in set.intersection(*map(set, states)).difference(without):
            if all(_is_own(state[key]) for state in states):
                self._join(key, states, may_move=True)

    def _join(self, key: str, states: list[State], *, may_move: bool) -> _Views | None:
        values = [state[key] for state in states]
        if not all(map(_is_on_cpu, values)):
            return None
        layout = self._layout if values[0].dim() else self._of_counts
        flat = layout.flat_of(values)
        if flat is None:
            may_move = may_move and not torch.is_inference_mode_enabled()
            if not (may_move and layout.fits(values)):
                return None
            flat = torch.cat([flattened(value) for value in values])
            values = layout.views(flat)
            for state, view in zip(states, values, strict=True):
                state[key] = view
        self._joined[key] = _Views(flat, values)
        return self._joined[key]

    def take_back(self, lent: State, stepped: State, states: list[State]) -> list[State]:
        """What the flat parameter's step adds to the state of each parameter, or replaces there.

        It may be called again after an interrupt.
        """
        new: list[State] = [{} for _ in states]
        for key, value in stepped.items():
            if not isinstance(value, torch.Tensor):
                values = [value] * len(states)
            elif value.dim():
                if value is lent.get(key):
                    continue
                values = self._layout.views(value)
            elif key in lent:
                self._joined[key].flat.fill_(value)
                continue
            else:
                values = self._of_counts.views(value.repeat(len(states)))
            for each, of_parameter in zip(new, values, strict=True):
                each[key] = of_parameter
        return new


class Span:
    """A span of one parameter, which is dense.

    Args:
        begin: the first element of the span, in the order of memory.
        end: the end of the span.
        layout: the layout of the parameter.
    """

    def __init__(self, begin: int, end: int, layout: Layout) -> None:
        self.begin, self._end, self._layout = begin, end, layout
        self.is_last = end == layout.size

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The span of a tensor in the parameter's layout."""
        return flattened(tensor)[self.begin : self._end]

    def lend(self, states: list[State], keys: Iterable[str], entry: str) -> State:
        """The state of the span, with a copy of what is not a tensor of the parameter's size."""
        (state,) = states
        return {
            key: self.of(state[key]) if self._has_span(state[key]) else _copied(state[key])
            for key in keys
        }

    def take_back(self, lent: State, stepped: State, states: list[State]) -> list[State]:
        """What the last span's step replaces in the parameter's state: counts of steps."""
        (state,) = states
        others = [key for key in stepped if not self._has_span(state.get(key))]
        return [{key: stepped[key] for key in others if self.is_last}]

    def _has_span(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and self._layout.fits([value])


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gaps, in any order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def separate(state: State) -> State:
    """A state without views of joined memory: pickle would write all of it for each view."""
    return {key: value.clone() if _is_joined(value) else value for key, value in state.items()}


def _is_joined(value: object) -> bool:
    return _is_on_cpu(value) and value.untyped_storage().nbytes() > value.nbytes


def _is_on_cpu(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a strided tensor in the memory of this process."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.is_cpu
        and not is_dtensor(value)
    )


def _is_own(value: object) -> bool:
    """Whether it is a tensor, of PyTorch's own class, in memory that is not shared."""
    return type(value) is torch.Tensor and _is_on_cpu(value) and not value.is_shared()


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (int, float, str))


def _copied(value: object) -> object:
    """A copy of a part of a state. Of a tensor, it takes less time than ``deepcopy``."""
    return value.clone() if isinstance(value, torch.Tensor) else deepcopy(value)
