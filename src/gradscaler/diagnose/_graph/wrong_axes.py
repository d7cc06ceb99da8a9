"""Operations of a loss along another axis than the one that what reads them takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

from gradscaler.diagnose._graph.call_site import Node, aten_name, behind_forms
from gradscaler.diagnose._graph.nodes import is_leaf, saved, shape_of

_VIEWS = "view", "unsafe_view", "reshape_alias", "unsqueeze", "squeeze"
_SAME = "to_copy", "clone", "expand", "slice", "alias", "native_dropout"
_ELEMENTWISE = "log", "neg", "add", "sub", "div", "mul", "clamp", "clamp_min", *_SAME
_SOFTMAXES = "softmax", "log_softmax"
_PRODUCTS = "mm", "bmm"
_ALL_PRODUCTS = *_PRODUCTS, "addmm", "baddbmm"
_POOLS = {"select": "last", "mean": "mean", "max": "maximum", "amax": "maximum"}
_NORMS = "linalg_vector_norm", "norm"
_MOST_ON_WAY = 12  # nodes between two operations
_MOST_OF_STEP = 60  # nodes between two steps of a recurrent layer

_Shape = tuple[int, ...]


class WrongAxis(NamedTuple):
    """An operation along a wrong axis: what it is, its node, and what follows its line."""

    kind: Literal["across", "over queries", "pooled batch", "whole norm"]
    node: Node
    rest: str = ""


def wrong_axes_in(nodes: Sequence[Node]) -> Iterator[WrongAxis]:
    """The operations along a wrong axis, among all nodes of a loss."""
    readers: dict[Node, list[Node]] = {}
    for node in nodes:
        for below, _ in node.next_functions:
            readers.setdefault(below, []).append(node)
    for node in nodes:
        name = _name(node)
        if (across := _across(node, name)) is not None:
            yield WrongAxis("across", across)
        elif name in _PRODUCTS and (softmax := _over_queries(node)) is not None:
            yield WrongAxis("over queries", softmax)
        elif name in _POOLS and (taken := _pooled_batch(node, name, readers)):
            yield WrongAxis("pooled batch", node, taken)
        elif name == "div" and _is_by_whole_norm(node, readers):
            sizes = list(shape_of(node))
            yield WrongAxis("whole norm", node, f" makes {sizes} of one norm for all rows")


def _name(node: Node) -> str:
    return _named(node.name())


@cache  # a graph has the same few names again and again
def _named(name: str) -> str:
    return aten_name(name).strip("_")


def _below(node: Node) -> list[Node]:
    """The nodes that made a node's inputs from something, other than a form of a parameter."""
    every = (each for each, _ in node.next_functions if each is not None)
    return [each for each in every if not _is_of_leaf(each)]


def _is_of_leaf(node: Node) -> bool:
    maker = node if is_leaf(node) else behind_forms(node)
    return maker is None or is_leaf(maker)


def _dim_of(node: Node, name: str = "dim") -> int | None:
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


def _axis_below(node: Node, axis: int) -> int | None:
    """Where an axis of what a node makes is in what it was made of; None if that is not known."""
    before, number = node.next_functions[0]
    if before is None or is_leaf(node):
        return None
    name, outer = _name(node), shape_of(node)
    inner = tuple(before._input_metadata[number].shape)
    if name in _VIEWS:  # an axis of a size has its place by how many numbers follow it
        follow = math.prod(outer[axis + 1 :])
        places = [n for n, size in enumerate(inner) if size == outer[axis] > 1]
        return next((n for n in places if math.prod(inner[n + 1 :]) == follow), None)
    if name in ("transpose", "t"):
        swapped = [0, 1] if name == "t" else [_dim_of(node, "dim0"), _dim_of(node, "dim1")]
        return swapped[1 - swapped.index(axis)] if axis in swapped else axis
    if name == "permute":
        dims = saved(node, "dims")
        return None if dims is None else int(dims[axis]) % len(outer)
    is_same = name in _SAME or (name == "mul" and _is_dropout(node))
    return axis if is_same and len(inner) == len(outer) else None


def _is_dropout(node: Node) -> bool:
    """Whether a product is that of a dropout: its constant is 0 or one other number."""
    kept = saved(node, "other")
    if kept is None or node.next_functions[-1][0] is not None or kept.numel() < 2:
        return False
    highest = kept.max()
    return bool(((kept == 0) | (kept == highest)).all()) and bool(highest >= 1)


def _across(node: Node, name: str) -> Node | None:
    """The softmax that is not along the classes of which a node takes one for each row, or None.

    In a square of scores of pairs, as of texts and pictures, both dimensions are meant.
    """
    axis = _classes_of(node, name)
    if axis is None:
        return None
    maker = node.next_functions[0][0]
    for _ in range(_MOST_ON_WAY):
        if maker is None or is_leaf(maker):
            return None
        if _name(maker) in _SOFTMAXES:
            shape, dim = shape_of(maker), _dim_of(maker)
            is_square = len(shape) == 2 and shape[0] == shape[1]
            return None if dim in (axis, None) or is_square or shape[dim] < 2 else maker
        if _name(maker) in _ELEMENTWISE and len(_below(maker)) == 1:
            is_same = shape_of(_below(maker)[0]) == shape_of(maker)
            axis, maker = (axis if is_same else None), _below(maker)[0]
        else:
            axis, maker = _axis_below(maker, axis), maker.next_functions[0][0]
        if axis is None:
            return None
    return None


def _classes_of(node: Node, name: str) -> int | None:
    """The axis along which a node takes one class for each row; None if it takes none."""
    shape = shape_of(node.next_functions[0][0]) if node.next_functions else ()
    if name in ("nll_loss", "nll_loss2d"):
        return 1 if len(shape) > 1 else None
    if name == "gather" and len(shape) == 2:
        index = saved(node, "index")
        is_one = _dim_of(node) == 1 and index is not None and tuple(index.shape) == (shape[0], 1)
        return 1 if is_one else None
    if name == "index" and len(shape) == 2:
        rows, *others = saved(node, "indices") or [None]
        is_each = rows is not None and rows.shape == (shape[0],) and len(others) == 1
        if not is_each or others[0] is None or shape[0] < 2 or rows[0] != 0:
            return None
        return 1 if bool((rows[1:] - rows[:-1] == 1).all()) else None
    return None


def _over_queries(node: Node) -> Node | None:
    """The softmax of an attention that is not along the keys, where a product takes its weights.

    The scores and the values are computed. What normalises the weights once more, as slots do, may
    mean another axis.
    """
    (weights, _), (values, _) = node.next_functions[:2]
    if weights is None or values is None or _is_of_leaf(values):
        return None
    axis: int | None = len(shape_of(weights)) - 1
    for _ in range(_MOST_ON_WAY):
        if weights is None or is_leaf(weights) or axis is None or axis < 0:
            return None
        if _name(weights) == "softmax":
            dim, shape = _dim_of(weights), shape_of(weights)
            is_wrong = dim not in (axis, None) and min(shape[dim], shape[axis]) > 1
            return weights if is_wrong and _is_of_scores(weights) else None
        axis, weights = _axis_below(weights, axis), weights.next_functions[0][0]
    return None


def _is_of_scores(softmax: Node) -> bool:
    """Whether a softmax is of products of two computed tensors, such as queries and keys."""
    node = softmax
    for _ in range(_MOST_ON_WAY):
        below = _below(node)
        if _name(node) in _ALL_PRODUCTS:
            return len(below) >= 2
        if len(below) != 1:
            return False
        (node,) = below
    return False


def _pooled_batch(node: Node, name: str, readers: Mapping[Node, Sequence[Node]]) -> str:
    """What a node takes along the axis that a recurrent layer has read as its batch; else empty."""
    layer, axis, shape = node.next_functions[0][0], _dim_of(node), saved(node, "self_sym_sizes")
    if layer is None or axis not in (0, 1) or len(shape or ()) != 3 or min(shape[:2]) < 2:
        return ""
    if name == "select" and (saved(node, "index") + 1) % 2**64 not in (0, shape[axis]):
        return ""
    place: int | None = axis
    for _ in range(_MOST_ON_WAY):
        if place is None or layer is None or len(readers[layer]) != 1:  # a loop may take each row
            return ""
        if _is_recurrent(layer):
            break
        place, layer = _axis_below(layer, place), layer.next_functions[0][0]
    order = "[batch, time, features]" if axis == 0 else "[time, batch, features]"
    took = f" makes {list(shape_of(node))} of {list(shape)}, read as {order}, by its {_POOLS[name]}"
    return f"{took} along dim {axis}" if place == 1 else ""


def _is_recurrent(node: Node) -> bool:
    """Whether a node is the output of a recurrent layer, of shape [time, batch, features]."""
    if is_leaf(node):
        return False
    name, shape = _name(node), shape_of(node)
    if "rnn" in name:
        return True
    parts = [each for each, _ in node.next_functions]
    if len(shape) != 3 or len(parts) < 2 or None in parts:
        return False
    if name == "cat" and (saved(node, "dim") or 0) in (2, 2**64 - 1):  # both directions
        return all(_is_recurrent(each) for each in parts)
    if name != "stack" or saved(node, "dim") != 0:
        return False
    first, second = parts[:2]
    return _leads_to(second, first) or _leads_to(first, second)  # or backward in time


def _leads_to(node: Node, other: Node) -> bool:
    near = [node]
    for each in near:  # grows meanwhile
        if each is other:
            return True
        if len(near) < _MOST_OF_STEP:
            near += [below for below in _below(each) if below not in near]
    return False


def _is_by_whole_norm(node: Node, readers: Mapping[Node, Sequence[Node]]) -> bool:
    """Whether rows are divided by one norm of all, and multiplied by others as if by their own.

    A square may be a matrix of scores or a covariance, and what is multiplied once more, a matrix
    whose root or inverse is iterated.
    """
    if len(node.next_functions) != 2:
        return False
    (rows, _), (norm, _) = node.next_functions
    shape = shape_of(node)
    if rows is None or norm is None or _is_of_leaf(rows) or shape_of(norm) != ():
        return False
    if len(shape) != 2 or min(shape) < 2 or shape[0] == shape[1]:
        return False
    return _is_norm_of(norm, rows) and _is_compared(node, readers)


def _is_norm_of(node: Node, rows: Node) -> bool:
    for _ in range(_MOST_ON_WAY):
        name, below = _name(node), _below(node)
        if len(below) != 1:
            return False
        if name in _NORMS:
            return below[0] is rows and saved(node, "dim") in (None, ())
        if name not in ("sqrt", "sum", "pow", *_ELEMENTWISE):
            return False
        if name == "pow" and below[0] is rows:
            return True
        (node,) = below
    return False


def _is_compared(node: Node, readers: Mapping[Node, Sequence[Node]]) -> bool:
    """Whether rows are multiplied by others along their features, and no product takes these."""
    for reader in readers.get(node, ()):
        factor, table, number = node, reader, 0
        is_transposed = _name(reader) in ("t", "transpose", "permute")
        if is_transposed:
            factor, (table, *others) = reader, readers[reader]
            number = 1
            if others:
                return False
        if _name(table) != "mm" or len(_below(table)) != 2:
            continue
        if table.next_functions[number][0] is factor and not _multiplies(table, readers):
            return True
    return False


def _multiplies(node: Node, readers: Mapping[Node, Sequence[Node]]) -> bool:
    """Whether a product takes what a node makes, directly or not."""
    waiting, seen = [*readers.get(node, ())], set[Node]()
    while waiting:
        reader = waiting.pop()
        if reader not in seen:
            seen.add(reader)
            if _name(reader) in _ALL_PRODUCTS:
                return True
            waiting += readers.get(reader, ())
    return False
