"""The dtypes of the gradients in a loss' graph, and the operations that block gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import currentframe
from traceback import walk_stack

from gradscaler.diagnose._findings.gradient_values import (
    BLOCKS,
    CHECKPOINT,
    CUT,
    ENDED,
    LEFT_OUT,
)
from gradscaler.diagnose._gradients.reading import Tensor, largest, largest_of
from gradscaler.diagnose._graph.call_site import Node, differentiated
from gradscaler.diagnose._graph.hooks import OneCallHooks, weakly
from gradscaler.diagnose._graph.nodes import MOST_NODES, is_leaf, is_opaque, nodes_from
from gradscaler.diagnose._monitor.failure_watch import FailureWatch
from gradscaler.diagnose._record.thresholds import NOT_FLUSHED

_CHECKPOINT = "torch.utils.checkpoint"
_LOOKS = 3  # consecutive steps that a round examines
# Each may make PyTorch compile modules again. The early samples of a run must not use up all.
_MOST_ROUNDS = 6


def listen(loss: object, dtypes: set[str], hooks: OneCallHooks) -> None:
    """Add the names of the gradients' dtypes in a loss' next backward pass to ``dtypes``.

    ``hooks`` gets the hooks of the pass.

    If the graph is too large or hides a part of itself, ``"unknown"`` is added too. The call
    computes nothing and waits for no device. It does nothing outside PyTorch, because no other
    framework's graph has the hooks.
    """
    for number, node in enumerate(nodes_from([getattr(loss, "grad_fn", None)])):
        name = node.name()
        if number == MOST_NODES or is_opaque(node):
            dtypes.add("unknown")
        if number == MOST_NODES:
            return
        if "AccumulateGrad" not in name:  # parameters stay in float32 under autocast
            hooks.add(node.register_prehook, partial(_note, dtypes))


def _note(dtypes: set[str], gradients: Sequence[Tensor]) -> None:
    dtypes.update(str(g.dtype).rpartition(".")[2] for g in gradients if g is not None)


class CutOff:
    """Finds what blocks gradients in PyTorch, after a sample with gradients all 0 or missing.

    A zero gradient counts if an operation made it from a gradient that is not small, and if the
    slope of that operation can be 0 by itself. A product does not count: one factor may be the
    weight of a loss that is switched off. A missing gradient counts if the modules that run first
    have none, although their outputs are part of the graph. A later module, such as a head, is left
    out if no loss reaches what it makes. A head that is not called does not count, and neither does
    a module that runs under ``no_grad``, unless it is in a reentrant checkpoint, which makes no
    graph if none of its inputs requires a gradient.

    Args:
        watch: gives the outputs of the model's modules.
        is_on: whether to examine any step.

    Attributes:
        is_looking: whether the present step is examined.
    """

    def __init__(self, watch: FailureWatch, is_on: bool) -> None:
        self._watch = watch
        self._left = 0  # steps to examine in this round
        self._rounds = _MOST_ROUNDS if is_on else 0  # rounds left
        self._cut: dict[str, str] | None = None  # blocked in all steps of this round
        self.is_looking = False
        self._see = weakly(self._see_output)
        self._hooks = OneCallHooks()
        self._called: dict[str, bool] = {}  # whether a module's output is in the graph
        self._checkpointed: set[str] = set()  # modules in a reentrant checkpoint without a graph
        self._made: list[tuple[str, Node]] = []  # by modules, since the loss before
        self._unused: dict[str, set[int]] = {}  # ids of what no loss reaches, by their module
        self._flat: dict[Node, str] = {}  # operations by node, of nodes that block gradients
        self._now: dict[str, str] = {}  # blocked in this step

    @property
    def is_due(self) -> bool:
        """Whether the next step is to be examined."""
        return bool(self._left)

    def begin(self, step: int) -> None:
        """Begin a step, before its forward pass."""
        if self._left:
            self.stop()  # the step before may have raised an error
            self.is_looking = self._watch.look(step, self._see)

    def _see_output(self, output: Tensor, module: str) -> None:
        if not output.requires_grad and _is_in_checkpoint():
            self._checkpointed.add(module)
        is_in_graph = output.requires_grad or module in self._checkpointed
        self._called[module] = self._called.get(module, False) or is_in_graph
        self._made += [] if output.grad_fn is None else [(module, output.grad_fn)]

    def see(self, loss: Tensor) -> None:
        """Watch the backward pass of a loss, and note what it leaves out."""
        reached = set(nodes_from([loss.grad_fn]))
        for node in reached:
            operation = differentiated(node.name())
            if operation in BLOCKS:
                # The hook must not refer to this object. The garbage collector does not see into
                # the graph, so the object would never be freed.
                note = partial(_note_slope, self._flat, node, operation)
                self._hooks.add(node.register_hook, note)
        made, self._made = self._made, []  # holds the graph of what is left out
        for module, node in made:
            leaves = (each for each in nodes_from([node], reached) if is_leaf(each))
            self._unused.setdefault(module, set()).update(id(leaf.variable) for leaf in leaves)

    def note(self, parameters: Mapping[str, Tensor]) -> set[int]:
        """Note what blocks the gradients of named parameters, before their optimizer steps.

        Returns:
            the ids of those that a gap in the graph keeps from a gradient.
        """
        self.is_looking = self._watch.is_on  # the watch may have broken off
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        missing = {name for name, p in trained.items() if p.grad is None}
        zero = {n for n, p in trained.items() if p.grad is not None and not largest(p.grad)}
        cut = self._first_called(trained, missing)
        self._now |= {n: self._cut_by(n) for n in cut}
        apart = {id(trained[name]) for name in cut}
        for name, parameter in trained.items() if missing else ():
            is_unused = id(parameter) in self._unused.get(_module_of(name), ())
            if is_unused and name in missing and name not in self._now:
                self._now[name] = LEFT_OUT
        first = set(self._first_called(trained, zero))
        names = {id(parameter): name for name, parameter in trained.items()}
        for node, operation in self._flat.items():
            leaves = (getattr(each, "variable", None) for each in nodes_from([node]))
            reached = {names[id(leaf)] for leaf in leaves if id(leaf) in names} & zero
            ends_all = reached == trained.keys()
            if operation not in ENDED or (first and first <= reached) or ends_all:
                self._now |= dict.fromkeys((n for n in trained if n in reached), operation)
        return apart

    def end(self, lacks_gradient: bool) -> dict[str, str] | None:
        """End a step.

        Args:
            lacks_gradient: whether the step was sampled, and a gradient was all 0 or missing.

        Returns:
            At the last step of a round, the operation that blocked a parameter's gradient in every
            step of the round, by the parameter's name; else None. The operation is empty if the
            graph is cut.
        """
        if self.is_looking:
            now = self._now
            self.stop()
            before = now if self._cut is None else self._cut
            self._cut = {name: by for name, by in now.items() if name in before}
            self._left -= 1
            return None if self._left else self._cut
        if lacks_gradient and self._rounds and not self._left:
            self._left, self._cut, self._rounds = _LOOKS, None, self._rounds - 1
        return None

    def stop(self) -> None:
        """Stop examining the step."""
        self._hooks.remove()
        self.is_looking = False
        self._called, self._flat, self._now, self._checkpointed = {}, {}, {}, set()
        self._made, self._unused = [], {}

    def _cut_by(self, parameter: str) -> str:
        return CHECKPOINT if _module_of(parameter) in self._checkpointed else CUT

    def _first_called(self, trained: Iterable[str], among: set[str]) -> list[str]:
        """The parameters of the modules that were called first, up to a module that differs.

        A module differs if it has a parameter that is not in ``among``, or if its output is not in
        the graph. If no module differs, the list is empty.
        """
        found: list[str] = []
        for module, is_in_graph in self._called.items():
            own = [name for name in trained if _module_of(name) == module]
            if own and not (is_in_graph and among.issuperset(own)):
                return found
            found += own
        return []  # no parameter has another gradient


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _is_in_checkpoint() -> bool:
    """Whether a checkpoint of PyTorch called the present module, without a graph."""
    frames = (frame for frame, _ in walk_stack(currentframe()))
    return any(frame.f_globals.get("__name__") == _CHECKPOINT for frame in frames)


def _note_slope(
    flat: dict[Node, str],
    node: Node,
    operation: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> None:
    with suppress(Exception):
        before = largest_of(largest(grad) for grad in outputs if grad is not None)
        after = [largest(grad) for grad in inputs if grad is not None]
        if before >= NOT_FLUSHED and after and not any(after):
            flat[node] = operation
