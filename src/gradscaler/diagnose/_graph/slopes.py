"""The nodes of a graph whose gradient may be Inf or NaN, though the loss is finite."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

from gradscaler.diagnose._gradients.reading import Tensor, read
from gradscaler.diagnose._graph.call_site import Node, operation_of
from gradscaler.diagnose._graph.nodes import has_packed, is_custom, is_leaf, kept, saved

# Where the slope of an operation is Inf or NaN, in the numbers that its node keeps by these names.
_POLES: dict[str, tuple[str, tuple[float, ...]]] = {
    r"sqrt|hypot": ("result", (0.0,)),  # the gradient of PyTorch's norms is 0 there
    r"pow|prod|log(2|10)?$|special_entr|lgamma|digamma|polygamma": ("self", (0.0,)),
    r"div|xlogy": ("other", (0.0,)),
    r"log1p": ("self", (-1.0,)),
    r"logit$": ("self", (0.0, 1.0)),
    r"linalg_slogdet": ("sign", (0.0,)),
    r"acos|asin|atanh|erfinv|acosh": ("self", (-1.0, 1.0)),
}
_NO_SLOPE = re.compile("svd|eig|(^|_)qr")  # where singular values or eigenvalues are equal
_IN_ORDER = {"linalg_eigh": "eigenvalues", "linalg_svd": "S"}  # these, by operation

STEEP = "|".join((*_POLES, *_IN_ORDER))
"""A pattern of the operations whose slope is Inf or NaN at some numbers that their node keeps."""


def part_of(nodes: Sequence[Node], bad: Collection[int], good: Collection[int]) -> list[Node]:
    """The nodes in which the gradients of some parameters can have become bad.

    Their gradients reach parameters whose gradient is bad, and none whose gradient is finite; or
    they give one of several gradients to such a node, or to a bad parameter. If no node is so, it
    is the nodes whose gradients reach a bad one, or else all nodes.

    Args:
        nodes: the nodes of a graph in the order of the forward pass.
        bad: the ids of the parameters whose gradient is not finite.
        good: those of the parameters whose gradient is.
    """
    reached: dict[Node, tuple[bool, bool]] = {}
    for node in nodes:
        below = [each for each, _ in node.next_functions if each is not None]
        leaves = {each: id(each.variable) for each in below if is_leaf(each)}
        reached |= {each: (leaf in bad, leaf in good) for each, leaf in leaves.items()}
        inner = [reached.get(each, (False, False)) for each in below]
        reached[node] = any(is_bad for is_bad, _ in inner), any(is_good for _, is_good in inner)
    only_bad = [
        node
        for node in nodes
        if any(reached.get(below) == (True, False) for below, _ in node.next_functions)
    ]
    return only_bad or [node for node in nodes if reached[node][0]] or list(nodes)


def suspects_in(part: Sequence[Node]) -> Iterator[Node]:
    """The nodes of a part whose gradient may be Inf or NaN, by the numbers that they keep."""
    for node in part:
        is_hidden = is_custom(node) or has_packed(node) or _NO_SLOPE.search(operation_of(node))
        if is_hidden or bad_in(node) is not None or is_at_pole(node):
            yield node


def is_steep(node: Node) -> bool:
    """Whether a node's operation can make a gradient Inf or NaN, for some numbers."""
    operation = operation_of(node)
    return _poles_of(node)[0] != "" or bool(_NO_SLOPE.search(operation)) or operation == "exp"


def is_at_pole(node: Node, tensors: Mapping[str, Tensor] | None = None) -> bool:
    """Whether a node keeps a number at which the slope of its operation is Inf or NaN.

    ``tensors`` are those that it has kept, if they may be freed by now.
    """
    (name, poles), in_order = _poles_of(node), _IN_ORDER.get(operation_of(node), "")
    if not name and not in_order:
        return False
    known = kept(node, may_unpack=True) if tensors is None else tensors
    found, exponent = known.get(name or in_order), known.get("exponent")
    if found is None:
        return False
    if in_order:
        return bool((found.diff() == 0).any())
    if exponent is not None:  # the slope in an exponent that is learned is NaN below 0
        is_learned = node.next_functions[1][0] is not None
        return bool(((found == 0) & (exponent < 1) | (found < 0) & is_learned).any())
    return any(bool((found == pole).any()) for pole in poles)


def _poles_of(node: Node) -> tuple[str, tuple[float, ...]]:
    operation, exponent = operation_of(node), saved(node, "exponent")
    if isinstance(exponent, (int, float)) and exponent >= 1:
        return "", ()
    return _poles_of_operation(operation)


@cache
def _poles_of_operation(operation: str) -> tuple[str, tuple[float, ...]]:
    return next((found for names, found in _POLES.items() if re.match(names, operation)), ("", ()))


def bad_in(node: Node, may_unpack: bool = False) -> Tensor | None:
    """A tensor that a node keeps and that holds a NaN or +Inf; None if there is none."""
    tensors = kept(node, may_unpack).values()
    return next((each for each in tensors if read(each).state == "bad"), None)
