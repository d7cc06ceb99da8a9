"""Locate the operation whose gradient has the first Inf or NaN of PyTorch's backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

from gradscaler.diagnose._gradients.reading import Tensor, largest_finite, memory_of, read
from gradscaler.diagnose._locate.call_site import Node, operation_of, source_of
from gradscaler.diagnose._locate.module_hooks import Handle, remove_all, weakly
from gradscaler.diagnose._locate.site import Site, located_at
from gradscaler.diagnose._locate.value_watch import Event, ValueWatch


class NodeWatch:
    """Hooks on the nodes of PyTorch's graph that find the first gradient that is not finite.

    A node made it if a gradient of its operation's inputs is not finite although the gradients of
    the operation's outputs are.

    Args:
        values: collects the events, and knows the names of parameters.

    Attributes:
        line: the user's line that made an Inf or NaN since the last node ran, in the backward
            method of a custom function or in a hook; None if there is none.
    """

    def __init__(self, values: ValueWatch) -> None:
        self.line: str | None = None
        self._values = values
        self._sites: dict[Node, Site] = {}
        self._reached: dict[Node, Event] = {}
        self._handles: list[Handle] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False

    def __contains__(self, node: Node) -> bool:
        return node in self._sites

    def add(self, node: Node, site: Site) -> None:
        """Watch the node of an operation that was called at ``site``."""
        self._sites[node] = site
        self._handles.append(node.register_hook(partial(weakly(self._after), node)))

    def stop(self) -> None:
        """Remove the hooks."""
        remove_all(self._handles)
        self._sites.clear()
        self._reached.clear()

    def _after(self, node: Node, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Check a node's results ``inputs``: the gradients of its operation's inputs."""
        line, self.line = self.line, None
        bad = [n for n, grad in enumerate(inputs) if read(grad).bad]
        if not bad:
            return
        event = self._reached.get(node)
        if event is None:
            is_given = any(read(grad).bad for grad in outputs)
            if is_given and line is None:
                return  # a sum of finite gradients, or something unwatched, made it
            leaf = getattr(source_of(node.next_functions[bad[0]][0]), "variable", None)
            _, parameter = self._values.owners.get(memory_of(leaf), (None, None))
            site = self._site_of(node, line)
            if is_given:  # a hook made it
                site, parameter = Site("hook", line), None
            what = inputs[bad[0]], largest_finite(outputs)
            event = Event(located_at(site, "backward", *what, parameter=parameter))
            self._values.events.append(event)
        for n in bad:
            before = node.next_functions[n][0]
            event.counts |= hasattr(before, "variable")
            self._reached.setdefault(before, event)

    def _site_of(self, node: Node, line: str | None) -> Site:
        """The call site of a node's operation; in a custom function, the line in its backward."""
        site = self._sites[node]
        is_custom = not node.name()[-1].isdigit()
        if is_custom or site.operation is None:
            line = line if is_custom and line else site.line
            site = site._replace(operation=operation_of(node), line=line)
        return site
