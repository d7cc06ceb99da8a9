"""The way to a failure: how large the numbers were in the operations before it."""

from __future__ import annotations

from gradscaler.diagnose._graph.call_site import Node, is_form, operation_of
from gradscaler.diagnose._graph.nodes import is_leaf
from gradscaler.diagnose._graph.values import Values

_MOST = 5  # operations
_MOST_BEFORE = 100  # operations, to look for an exponential among
_EXPONENTIALS = "exp", "exp2", "expm1"
_HUGE = 1e9  # more than the numbers of a network that learns


def way_to(node: Node, number: int, values: Values) -> str | None:
    """The largest magnitudes up to a node's result, such as "matmul 3e+03 → pow Inf".

    Before each operation is the one that made the largest of its inputs, as far as they are known.
    None if no input of the node is known.
    """
    made = values.tensor(node, number)
    is_nan = values.has_nan if made is None else bool(made.isnan().any())
    steps, edge = [f"{operation_of(node)} {'NaN' if is_nan else 'Inf'}"], _largest(node, values)
    while edge is not None and len(steps) < _MOST:
        found = values.reading(*edge)
        if not is_form(edge[0]) and found is not None:
            steps.append(f"{operation_of(edge[0])} {found.largest:.2g}")
        edge = _largest(edge[0], values)
    return " → ".join(reversed(steps)) if len(steps) > 1 else None


def exponential_before(node: Node, values: Values) -> Node | None:
    """The exponential from which a node's large inputs come; None if there is none."""
    edge = _largest(node, values)
    for _ in range(_MOST_BEFORE):
        found = None if edge is None else values.reading(*edge)
        if edge is None or found is None or found.largest < _HUGE:
            return None
        if operation_of(edge[0]) in _EXPONENTIALS:
            return edge[0]
        edge = _largest(edge[0], values)
    return None


def _largest(node: Node, values: Values) -> tuple[Node, int] | None:
    """The input of a node, made by another, that holds the largest known magnitude."""
    inputs = [edge for edge in node.next_functions if edge[0] is not None and not is_leaf(edge[0])]
    known = {edge: values.reading(*edge) for edge in inputs}
    finite = {edge: read.largest for edge, read in known.items() if read and not read.bad}
    return max(finite, key=finite.__getitem__, default=None)
