"""Terms that are added to a loss, though ``detach()`` cuts them off from what the loss trains."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from itertools import islice
from typing import Any, NamedTuple

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.call_site import Node, called_from, stack_from
from gradscaler.diagnose._graph.calls import Call
from gradscaler.diagnose._graph.nodes import MOST_NODES, is_leaf, nodes_from
from gradscaler.diagnose._graph.summands import adders_of
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with

_ADDS, _STACKS = names_with(Role.ADDS), names_with(Role.STACKS)
_TO_NUMBERS = {"item": "item()", "__float__": "float()"}
_MOST_CUTS = 20  # of one step; a rollout may have one for each action


class _Cut(NamedTuple):
    """A call of detach(): its place, the number of the node before it, and the leaves before it."""

    place: str
    number: int
    leaves: frozenset[int]  # by id


class CutTerms:
    """Follows what is computed from a detached value, up to the graph that adds it as one number.

    Left out is a value that the graph of a loss also reads otherwise, as a factor, a target or an
    input: that is what detach() is for. So is one whose own gradient the loss adds (straight-
    through), and what depends on nothing that the loss trains.

    Attributes:
        added: for each node that adds such a value, the cut.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, _Cut]] = {}  # by ids; keeps no tensor alive
        self._numbers: dict[float, _Cut] = {}
        self._meant: dict[_Cut, None] = {}  # in their order
        self._taken: set[int] = set()  # numbers of nodes of losses, and of what these add up
        self._left = _MOST_CUTS
        self.added: dict[Node, _Cut] = {}

    def go_on(self) -> None:
        """Follow as many values of the next step, too."""
        self._left = _MOST_CUTS

    def see(self, call: Call) -> None:
        """Note a call that cuts a value off, computes with one, or adds one to a graph."""
        cuts = "detach()" if call.operation == "detach" else _TO_NUMBERS.get(call.name)
        node = call.inputs[0].grad_fn if cuts and call.inputs else None
        if node is not None and self._left:
            self._left -= 1
            _, line = called_from(stack_from(call.frame)[0])
            place = f"{cuts} at {line}" if line else f"{cuts}"
            self._keep(call, _Cut(place, node._sequence_nr(), _leaves_of(node)))
            return
        read = [(each.numel(), cut) for each in call.inputs if (cut := self._cut_of(each))]
        numbers = [each for each in call.args if isinstance(each, float)]
        read += [(1, self._numbers[each]) for each in numbers if each in self._numbers]
        made = [each for each in call.outputs if each.grad_fn is not None]
        if read and not made:
            self._keep(call, read[0][1])
        elif read:
            is_sum = call.operation in _ADDS and all(each.numel() == 1 for each in made)
            is_sum |= call.operation in _STACKS
            if is_sum and all(size == 1 for size, _ in read):
                self.added |= {each.grad_fn: read[0][1] for each in made}
            else:
                self._meant.update(dict.fromkeys(cut for _, cut in read))

    def _keep(self, call: Call, cut: _Cut) -> None:
        """Note what a call makes of a value that is cut off; few other numbers are equal to it."""
        self._values |= {id(each): (weakref.ref(each), cut) for each in call.outputs}
        if call.name in _TO_NUMBERS and not (number := float(call.inputs[0].detach())).is_integer():
            self._numbers[number] = cut

    def _cut_of(self, tensor: Tensor) -> _Cut | None:
        alive, cut = self._values.get(id(tensor), (None, None))
        return cut if alive is not None and alive() is tensor else None

    def note_loss(self, loss: Tensor) -> None:
        """Note a loss that has a backward pass of its own, so that what it adds is trained."""
        if loss.grad_fn is not None:
            self._taken |= _numbers_in(loss)

    def used_before(self, leaves: Collection[int]) -> str:
        """The call that cuts off these leaves, by ids, of a value that a graph reads; or empty."""
        used = (cut.place for cut in self._meant if cut.leaves.issuperset(leaves))
        return next(used, "")

    def used_of(self, leaves: Collection[int]) -> list[str]:
        """The calls that cut off any of these leaves, by ids, of values that graphs read."""
        used = (cut.place for cut in self._meant if not cut.leaves.isdisjoint(leaves))
        return list(dict.fromkeys(used))

    def found_in(self, loss: Tensor) -> str | None:
        """The cut of a value that a loss adds, as ``"detach() at train.py:7"``, or None."""
        adders = list(adders_of(loss.grad_fn))
        added = [self.added[node] for node in adders if node in self.added]
        if not added:
            return None
        numbers = self._taken | _numbers_in(loss)
        leaves = _leaves_of(loss.grad_fn)
        return next(
            (
                cut.place
                for cut in added
                if cut not in self._meant
                and cut.number not in numbers
                and not leaves.isdisjoint(cut.leaves)
            ),
            None,
        )


def _numbers_in(loss: Tensor) -> set[int]:
    """The numbers of a loss' node, and of those that it adds up."""
    adders = adders_of(loss.grad_fn)
    below = [each for node in adders for each, _ in node.next_functions if each is not None]
    return {each._sequence_nr() for each in (loss.grad_fn, *below)}


def _leaves_of(node: Node) -> frozenset[int]:
    """The ids of the leaves that a node depends on."""
    nodes = islice(nodes_from([node]), MOST_NODES)
    return frozenset(id(each.variable) for each in nodes if is_leaf(each))
