"""Follow each Inf and NaN through operations, from the one that made it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, TypeVar

from gradscaler.diagnose._gradients.reading import (
    Reading,
    Tensor,
    floating,
    largest_finite,
    largest_of,
    memory_of,
    read,
)
from gradscaler.diagnose._locate.call_site import called, operation_of, source_of
from gradscaler.diagnose._locate.module_hooks import Module
from gradscaler.diagnose._locate.site import Site, located_at
from gradscaler.diagnose._record.located import Located

Source = TypeVar("Source")

TAKES_MASKS = re.compile("softmax|logsumexp|attention")
FILLS = re.compile("fill|where|scatter|index_put")  # they may write -inf as a mask
_CASTS = re.compile("copy|_to$")
_OVERWRITES = ("copy_", "fill_", "normal_", "uniform_", "zero_")  # their first argument
DIVIDES = re.compile("div|reciprocal|rsqrt")


@dataclass(frozen=True)
class Value(Generic[Source]):
    """An array's reading, and the source of its Inf, NaN or -inf; None for a given mask."""

    found: Reading
    source: Source | None = None


def result(
    found: Reading,
    is_scalar: bool,
    inputs: Sequence[Value[Source]],
    makes_masks: bool,
    made: Callable[[], Source],
) -> Value[Source]:
    """The value that an operation returns, from its reading and the operation's inputs.

    An Inf or NaN comes from the first input that holds one. If none does, the operation made it.
    -inf may be a mask, so it does no harm until an operation turns it into +Inf or NaN. The source
    is then that of the -inf, or the operation itself if the mask was given. -inf is not a mask if
    it is a scalar, or if an operation that makes no masks makes it from finite numbers.

    Args:
        found: the reading of the result.
        is_scalar: whether the result is a single number.
        inputs: the values of the operation's inputs.
        makes_masks: whether -inf in the result may be meant as a mask.
        made: returns the source that stands for the operation.
    """
    if not found.bad:
        return Value(found)
    bad = [value for value in inputs if value.found.state == "bad"]
    masks = [value for value in inputs if value.found.state == "mask"]
    source = next((value.source for value in bad or masks if value.source is not None), None)
    if found.state == "mask" and not bad:
        if source is None and (masks or not inputs):  # the mask was given
            return Value(found)
        if is_scalar or not (masks or makes_masks):
            found = Reading("bad")
    return Value(found, made() if source is None else source)


@dataclass(eq=False)
class Event:
    """An Inf or a NaN, and where it was made. It may do no harm: ``where`` can leave it out.

    Attributes:
        located: where it was made.
        counts: whether it reached a result, such as a loss, or the gradient of a leaf.
    """

    located: Located
    counts: bool = False


class Operation:
    """A call of an operation of PyTorch.

    Attributes:
        name: PyTorch's internal name of the operation.
        inputs: the floating-point tensors that it reads.
        before: the readings of ``inputs`` before the call; None if they were not read.
        outputs: the floating-point tensors that it makes or changes.
        after: the readings of ``outputs``.
        site: where it is called.
        outer: the outermost running module, if no module of the model is running.
        changes_inputs: whether it may change its inputs.
    """

    def __init__(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        from torch import Tensor

        self.name: str = func.name().partition("::")[2].partition(".")[0]
        given = [value for key, value in kwargs.items() if key != "out"]
        self.inputs = list(floating(Tensor, (args[self.name in _OVERWRITES :], given)))
        self.before: list[Reading] | None = None
        self.outputs: list[Tensor] = []
        self.after: list[Reading] = []
        self.site = Site()
        self.outer: Module | None = None
        self.changes_inputs = self.name.endswith("_") or "out" in kwargs
        self.changes_inputs |= "batch_norm" in self.name  # it updates statistics
        self._tags = getattr(func, "tags", ())  # higher-order operators have none
        self._args = args

    @property
    def makes_masks(self) -> bool:
        """Whether -inf in its outputs may be meant as a mask."""
        is_elementwise = any(tag.name == "pointwise" for tag in self._tags)
        return is_elementwise or bool(_CASTS.search(self.name))

    @property
    def bad(self) -> Tensor:
        """The first output that is not finite."""
        return next(t for t, found in zip(self.outputs, self.after, strict=True) if found.bad)

    @property
    def largest_input(self) -> float:
        """The largest magnitude in its inputs."""
        return largest_of(found.largest for found in self.before or ())

    @property
    def smallest_divisor(self) -> float | None:
        """The smallest magnitude of its divisor; None if it has none, or overwrote it."""
        if not DIVIDES.search(self.name):
            return None
        divisors = self.inputs[1:] if "div" in self.name else self.inputs
        if not divisors:
            numbers = (each for each in self._args if isinstance(each, (int, float)))
            return next((abs(float(number)) for number in numbers), None)
        if any(divisors[-1] is tensor for tensor in self.outputs):  # it was overwritten
            return None
        return float(divisors[-1].detach().abs().min())


class ValueWatch:
    """Follows each Inf and NaN in PyTorch's tensors from the operation that made it to the loss.

    Args:
        model: the model that gives parameters and buffers their names; None if there is none.

    Attributes:
        events: each Inf and NaN that was made, in order.
        owners: the module's site and the own name of each parameter and buffer, by its memory.
    """

    def __init__(self, model: Module | None) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self.events: list[Event] = []
        self.owners = {} if model is None else _owners_in(model)
        self._has_ended = False  # whether a loss or another result was seen
        self._sources: dict[int, Event] = {}  # of Inf, NaN and -inf, by memory
        self._unread: Any = WeakIdKeyDictionary()  # by tensor, the unchecked operation that made it

    @property
    def harmful(self) -> list[Located]:
        """The events that reached a result or a leaf; all events if no result was seen."""
        return [e.located for e in self.events if e.counts or not self._has_ended]

    def note_unread(self, operation: Operation) -> None:
        """Note an operation whose outputs are not checked."""
        self._unread.update(dict.fromkeys(operation.outputs, called(operation.name)))

    def pass_on(self, operation: Operation) -> None:
        """Give the outputs the sources of the inputs, such as where gradscaler scales a loss."""
        sources = [self._sources.get(memory_of(tensor)) for tensor in operation.inputs]
        made = map(memory_of, operation.outputs)
        self._sources |= {memory: s for memory in made for s in sources if s is not None}

    def end_in(self, results: object) -> None:
        """Note the results of a pass. An Inf or NaN that reaches none of them does no harm."""
        from torch import Tensor

        for tensor in floating(Tensor, results):
            self._has_ended = True
            source = self._sources.get(memory_of(tensor))
            if source is not None and read(tensor).bad:
                source.counts = True

    def leave_views_out(self, operation: Operation) -> None:
        """Drop outputs that are views of inputs, and old sources of the others' memory."""
        of_inputs = {memory_of(tensor): tensor for tensor in operation.inputs}
        outputs, operation.outputs = operation.outputs, []
        for tensor in outputs:
            viewed = of_inputs.get(memory_of(tensor))
            if viewed is None:
                operation.outputs.append(tensor)
                self._sources.pop(memory_of(tensor), None)
            elif (made_by := self._unread.get(viewed)) is not None:
                self._unread[tensor] = made_by

    def follow(self, operation: Operation) -> None:
        """Note the source of each Inf, NaN and -inf in an operation's outputs."""
        made = cache(partial(self._made, operation))
        of_inputs = zip(operation.inputs, operation.before or (), strict=True)
        values = [self._value(operation, tensor, found) for tensor, found in of_inputs]
        is_meant = FILLS.search(operation.name) and not any(value.source for value in values)
        for tensor, found in zip(operation.outputs, operation.after, strict=True):
            if found.state == "mask" and is_meant:
                continue
            value = result(found, tensor.ndim == 0, values, operation.makes_masks, made)
            if value.source is not None:
                self._sources[memory_of(tensor)] = value.source
                if value.found.state == "bad" and value.source not in self.events:
                    self.events.append(value.source)

    def _made(self, operation: Operation) -> Event:
        """The event for an Inf or NaN that an operation made from finite inputs."""
        largest, divisor = operation.largest_input, operation.smallest_divisor
        at = operation.site
        return Event(located_at(at, "forward", operation.bad, largest, smallest_divisor=divisor))

    def _value(self, operation: Operation, tensor: Tensor, found: Reading) -> Value[Event]:
        """The value of an input: its reading, and the source of its Inf, NaN or -inf."""
        source = self._sources.get(memory_of(tensor)) if found.bad else None
        if found.state == "bad" and source is None:
            source = self._sources[memory_of(tensor)] = self._given(operation, tensor)
        if found.state == "mask" and TAKES_MASKS.search(operation.name):
            source = None  # it takes masks, so a NaN in its output is its own
        return Value(found, source)

    def _given(self, operation: Operation, tensor: Tensor) -> Event:
        """The event for an Inf or NaN that a parameter, a buffer or an input already held."""
        site, outer, memory = operation.site, operation.outer, memory_of(tensor)
        own, others = self.owners.get(memory), {} if outer is None else _owners_in(outer)
        writes = FILLS.search(operation.name) or operation.name == "copy_"
        if own is None and writes and not tensor.ndim:  # a number in the code
            return self._made(operation)
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
        """The unwatched operation that computed a tensor; None if none is known."""
        node = source_of(tensor.grad_fn)
        if node is None or hasattr(node, "variable"):
            made_by: str | None = self._unread.get(tensor)
            return made_by
        return operation_of(node)


def _owners_in(model: Module) -> dict[int, tuple[Site, str]]:
    """The module's site and the own name of each parameter and buffer, by its memory."""
    found: dict[int, tuple[Site, str]] = {}
    for name, module in model.named_modules():
        site = Site(module=name, type=type(module).__name__)
        for own in (module.named_parameters, module.named_buffers):
            found |= {memory_of(tensor): (site, key) for key, tensor in own(recurse=False)}
    return found
