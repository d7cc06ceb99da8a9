"""A sum over a batch that a loss adds to a mean, which it outweighs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradscaler.diagnose._gradients.arrays import local
from gradscaler.diagnose._graph.call_site import Node, operation_of
from gradscaler.diagnose._graph.nodes import is_leaf, saved, shape_of
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with
from gradscaler.diagnose._record.thresholds import LEAST_BATCH, LEAST_SUM_WEIGHT, SAME_ROWS

_ADDS = names_with(Role.ADDS)
_COMPARES = names_with(Role.COMPARES) | {
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
}


def summed_in(loss: Node) -> tuple[Node, str] | None:
    """The sum over a batch and its columns that outweighs the mean beside it, and its shape.

    The outputs that the mean compares with targets are almost the same in all rows, and the targets
    are not. A sum with a small factor is meant, such as a penalty.
    """
    terms = list(_terms_of(loss))
    sums = [(node, shape) for node, weight in terms if (shape := _summed(node, weight))]
    means = [node for node, _ in terms if operation_of(node) in _COMPARES]
    for node, shape in sums:
        if any(_gives_one_row(each, shape[0]) for each in means):
            return node, f" makes one number of {list(shape)}"
    return None


def _terms_of(loss: Node) -> Iterator[tuple[Node, float]]:
    """What a loss adds up, each with the number that multiplies it; NaN if that is unknown."""
    waiting = [(loss, 1.0)]
    while waiting:
        node, weight = waiting.pop()
        if node is None or is_leaf(node) or shape_of(node) != ():
            continue
        operation, below = operation_of(node), [each for each, _ in node.next_functions]
        known = [each for each in below if each is not None]
        if operation in _ADDS and known:
            waiting += [(each, weight) for each in known]
        elif operation in ("mul", "div") and len(known) == 1:
            factor = saved(node, "other")
            factor = saved(node, "self") if factor is None else factor
            number = math.nan if factor is None or factor.numel() != 1 else abs(float(factor))
            inverse = operation == "div" and number > 0
            waiting.append((known[0], weight / number if inverse else weight * number))
        elif operation in ("neg", "to") and len(known) == 1:
            waiting.append((known[0], weight))
        else:
            yield node, weight


def _summed(node: Node, weight: float) -> tuple[int, ...]:
    """The shape of which a term is the sum; empty if it is none, or has a small factor."""
    shape: tuple[int, ...] = ()
    while operation_of(node) == "sum" and node.next_functions[0][0] is not None:
        shape = tuple(saved(node, "self_sym_sizes") or ())
        node = node.next_functions[0][0]
    is_of_batch = len(shape) > 1 and shape[0] >= LEAST_BATCH and math.prod(shape[1:]) > 1
    return shape if is_of_batch and weight >= LEAST_SUM_WEIGHT else ()


def _gives_one_row(node: Node, rows: int) -> bool:
    """Whether a mean compares outputs that are one row with targets that are not."""
    outputs, targets = saved(node, "self"), saved(node, "target")
    is_mean = saved(node, "reduction") == 1  # as torch.nn._reduction has it
    if outputs is None or targets is None or not is_mean:
        return False
    outputs, targets = local(outputs).detach(), local(targets).detach()
    if outputs.shape != targets.shape or len(outputs) != rows or outputs.is_complex():
        return False
    if operation_of(node) == "binary_cross_entropy_with_logits":
        outputs = outputs.sigmoid()
    of_outputs, of_targets = (float(each.float().var(0).mean()) for each in (outputs, targets))
    return of_outputs <= SAME_ROWS * of_targets
