"""Operations of a loss along another axis than the one that what reads them takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from gradscaler.diagnose._graph.attention_batches import is_batch_of_attention
from gradscaler.diagnose._graph.axes import (
    SAME,
    SOFTMAXES,
    axis_below,
    computed_below,
    dim_of,
    is_of_leaf,
    kept_name,
)
from gradscaler.diagnose._graph.call_site import Node
from gradscaler.diagnose._graph.nodes import is_leaf, saved, shape_of

_ELEMENTWISE = "log", "neg", "add", "sub", "div", "mul", "clamp", "clamp_min", *SAME
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
        name = kept_name(node)
        if (across := _across(node, name)) is not None:
            yield WrongAxis("across", across)
        elif name in _PRODUCTS and (softmax := _over_queries(node)) is not None:
            yield WrongAxis("over queries", softmax)
        elif name in _POOLS and (taken := _pooled_batch(node, name, readers)):
            yield WrongAxis("pooled batch", node, taken)
        elif name == "div" and _is_by_whole_norm(node, readers):
            sizes = list(shape_of(node))
            yield WrongAxis("whole norm", node, f" makes {sizes} of one norm for all rows")


def _across(node: Node, name: str) -> Node | None:
    """The softmax that is not along the classes of which a node takes one for each row, or None.

    In scores of pairs, as of texts and pictures, both dimensions are meant: they are a square, or
    products of two computed tensors, or another softmax normalises them, too.
    """
    axis = _classes_of(node, name)
    if axis is None:
        return None
    maker = node.next_functions[0][0]
    for _ in range(_MOST_ON_WAY):
        if maker is None or is_leaf(maker):
            return None
        if kept_name(maker) in SOFTMAXES:
            shape, dim = shape_of(maker), dim_of(maker)
            is_square = len(shape) == 2 and shape[0] == shape[1]
            if dim in (axis, None) or is_square or shape[dim] < 2:
                return None
            return None if _is_of_scores(maker) or _is_normalised_before(maker) else maker
        if kept_name(maker) in _ELEMENTWISE and len(computed_below(maker)) == 1:
            is_same = shape_of(computed_below(maker)[0]) == shape_of(maker)
            axis, maker = (axis if is_same else None), computed_below(maker)[0]
        else:
            axis, maker = axis_below(maker, axis), maker.next_functions[0][0]
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
        is_one = dim_of(node) == 1 and index is not None and tuple(index.shape) == (shape[0], 1)
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
    if weights is None or values is None or is_of_leaf(values):
        return None
    axis: int | None = len(shape_of(weights)) - 1
    for _ in range(_MOST_ON_WAY):
        if weights is None or is_leaf(weights) or axis is None or axis < 0:
            return None
        if kept_name(weights) == "softmax":
            dim, shape = dim_of(weights), shape_of(weights)
            is_wrong = dim not in (axis, None) and min(shape[dim], shape[axis]) > 1
            return weights if is_wrong and _is_of_scores(weights) else None
        axis, weights = axis_below(weights, axis), weights.next_functions[0][0]
    return None


def _is_of_scores(softmax: Node) -> bool:
    """Whether a softmax is of products of two computed tensors, such as queries and keys."""
    node = softmax
    for _ in range(_MOST_ON_WAY):
        below = computed_below(node)
        if kept_name(node) in _ALL_PRODUCTS:
            return len(below) >= 2
        if len(below) != 1:
            return False
        (node,) = below
    return False


def _is_normalised_before(softmax: Node) -> bool:
    """Whether a softmax is of what another one, or the logarithm of sums, has normalised."""
    near = computed_below(softmax)
    for node in near:  # grows meanwhile
        if kept_name(node) in (*SOFTMAXES, "logsumexp"):
            return True
        if len(near) < _MOST_ON_WAY and kept_name(node) in _ELEMENTWISE:
            near += computed_below(node)
    return False


def _pooled_batch(node: Node, name: str, readers: Mapping[Node, Sequence[Node]]) -> str:
    """What a node takes along the axis that a layer has read as its batch; empty if it does not.

    A loop may take each row.
    """
    made, axis, shape = node.next_functions[0][0], dim_of(node), saved(node, "self_sym_sizes")
    if made is None or axis not in (0, 1) or len(shape or ()) != 3 or min(shape[:2]) < 2:
        return ""
    place = saved(node, "index") if name == "select" else None
    is_last = place is None or (place + 1) % 2**64 in (0, shape[axis])
    is_of_layer = is_last and _is_batch_of_recurrent(made, axis, readers)
    if not is_of_layer and (len(readers[made]) > 1 or not is_batch_of_attention(made, axis)):
        return ""
    order = "[batch, time, features]" if axis == 0 else "[time, batch, features]"
    taken = _POOLS[name] if is_last else "place"
    sizes = f" makes {list(shape_of(node))} of {list(shape)}"
    return f"{sizes}, read as {order}, by its {taken} along dim {axis}"


def _is_batch_of_recurrent(layer: Node, axis: int, readers: Mapping[Node, Sequence[Node]]) -> bool:
    place: int | None = axis
    for _ in range(_MOST_ON_WAY):
        if place is None or layer is None or len(readers[layer]) != 1:
            return False
        if _is_recurrent(layer):
            return place == 1
        place, layer = axis_below(layer, place), layer.next_functions[0][0]
    return False


def _is_recurrent(node: Node) -> bool:
    """Whether a node is the output of a recurrent layer, of shape [time, batch, features]."""
    if is_leaf(node):
        return False
    name, shape = kept_name(node), shape_of(node)
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
            near += [below for below in computed_below(each) if below not in near]
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
    if rows is None or norm is None or is_of_leaf(rows) or shape_of(norm) != ():
        return False
    if len(shape) != 2 or min(shape) < 2 or shape[0] == shape[1]:
        return False
    return _is_norm_of(norm, rows) and _is_compared(node, readers)


def _is_norm_of(node: Node, rows: Node) -> bool:
    for _ in range(_MOST_ON_WAY):
        name, below = kept_name(node), computed_below(node)
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
        is_transposed = kept_name(reader) in ("t", "transpose", "permute")
        if is_transposed:
            factor, (table, *others) = reader, readers[reader]
            number = 1
            if others:
                return False
        if kept_name(table) != "mm" or len(computed_below(table)) != 2:
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
            if kept_name(reader) in _ALL_PRODUCTS:
                return True
            waiting += readers.get(reader, ())
    return False
