"""What a loss of PyTorch compares in a sampled step: outputs and their targets."""

from __future__ import annotations

from gradscaler.diagnose._gradients.arrays import local
from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.call_site import Node, differentiated
from gradscaler.diagnose._graph.nodes import saved
from gradscaler.diagnose._record.lines import Targets
from gradscaler.diagnose._record.thresholds import LEAST_BATCH

_MOST_ROWS, _MOST_COLUMNS = 4096, 256  # that are read; others are alike
_MOST_LABELS = 1000  # likewise


def targets_of(node: Node) -> Targets | None:
    """What a node compares, as ``mse_loss`` does; None if it does not, or if batches are small."""
    pair = saved(node, "self"), saved(node, "target")
    made = [below is not None for below, _ in node.next_functions]
    if any(each is None for each in pair) or sorted(made) != [False, True]:
        return None  # neither of two outputs is a target
    outputs, targets = (local(each).detach() for each in (pair if made[0] else pair[::-1]))
    if outputs.shape != targets.shape or not targets.ndim or not targets.numel():
        return None
    if outputs.is_complex() or targets.is_complex():
        return None
    if len(targets) < LEAST_BATCH:
        return None
    outputs, targets = _rows_of(outputs), _rows_of(targets)
    is_square = differentiated(node.name()) == "mse_loss"
    return Targets(
        float((outputs - targets).square().mean()),
        float(targets.var(0).mean()) if is_square else None,
        float(targets.square().mean().sqrt()),
        float(outputs.square().mean().sqrt()),
    )


def classes_of(node: Node) -> tuple[int, ...] | None:
    """The classes of a batch whose labels are sorted, as ``nll_loss`` keeps them.

    They are empty if the labels are not sorted; None if there are few, or none.
    """
    labels, ignored = saved(node, "target"), saved(node, "ignore_index")
    if labels is None or ignored is None or labels.ndim != 1 or labels.is_floating_point():
        return None
    labels = local(labels)[:_MOST_LABELS]
    found = [label for label in labels.tolist() if label not in (ignored, ignored - 2**64)]
    if len(found) < LEAST_BATCH:
        return None
    is_sorted = sorted(found) in (found, found[::-1])
    return tuple(dict.fromkeys(found)) if is_sorted else ()


def _rows_of(tensor: Tensor) -> Tensor:
    """A part of a tensor as float32, of shape [rows, columns]; the first dimension is a batch's."""
    rows = tensor.reshape(len(tensor), -1)
    down, along = max(len(rows) // _MOST_ROWS, 1), max(rows.shape[1] // _MOST_COLUMNS, 1)
    return rows[::down, ::along].float()
