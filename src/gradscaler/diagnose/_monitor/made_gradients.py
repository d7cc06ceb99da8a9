"""A gradient as a backward pass made it, beside what the step gets of it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.arrays import sample_of
from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.call_site import Node
from gradscaler.diagnose._graph.hooks import OneCallHooks, weakly
from gradscaler.diagnose._graph.nodes import MOST_NODES, is_leaf, nodes_from
from gradscaler.diagnose._record.thresholds import EXACT, FEW_ELEMENTS


class MadeGradient:
    """Some elements of one parameter's gradient, as the latest backward pass has left it.

    Args:
        leaves: the nodes of the parameters, of which a small one stands for all.
    """

    def __init__(self, leaves: Collection[Node]) -> None:
        self._parameter = weakref.ref(min(leaves, key=_place_of).variable)
        self._made: tuple[Any, NDArray[Any]] | None = None  # the gradient, weakly, and the elements

    def note_after(self, leaves: Mapping[int, Node], hooks: OneCallHooks) -> bool:
        """Note the gradient that a pass will make of leaves, by ids; False if it makes none."""
        leaf = leaves.get(id(self._parameter()))
        if leaf is not None:
            hooks.add(leaf.register_hook, weakly(self._after))
        return leaf is not None

    def _after(self, *_: object) -> None:
        parameter = self._parameter()
        if parameter is not None:
            self._made = weakref.ref(parameter.grad), _part_of(parameter.grad)

    def forget(self) -> bool:
        """Forget the gradient; return whether there was one."""
        made, self._made = self._made, None
        return made is not None

    @property
    def is_kept(self) -> bool:
        """Whether the parameter still has the gradient that the pass has made, changed or not."""
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        return self._made is not None and gradient is not None and self._made[0]() is gradient

    def factor(self, held: Collection[int]) -> float | None:
        """The number that multiplies the gradient by now, if parameters with these ids have it.

        None if it is not one number: unscaling and clipping by the norm multiply by one.
        """
        parameter: Any = self._parameter()
        if self._made is None or id(parameter) not in held or parameter.grad is None:
            return None
        return _factor(_part_of(parameter.grad), self._made[1])


def first_nodes(loss: Tensor) -> list[Node]:
    """The nodes that a loss depends on, up to a number of them."""
    return list(islice(nodes_from([loss.grad_fn]), MOST_NODES))


def leaves_among(nodes: Iterable[Node]) -> dict[int, Node]:
    """The leaves among nodes, by the ids of their tensors."""
    return {id(node.variable): node for node in nodes if is_leaf(node)}


def _place_of(leaf: Node) -> tuple[bool, int]:
    """The place in an order of parameters by their size; those of too few elements come last."""
    size = leaf.variable.numel()
    return size < FEW_ELEMENTS, size


def _part_of(gradient: Tensor) -> NDArray[Any]:
    """A copy of some of a gradient's elements, on the host."""
    return np.array(sample_of(gradient, FEW_ELEMENTS), np.float64).ravel()


def _factor(now: NDArray[Any], before: NDArray[Any]) -> float | None:
    """The number that multiplies all of some numbers, where now are others; None if several do."""
    if now.shape != before.shape or not np.isfinite(now).all() or not np.isfinite(before).all():
        return None
    place = np.abs(before).argmax()
    if not before[place] or not now[place]:
        return None
    is_one = np.allclose(now / now[place], before / before[place], rtol=0, atol=EXACT)
    return float(now[place] / before[place]) if is_one else None
