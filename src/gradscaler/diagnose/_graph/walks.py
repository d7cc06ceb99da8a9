"""Walks through the graphs of a training's losses: most steps make the same graph again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gradscaler.diagnose._graph.call_site import Node, aten_name, differentiated, is_form
from gradscaler.diagnose._graph.masks import TAKES_MASKS
from gradscaler.diagnose._graph.nodes import MOST_NODES, is_leaf, saved
from gradscaler.diagnose._graph.slopes import EXPONENTIALS, STEEP

# Operations whose gradient can be Inf or NaN though the loss is finite: their slope is Inf at some
# number, or they make an Inf or NaN that the loss leaves out, as an exponential before a clamp.
_SUSPICIOUS = STEEP | EXPONENTIALS | TAKES_MASKS
_MULTIPLY = "mm", "addmm", "convolution"  # by a matrix
_MOST_WALKS = 4  # graphs of different losses


class Walks:
    """The latest walks, each of which is followed as long as the graphs are alike.

    Attributes:
        shown: of the latest graph, if it is like one before it, the id of a vector of parameters by
            that of a matrix: the gradient of the vector is bad if that of the matrix is.
    """

    def __init__(self) -> None:
        self._walks: list[_Walk] = []
        self.shown: Mapping[int, int] = {}

    def suspects(self, root: Node) -> list[Node]:
        """The nodes below a loss that can make an Inf or NaN of a gradient.

        The list is empty if the graph is larger than ``MOST_NODES``.
        """
        for walk in self._walks:
            if (nodes := walk.follow(root)) is not None:
                if walk.shown is None:
                    walk.shown = _shown_in(nodes)
                self.shown = walk.shown
                break
        else:
            self.shown, (walk, nodes) = {}, _Walk.through(root)
            if nodes:
                self._walks = [walk, *self._walks][:_MOST_WALKS]
        return [node for place in walk.suspects if not _is_power(node := nodes[place])]


class _Step(NamedTuple):
    """A node in a walk.

    Attributes:
        kind: its class.
        num_edges: how many edges it has.
        ends: the edges that lead to a leaf or nowhere, and the class of that.
        edges: those that lead to a node that the walk comes to next.
    """

    kind: Any
    num_edges: int
    ends: tuple[tuple[int, type], ...]
    edges: tuple[int, ...]


class _Walk:
    """A walk through a graph, which another graph may have.

    Attributes:
        suspects: the places of suspicious nodes in the walk.
        shown: see :class:`Walks`; None if it is not known yet.
    """

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self.suspects: list[int] = []
        self.shown: Mapping[int, int] | None = None

    @classmethod
    def through(cls, root: Node) -> tuple[_Walk, list[Node]]:
        """A walk through all nodes below one but the leaves, and the nodes."""
        walk, nodes, seen = cls(), [root], {root}
        for node in nodes:  # grows meanwhile
            if len(nodes) > MOST_NODES:
                return cls(), []
            following = [below for below, _ in node.next_functions]
            ends = [(n, type(b)) for n, b in enumerate(following) if b is None or is_leaf(b)]
            edges: list[int] = []
            for edge, below in enumerate(following):
                if below is not None and below not in seen and not is_leaf(below):
                    seen.add(below)
                    edges.append(edge)
                    nodes.append(below)
            is_suspicious = differentiated(type(node).__name__) in _SUSPICIOUS
            if is_suspicious or (None in following and _keeps_data(node)):
                walk.suspects.append(len(walk._steps))
            walk._steps.append(_Step(type(node), len(following), tuple(ends), tuple(edges)))
        return walk, nodes

    def follow(self, root: Node) -> list[Node] | None:
        """The nodes of a graph in this walk; None if they, or what they lead to, differ in kind."""
        nodes: list[Node] = [root]
        for node, (kind, count, ends, edges) in zip(nodes, self._steps, strict=False):
            if type(node) is not kind:
                return None
            below = node.next_functions
            if len(below) != count:  # such as those of a concatenation
                return None
            for edge, end in ends:
                if type(below[edge][0]) is not end:
                    return None
            for edge in edges:
                nodes.append(below[edge][0])  # noqa: PERF401 # it would be a call a node
        return nodes


def _keeps_data(node: Node) -> bool:
    """Whether a node keeps data that weights are multiplied by: a tanh may hide an Inf in them."""
    name = aten_name(node.name())
    if name != "mul":
        return name in (*_MULTIPLY, "bmm")
    other = saved(node, "other")
    return other is not None and other.numel() > 1


def _is_power(node: Node) -> bool:
    """Whether a node is that of a power of 2 or more, whose slope has a slope of its own at 0."""
    if not type(node).__name__.startswith("Pow"):
        return False
    exponent = saved(node, "exponent")
    return isinstance(exponent, (int, float)) and exponent >= 2


def _shown_in(nodes: Sequence[Node]) -> dict[int, int]:
    """For each matrix that is only multiplied, and whose product a vector is added to, the vector.

    The gradient of the vector is the sum of the gradients of the product. That of the matrix is
    their product with the inputs, so it is bad only if they are, or the inputs. Inputs from outside
    the graph may be so, and those that a steep operation made. What a fully masked row makes also
    makes bad gradients of the matrices before it. In float16, the product may overflow.
    """
    readers: dict[Node, list[Node]] = {}
    for node in nodes:
        for below, _ in node.next_functions:
            readers.setdefault(below, []).append(node)
    named = (node for node in nodes if differentiated(node.name()) in STEEP | EXPONENTIALS)
    steep = (node._sequence_nr() for node in named if not _is_power(node))
    first_steep = min(steep, default=math.inf)
    shown: dict[int, int] = {}
    for leaf in (each for each in readers if each is not None and is_leaf(each)):
        if leaf.variable.ndim < 2 or leaf.variable._backward_hooks:
            continue
        node = _reader_of(leaf, readers)
        if node is None or aten_name(node.name()) not in _MULTIPLY:
            continue
        is_early = node._sequence_nr() < first_steep
        is_in_float16 = "float16" in str(node._input_metadata[0].dtype).split(".")
        is_of_data = any(below is None for below, _ in node.next_functions)
        vector = _vector_beside(node, readers)
        if vector is not None and is_early and not is_in_float16 and not is_of_data:
            shown[id(leaf.variable)] = id(vector)
    return shown


def _reader_of(node: Node, readers: Mapping[Node, Sequence[Node]]) -> Node | None:
    """The only node that reads another one, past views and casts; None if several do."""
    while len(found := readers.get(node, ())) == 1:
        (node,) = found
        if not is_form(node):
            return node
    return None


def _vector_beside(node: Node, readers: Mapping[Node, Sequence[Node]]) -> object | None:
    """The vector of parameters that is added to a product; None if there is none."""
    adds = node
    if aten_name(node.name()) == "mm":
        found = _reader_of(node, readers)
        if found is None or aten_name(found.name()) != "add":
            return None
        adds = found
    for below, _ in adds.next_functions:
        leaf = below
        while leaf is not None and not is_leaf(leaf) and is_form(leaf):
            leaf = leaf.next_functions[0][0]
        if leaf is not None and is_leaf(leaf) and leaf.variable.ndim == 1:
            return leaf.variable  # type: ignore[no-any-return]
    return None
