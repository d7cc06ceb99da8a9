"""Which operation of PyTorch's backward pass made the first Inf or NaN."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from gradscaler.diagnose._gradients.reading import largest_finite, memory_of, read
from gradscaler.diagnose._locate.call_site import Node, operation_of, source_of
from gradscaler.diagnose._locate.located import Located, Site, located_at
from gradscaler.diagnose._locate.module_hooks import Tensor, quietly, remove_all
from gradscaler.diagnose._locate.value_watch import Event, ValueWatch


class NodeWatch:
    """Hooks on nodes that find the first whose input's gradient is not finite, but its output's is.

    Args:
        values: gets the events, and knows whose parameters are.

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
        self._handles.append(node.register_hook(partial(quietly(self._after), node)))

    def stop(self) -> None:
        """Remove the hooks."""
        remove_all(self._handles)
        self._sites.clear()
        self._reached.clear()

    def _after(self, node: Node, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """See the gradients of an operation's inputs, made of those of its outputs."""
        line, self.line = self.line, None
        bad = [n for n, grad in enumerate(inputs) if read(grad).bad]
        if not bad:
            return
        event = self._reached.get(node)
        if event is None:
            if any(read(grad).bad for grad in outputs):
                return  # a sum of finite gradients overflowed, or what was not watched
            event = Event(self._located(node, bad[0], inputs[bad[0]], outputs, line))
            self._values.events.append(event)
        for n in bad:
            before = node.next_functions[n][0]
            event.counts |= hasattr(before, "variable")
            self._reached.setdefault(before, event)

    def _located(
        self, node: Node, place: int, grad: Tensor, outputs: tuple[Any, ...], line: str | None
    ) -> Located:
        site = self._sites[node]
        is_custom = not node.name()[-1].isdigit()
        if is_custom or site.operation is None:
            line = line if is_custom and line else site.line
            site = site._replace(operation=operation_of(node), line=line)
        leaf = getattr(source_of(node.next_functions[place][0]), "variable", None)
        _, parameter = self._values.owners.get(memory_of(leaf), (None, None))
        return located_at(site, "backward", grad, largest_finite(outputs), parameter=parameter)
