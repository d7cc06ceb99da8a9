"""A graph that is read: its nodes, their lines and places, and where an Inf or NaN began."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from gradscaler.diagnose._gradients.arrays import local
from gradscaler.diagnose._gradients.reading import Tensor, largest_finite, read
from gradscaler.diagnose._graph.call_origins import CallOrigins
from gradscaler.diagnose._graph.call_site import Node, behind_forms, is_form, is_own, operation_of
from gradscaler.diagnose._graph.lines import Line, Tracebacks
from gradscaler.diagnose._graph.nodes import (
    has_packed,
    is_custom,
    is_leaf,
    is_opaque,
    reads_unknown,
    saved,
)
from gradscaler.diagnose._graph.origin import (
    Origin,
    largest_input,
    origin_of,
    smallest_divisor,
)
from gradscaler.diagnose._graph.places import Places
from gradscaler.diagnose._graph.site import Site, exponent_in, located_at
from gradscaler.diagnose._graph.slopes import bad_in, is_steep
from gradscaler.diagnose._graph.summands import summand_of, summands_of
from gradscaler.diagnose._graph.underflows import underflow_before
from gradscaler.diagnose._graph.values import Values
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._record.thresholds import HUGE

_MOST_ON_WAY = 5  # operations
_MOST_SUMMANDS = 10  # of a loss, to compare where each became bad
_MOST_BEFORE = 100  # operations, to look for an exponential among
_EXPONENTIALS = names_with(Role.EXPONENTIATES)


class GraphReader:
    """Reads the nodes of a graph, in the order of the forward pass.

    Args:
        nodes: the nodes.
        lines: the tracebacks of an earlier forward pass.
        places: the places in the model.
        origins: what was seen of operations without a graph.
    """

    def __init__(
        self, nodes: Sequence[Node], lines: Tracebacks, places: Places, origins: CallOrigins
    ) -> None:
        self.nodes = nodes
        self._lines = lines
        self._places = places
        self._origins = origins

    def forward(self, loss: Tensor) -> Located | None:
        """Where the Inf or NaN of a loss began; None if gradscaler made it, scaling the loss."""
        values = self._values(loss)
        origin = _first_origin(loss, values)
        if is_own(self._line_of(origin.node).frames):
            return None
        site = self._site_of(origin.node)
        made = values.tensor(origin.node, origin.number)
        if made is None:  # then the loss stands for it
            made = loss.detach().to(origin.node._input_metadata[origin.number].dtype)
        made = local(made)
        buffer = self._places.bad_buffer() if self._may_read_buffer(origin) else None
        if origin.is_given or buffer is not None:
            given = made if origin.given is None else origin.given
            given = self._as_batch(given, origin.node) if buffer is None else buffer
            found = origin.made or self._places.given_to(given, site)
            return replace(found, summand=self._summand_of(origin.node, loss.grad_fn))
        divisor = smallest_divisor(origin.node, values)
        largest = largest_input(origin.node, values)
        # It may have been given an Inf or NaN by a tensor that a checkpoint hides.
        is_likely = has_packed(origin.node) and reads_unknown(origin.node)
        summand = self._summand_of(origin.node, loss.grad_fn)
        known: Any = {"smallest_divisor": divisor, "is_likely": is_likely, "summand": summand}
        operands = None, saved(origin.node, "exponent")
        known["exponent"] = exponent_in(site.operation, operands)
        known["way"] = _way_to(origin.node, origin.number, values)
        before = _exponential_before(origin.node, values)
        if before is not None:
            known["enlarged_by"] = self._operation_at_line(before)
        if (before := underflow_before(origin.node, values)) is not None:
            known["zeroed_by"] = self._operation_at_line(before)
        return located_at(site, "forward", made, largest, **known)

    def given(self, node: Node, tensor: Tensor) -> Located:
        """The place of an Inf or NaN in a tensor that a node keeps, and that no node made."""
        return self._places.given_to(self._as_batch(tensor, node), self._site_of(node))

    def _as_batch(self, given: Tensor, node: Node) -> Tensor:
        """What a node was given, in the form that its result takes, which had been flattened."""
        after = (n for n in self.nodes if is_form(n) and n.next_functions[0][0] is node)
        shape = next((tuple(each._input_metadata[0].shape)[:-1] for each in after), ())
        is_same = given.ndim > 1 and len(shape) > 1 and math.prod(shape) == len(given)
        return given.reshape(*shape, -1) if is_same else given

    def _may_read_buffer(self, origin: Origin) -> bool:
        """Whether an Inf or NaN may come from a buffer, directly or by a tensor made of it.

        A batch is read first, by a node that reads nothing else but parameters.
        """
        if not origin.is_given:
            return is_opaque(origin.node)
        is_own = origin.given is not None and self._places.owner_of(origin.given) is not None
        makers = [behind_forms(before) for before, _ in origin.node.next_functions]
        reads_made = any(maker is not None and not is_leaf(maker) for maker in makers)
        return origin.made is None and not is_own and reads_made

    def _values(self, result: Tensor) -> Values:
        return Values(self.nodes, bool(local(result).detach().isnan().any()), self._origins)

    def backward(
        self,
        node: Node,
        made: Sequence[Tensor],
        given: Sequence[Tensor],
        line: str | None = None,
        is_given: bool = False,
    ) -> Located:
        """Where the first bad gradient of a backward pass began, in a node that made it.

        If the node keeps an Inf or NaN, it began in the operation that made that.

        Args:
            node: the node.
            made: the gradients that it made.
            given: those that it was given.
            line: the line, in a hook or a function's own backward pass, that made a bad number.
            is_given: whether one of ``given`` is bad, so that a hook made it.
        """
        largest, number = largest_finite(given), _bad_in(made)
        if is_given:
            return located_at(Site("hook", line), "backward", local(made[number]), largest)
        site = self._site_of(node)
        if line is not None and is_custom(node):
            site = site._replace(operation=operation_of(node), line=line)
        held = bad_in(node, may_unpack=True)
        if held is not None and held.grad_fn is not None:
            site = self._site_of(origin_of(held.grad_fn, held.output_nr, self._values(held)).node)
        bad = made[number] if held is None else held
        leaf = getattr(behind_forms(node.next_functions[number][0]), "variable", None)
        owned = None if leaf is None else self._places.owner_of(leaf)
        known = {"parameter": owned and owned[1], "summand": self._summand_of(node, self.nodes[-1])}
        return located_at(site, "backward", local(bad), largest, **known)

    def likely(self, node: Node) -> Located:
        """The place of a node whose gradient was most likely bad."""
        site = self._site_of(node)
        dtype = str(node._input_metadata[0].dtype).removeprefix("torch.")
        found = Located(site.module, "backward", site.type, dtype, 0, 0, 0, math.nan, math.nan)
        return replace(found, operation=site.operation, line=site.line, is_likely=True)

    def only_steep(self, part: Sequence[Node]) -> Located | None:
        """The place of the only operation in a part of the graph whose gradient can be bad.

        If none of PyTorch's is so, it is the only function written in Python.
        """
        steep = [node for node in part if is_steep(node)]
        own = [node for node in part if is_custom(node) and not is_opaque(node)]
        steep = [self.likely(node) for node in steep or own]
        return steep[0] if steep and all(each.is_at(steep[0]) for each in steep) else None

    def _summand_of(self, node: Node, loss: Node) -> str | None:
        """The summand of the loss that a node is part of, such as "2 of 3 (mean at train.py:5)"."""
        if (found := summand_of(node, loss)) is None:
            return None
        place, summands = found
        return f"{place + 1} of {len(summands)} ({self._operation_at_line(summands[place])})"

    def _operation_at_line(self, node: Node) -> str:
        site = self._site_of(node)
        return f"{site.operation} at {site.line}" if site.line else f"{site.operation}"

    def _site_of(self, node: Node) -> Site:
        return self._places.site_of(node, self.nodes, self._line_of(node))

    def _line_of(self, node: Node) -> Line:
        return self._lines.line_of(node, self.nodes)


def _first_origin(loss: Tensor, values: Values) -> Origin:
    """Where the first Inf or NaN of a loss began; each of its summands may have one of its own."""
    summands = dict.fromkeys(islice(summands_of(loss.grad_fn), _MOST_SUMMANDS))
    known = {each: values.reading(each) for each in summands}
    bad = [each for each, found in known.items() if found is not None and found.state == "bad"]
    if len(bad) < 2:
        return origin_of(loss.grad_fn, loss.output_nr, values)
    return min((origin_of(each, 0, values) for each in bad), key=_number_of)


def _number_of(origin: Origin) -> int:
    return int(origin.node._sequence_nr())


def _bad_in(gradients: Sequence[Tensor]) -> int:
    """The number of the first gradient that is not finite."""
    return next(number for number, gradient in enumerate(gradients) if read(gradient).bad)


def _way_to(node: Node, number: int, values: Values) -> str | None:
    """The largest magnitudes up to a node's result, such as "matmul 3e+03 → pow Inf".

    Before each operation is the one that made the largest of its inputs, as far as they are known.
    None if no input of the node is known.
    """
    made = values.tensor(node, number)
    is_nan = values.has_nan if made is None else bool(made.isnan().any())
    steps, edge = [f"{operation_of(node)} {'NaN' if is_nan else 'Inf'}"], _largest(node, values)
    while edge is not None and len(steps) < _MOST_ON_WAY:
        found = values.reading(*edge)
        if not is_form(edge[0]) and found is not None:
            steps.append(f"{operation_of(edge[0])} {found.largest:.2g}")
        edge = _largest(edge[0], values)
    return " → ".join(reversed(steps)) if len(steps) > 1 else None


def _exponential_before(node: Node, values: Values) -> Node | None:
    """The exponential from which a node's large inputs come; None if there is none."""
    edge = _largest(node, values)
    for _ in range(_MOST_BEFORE):
        found = None if edge is None else values.reading(*edge)
        if edge is None or found is None or found.largest < HUGE:
            return None
        if operation_of(edge[0]) in _EXPONENTIALS:
            return edge[0]
        edge = _largest(edge[0], values)
    return None


def _largest(node: Node, values: Values) -> tuple[Node, int] | None:
    """The input of a node, made by another, that holds the largest known magnitude."""
    inputs = [edge for edge in node.next_functions if edge[0] is not None and not is_leaf(edge[0])]
    known = {edge: values.reading(*edge) for edge in inputs}
    finite = {edge: read.largest for edge, read in known.items() if read and not read.bad}
    return max(finite, key=finite.__getitem__, default=None)
