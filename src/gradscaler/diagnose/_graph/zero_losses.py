"""Why a loss gives gradients of exactly 0: what ends each way from it to the parameters."""

from __future__ import annotations

from collections.abc import Iterator

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.axes import SOFTMAXES, dim_of
from gradscaler.diagnose._graph.call_site import Node, aten_name
from gradscaler.diagnose._graph.nodes import MOST_NODES, is_custom, is_leaf, saved, shape_of

_MARGINS = "clamp", "clamp_min", "relu", "threshold"
_DISTANCES = "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"


def ends_of(loss: Tensor) -> list[tuple[str, Node]]:
    """What ends the gradients of a loss, and the nodes that do, the nearest to it first.

    It is ``"factor"`` if the node multiplies by numbers that are all 0, ``"ignored"`` if each
    target is the index to ignore, ``"margin"`` if a relu or clamp is off for all of its inputs,
    ``"equal"`` if all outputs equal their targets, ``"alone"`` if a softmax is over one class, and
    ``"empty"`` if the node makes no element.
    There is one on each way, or else the gradients are 0 for another reason, and the list is empty.
    """
    nodes, ends = [loss.grad_fn], list[tuple[str, Node]]()
    seen = set(nodes)
    for node in nodes:  # grows meanwhile
        if node is None or is_leaf(node) or is_custom(node) or len(nodes) > MOST_NODES:
            return []
        try:
            cause, open_ways = _cause_in(node)
        except Exception:  # what it keeps cannot be compared, such as a sparse factor
            return []
        if cause is not None:
            ends.append((cause, node))
        for below in open_ways:
            if below not in seen:
                seen.add(below)
                nodes.append(below)
    return ends


def is_at_floor(node: Node) -> bool:
    """Whether a node puts a constant in the place of all of its inputs, which are below it."""
    name = aten_name(node.name()).rstrip("_")
    given, low = saved(node, "self"), saved(node, "min")
    if name == "maximum" and sum(below is not None for below, _ in node.next_functions) == 1:
        low = saved(node, "other")
        is_swapped = node.next_functions[0][0] is None
        given, low = (low, given) if is_swapped else (given, low)
    elif name not in _MARGINS:
        return False
    return given is not None and low is not None and bool((given < low).all())


def is_margin(node: Node) -> bool:
    """Whether a node's operation leaves out what is beyond a margin."""
    return aten_name(node.name()).rstrip("_") in _MARGINS


def _cause_in(node: Node) -> tuple[str | None, list[Node]]:
    """What ends the gradients of a node's inputs, and the nodes to which it lets them pass."""
    name = aten_name(node.name()).rstrip("_")
    ways = [(n, below) for n, (below, _) in enumerate(node.next_functions) if below is not None]
    if any(0 in made.shape for made in node._input_metadata):
        return "empty", []
    if name.startswith("nll_loss") and _is_ignored(node):
        return "ignored", []
    if name in SOFTMAXES and _is_over_one(node):
        return "alone", []
    if name in _MARGINS and _is_off(node, name):
        return "margin", []
    if _has_equal(node, name):
        return "equal", []
    ended = set(_without_factor(node, name))
    return "factor" if ended else None, [below for n, below in ways if n not in ended]


def _without_factor(node: Node, name: str) -> Iterator[int]:
    """The inputs of a node whose gradient it multiplies by numbers that are all 0."""
    if name == "mul":
        for number, factor in enumerate(("other", "self")):
            if _is_zero(saved(node, factor)):
                yield number
    elif name == "masked_fill" and _all(saved(node, "mask")):
        yield 0
    elif name == "where" and (condition := saved(node, "condition")) is not None:
        yield from [0] * (not condition.any()) + [1] * _all(condition)


def _is_over_one(node: Node) -> bool:
    """Whether a softmax is over one class, which has the probability 1 then."""
    dim, shape = dim_of(node), shape_of(node)
    return dim is not None and bool(shape) and shape[dim] == 1


def _is_ignored(node: Node) -> bool:
    target, ignored = saved(node, "target"), saved(node, "ignore_index")
    if target is None or ignored is None:
        return False
    return _all(target == (ignored - 2**64 if ignored >= 2**63 else ignored))  # it is read unsigned


def _is_off(node: Node, name: str) -> bool:
    """Whether a relu or a clamp is off for all of its inputs."""
    if name == "relu":
        return _is_zero(saved(node, "result"))
    given, low, high = (saved(node, key) for key in ("self", "min", "max"))
    low = saved(node, "threshold") if name == "threshold" else low
    if given is None or (low is None and high is None):
        return False
    is_below = given <= low if name == "threshold" else given < low if low is not None else None
    is_above = None if high is None else given > high
    off = is_below if is_above is None else is_above if is_below is None else is_below | is_above
    return _all(off)


def _has_equal(node: Node, name: str) -> bool:
    """Whether a node takes a distance of numbers from equal ones, where its slope is 0."""
    given = saved(node, "self")
    if name in _DISTANCES:
        target = saved(node, "target")
        return given is not None and target is not None and bool((given == target).all())
    exponent = saved(node, "exponent")
    is_power = name == "pow" and isinstance(exponent, (int, float)) and exponent > 1
    return (is_power or name == "abs") and _is_zero(given)


def _is_zero(tensor: Tensor | None) -> bool:
    return tensor is not None and not bool(tensor.any())


def _all(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(tensor.all())
