"""The user's line of each node of a graph, from the tracebacks of one forward pass."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from gradscaler.diagnose._graph.call_site import Frame, Node, called_from

_FRAME = re.compile(r'  File "(.*)", line (\d+), in (.*)')
_MOST_TRACES = 4  # graphs of different losses
_all: weakref.WeakSet[Tracebacks] = weakref.WeakSet()


class Line(NamedTuple):
    """Where a node's operation was called.

    Attributes:
        line: the user's line, such as ``"train.py:12"``; None if there is none.
        function: PyTorch's public Python function that called it; None if there is none.
        frames: the frames of the call, innermost first.
    """

    line: str | None = None
    function: str | None = None
    frames: tuple[Frame, ...] = ()


class Tracebacks:
    """The lines of the nodes of one forward pass, in the order of the pass.

    PyTorch keeps a traceback for each node while its anomaly mode is on. That mode is on, without
    its check of gradients, between :meth:`start` and :meth:`stop`. A user's own mode stays.
    """

    def __init__(self) -> None:
        _all.add(self)
        self._modes: list[Any] = []
        weakref.finalize(self, _leave, self._modes).atexit = False
        self._traces: list[tuple[list[str], list[Line]]] = []

    @property
    def is_on(self) -> bool:
        """Whether the mode is on."""
        return bool(self._modes)

    def start(self) -> None:
        """Keep the tracebacks of the forward passes from here on."""
        torch: Any = sys.modules["torch"]
        if not self._modes and not torch.is_anomaly_enabled():
            self._modes.append(torch.autograd.set_detect_anomaly(True, check_nan=False))

    def stop(self) -> bool:
        """Keep no more tracebacks; return whether they were kept."""
        was_on = bool(self._modes)
        if was_on:
            _leave(self._modes)
        return was_on

    def note(self, nodes: Sequence[Node]) -> bool:
        """Note the lines of nodes that have tracebacks; return whether there were new ones."""
        names = [node.name() for node in nodes]
        if any(names == known for known, _ in self._traces):
            return False
        lines = [_line_of(node) for node in nodes]
        if any(line.frames for line in lines):
            self._traces = [(names, lines), *self._traces][:_MOST_TRACES]
        return True

    def line_of(self, node: Node, nodes: Sequence[Node]) -> Line:
        """The line of a node among the nodes of its graph, in the order of the forward pass.

        If the traced pass had other nodes, the line is known up to the first that differs, and from
        the last that differs on.
        """
        if (own := _line_of(node)).frames:
            return own
        names, index = [each.name() for each in nodes], list(nodes).index(node)
        for known, lines in sorted(self._traces, key=lambda trace: trace[0] != names):
            from_end = len(names) - index
            if known[: index + 1] == names[: index + 1]:
                return lines[index]
            if len(known) >= from_end and known[-from_end:] == names[index:]:
                return lines[-from_end]
        return Line()


def _line_of(node: Node) -> Line:
    frames = tuple(map(_frame_of, reversed(node.metadata.get("traceback_") or ())))
    function, line = called_from(frames)
    return Line(line, function, frames)


def keep_under(other: Any) -> None:
    """Keep tracebacks under another anomaly mode that was entered, such as Lightning's for `fit`.

    When it is left, it restores the state that was there before ours.
    """
    if any(each.is_on for each in _all) and other.prev and not other.prev_check_nan:
        other.prev, other.prev_check_nan = False, True
        torch: Any = sys.modules["torch"]
        if not torch.is_anomaly_enabled():
            torch.set_anomaly_enabled(True, False)


@lru_cache(maxsize=10_000)  # most operations share their outer frames
def _frame_of(text: str) -> Frame:
    found = _FRAME.match(text)
    return Frame(found[1], int(found[2]), found[3]) if found else Frame("<frozen ", 0, "")


def _leave(modes: list[Any]) -> None:
    """Restore the mode as it was, unless the user has set another one since."""
    torch: Any = sys.modules.get("torch")
    while modes:
        mode = modes.pop()
        if torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled():
            mode.__exit__(None, None, None)
