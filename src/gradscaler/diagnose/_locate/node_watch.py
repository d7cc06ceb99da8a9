"""The nodes of PyTorch's graph, watched in the backward pass."""

from __future__ import annotations

import weakref
from contextlib import suppress
from functools import partial
from typing import Any

from gradscaler.diagnose._gradients.reading import largest_finite, read
from gradscaler.diagnose._locate.located import Site, located_at
from gradscaler.diagnose._locate.module_hooks import remove_all, weakly
from gradscaler.diagnose._locate.value_watch import Event, Node, Tensor, ValueWatch, operation_of


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
        return Event(located_at(site, "backward", grad, largest, parameter))
