"""Where each Inf and NaN in the tensors of a pass was made, followed from call to call."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.arrays import to_numpy
from gradscaler.diagnose._gradients.reading import (
    Reading,
    Tensor,
    largest_of,
    memory_of,
    read,
)
from gradscaler.diagnose._graph.call_site import Node, is_own, stack_from
from gradscaler.diagnose._graph.calls import Call
from gradscaler.diagnose._graph.masks import ADDS_UP, ARITHMETIC, FILLS, TAKES_MASKS, Value, result
from gradscaler.diagnose._graph.places import Places
from gradscaler.diagnose._graph.site import located_at
from gradscaler.diagnose._record.located import Located

_UNWRITTEN = re.compile("empty|resize")  # they leave memory as it is
_GIVES = re.compile("tensor$|^from|^asarray|^as_")  # their result holds what the user gave

_MULTIPLIES = "matmul", "conv1d", "conv2d", "conv3d"  # by weights, which no mask is

_Edge = tuple[Node, int]  # a node, and which of its results


class CallOrigins:
    """Follows each Inf and NaN from the call of a function that made it.

    Args:
        places: the places in the model.
        of_all: whether to follow all; else only those that are made without a graph, up to the
            graph that reads them.

    Attributes:
        ungraphed: by a node and which of its results, an Inf or NaN that no node before it made.
        readings: what was read of these results.
    """

    def __init__(self, places: Places, of_all: bool = False) -> None:
        self._places, self._of_all = places, of_all
        # By memory. A tensor that is kept here keeps its memory from being used again.
        self._origins: dict[int, tuple[Tensor, Located]] = {}
        self.ungraphed: dict[_Edge, Located] = {}
        self.readings: dict[_Edge, Reading] = {}

    def see(self, call: Call) -> None:
        """Read what a call made, or note where in a graph it is read."""
        if not self._of_all and any(tensor.grad_fn is not None for tensor in call.outputs):
            if self._origins:
                self._see_graphed(call)
        elif not _UNWRITTEN.search(call.name):
            for tensor in _made(call):
                self._note(tensor, call)

    def origin_of(self, tensor: Tensor) -> Located | None:
        """Where the Inf or NaN in a tensor was made; None if that was not seen."""
        kept = self._origins.get(memory_of(tensor))
        return None if kept is None else kept[1]

    @property
    def first_made(self) -> Located | None:
        """The first Inf or NaN that a call made from finite numbers; None if there is none."""
        made = (each for _, each in self._origins.values() if each.kind == "forward")
        return next((each for each in made if each.parameter is None), None)

    @property
    def latest(self) -> Located | None:
        """Where the latest Inf or NaN was made that is still there; None if there is none."""
        kept = reversed(self._origins.values())
        return next((origin for tensor, origin in kept if read(tensor).state == "bad"), None)

    def _see_graphed(self, call: Call) -> None:
        """Note the nodes that made, or were given, an Inf or NaN that was made before them."""
        for tensor in call.inputs:
            if (origin := self.origin_of(tensor)) is None:
                continue
            if tensor.grad_fn is None and _is_given_by_graph(call):
                continue  # an earlier one reached the node, too
            # A tensor with a graph has its Inf or NaN from a node that hides its operations.
            of = call.outputs if tensor.grad_fn is None else [tensor]
            for each in (each for each in of if each.grad_fn is not None):
                edge, reading = (each.grad_fn, each.output_nr), read(each)
                if reading.bad and edge not in self.ungraphed:
                    self.ungraphed[edge], self.readings[edge] = origin, reading

    def _note(self, tensor: Tensor, call: Call) -> None:
        """Note the origin of the Inf, NaN and -inf in what a call made."""
        memory, reading = memory_of(tensor), read(tensor)
        origin = self._origin_in(call, tensor, reading) if reading.bad else None
        if origin is not None:
            self._origins[memory] = tensor, origin
        elif memory in self._origins and not read(self._origins[memory][0]).bad:
            del self._origins[memory]

    def _origin_in(self, call: Call, tensor: Tensor, reading: Reading) -> Located | None:
        """The origin of the Inf, NaN or -inf that a call returned in a tensor."""
        inputs = list(zip(call.inputs, call.readings, strict=True))
        if is_own(stack_from(call.frame)[0]):  # such as where gradscaler scales a loss
            return next(filter(None, (self.origin_of(each) for each, at in inputs if at.bad)), None)
        if not self._of_all and any(each.grad_fn is not None and at.bad for each, at in inputs):
            return None  # its graph shows it
        values = [self._value(call, *each) for each in inputs]
        numbers = call.numbers if self._of_all and call.operation in ARITHMETIC else []
        origins = list(map(self._of_number, numbers))
        values += [Value(read(n), of) for n, of in zip(numbers, origins, strict=True) if of]
        is_given = _GIVES.search(call.name) and not call.inputs
        is_meant = call.operation in FILLS and not any(value.origin for value in values)
        if is_given or (is_meant and reading.state == "mask"):
            return None

        def made() -> Located:
            site = self._places.site_at(call.frame, call.operation)
            largest = largest_of(each.largest for each in call.readings)
            known = {"smallest_divisor": call.divisor, "exponent": call.exponent}
            is_number = bool(numbers)
            return located_at(site, "forward", tensor, largest, **known, is_number=is_number)

        makes_masks = call.operation not in ADDS_UP
        return result(reading, not tensor.ndim, values, makes_masks, made).origin

    def _of_number(self, number: NDArray[Any]) -> Located | None:
        """Where the Inf or NaN in a number began, if it was read from a tensor of one element."""
        for tensor, origin in reversed(list(self._origins.values())) if number.size == 1 else ():
            if tensor.numel() == 1 and np.array_equal(to_numpy(tensor), number, equal_nan=True):
                return origin
        return None

    def _value(self, call: Call, tensor: Tensor, reading: Reading) -> Value[Located]:
        """The value of an input: its reading, and the origin of its Inf, NaN or -inf."""
        origin = self.origin_of(tensor) if reading.bad else None
        is_data = reading.state == "mask" and call.operation in _MULTIPLIES and not tensor.grad_fn
        if (is_data or reading.state == "bad") and origin is None:
            origin = self._places.given_to(tensor, self._places.site_at(call.frame, call.operation))
            self._origins[memory_of(tensor)] = tensor, origin
        if reading.state == "mask" and call.operation in TAKES_MASKS:
            origin = None  # it takes masks, so a NaN in its output is its own
        return Value(reading, origin)


def _is_given_by_graph(call: Call) -> bool:
    """Whether a call reads an Inf or NaN in the result of a node."""
    inputs = zip(call.inputs, call.readings, strict=True)
    return any(each.grad_fn is not None and at.state == "bad" for each, at in inputs)


def _made(call: Call) -> list[Tensor]:
    """What a call made or changed, without views of what it read."""
    if call.changes_inputs:
        return call.outputs
    viewed = {memory_of(tensor) for tensor in call.inputs}
    return [tensor for tensor in call.outputs if memory_of(tensor) not in viewed]
