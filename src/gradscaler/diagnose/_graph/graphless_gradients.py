"""Gradients that ``torch.autograd.grad`` returns without a graph, though a loss reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from gradscaler.diagnose._gradients.reading import Tensor, floating
from gradscaler.diagnose._graph.call_site import (
    Node,
    called_from,
    is_form,
    operation_of,
    stack_from,
)
from gradscaler.diagnose._graph.calls import Call
from gradscaler.diagnose._graph.nodes import MOST_NODES, is_leaf, nodes_from
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with

_ADDS = names_with(Role.ADDS)
# What makes a residual of a gradient: a factor is rather a weight, and is meant to be constant.
_COMPARES = {*names_with(Role.COMPARES), "l1_loss", "sub"}
_READS = frozenset({*_ADDS, *names_with(Role.STACKS), *_COMPARES})
# Between a residual and the loss: what passes a layer may be an input along a gradient.
_PASSED = {*_READS, "abs", "div", "mean", "mul", "neg", "norm", "pow", "sqrt", "sum", "to"}


@dataclass(frozen=True)
class _Gradient:
    """The result of a call: its place, what it was taken by, and what it depends on beside."""

    place: str
    by: frozenset[int]  # addresses
    leaves: dict[int, Tensor]  # by id


class GraphlessGradients:
    """Follows gradients without a graph, up to the loss that adds or compares them.

    Left out are gradients by parameters, steps along a gradient, as of inputs that are to fool the
    model, what ``detach()`` says to be meant, gradients of another model than the loss trains, and
    those that are the targets of another model, which is not given what they are taken by.

    Attributes:
        readers: for each node that reads such a gradient, the gradient.
    """

    def __init__(self) -> None:
        # By ids of tensors. One that is kept here keeps its id from being used again.
        self._values: dict[int, tuple[Tensor, _Gradient]] = {}
        self.readers: dict[Node, _Gradient] = {}

    def see(self, call: Call) -> None:
        """Note a call that makes such a gradient, or reads one."""
        if call.name == "grad":
            self._note_result(call)
            return
        if not self._values or call.operation == "detach":
            return
        read = (self._values[id(each)][1] for each in call.inputs if id(each) in self._values)
        if (gradient := next(read, None)) is None:
            return
        if call.operation in _ADDS and not gradient.by.isdisjoint(_addresses(call.inputs)):
            return  # a step along the gradient
        made = [each for each in call.outputs if each.grad_fn is not None]
        if made and call.operation in _READS and not _is_target(call, gradient):
            self.readers |= {each.grad_fn: gradient for each in made}
        elif not made:
            new = [each for each in call.outputs if not each.requires_grad]
            self._values |= {id(each): (each, gradient) for each in new}

    def _note_result(self, call: Call) -> None:
        import torch

        of, by = (list(floating(torch.Tensor, each)) for each in call.args[:2])
        are_parameters = any(isinstance(each, torch.nn.Parameter) for each in by)
        if call.kwargs.get("create_graph") or are_parameters or not torch.is_grad_enabled():
            return
        _, line = called_from(stack_from(call.frame)[0])
        place = "autograd.grad" + (f" at {line}" if line else "")
        own = {id(each) for each in by}
        leaves = {key: leaf for key, leaf in _leaves_of(of) if key not in own}
        gradient = _Gradient(place, frozenset(_addresses(by)), leaves)
        results = [each for each in call.outputs if not each.requires_grad]
        self._values |= {id(each): (each, gradient) for each in results}

    def found_in(self, loss: Tensor) -> str | None:
        """The call whose result a loss reads, as ``"autograd.grad at train.py:7"``, or None."""
        nodes = _parts_of(loss.grad_fn)
        found = next((self.readers[node] for node in nodes if node in self.readers), None)
        if found is None or all(key not in found.leaves for key, _ in _leaves_of([loss])):
            return None
        return found.place


def _is_target(call: Call, gradient: _Gradient) -> bool:
    """Whether a call compares a gradient with what depends on nothing that it depends on."""
    others = [each for each in call.inputs if each.grad_fn is not None and each.numel() > 1]
    leaves = dict(_leaves_of(others))
    is_apart = gradient.leaves.keys().isdisjoint(leaves)
    is_apart &= gradient.by.isdisjoint(_addresses(leaves.values()))
    return call.operation in _COMPARES and bool(leaves) and is_apart


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Where tensors are in memory, as ``detach()`` makes another one there."""
    return {each.data_ptr() for each in tensors} - {0}


def _leaves_of(tensors: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The leaves that tensors depend on, by their ids."""
    for node in islice(nodes_from([each.grad_fn for each in tensors]), MOST_NODES):
        if is_leaf(node):
            yield id(node.variable), node.variable


def _parts_of(node: Node) -> Iterator[Node]:
    """The nodes of a loss down to the results of layers."""
    waiting, seen = [node], {None}
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if not is_leaf(node) and (is_form(node) or operation_of(node) in _PASSED):
            waiting += [below for below, _ in node.next_functions]
