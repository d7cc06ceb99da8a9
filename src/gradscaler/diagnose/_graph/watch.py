"""Watch the losses of a training of PyTorch, and locate the first Inf or NaN in their graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from gradscaler.diagnose._gradients.arrays import local
from gradscaler.diagnose._gradients.reading import Tensor, largest_finite
from gradscaler.diagnose._graph.lines import Tracebacks
from gradscaler.diagnose._graph.nodes import OPAQUE, in_order
from gradscaler.diagnose._graph.origin import largest_input, origin_of, smallest_divisor
from gradscaler.diagnose._graph.places import Module, Places
from gradscaler.diagnose._graph.values import Values
from gradscaler.diagnose._locate.budget import LOOKED_AT, Budget
from gradscaler.diagnose._locate.call_site import Node
from gradscaler.diagnose._locate.site import located_at
from gradscaler.diagnose._record.located import Located


class GraphWatch:
    """Reads the graph of each loss that is not finite, before its backward pass frees it.

    Nothing runs again, and no module is hooked. Lines come from the tracebacks of the first
    forward pass, and of another one after a failure in a node that the first lacks. On a device,
    losses are not read before :meth:`step_ended` has seen a failure.

    Args:
        model: the model, which names the places; None if there is none.

    Attributes:
        located: the origin of the first Inf or NaN in the present step; None if unknown.
    """

    def __init__(self, model: Module | None) -> None:
        self._model = model
        self._lines = Tracebacks()
        self._lines.start()
        self._budget = Budget()
        self._step = 0
        self._has_failed = self._is_known = self._is_told = False
        self.located: Located | None = None

    def see(self, loss: Tensor) -> None:
        """Read a loss before its backward pass, and its graph if it is not finite."""
        with suppress(Exception):
            if self._lines.is_on and not self._lines.note(in_order(loss)):
                self._lines.stop()
            if self.located is None and not self._is_told and self._is_bad(loss):
                self._read(loss)

    def _is_bad(self, loss: Tensor) -> bool:
        """Whether a loss is not finite; False if it was not read."""
        own = local(loss).detach()
        may_read = self._has_failed or own.device.type == "cpu"
        return may_read and not math.isfinite(float(own.sum()))

    def _read(self, loss: Tensor) -> None:
        seconds = self._budget.left(self._step, LOOKED_AT) if self._is_known else math.inf
        if seconds is not None and (nodes := in_order(loss)):
            self._budget.begin(seconds)
            self.located = self._locate(loss, nodes)
            self._budget.end()

    def step_ended(self, step: int, has_failed: bool) -> None:
        """Note the end of a step, and whether it failed in a way that no loss scale fixes."""
        self._budget.step_ended(step)
        self._step = step
        found, self.located = self.located, None
        self._has_failed |= has_failed
        self._is_known |= is_exact(found)  # from here on, reading a graph needs time
        self._is_told = has_failed and (self._is_told or is_exact(found))  # in this streak
        self._lines.stop()
        if found is not None and found.line is None:
            self._lines.start()

    def stop(self) -> None:
        """Stop watching."""
        self._lines.stop()

    def _locate(self, loss: Tensor, nodes: Sequence[Node]) -> Located:
        has_nan = bool(local(loss).detach().isnan().any())
        values, places = Values(nodes, has_nan), Places(self._model)
        origin = origin_of(loss.grad_fn, loss.output_nr, values)
        line = self._lines.line_of(origin.node, nodes)
        site = places.site_of(origin.node, nodes, line)
        made = values.tensor(origin.node, origin.number)
        made = loss if made is None else made
        if origin.is_given:
            owned = None if origin.given is None else places.owner_of(origin.given)
            given = local(made if origin.given is None else origin.given)
            if owned is None:
                return located_at(site, "input", given, largest_finite([given.detach()]))
            site, name = owned[0]._replace(line=line.line), owned[1]
            return located_at(site, "forward", given, math.nan, parameter=name)
        divisor = smallest_divisor(origin.node, values)
        largest = largest_input(origin.node, values)
        return located_at(site, "forward", local(made), largest, smallest_divisor=divisor)


def is_exact(located: Located | None) -> bool:
    """Whether a place in a graph is that of the operation that made an Inf or NaN.

    A tensor that no node made may come from an operation that records no graph. A compiled or
    checkpointed function hides its operations.
    """
    if located is None or located.kind == "input":
        return False
    return not (located.operation or "").startswith(OPAQUE)
