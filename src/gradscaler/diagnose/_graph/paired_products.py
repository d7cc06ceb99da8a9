"""Products of a loss in which each number of a batch meets all numbers of another one."""

from __future__ import annotations

import math

from gradscaler.diagnose._graph.call_site import Node, operation_of
from gradscaler.diagnose._graph.nodes import is_leaf, saved, shape_of
from gradscaler.diagnose._graph.summands import summands_of
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with
from gradscaler.diagnose._record.thresholds import LEAST_PAIRED

_PRODUCTS = {"mul", "div"}
_REDUCE = {"mean", "sum"}
# What makes one table of one or two others, number by number.
_PASSED = {"clamp", "clamp_min", "clamp_max", "neg", "to", *names_with(Role.ADDS), *_PRODUCTS}
_PASSED |= {"minimum", "maximum"}
_WRITTEN = {"unsqueeze", "reshape", "view", "unsafe_view", "index", "expand"}
_MOST_NODES = 50  # between the mean of a table and the products in it


def paired_in(loss: Node) -> tuple[Node, str] | None:
    """The first product of n numbers and n others that makes a table of a loss, and its sizes.

    One factor has the shape [n], the other [n, 1]; one at least is computed from parameters. The
    code may mean all pairs if it makes that shape itself, as ``x[:, None]`` does.
    """
    for summand in summands_of(loss):
        reduced = summand
        while operation_of(reduced) in {*_PASSED, *_REDUCE} and not shape_of(reduced):
            below = [each for each, _ in reduced.next_functions if each is not None]
            if len(below) != 1:
                break
            (reduced,) = below
        shape = shape_of(reduced)
        is_table = len(shape) == 2 and shape[0] == shape[1] >= LEAST_PAIRED
        if is_table and (found := _paired(reduced, shape)) is not None:
            return found
    return None


def _paired(table: Node, shape: tuple[int, ...]) -> tuple[Node, str] | None:
    """The first such product that a table of a shape is made of, number by number."""
    waiting = [table]
    for _ in range(_MOST_NODES):
        if not waiting:
            break
        node = waiting.pop()
        operation = operation_of(node)
        if operation in _PRODUCTS and (sizes := _sizes(node, shape)):
            return node, sizes
        below = [each for each, _ in node.next_functions if each is not None]
        if operation in _PASSED and not (operation in _PRODUCTS and _is_of_tables(node)):
            waiting += [each for each in reversed(below) if shape_of(each) == shape]
    return None


def _is_of_tables(node: Node) -> bool:
    """Whether a product has two factors of several numbers each."""
    others = (getattr(saved(node, name), "shape", ()) for name in ("self", "other"))
    is_of_two = all(below is not None for below, _ in node.next_functions)
    return (is_of_two and len(node.next_functions) > 1) or any(
        math.prod(each) > 1 for each in others
    )


def _sizes(node: Node, shape: tuple[int, ...]) -> str:
    """What a product makes a table of; empty if its factors are not such, or are meant so."""
    shapes: list[tuple[int, ...]] = []
    trained: list[tuple[int, ...]] = []
    for (below, _), name in zip(node.next_functions, ("self", "other"), strict=False):
        if below is None:
            factor = saved(node, name)
            shapes.append(tuple(getattr(factor, "shape", ())))
            base = getattr(factor, "_base", None)
            is_written = base is not None and base.shape == shape[:1]
        else:
            shapes.append(shape_of(below))
            trained += [] if is_leaf(below) else shapes[-1:]
            is_written = not is_leaf(below) and operation_of(below) in _WRITTEN
        if is_written and len(shapes[-1]) == 2:
            return ""
    if not trained or sorted(shapes) != [shape[:1], (shape[0], 1)]:
        return ""
    return f" makes {list(shape)} of {list(trained[0])}"
