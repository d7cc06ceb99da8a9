"""Scores that a mask of 0 and 1 multiplies before their softmax, which gives 0 a weight, too."""

from __future__ import annotations

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.axes import SOFTMAXES, dim_of, is_of_leaf, kept_name
from gradscaler.diagnose._graph.call_site import Node, behind_forms
from gradscaler.diagnose._graph.nodes import MOST_NODES, nodes_from, saved, shape_of

_MOST_ON_WAY = 3  # casts, and products with a number, such as a temperature
_FACTORS = "other", "self"
_FILLS = "masked_fill", "where"


def zero_masked_in(loss: Node) -> tuple[Node, str] | None:
    """The product with such a mask in the graph of a loss, or None.

    Left out is a softmax whose result is masked again, and then normalised, and a product with a
    parameter or with fewer numbers, as of features that are 0 or 1 with their weights.
    """
    found: dict[Node, Node] = {}
    masked_after: set[Node] = set()
    for count, node in enumerate(nodes_from([loss])):
        if count > MOST_NODES:
            return None
        name, shape = kept_name(node), shape_of(node)
        if name in SOFTMAXES and (dim := dim_of(node)) is not None:
            if (product := _product_before(node, dim, shape)) is not None:
                found[node] = product
        elif name in _FILLS or (name == "mul" and _mask_of(node) is not None):
            masked_after |= {behind_forms(below) for below, _ in node.next_functions}
    return next(((found[node], "") for node in found if node not in masked_after), None)


def _product_before(softmax: Node, dim: int, shape: tuple[int, ...]) -> Node | None:
    """The product with a mask that a softmax reads, which masks a part of a row of it."""
    node = softmax.next_functions[0][0]
    for _ in range(_MOST_ON_WAY):
        if node is None or shape_of(node) != shape:
            return None
        name = kept_name(node)
        if name == "mul" and (mask := _mask_of(node)) is not None:
            along, scores = mask.expand(shape), next(b for b, _ in node.next_functions if b)
            if is_of_leaf(scores) or shape_of(scores) != shape:
                return None
            return node if bool((along.amax(dim) != along.amin(dim)).any()) else None
        if name not in ("to_copy", "mul", "div"):
            return None
        node = node.next_functions[0][0]
    return None


def _mask_of(product: Node) -> Tensor | None:
    """The factor of a product that no node made, as floats, if all of its elements are 0 or 1."""
    if all(below is not None for below, _ in product.next_functions):
        return None
    factors = [saved(product, name) for name in _FACTORS]
    for factor in (each for each in factors if each is not None and each.ndim):
        mask = factor.detach().float()
        if bool(((mask == 0) | (mask == 1)).all()) and bool((mask == 0).any()):
            return mask
    return None
