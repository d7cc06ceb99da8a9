"""A graph that is read: its nodes, their lines and places, and where an Inf or NaN began."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gradscaler.diagnose._gradients.arrays import local
from gradscaler.diagnose._gradients.reading import Tensor, largest_finite
from gradscaler.diagnose._graph.lines import Tracebacks
from gradscaler.diagnose._graph.nodes import has_packed, reads_unknown
from gradscaler.diagnose._graph.origin import Origin, largest_input, origin_of, smallest_divisor
from gradscaler.diagnose._graph.places import Module, Places
from gradscaler.diagnose._graph.slopes import bad_in
from gradscaler.diagnose._graph.values import Values
from gradscaler.diagnose._locate.call_site import Node
from gradscaler.diagnose._locate.site import Site, located_at
from gradscaler.diagnose._record.located import Located


class GraphReader:
    """Reads the nodes of a graph, in the order of the forward pass.

    Args:
        nodes: the nodes.
        lines: the tracebacks of an earlier forward pass.
        model: the model that gives the places their names; None if there is none.
    """

    def __init__(self, nodes: Sequence[Node], lines: Tracebacks, model: Module | None) -> None:
        self.nodes = nodes
        self._lines = lines
        self._places = Places(model)

    def forward(self, loss: Tensor) -> Located:
        """Where the Inf or NaN of a loss began."""
        values = Values(self.nodes, bool(local(loss).detach().isnan().any()))
        origin = origin_of(loss.grad_fn, loss.output_nr, values)
        site = self._site_of(origin.node)
        made = values.tensor(origin.node, origin.number)
        made = local(loss if made is None else made)
        if origin.is_given:
            return self._given(origin, site, made)
        divisor = smallest_divisor(origin.node, values)
        largest = largest_input(origin.node, values)
        # It may have been given an Inf or NaN by a tensor that a checkpoint hides.
        is_likely = has_packed(origin.node) and reads_unknown(origin.node)
        known = {"smallest_divisor": divisor, "is_likely": is_likely}
        return located_at(site, "forward", made, largest, **known)

    def _given(self, origin: Origin, site: Site, made: Tensor) -> Located:
        owned = None if origin.given is None else self._places.owner_of(origin.given)
        given = made if origin.given is None else local(origin.given)
        if owned is None:
            return located_at(site, "input", given, largest_finite([given.detach()]))
        site, name = owned[0]._replace(line=site.line), owned[1]
        return located_at(site, "forward", given, math.nan, parameter=name)

    def backward(self, node: Node, made: Sequence[Tensor], given: Sequence[Tensor]) -> Located:
        """Where the first bad gradient of a backward pass began, in a node that made it.

        If the node keeps an Inf or NaN, it began in the operation that made that.
        """
        site = self._site_of(node)
        held = bad_in(node, may_unpack=True)
        if held is not None and held.grad_fn is not None:
            values = Values(self.nodes, has_nan=bool(held.isnan().any()))
            site = self._site_of(origin_of(held.grad_fn, held.output_nr, values).node)
        bad = held if held is not None else _bad(made)
        return located_at(site, "backward", local(bad), largest_finite(given))

    def likely(self, node: Node) -> Located:
        """The place of a node whose gradient was most likely bad."""
        site = self._site_of(node)
        dtype = str(node._input_metadata[0].dtype).removeprefix("torch.")
        found = Located(site.module, "backward", site.type, dtype, 0, 0, 0, math.nan, math.nan)
        return replace(found, operation=site.operation, line=site.line, is_likely=True)

    def _site_of(self, node: Node) -> Site:
        return self._places.site_of(node, self.nodes, self._lines.line_of(node, self.nodes))


def _bad(gradients: Sequence[Tensor]) -> Tensor:
    return next(g for g in gradients if g is not None and not bool(local(g).isfinite().all()))
