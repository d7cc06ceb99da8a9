"""Where an Inf or a NaN in the values of a forward pass comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

from gradscaler.diagnose._gradients.reading import (
    Reading,
    largest_finite,
    largest_of,
    memory_of,
    read,
)
from gradscaler.diagnose._locate.call_site import Site
from gradscaler.diagnose._locate.event import Event, located_at

Tensor = Any

_TAKES_MASKS = re.compile("softmax|logsumexp|attention")
_MAKES_MASKS = re.compile("fill|where|scatter|index_put|copy|_to$")  # and all elementwise ones


class Operation(NamedTuple):
    """An operation that was called.

    Attributes:
        site: where.
        name: PyTorch's own.
        is_elementwise: whether it is.
        inputs: the floating-point tensors that it read.
        before: what they held.
        outputs: the floating-point tensors that it made or changed.
        overwrites: whether it replaces the first of its inputs.
    """

    site: Site
    name: str
    is_elementwise: bool
    inputs: Sequence[Tensor]
    before: Sequence[Reading]
    outputs: Sequence[Tensor]
    overwrites: bool


class _Mark(NamedTuple):
    event: Event
    number: int


class ValueWatch:
    """Follows each Inf and NaN from the operation that made it.

    -inf is what a mask holds. So it counts as finite if it goes in; and if an elementwise
    operation makes it, unless another one turns it into NaN or +Inf. A softmax is made for masks:
    if it returns NaN, as for a row that is masked altogether, it is itself to blame.

    Args:
        model: names the memory of its parameters and buffers; None if there is no model.
    """

    def __init__(self, model: Any) -> None:
        self.events: list[Event] = []
        self._marks: dict[int, _Mark] = {}  # by memory that holds an Inf or a NaN
        self._masks: dict[int, Event] = {}  # by memory in which an operation made -inf
        self._own = {} if model is None else dict(_memory_of(model))
        self._numbers = count()

    @property
    def is_empty(self) -> bool:
        """Whether all that was seen is finite."""
        return not self._marks and not self._masks

    def parameter_of(self, tensor: Tensor) -> str | None:
        """The name within its module of one of the model's own tensors."""
        owner = self._own.get(memory_of(tensor))
        return None if owner is None else owner[2]

    def forget(self, tensor: Tensor) -> None:
        """Forget what a tensor's memory held: it is another tensor's now."""
        self._marks.pop(memory_of(tensor), None)
        self._masks.pop(memory_of(tensor), None)

    def begin_backward(self, tensor: Tensor) -> None:
        """Note that a backward pass begins at a tensor."""
        mark = self._marks.get(memory_of(tensor))
        if mark is not None and read(tensor).bad:
            mark.event.counts = True

    def see(self, operation: Operation, after: Sequence[Reading]) -> None:
        """See what an operation made of its inputs; ``after`` is what its outputs hold."""
        bad = [tensor for tensor, found in zip(operation.outputs, after, strict=True) if found.bad]
        event = self._event_of_inputs(operation, [*bad, *operation.inputs])
        mask = self._mask_of_inputs(operation)
        for tensor, found in zip(operation.outputs, after, strict=True):
            memory = memory_of(tensor)
            if found.state == "mask" and event is None and _may_be_mask(operation, tensor, mask):
                if mask is None and not _has_mask(operation) and operation.inputs:
                    mask = self._made(operation, tensor)
                if mask is not None:
                    self._masks[memory] = mask
            elif found.bad:
                if event is None:
                    takes_masks = _TAKES_MASKS.search(operation.name)
                    event = self._made(operation, tensor) if mask is None or takes_masks else mask
                if event not in self.events:
                    self.events.append(event)
                self._mark(memory, event)

    def _made(self, operation: Operation, tensor: Tensor) -> Event:
        """What an operation made of finite inputs."""
        largest = largest_of(found.largest for found in operation.before)
        return Event(located_at(operation.site, "forward", tensor, largest))

    def _event_of_inputs(self, operation: Operation, shown: Sequence[Tensor]) -> Event | None:
        """The event that made the first input that is not finite. The operation has read it."""
        event = None
        for n, (tensor, found) in enumerate(zip(operation.inputs, operation.before, strict=True)):
            if found.state != "bad":
                continue
            memory = memory_of(tensor)
            is_overwritten = n == 0 and operation.overwrites
            mark = self._marks.get(memory)
            if mark is None and not is_overwritten:
                given = self._given(operation, tensor, shown[0])
                self.events.append(given)
                mark = self._mark(memory, given)
            if mark is not None:
                mark.event.unread.discard(mark.number)
                event = event or (None if is_overwritten else mark.event)
        return event

    def _mask_of_inputs(self, operation: Operation) -> Event | None:
        """The event that made -inf in an input."""
        masks = (
            self._masks.get(memory_of(tensor))
            for tensor, found in zip(operation.inputs, operation.before, strict=True)
            if found.state == "mask"
        )
        return next((mask for mask in masks if mask is not None), None)

    def _given(self, operation: Operation, tensor: Tensor, shown: Tensor) -> Event:
        """What no operation made: one of the model's own tensors, or an input."""
        site, owner = operation.site, self._own.get(memory_of(tensor))
        if owner is None:
            return Event(located_at(site, "input", tensor, largest_finite([tensor])))
        module, type_, parameter = owner
        site = Site(None, site.line, module, type_)
        largest = largest_of(found.largest for found in operation.before)
        return Event(located_at(site, "forward", shown, largest, parameter))

    def _mark(self, memory: int, event: Event) -> _Mark:
        mark = self._marks[memory] = _Mark(event, next(self._numbers))
        event.unread.add(mark.number)
        return mark


def _has_mask(operation: Operation) -> bool:
    return any(found.state == "mask" for found in operation.before)


def _may_be_mask(operation: Operation, tensor: Tensor, mask: Event | None) -> bool:
    """Whether -inf in an output may be meant to mask."""
    if not operation.inputs:  # a constant
        return True
    if tensor.ndim == 0:
        return mask is None and _has_mask(operation)
    name = operation.name
    return operation.is_elementwise or bool(_MAKES_MASKS.search(name)) or _has_mask(operation)


def _memory_of(model: Any) -> Iterator[tuple[int, tuple[str, str, str]]]:
    """The memory of each parameter and buffer: its module's name and type, and its own name."""
    for name, module in model.named_modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for key, tensor in own:
            yield memory_of(tensor), (name, type(module).__name__, key)
