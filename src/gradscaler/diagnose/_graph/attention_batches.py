"""Whether an axis of a tensor is the one that an attention before it has read as its batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gradscaler.diagnose._graph.axes import axis_below, computed_below, kept_name
from gradscaler.diagnose._graph.call_site import Node
from gradscaler.diagnose._graph.nodes import is_leaf

_MOST_NODES = 100  # up to the attention: a layer has some 20
_EACH = "native_layer_norm", "gelu", "relu", "native_dropout", "mul", "to_copy", "clone"
_PRODUCTS = "addmm", "mm"


class _Axis(NamedTuple):
    """An axis of what a node makes; where rows are flattened, None, and the rows that it spans.

    Attributes:
        node: the node.
        place: the axis.
        outer: how many rows are in one pass through the axis.
        inner: how many are in one step along it.
    """

    node: Node
    place: int | None
    outer: int = 0
    inner: int = 0


def is_batch_of_attention(node: Node, axis: int) -> bool:
    """Whether the nearest attention before a node has read an axis of [.., .., features] as batch.

    Up to it are residual sums, normalizations and linear layers, which keep the axes.
    """
    waiting, seen = [_Axis(node, axis)], {node}
    for each in waiting:  # grows meanwhile
        if (found := _of_attention(each)) is not None:
            return found
        for below in _before(each):
            if below.node not in seen and len(waiting) < _MOST_NODES:
                seen.add(below.node)
                waiting.append(below)
    return False


def _before(axis: _Axis) -> list[_Axis]:
    """An axis in what a node was computed from."""
    node, name, shape = axis.node, kept_name(axis.node), _shape(axis.node)
    below = [each for each in computed_below(node) if not is_leaf(each)]
    if name in ("add", *_EACH):
        return [axis._replace(node=each) for each in below if _shape(each) == shape]
    if axis.place is None and name in _PRODUCTS and len(below) == 1:
        return [axis._replace(node=below[0])]
    if len(below) != 1:
        return []
    inner = _shape(below[0])
    if axis.place is None:
        rows = [n for n in range(len(inner) - 1) if _spans(inner, n) == axis[2:]]
        is_same = len(inner) == 3 and inner[-1:] == shape[-1:]
        return [_Axis(below[0], rows[0])] if is_same and rows else []
    if len(shape) == 3 and len(inner) == 2 and inner[1] == shape[2]:
        return [_Axis(below[0], None, *_spans(shape, axis.place))]
    place = axis_below(node, axis.place)
    return [] if place is None else [_Axis(below[0], place)]


def _shape(node: Node) -> tuple[int, ...]:
    """The shape of the first result of a node, which may have statistics beside it."""
    return tuple(node._input_metadata[0].shape)


def _spans(shape: tuple[int, ...], place: int) -> tuple[int, int]:
    return math.prod(shape[place:-1]), math.prod(shape[place + 1 : -1])


def _of_attention(axis: _Axis) -> bool | None:
    """Whether an axis is the batch of the attention whose heads a node joins; None if of none."""
    node, shape = axis.node, _shape(axis.node)
    if axis.place is not None or len(shape) != 2 or kept_name(node) in _PRODUCTS:
        return None
    features, maker = shape[1], next(iter(computed_below(node)), None)
    inner = () if maker is None else _shape(maker)
    outer, step = axis.outer * features, axis.inner * features
    places = [n for n in range(len(inner)) if math.prod(inner[n:]) == outer]
    place = next((n for n in places if math.prod(inner[n + 1 :]) <= step and inner[n] > 1), None)
    for _ in range(_MOST_NODES):
        if place is None or maker is None or is_leaf(maker):
            break
        below = computed_below(maker)
        if (num_heads := _num_heads_in(maker, below, features)) is not None:
            return place == 0 and _shape(maker)[0] * axis.inner == axis.outer * num_heads
        place, maker = (axis_below(maker, place), below[0]) if len(below) == 1 else (None, None)
    return None


def _num_heads_in(node: Node, below: Sequence[Node], features: int) -> int | None:
    """How many heads are in the first axis of an attention's result; None if a node is none."""
    name, shape = kept_name(node), _shape(node)
    if name == "bmm":
        return features // shape[-1]
    of_heads = len(shape) == 4 and len(below) == 1 and kept_name(below[0]) == "bmm"
    return 1 if of_heads or name.startswith("scaled_dot_product") else None
