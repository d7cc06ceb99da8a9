"""The nodes of a graph whose gradient may be Inf or NaN, though the loss is finite."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from gradscaler.diagnose._gradients.reading import Tensor, read
from gradscaler.diagnose._graph.call_site import Node, operation_of
from gradscaler.diagnose._graph.nodes import has_packed, is_custom, is_leaf, kept, saved
from gradscaler.diagnose._operations.operation import At, Role
from gradscaler.diagnose._operations.rows import OPERATIONS, names_with, row_of

# The name under which a node keeps the numbers of its row, if not "self". Where it keeps its result
# alone, and that is Inf itself at a pole, there is none.
_KEPT = {
    "addcdiv": "tensor2",
    "div": "other",
    "fmod": "other",
    "hypot": "result",
    "igamma": "other",
    "igammac": "other",
    "linalg_slogdet": "sign",
    "reciprocal": "",
    "remainder": "other",
    "rsqrt": "",
    "special_xlog1py": "other",
    "sqrt": "result",
    "xlogy": "other",
}
_SINGULAR: dict[str, tuple[At, ...]] = {"linalg_slogdet": (0.0,)}  # the sign of a determinant of 0
_IN_ORDER = {"linalg_eigh": "eigenvalues", "linalg_svd": "S"}  # which have no slope if equal
_ANGLES = {"atan2"}  # at 0 and 0, PyTorch says that the slope is 0
_SOLVES = names_with(Role.SOLVES)
EXPONENTIALS = {row.name for row in OPERATIONS if row.largest}

STEEP = {row.name for row in OPERATIONS if row.steep_at}
STEEP |= _SINGULAR.keys() | _IN_ORDER.keys() | _ANGLES
"""The operations whose slope is Inf or NaN at some numbers."""


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
        is_hidden = is_custom(node) or has_packed(node) or operation_of(node) in _SOLVES
        if is_hidden or bad_in(node) is not None or is_at_pole(node):
            yield node


def is_steep(node: Node) -> bool:
    """Whether a node's operation can make a gradient Inf or NaN, for some numbers."""
    operation = operation_of(node)
    return bool(_poles_of(node)[0]) or operation in _SOLVES | EXPONENTIALS | _ANGLES


def is_at_pole(node: Node, tensors: Mapping[str, Tensor] | None = None) -> bool:
    """Whether a node keeps a number at which the slope of its operation is Inf or NaN.

    ``tensors`` are those that it has kept, if they may be freed by now.
    """
    if operation_of(node) in _ANGLES:
        return _underflows(kept(node, may_unpack=True) if tensors is None else tensors)
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
    return any(_holds(found, pole) for pole in poles)


def _underflows(known: Mapping[str, Tensor]) -> bool:
    """Whether the sum of the squares of two tensors is so small that its reciprocal is Inf."""
    one, other = (known.get(name) for name in ("self", "other"))
    if one is None or other is None:
        return False
    squares = one * one + other * other
    return bool(((squares != 0) & squares.reciprocal().isinf()).any())


def _holds(found: Tensor, pole: At) -> bool:
    """Whether a tensor holds a pole, or a number between its ends; complex ones have no order."""
    if not isinstance(pole, tuple):
        return bool((found == pole).any())
    return not found.is_complex() and bool(((found > pole[0]) & (found < pole[1])).any())


def _poles_of(node: Node) -> tuple[str, tuple[At, ...]]:
    """The name under which a node keeps numbers, and the poles among them."""
    operation, exponent = operation_of(node), saved(node, "exponent")
    if isinstance(exponent, (int, float)) and exponent >= 1:
        return "", ()
    row = row_of(operation)
    poles = _SINGULAR.get(operation) or (() if row is None else row.steep_at)
    return (_KEPT.get(operation, "self"), poles) if poles else ("", ())


def bad_in(node: Node, may_unpack: bool = False) -> Tensor | None:
    """A tensor that a node keeps and that holds a NaN or +Inf; None if there is none."""
    tensors = kept(node, may_unpack).values()
    return next((each for each in tensors if read(each).state == "bad"), None)
