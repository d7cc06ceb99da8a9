"""What the graph of a loss shows: dtypes that it computes in, and what lets no gradient through."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from gradscaler.diagnose._findings.gradient_values import CUT, ENDED, SATURATED, STEPS
from gradscaler.diagnose._gradients.reading import largest, largest_of
from gradscaler.diagnose._locate.call_site import differentiated
from gradscaler.diagnose._locate.module_hooks import remove_all, weakly
from gradscaler.diagnose._monitor.failure_watch import FailureWatch

_MOST_NODES = 10_000
_OPAQUE = "CompiledFunction", "CheckpointFunction"  # nodes that hide a graph of their own
_LARGE = 2.0**-10  # a gradient that no slope of 2**-14 flushes in float16
_LOOKS = 3  # steps in a row that are looked at
_MOST_ROUNDS = 4  # of such looks: each may have modules compiled again


def listen(loss: Any, dtypes: set[str]) -> None:
    """Add the dtypes of the gradients in a loss' next backward pass to ``dtypes``, by name.

    ``"unknown"`` is one of them if the graph is too large, or hides a part of itself. Nothing is
    computed, and no device waited for. Nothing happens where a framework's graph has no such
    hooks, as only PyTorch's does.
    """
    for number, node in enumerate(_nodes_from([getattr(loss, "grad_fn", None)])):
        name = node.name()
        if number == _MOST_NODES or name.startswith(_OPAQUE):
            dtypes.add("unknown")
        if number == _MOST_NODES:
            return
        if "AccumulateGrad" not in name:  # parameters stay in float32 under autocast
            node.register_prehook(partial(_note, dtypes))


def _note(dtypes: set[str], gradients: tuple[Any, ...]) -> None:
    dtypes.update(str(g.dtype).rpartition(".")[2] for g in gradients if g is not None)


class CutOff:
    """Looks at some steps of PyTorch after a sample in which gradients are all 0 or missing.

    A gradient that is 0 counts if an operation makes it of one that is not small, and whose slope
    may be 0 by itself: no product, as with the weight of a loss that is switched off. One that is
    missing counts if the modules that run first have none, though their outputs take part in the
    graph: a head that is not used is not among them, nor what runs under ``no_grad``.

    Args:
        watch: looks at the model's modules.
        is_on: whether to look at all.

    Attributes:
        is_looking: whether this step is looked at.
    """

    def __init__(self, watch: FailureWatch, is_on: bool) -> None:
        self._watch = watch
        self._left = 0  # steps to look at in this round
        self._rounds = _MOST_ROUNDS if is_on else 0  # that are left
        self._cut: dict[str, str] | None = None  # in all steps of this round
        self.is_looking = False
        self._handles: list[Any] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False
        self._called: dict[str, bool] = {}  # whether a module's output takes part in the graph
        self._flat: dict[Any, str] = {}  # the operations of nodes that let nothing through
        self._now: dict[str, str] = {}  # what this step shows

    def begin(self, step: int) -> None:
        """Begin a step, before its forward pass."""
        if self._left:
            self.stop()  # the step before may have broken off
            self.is_looking = self._watch.look(step, weakly(self._see_output))

    def _see_output(self, output: Any, module: str, _: str) -> None:
        self._called[module] = self._called.get(module, False) or output.requires_grad

    def see(self, loss: Any) -> None:
        """Watch the backward pass of a loss."""
        for node in _nodes_from([loss.grad_fn]):
            operation = differentiated(node.name())
            if operation in (*STEPS, *SATURATED, *ENDED):
                # A hook that held its owner would keep it alive: no collector sees into the graph.
                note = partial(_note_slope, self._flat, node, operation)
                self._handles.append(node.register_hook(note))

    def note(self, parameters: Mapping[str, Any]) -> None:
        """Note what lets no gradient through to parameters, by their names, before they step."""
        self.is_looking = self._watch.is_on  # it may have broken off
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        missing = {name for name, p in trained.items() if p.grad is None}
        zero = {n for n, p in trained.items() if p.grad is not None and not largest(p.grad)}
        self._now |= dict.fromkeys(self._first_called(trained, missing), CUT)
        first = set(self._first_called(trained, zero))
        names = {id(parameter): name for name, parameter in trained.items()}
        for node, operation in self._flat.items():
            leaves = (getattr(each, "variable", None) for each in _nodes_from([node]))
            reached = {names[id(leaf)] for leaf in leaves if id(leaf) in names} & zero
            if operation not in ENDED or (first and first <= reached):
                self._now |= dict.fromkeys((n for n in trained if n in reached), operation)

    def end(self, has_gone: bool) -> dict[str, str] | None:
        """End a step; ``has_gone`` if it was sampled, and gradients are all 0 or missing.

        Returns:
            What lets no gradient through, by the parameters' names, in all steps of a round; None
            if this step is not the last of one.
        """
        if self.is_looking:
            now = self._now
            self.stop()
            before = now if self._cut is None else self._cut
            self._cut = {name: by for name, by in now.items() if name in before}
            self._left -= 1
            return None if self._left else self._cut
        if has_gone and self._rounds and not self._left:
            self._left, self._cut, self._rounds = _LOOKS, None, self._rounds - 1
        return None

    def stop(self) -> None:
        """Watch no more."""
        remove_all(self._handles)
        self.is_looking = False
        self._called, self._flat, self._now = {}, {}, {}

    def _first_called(self, trained: Iterable[str], among: set[str]) -> list[str]:
        """The parameters of the modules that were called first, as long as all are ``among``."""
        found: list[str] = []
        for module, is_in_graph in self._called.items():
            own = [name for name in trained if name.rpartition(".")[0] == module]
            if own and not (is_in_graph and among.issuperset(own)):
                return found
            found += own
        return []  # none has another gradient


def _note_slope(
    flat: dict[Any, str], node: Any, operation: str, inputs: Iterable[Any], outputs: Iterable[Any]
) -> None:
    with suppress(Exception):
        before = largest_of(largest(grad) for grad in outputs if grad is not None)
        after = [largest(grad) for grad in inputs if grad is not None]
        if before >= _LARGE and after and not any(after):
            flat[node] = operation


def _nodes_from(waiting: list[Any]) -> Iterator[Any]:
    """The nodes of PyTorch's graph that nodes lead to, and these themselves."""
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or not hasattr(node, "register_prehook"):
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]
