"""Where an Inf or a NaN comes from: in values of the forward pass, or in gradients."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from gradscaler.diagnose._gradients.reading import (
    Reading,
    largest_finite,
    largest_of,
    memory_of,
    read,
)
from gradscaler.diagnose._locate.call_site import differentiated
from gradscaler.diagnose._locate.located import Located, Site, located_at
from gradscaler.diagnose._locate.module_hooks import remove_all, weakly

Module = Any
Node = Any
Tensor = Any

_TAKES_MASKS = re.compile("softmax|logsumexp|attention")
_MAKES_MASKS = re.compile("fill|where|scatter|index_put|copy|_to$")  # and all elementwise ones
_DIVIDES = re.compile("div|reciprocal|rsqrt")
# Nodes whose output is their input in another form.
_FORMS = re.compile(
    r"(T|Transpose|Permute|View|UnsafeView|Reshape\w*|Expand|ToCopy|Clone|Slice|Select|Alias"
    r"|Squeeze|Unsqueeze)Backward\d"
)
_MOST_FORMS = 8


class Operation(NamedTuple):
    """An operation that was called.

    Attributes:
        site: where.
        outer: the outermost module that ran, if it ran outside of the model's modules.
        name: PyTorch's own.
        is_elementwise: whether it is.
        inputs: the floating-point tensors that it read.
        before: what they held.
        outputs: the floating-point tensors that it made or changed.
        overwrites: whether it replaces the first of its inputs.
    """

    site: Site
    outer: Module | None
    name: str
    is_elementwise: bool
    inputs: Sequence[Tensor]
    before: Sequence[Reading]
    outputs: Sequence[Tensor]
    overwrites: bool

    @property
    def has_mask(self) -> bool:
        """Whether -inf went in."""
        return any(found.state == "mask" for found in self.before)

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


@dataclass(eq=False)
class Event:
    """An Inf or a NaN that was made of finite numbers, or that no operation made.

    Many do no harm, as ``where`` or a softmax leaves them out.

    Attributes:
        located: what made it.
        counts: whether a backward pass began at it, or it reached the gradient of a leaf.
        marks: the tensors that it reached and that no operation made finite since.
    """

    located: Located
    counts: bool = False
    marks: set[_Mark] = field(default_factory=set)

    @property
    def does_harm(self) -> bool:
        """Whether it reached a result."""
        return self.counts or bool(self.marks)


@dataclass(eq=False)
class _Mark:
    """A tensor that an event reached."""

    event: Event


class ValueWatch:
    """Follows each Inf and NaN from the operation that made it.

    -inf is what a mask holds. So it counts as finite if it goes in; and if an elementwise
    operation makes it, unless another one turns it into NaN or +Inf. A softmax is made for masks:
    if it returns NaN, as for a row that is masked altogether, it is itself to blame.

    Args:
        model: names the memory of its parameters and buffers; None if there is no model.
        made_by: names the operation that made a tensor without being watched; else returns None.
    """

    def __init__(self, model: Module | None, made_by: Any) -> None:
        self.events: list[Event] = []
        self._marks: dict[int, _Mark] = {}  # by memory that holds an Inf or a NaN
        self._masks: dict[int, Event] = {}  # by memory in which an operation made -inf
        self._own = {} if model is None else dict(_memory_of(model))
        self._made_by = made_by

    @property
    def is_empty(self) -> bool:
        """Whether all that was seen is finite."""
        return not self._marks and not self._masks

    def parameter_of(self, node: Node) -> str | None:
        """The name within its module of the parameter that a node's output is a form of."""
        memory = memory_of(getattr(source_of(node), "variable", None))
        return self._own[memory][1] if memory in self._own else None

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
        results = list(zip(operation.outputs, after, strict=True))
        bad = [tensor for tensor, found in results if found.bad]
        event = self._event_of_inputs(operation, [*bad, *operation.inputs])
        mask = self._mask_of_inputs(operation)
        for tensor, found in results:
            if found.state == "mask" and event is None and _may_be_mask(operation, tensor, mask):
                if mask is None and not operation.has_mask and operation.inputs:
                    mask = self._made(operation, tensor)
                if mask is not None:
                    self._masks[memory_of(tensor)] = mask
            elif found.bad:
                if event is None:
                    takes_masks = _TAKES_MASKS.search(operation.name)
                    event = self._made(operation, tensor) if mask is None or takes_masks else mask
                if event not in self.events:
                    self.events.append(event)
                self._mark(tensor, event)

    def _made(self, operation: Operation, tensor: Tensor) -> Event:
        """What an operation made of finite inputs."""
        largest, divisor = operation.largest_input, operation.smallest_divisor
        found = located_at(operation.site, "forward", tensor, largest, smallest_divisor=divisor)
        return Event(found)

    def _event_of_inputs(self, operation: Operation, shown: Sequence[Tensor]) -> Event | None:
        """The event that made the first input that is not finite. The operation has read it."""
        event = None
        for n, (tensor, found) in enumerate(zip(operation.inputs, operation.before, strict=True)):
            if found.state != "bad":
                continue
            mark = self._marks.get(memory_of(tensor))
            is_overwritten = n == 0 and operation.overwrites
            if mark is None and not is_overwritten:
                self.events.append(self._given(operation, tensor, shown[0]))
                mark = self._mark(tensor, self.events[-1])
            if mark is not None:
                mark.event.marks.discard(mark)
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
        """What no operation made: a parameter or a buffer of a module, or an input."""
        site, outer, memory = operation.site, operation.outer, memory_of(tensor)
        others = {} if outer is None else _tensors_of(outer)
        if memory in self._own or memory in others:
            owner, parameter = self._own.get(memory) or (site, others[memory])
            site = owner._replace(operation=None, line=site.line)
            largest = operation.largest_input
            return Event(located_at(site, "forward", shown, largest, parameter=parameter))
        largest, made_by = largest_finite([tensor]), self._made_by(tensor)
        return Event(located_at(site, "input", tensor, largest, made_by=made_by))

    def _mark(self, tensor: Tensor, event: Event) -> _Mark:
        mark = self._marks[memory_of(tensor)] = _Mark(event)
        event.marks.add(mark)
        return mark


class NodeWatch:
    """Hooks on nodes that find the first whose input's gradient is not finite, but its output's is.

    An event counts if its Inf or NaN reaches the gradient of a leaf: ``where`` may leave it out.

    Attributes:
        line: what ran in the backward method of a custom function and made an Inf or a NaN.
    """

    def __init__(self, values: ValueWatch) -> None:
        self.line: str | None = None
        self._values = values
        self._sites: dict[Node, Site] = {}
        self._reached: dict[Node, Event] = {}
        self._handles: list[Any] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False

    def __contains__(self, node: Node) -> bool:
        return node in self._sites

    def add(self, node: Node, site: Site) -> None:
        """Watch a node, which comes from an operation at ``site``."""
        self._sites[node] = site
        # A hook that held its watch would never be collected, as no collector sees into the graph.
        self._handles.append(node.register_hook(partial(weakly(self._after), node)))

    def stop(self) -> None:
        """Remove the hooks."""
        remove_all(self._handles)
        self._sites.clear()
        self._reached.clear()

    def _after(self, node: Node, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """See the gradients of an operation's inputs, made of those of its outputs."""
        line, self.line = self.line, None
        with suppress(Exception):
            bad = [n for n, grad in enumerate(inputs) if read(grad).bad]
            if not bad:
                return
            event = self._reached.get(node)
            if event is None:
                if any(read(grad).bad for grad in outputs):
                    return  # a sum of finite gradients overflowed, or what was not watched
                event = self._event(node, bad[0], inputs[bad[0]], outputs, line)
                self._values.events.append(event)
            for n in bad:
                before = node.next_functions[n][0]
                event.counts |= hasattr(before, "variable")
                self._reached.setdefault(before, event)

    def _event(
        self, node: Node, place: int, grad: Tensor, outputs: tuple[Any, ...], line: str | None
    ) -> Event:
        site = self._sites[node]
        is_custom = not node.name()[-1].isdigit()
        if is_custom or site.operation is None:
            line = line if is_custom and line else site.line
            site = site._replace(operation=operation_of(node), line=line)
        parameter = self._values.parameter_of(node.next_functions[place][0])
        largest = largest_finite(outputs)
        return Event(located_at(site, "backward", grad, largest, parameter=parameter))


def source_of(node: Node) -> Node:
    """The node of PyTorch's graph that a node's output is the output of, in whatever form."""
    for _ in range(_MOST_FORMS):
        if node is None or not _FORMS.fullmatch(node.name()):
            break
        node = node.next_functions[0][0]
    return node


def operation_of(node: Node) -> str:
    """The operation of the forward pass that a node is the gradient of."""
    name: str = node.name()
    return differentiated(name) if name[-1].isdigit() else name.removesuffix("Backward")


def _may_be_mask(operation: Operation, tensor: Tensor, mask: Event | None) -> bool:
    """Whether -inf in an output may be meant to mask."""
    if not operation.inputs:  # a constant
        return True
    if tensor.ndim == 0:
        return mask is None and operation.has_mask
    makes_masks = operation.is_elementwise or _MAKES_MASKS.search(operation.name)
    return bool(makes_masks) or operation.has_mask


def _memory_of(model: Module) -> Iterator[tuple[int, tuple[Site, str]]]:
    """The memory of each parameter and buffer, with the site of its module, and its own name."""
    for name, module in model.named_modules():
        site = Site(module=name, type=type(module).__name__)
        for memory, key in _tensors_of(module, recurse=False).items():
            yield memory, (site, key)


def _tensors_of(module: Module, recurse: bool = True) -> dict[int, str]:
    """The names of a module's parameters and buffers, by their memory."""
    own = (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse))
    return {memory_of(tensor): name for name, tensor in own}
