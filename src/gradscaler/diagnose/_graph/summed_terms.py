"""A sum over a batch that a loss adds to a mean, which it outweighs."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gradscaler.diagnose._gradients.arrays import local
from gradscaler.diagnose._graph.call_site import Node, operation_of
from gradscaler.diagnose._graph.nodes import saved
from gradscaler.diagnose._graph.summands import ways_to_summands
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with
from gradscaler.diagnose._record.thresholds import LEAST_BATCH, LEAST_SUM_WEIGHT, SAME_ROWS

_COMPARES = names_with(Role.COMPARES) | {
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
}


def summed_in(loss: Node) -> tuple[Node, str] | None:
    """The sum over a batch and its columns that outweighs the mean beside it, and its shape.

    The outputs that the mean compares with targets are almost the same in all rows, and the targets
    are not. A sum with a small factor is meant, such as a penalty.
    """
    terms = ways_to_summands(loss)
    sums = [(node, shape) for node, way in terms if (shape := _summed(node, way))]
    means = [node for node, _ in terms if operation_of(node) in _COMPARES]
    for node, shape in sums:
        if any(_gives_one_row(each, shape[0]) for each in means):
            return node, f" makes one number of {list(shape)}"
    return None


def _summed(node: Node, way: Iterable[Node]) -> tuple[int, ...]:
    """The shape of which a term is the sum; empty if it is none, or has a small factor."""
    shape: tuple[int, ...] = ()
    while operation_of(node) == "sum" and node.next_functions[0][0] is not None:
        shape = tuple(saved(node, "self_sym_sizes") or ())
        node = node.next_functions[0][0]
    is_of_batch = len(shape) > 1 and shape[0] >= LEAST_BATCH and math.prod(shape[1:]) > 1
    return shape if is_of_batch and math.prod(map(_factor, way)) >= LEAST_SUM_WEIGHT else ()


def _factor(node: Node) -> float:
    """The size of the number by which a node multiplies a term; NaN if it is not one number."""
    operation = operation_of(node)
    if operation == "mean":
        return 1 / len(node.next_functions[0][0].next_functions)  # of a stack
    if operation not in ("mul", "div"):
        return 1.0
    kept = [factor for name in ("other", "self") if (factor := saved(node, name)) is not None]
    if not kept or kept[0].numel() != 1:
        return math.nan
    number = abs(float(kept[0]))
    return number if operation == "mul" else 1 / number if number else math.nan


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
