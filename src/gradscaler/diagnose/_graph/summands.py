"""The losses that a loss adds up."""

from __future__ import annotations

from collections.abc import Iterator

from gradscaler.diagnose._graph.call_site import Node, is_form, operation_of
from gradscaler.diagnose._graph.nodes import nodes_from
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with

_ADDS = names_with(Role.ADDS)
_WEIGHS = "mul", "div", "neg"  # with a number
_STACKS = names_with(Role.STACKS)


def summand_of(node: Node, loss: Node) -> tuple[int, list[Node]] | None:
    """The place, from 0, of the only summand of a loss that a node is part of, and all summands.

    None if the loss has no summands, or if several have the node as a part.
    """
    summands = list(dict.fromkeys(summands_of(loss)))
    places = [n for n, each in enumerate(summands) if node in nodes_from([each])]
    return (places[0], summands) if len(places) == 1 and len(summands) > 1 else None


def summands_of(node: Node) -> list[Node]:
    """What a node adds up, in the order of the code."""
    return [summand for summand, _ in ways_to_summands(node)]


def ways_to_summands(node: Node, way: tuple[Node, ...] = ()) -> list[tuple[Node, tuple[Node, ...]]]:
    """What a node adds up, in the order of the code, each with the nodes between the two.

    Args:
        node: the node.
        way: the nodes that come before those between the two.
    """
    while True:
        below = [each for each, _ in node.next_functions if each is not None]
        operation = operation_of(node)
        if operation in _ADDS | _STACKS and len(below) > 1:
            inner_way = (*way, node)
            return [found for each in below for found in ways_to_summands(each, inner_way)]
        inner = operation_of(below[0]) if len(below) == 1 else None
        is_sum_of_stack = operation in ("sum", "mean") and inner in _STACKS
        is_alone = operation in (*_ADDS, *_WEIGHS) or is_form(node)
        if inner is None or not (is_alone or is_sum_of_stack):
            return [(node, way)]
        way = (*way, node)
        (node,) = below


def subtracted_in(node: Node) -> Iterator[Node]:
    """What a node takes from a sum, such as the second of ``2 * first - second``."""
    waiting = [(node, False)]
    while waiting:
        node, is_minus = waiting.pop()
        inner = [each for each, _ in node.next_functions if each is not None]
        operation = operation_of(node)
        if operation in _ADDS and len(inner) > 1:
            is_taken = operation == "sub"
            waiting += [(each, is_minus ^ (is_taken and n > 0)) for n, each in enumerate(inner)]
        elif len(inner) == 1 and (operation in (*_ADDS, *_WEIGHS) or is_form(node)):
            waiting.append((inner[0], is_minus ^ (operation == "neg")))
        elif is_minus:
            yield node


def adders_of(node: Node) -> Iterator[Node]:
    """The nodes that add something up to make a loss, among them those that add one to numbers."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        operation, below = operation_of(node), [each for each, _ in node.next_functions]
        is_adder = operation in _ADDS | _STACKS
        if is_adder:
            yield node
        is_weighed = operation in _WEIGHS and len(below) - below.count(None) == 1
        if is_adder or is_weighed or operation in ("sum", "mean") or is_form(node):
            waiting += below


def adds_a_constant(node: Node) -> bool:
    """Whether a loss adds up something without a graph, such as a number."""
    return any(below is None for each in adders_of(node) for below, _ in each.next_functions)
