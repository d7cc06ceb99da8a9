"""The nodes of PyTorch's graph, watched in the backward pass."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from gradscaler.diagnose._gradients.reading import are_finite, largest_finite, read
from gradscaler.diagnose._locate.call_site import Site, differentiated
from gradscaler.diagnose._locate.event import Event, located_at
from gradscaler.diagnose._locate.module_hooks import remove_all
from gradscaler.diagnose._locate.value_watch import ValueWatch

Tensor = Any
Node = Any

# Of these, the gradient of the input is that of the output in another form.
_FORMS = re.compile(r"(T|Transpose|Permute|View|UnsafeView|Expand|ToCopy)Backward\d")
_MOST_FORMS = 8


class NodeWatch:
    """Hooks on nodes that find the first whose input's gradient is not finite, but its output's is.

    An event counts if its Inf or NaN reaches the gradient of a leaf: ``where`` may leave it out.

    Attributes:
        line: what ran in the backward method of a custom function and made an Inf or a NaN.
    """

    def __init__(self, values: ValueWatch, is_on: Callable[[], bool]) -> None:
        self.line: str | None = None
        self._values = values
        self._is_on = is_on
        self._sites: dict[Node, Site] = {}
        self._reached: dict[Node, Event] = {}
        self._handles: list[Any] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False

    def __contains__(self, node: Node) -> bool:
        return node in self._sites

    def add(self, node: Node, site: Site) -> None:
        """Watch a node, which comes from an operation at ``site``."""
        self._sites[node] = site
        after = partial(_call, weakref.WeakMethod(self._after), node)
        self._handles.append(node.register_hook(after))

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
            if not bad or not self._is_on():
                return
            event = self._reached.get(node)
            if event is None:
                if not are_finite(outputs):
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
        site, name = self._sites[node], node.name()
        if not name[-1].isdigit():  # a custom function
            name = name.removesuffix("Backward")
            site = site._replace(operation=name, line=line or site.line)
        elif site.operation is None:
            site = site._replace(operation=differentiated(name))
        parameter = self._parameter(node.next_functions[place][0])
        largest = largest_finite(outputs)
        return Event(located_at(site, "backward", grad, largest, parameter))

    def _parameter(self, node: Node) -> str | None:
        """The name of the parameter whose gradient a node is given, in whatever form."""
        for _ in range(_MOST_FORMS):
            if hasattr(node, "variable"):
                return self._values.parameter_of(node.variable)
            if node is None or not _FORMS.fullmatch(node.name()):
                return None
            node = node.next_functions[0][0]
        return None


# A hook that held its watch would never be collected, as no collector sees into the graph.


def _call(method: weakref.WeakMethod[Any], node: Node, *gradients: Any) -> None:
    if (after := method()) is not None:
        after(node, *gradients)
