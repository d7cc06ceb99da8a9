"""Whose an Inf or a NaN is, among the values that operations make of one another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

from gradscaler.diagnose._gradients.reading import (
    Reading,
    floating,
    largest_finite,
    largest_of,
    memory_of,
    read,
)
from gradscaler.diagnose._locate.call_site import operation_of, source_of
from gradscaler.diagnose._locate.located import Located, Site, located_at
from gradscaler.diagnose._locate.module_hooks import Module, Tensor

Source = TypeVar("Source")

_TAKES_MASKS = re.compile("softmax|logsumexp|attention")
_FILLS = re.compile("fill|where|scatter|index_put")  # with -inf that is meant to mask
_CASTS = re.compile("copy|_to$")
_DIVIDES = re.compile("div|reciprocal|rsqrt")


class Value(NamedTuple, Generic[Source]):
    """What an array holds, and what made its Inf, NaN or -inf; None for a mask that was given."""

    found: Reading
    source: Source | None = None


def result(
    found: Reading,
    is_scalar: bool,
    inputs: Sequence[Value[Source]],
    makes_masks: bool,
    made: Callable[[], Source],
) -> Value[Source]:
    """The result of an operation, by what it holds and by the operation's inputs.

    An Inf or NaN comes from the first input that holds one; else the operation made it. -inf is
    what a mask holds, so it does no harm until an operation turns it into +Inf or NaN. Then it is
    whose -inf that was; or the operation's, if the mask was given. -inf is no mask if it is a
    scalar, or is made of finite numbers by an operation that makes no masks.

    Args:
        found: what the result holds.
        is_scalar: whether it is one number.
        inputs: of the operation.
        makes_masks: whether -inf in its result may be meant to mask.
        made: what the operation is as a source.
    """
    if not found.bad:
        return Value(found)
    bad = [value for value in inputs if value.found.state == "bad"]
    masks = [value for value in inputs if value.found.state == "mask"]
    source = next((value.source for value in bad or masks if value.source is not None), None)
    if found.state == "mask" and not bad:
        if source is None and (masks or not inputs):  # it was given
            return Value(found)
        if is_scalar or not (masks or makes_masks):
            found = Reading("bad")
    return Value(found, made() if source is None else source)


@dataclass(eq=False)
class Event:
    """An Inf or a NaN, and what made it. Many do no harm, as ``where`` leaves them out.

    Attributes:
        located: what made it.
        counts: whether a backward pass began at it, or it reached the gradient of a leaf.
    """

    located: Located
    counts: bool = False


class Operation(NamedTuple):
    """An operation that was called.

    Attributes:
        name: PyTorch's own.
        is_elementwise: whether it is.
        site: where.
        outer: the outermost module that ran, if none of the model's did.
        inputs: the floating-point tensors that it read.
        before: what they held.
        outputs: those that it made or changed.
        after: what they hold.
    """

    name: str
    is_elementwise: bool
    site: Site
    outer: Module | None
    inputs: Sequence[Tensor]
    before: Sequence[Reading]
    outputs: Sequence[Tensor]
    after: Sequence[Reading]

    @property
    def bad(self) -> Tensor:
        """The first output that is not finite."""
        return next(t for t, found in zip(self.outputs, self.after, strict=True) if found.bad)

    @property
    def largest_input(self) -> float:
        """The largest magnitude that went in."""
        return largest_of(found.largest for found in self.before)

    @property
    def smallest_divisor(self) -> float | None:
        """The smallest magnitude that it divided by, if it divided by a tensor that is there."""
        divisors = self.inputs[1:] if "div" in self.name else self.inputs
        is_there = divisors and not any(divisors[-1] is tensor for tensor in self.outputs)
        if not is_there or not _DIVIDES.search(self.name):
            return None
        return float(divisors[-1].detach().abs().min())


class ValueWatch:
    """Follows each Inf and NaN in PyTorch's tensors from the operation that made it to the loss.

    Args:
        model: names its parameters and buffers; None if there is no model.

    Attributes:
        events: what was made, in this order.
        owners: by the memory of each parameter and buffer, the site of its module, and its own
            name.
    """

    def __init__(self, model: Module | None) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self.events: list[Event] = []
        self.owners = {} if model is None else _owners_in(model)
        self._has_ended = False  # in a loss, or another result
        self._sources: dict[int, Event] = {}  # of the Inf, NaN and -inf in memory
        self._unread: Any = WeakIdKeyDictionary()  # what made a tensor and was not read

    @property
    def harmful(self) -> list[Located]:
        """What reached a result, if there was one; else all."""
        return [e.located for e in self.events if e.counts or not self._has_ended]

    def note_unread(self, outputs: Iterable[Tensor], operation: str) -> None:
        """Note which operation made tensors that are not read."""
        self._unread.update(dict.fromkeys(outputs, operation))

    def pass_on(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Note that outputs hold what inputs hold, as where gradscaler scales a loss."""
        sources = [self._sources.get(memory_of(tensor)) for tensor in inputs]
        self._sources |= {memory_of(t): s for t in outputs for s in sources if s is not None}

    def end_in(self, results: Any) -> None:
        """Note that tensors are results: an Inf or NaN that does not reach one does no harm."""
        from torch import Tensor

        for tensor in floating(Tensor, results):
            self._has_ended = True
            source = self._sources.get(memory_of(tensor))
            if source is not None and read(tensor).bad:
                source.counts = True

    def new_among(self, outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        """The outputs that are no views of inputs, whose memory was another tensor's before."""
        of_inputs = {memory_of(tensor): tensor for tensor in inputs}
        new = []
        for tensor in outputs:
            viewed = of_inputs.get(memory_of(tensor))
            if viewed is None:
                new.append(tensor)
                self._sources.pop(memory_of(tensor), None)
            elif (made_by := self._unread.get(viewed)) is not None:
                self._unread[tensor] = made_by
        return new

    def follow(self, operation: Operation) -> None:
        """Note whose the Inf, NaN and -inf are in what an operation made."""
        name = operation.name
        makes_masks = operation.is_elementwise or bool(_CASTS.search(name))

        @cache
        def made() -> Event:
            largest, divisor = operation.largest_input, operation.smallest_divisor
            site, bad = operation.site, operation.bad
            return Event(located_at(site, "forward", bad, largest, smallest_divisor=divisor))

        of_inputs = zip(operation.inputs, operation.before, strict=True)
        values = [self._value(operation, tensor, found) for tensor, found in of_inputs]
        is_meant = _FILLS.search(name) and not any(value.source for value in values)
        for tensor, found in zip(operation.outputs, operation.after, strict=True):
            if found.state == "mask" and is_meant:
                continue
            value = result(found, tensor.ndim == 0, values, makes_masks, made)
            if value.source is not None:
                self._sources[memory_of(tensor)] = value.source
                if value.found.state == "bad" and value.source not in self.events:
                    self.events.append(value.source)

    def _value(self, operation: Operation, tensor: Tensor, found: Reading) -> Value[Event]:
        """What an input held, and what made that."""
        source = self._sources.get(memory_of(tensor)) if found.bad else None
        if found.state == "bad" and source is None:
            source = self._sources[memory_of(tensor)] = self._given(operation, tensor)
        if found.state == "mask" and _TAKES_MASKS.search(operation.name):
            source = None  # it is made for masks: if it returns NaN, it is itself to blame
        return Value(found, source)

    def _given(self, operation: Operation, tensor: Tensor) -> Event:
        """What no operation made: a parameter or a buffer of a module, or an input."""
        site, outer, memory = operation.site, operation.outer, memory_of(tensor)
        own, others = self.owners.get(memory), {} if outer is None else _owners_in(outer)
        if own is None and memory not in others:
            largest, made_by = largest_finite([tensor]), self._maker_of(tensor)
            return Event(located_at(site, "input", tensor, largest, made_by=made_by))
        if own is None:
            owner, name = others[memory]
            own = site, f"{owner.module}.{name}".lstrip(".")
        owner, name = own
        at, largest = owner._replace(operation=None, line=site.line), operation.largest_input
        return Event(located_at(at, "forward", operation.bad, largest, parameter=name))

    def _maker_of(self, tensor: Tensor) -> str | None:
        """The operation that computed a tensor unread, if anything says that one did."""
        node = source_of(tensor.grad_fn)
        if node is None or hasattr(node, "variable"):
            made_by: str | None = self._unread.get(tensor)
            return made_by
        return operation_of(node)


def _owners_in(model: Module) -> dict[int, tuple[Site, str]]:
    """By the memory of each parameter and buffer, the site of its module, and its own name."""
    found: dict[int, tuple[Site, str]] = {}
    for name, module in model.named_modules():
        site = Site(module=name, type=type(module).__name__)
        for own in (module.named_parameters, module.named_buffers):
            found |= {memory_of(tensor): (site, key) for key, tensor in own(recurse=False)}
    return found
