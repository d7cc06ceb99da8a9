"""Backward passes of one step whose gradients are zeroed before the next pass, unused."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from typing import Any, NamedTuple

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.call_site import Node
from gradscaler.diagnose._graph.hooks import OneCallHooks
from gradscaler.diagnose._graph.nodes import MOST_NODES
from gradscaler.diagnose._monitor.gradient_check import elements_of
from gradscaler.diagnose._monitor.made_gradients import MadeGradient, first_nodes, leaves_among
from gradscaler.diagnose._record.thresholds import LARGER_PASS, LEAST_ZEROED

_MOST_NAMED = 8  # nodes behind a loss, which show what it computes
_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"  # of a tensor


class _Kind(NamedTuple):
    """What a loss computes, and the ids of all parameters that it depends on."""

    operations: tuple[str, ...]
    leaves: frozenset[int]


class ZeroedPasses:
    """The backward passes of a sampled step: whether all but the last are made for nothing.

    So are those of micro-batches, if gradients are zeroed before each of them. Other passes are
    made for what the code reads from their gradients, and are none of these: each of another loss
    (as for the weights of tasks, and of terms), or of a smaller batch than the last (as of single
    rows); of inputs, as for adversarial ones; at other weights, as in sharpness-aware steps; and
    those of gradients that have hooks, or that are replaced before the step.
    """

    def __init__(self) -> None:
        self._count = 0
        self._is_so = True
        self._kind = _Kind((), frozenset())  # of all losses so far
        self._most = 0  # elements of what one of these losses is made from
        self._sums: Any = None  # of each parameter's elements
        self._made: MadeGradient | None = None

    def before(self, loss: Tensor, held: Collection[int], hooks: OneCallHooks) -> None:
        """Look at a loss, and at what the pass before it has left; waits for the device.

        ``held`` are the ids of the parameters that optimizers hold.
        """
        if self._is_so:
            self._count, is_next = self._count + 1, False
            try:
                is_next = self._is_next(loss, held, hooks)
            finally:
                self._is_so = is_next

    def _is_next(self, loss: Tensor, held: Collection[int], hooks: OneCallHooks) -> bool:
        nodes = first_nodes(loss)
        leaves = leaves_among(nodes)
        kind = _Kind(tuple(node.name() for node in nodes[:_MOST_NAMED]), frozenset(leaves))
        size = next((size for size in map(_size_of, nodes) if size > 1), 1)
        sums = _sums_of(leaves.values())
        was_made = self._made is not None and self._made.forget()
        if self._count == 1:
            is_held = bool(leaves) and kind.leaves <= {*held} and len(nodes) < MOST_NODES
            if not is_held or any(map(_has_hooks, leaves.values())):
                return False
            self._kind, self._most, self._sums = kind, size, sums
            self._made = MadeGradient(leaves.values())
        elif (
            not was_made
            or kind != self._kind
            or not size < LARGER_PASS * self._most
            or not bool((sums == self._sums).all())
            or any(_has_gradient(node.variable) for node in leaves.values())
        ):
            return False
        self._most = max(self._most, size)
        return self._made is not None and self._made.note_after(leaves, hooks)

    def lost_before(self, held: Collection[int]) -> int:
        """How many passes were made for nothing, at a step of the parameters with these ids."""
        if not self._is_so or self._made is None or self._count < LEAST_ZEROED:
            return 0
        is_last = self._made.is_kept and self._made.factor(held) is not None
        return (self._count - 1) * is_last


def _size_of(node: Node) -> int:
    """The number of elements of what a node makes."""
    return max((math.prod(made.shape) for made in node._input_metadata), default=0)


def _sums_of(leaves: Collection[Node]) -> Tensor:
    """The sum of each parameter's elements, which changes with what is written to ``.data``."""
    torch: Any = sys.modules["torch"]
    sums = [node.variable.detach().sum(dtype=torch.float32) for node in leaves]
    return torch.stack(sums) if sums else torch.zeros(0)


def _has_hooks(leaf: Node) -> bool:
    """Whether code of the user's is called with a parameter's gradient."""
    return any(getattr(leaf.variable, name, None) for name in _HOOKS)


def _has_gradient(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return gradient is not None and bool(elements_of(gradient).any())
