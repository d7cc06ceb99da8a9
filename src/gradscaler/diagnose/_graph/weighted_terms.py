"""Terms of a loss that are multiplied by numbers without a gradient, such as rewards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.call_site import Node, is_form, operation_of
from gradscaler.diagnose._graph.nodes import MOST_LOSSES, is_leaf, saved
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with
from gradscaler.diagnose._record.thresholds import SAME_DIFFERENCE

_STACKS = names_with(Role.STACKS)
# What comes between a loss and such a product: the smaller of two is that of clipped ratios.
_PASSES = {*names_with(Role.ADDS), *_STACKS, "div", "mean", "min", "minimum", "mul", "neg", "sum"}
_LOGARITHMS = (
    "binary_cross_entropy_with_logits",
    "log",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "nll_loss",
)
_MOST_NEAR = 16  # nodes from the product to the logarithm of a probability, and on the way back


def weighted_in(root: Node) -> tuple[Node, str] | None:
    """The product that a loss adds up of what is trained and of numbers without a gradient.

    They are not the same for all, and some are negative, or they multiply the logarithm of a
    probability. None if there is no such product; there is no more to say of one. Waits for the
    device.
    """
    with suppress(Exception):  # a factor cannot be compared, such as a sparse one
        return next(((n, "") for n in _terms_of(root) if _is_weighted(n) or _has_weights(n)), None)
    return None


def _terms_of(root: Node) -> Iterator[Node]:
    """The nodes that a loss adds up, and those that add them up, the nearest first."""
    nodes = [root]
    for node in nodes:  # grows meanwhile
        if node is None or is_leaf(node):
            continue
        yield node
        if (operation_of(node) in _PASSES or is_form(node)) and len(nodes) < MOST_LOSSES:
            nodes += [below for below, _ in node.next_functions if below not in nodes]


def _is_weighted(node: Node) -> bool:
    """Whether a product has one factor without a gradient, of several numbers or one of a batch."""
    factor = _factor_of(node)
    if factor is None or not factor.ndim or factor.is_complex():
        return False
    if bool((factor < 0).any()):
        return True
    # Soft targets add up to 1 over the classes.
    are_targets = factor.ndim > 1 and bool((factor.sum(-1) - 1).abs().max() < SAME_DIFFERENCE)
    return not are_targets and _has_logarithm(node)


def _has_weights(node: Node) -> bool:
    """Whether a node stacks products with one number each, which differ."""
    if operation_of(node) not in _STACKS:
        return False
    products = [_product_at(below) for below, _ in node.next_functions[:MOST_LOSSES]]
    factors = [_factor_of(each) for each in products]
    numbers = {float(each) for each in factors if each is not None and each.numel() == 1}
    return len(numbers) > 1 and any(map(_has_logarithm, products))


def _product_at(node: Node) -> Node:
    """The nearest product on the only way through a node; None if another operation is before."""
    while node is not None and (operation_of(node) == "neg" or is_form(node)):
        ((node, _), *_) = node.next_functions
    return node


def _factor_of(node: Node) -> Tensor | None:
    """The factor of a product that has no gradient; None if both have one, or it is another."""
    if node is None or is_leaf(node) or operation_of(node) != "mul":
        return None
    has_gradient = [below is not None for below, _ in node.next_functions]
    if has_gradient not in ([True, False], [False, True]):
        return None
    return saved(node, "other" if has_gradient[0] else "self")


def _has_logarithm(node: Node) -> bool:
    """Whether the logarithm of a probability is near a node, on the way back."""
    nodes = [node]
    for each in nodes:  # grows meanwhile
        if each is None or is_leaf(each) or len(nodes) > _MOST_NEAR:
            continue
        if operation_of(each) in _LOGARITHMS:
            return True
        # What a stack holds is alike.
        nodes += [below for below, _ in each.next_functions[:2] if below not in nodes]
    return False
