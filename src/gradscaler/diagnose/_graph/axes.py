"""Axes of the tensors in a graph, followed from an operation to those before it."""

from __future__ import annotations

import math
from functools import cache

from gradscaler.diagnose._graph.call_site import Node, aten_name, behind_forms
from gradscaler.diagnose._graph.nodes import is_leaf, saved, shape_of

_VIEWS = "view", "unsafe_view", "reshape_alias", "unsqueeze", "squeeze"
SOFTMAXES = "softmax", "log_softmax"
SAME = "to_copy", "clone", "expand", "slice", "alias", "native_dropout"


def kept_name(node: Node) -> str:
    """The name of a node's operation in PyTorch's own code, as ``"native_layer_norm"``."""
    return _named(node.name())


@cache  # a graph has the same few names again and again
def _named(name: str) -> str:
    return aten_name(name).strip("_")


def computed_below(node: Node) -> list[Node]:
    """The nodes that made a node's inputs from something, other than a form of a parameter."""
    every = (each for each, _ in node.next_functions if each is not None)
    return [each for each in every if not is_of_leaf(each)]


def is_of_leaf(node: Node) -> bool:
    """Whether a node is a parameter, or a form of one."""
    maker = node if is_leaf(node) else behind_forms(node)
    return maker is None or is_leaf(maker)


def dim_of(node: Node, name: str = "dim") -> int | None:
    """The dimension that a node keeps, counted from the first; None if it keeps not one."""
    before, number = node.next_functions[0]
    dim, ndim = (
        saved(node, name),
        0 if before is None else len(before._input_metadata[number].shape),
    )
    if isinstance(dim, (tuple, list)):
        dim = dim[0] if len(dim) == 1 else None
    if not isinstance(dim, int):
        return None
    dim -= 2**64 if dim >= 2**63 else 0  # as PyTorch shows a negative one
    return dim + ndim if dim < 0 else dim


def axis_below(node: Node, axis: int) -> int | None:
    """Where an axis of what a node makes is in what it was made of; None if that is not known."""
    before, number = node.next_functions[0]
    if before is None or is_leaf(node):
        return None
    name, outer = kept_name(node), shape_of(node)
    inner = tuple(before._input_metadata[number].shape)
    if name in _VIEWS:  # an axis of a size has its place by how many numbers follow it
        follow = math.prod(outer[axis + 1 :])
        places = [n for n, size in enumerate(inner) if size == outer[axis] > 1]
        return next((n for n in places if math.prod(inner[n + 1 :]) == follow), None)
    if name in ("transpose", "t"):
        swapped = [0, 1] if name == "t" else [dim_of(node, "dim0"), dim_of(node, "dim1")]
        return swapped[1 - swapped.index(axis)] if axis in swapped else axis
    if name == "permute":
        dims = saved(node, "dims")
        return None if dims is None else int(dims[axis]) % len(outer)
    is_same = name in SAME or (name == "mul" and _is_dropout(node))
    return axis if is_same and len(inner) == len(outer) else None


def _is_dropout(node: Node) -> bool:
    """Whether a product is that of a dropout: its constant is 0 or one other number."""
    kept = saved(node, "other")
    if kept is None or node.next_functions[-1][0] is not None or kept.numel() < 2:
        return False
    highest = kept.max()
    return bool(((kept == 0) | (kept == highest)).all()) and bool(highest >= 1)
