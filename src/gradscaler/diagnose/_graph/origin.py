"""The operation that made the first Inf or NaN of a forward pass, from the graph of its loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from gradscaler.diagnose._gradients.reading import Reading, Tensor, largest_of, read
from gradscaler.diagnose._graph.call_site import LOGDET, Node, is_form, operation_of
from gradscaler.diagnose._graph.masks import ADDS_UP, FILLS, TAKES_MASKS
from gradscaler.diagnose._graph.nodes import (
    has_packed,
    is_custom,
    is_leaf,
    is_opaque,
    reads_unknown,
    saved,
)
from gradscaler.diagnose._graph.values import Values
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import RISKY, names_with
from gradscaler.diagnose._record.located import Located

_DIVIDES = names_with(Role.DIVIDES)
_ADDS = names_with(Role.ADDS)
_EXPONENTIATES = names_with(Role.EXPONENTIATES)

_Edge = tuple[Node, int]  # a node, and which of its results


class Origin(NamedTuple):
    """Where an Inf or a NaN began.

    Attributes:
        node: the node that made it, or the first that read it.
        number: which of the node's results holds it.
        given: the tensor that held it before any operation: a parameter, or what no node made.
        is_given: whether a tensor held it before, which may be unknown.
        made: where an operation without a graph made it; None if that was not seen.
    """

    node: Node
    number: int
    given: Tensor | None = None
    is_given: bool = False
    made: Located | None = None


def origin_of(node: Node, number: int, values: Values) -> Origin:
    """Where the Inf or NaN in a node's result began.

    It began in the first node on the way back whose inputs are all finite. -Inf may be a mask: it
    counts only if an operation turns it into Inf or NaN, and then for the operation that made it
    from finite numbers, or else for the one that turned it.
    """
    edge = reader = node, number
    while edge not in values.ungraphed and (found := _bad_input(edge[0], values)) is not None:
        reader = reader if is_form(edge[0]) else edge
        if is_leaf(found[0]):
            leaf = found[0].variable
            return Origin(*reader, leaf, is_given=True, made=values.ungraphed_origin(leaf))
        edge = found
    if edge in values.ungraphed:
        return Origin(*edge, is_given=True, made=values.ungraphed[edge])
    if (given := _bad_constant(*edge, values)) is not None:
        return given
    if (suspect := _absorbed(edge[0], values) or _most_suspect(edge, values)) != edge:
        return origin_of(*suspect, values)
    return Origin(*edge, is_given=_has_bad_summand(*edge, values))


def _absorbed(node: Node, values: Values) -> _Edge | None:
    """The Inf that a node's input was divided by, which made it 0; None if there is none."""
    for maker, _ in node.next_functions:
        if maker is not None and operation_of(maker) == "div" and len(maker.next_functions) > 1:
            divisor: _Edge = maker.next_functions[1]
            found = None if divisor[0] is None else values.reading(*divisor)
            if found is not None and found.state == "bad":
                return divisor
    return None


def _bad_constant(node: Node, number: int, values: Values) -> Origin | None:
    """The origin if a node keeps an Inf or NaN that no node made."""
    if is_custom(node):  # what it keeps may be its own
        return None
    takes_masks = operation_of(node) in TAKES_MASKS
    for tensor in values.constants.get(node, {}).values():
        state = read(tensor).state
        is_bad = state == "bad" or (state == "mask" and not takes_masks)
        if is_bad and not _is_in_code(tensor):
            made = values.ungraphed_origin(tensor)
            return Origin(node, number, tensor, is_given=True, made=made)
    return None


def _has_bad_summand(node: Node, number: int, values: Values) -> bool:
    """Whether a sum is Inf or NaN by a number that no node made, and that the sum does not keep."""
    if not _adds_unknown(node) or node in values.constants:
        return False
    made, largest = values.tensor(node, number), largest_input(node, values)
    is_nan = made is not None and bool(made.isnan().any())
    return is_nan or not largest >= _edge(node, number)


def _is_in_code(tensor: Tensor) -> bool:
    """Whether a tensor that a node keeps is a number in the code, which PyTorch keeps in double."""
    import torch

    return tensor.ndim == 0 and tensor.dtype in (torch.float64, torch.complex128)


def _edge(node: Node, number: int) -> float:
    """Half of the largest number of a result: a sum of two smaller ones is finite."""
    import torch

    return torch.finfo(node._input_metadata[number].dtype).max / 2


def _bad_input(node: Node, values: Values) -> _Edge | None:
    """The input of a node that its Inf or NaN came from; None if the node made it."""
    edges = sorted((e for e in node.next_functions if e[0] is not None), key=_order)
    known = [(edge, values.reading(*edge)) for edge in edges]
    states = [(edge, None if found is None else found.state) for edge, found in known]
    bad = [edge for edge, state in states if state == "bad"]
    masks = [edge for edge, state in states if state == "mask" and _is_no_mask(node, edge, values)]
    bad = bad or [edge for edge in _behind(node, values) if values.reading(*edge) is not None]
    return next(iter([*bad, *masks]), None)


def _is_no_mask(node: Node, edge: _Edge, values: Values) -> bool:
    """Whether a -Inf that a node reads is no mask, but was made from finite numbers."""
    if (node, edge) not in values.unmasked:
        values.unmasked[node, edge] = _makes_no_mask(node, edge, values)
    return values.unmasked[node, edge]


def _makes_no_mask(node: Node, edge: _Edge, values: Values) -> bool:
    maker, takes_masks = origin_of(*edge, values), operation_of(node) in TAKES_MASKS
    if is_leaf(maker.node) or maker.node is node:
        return False
    if maker.is_given and maker.made is None:
        return not takes_masks
    operation = operation_of(maker.node) if maker.made is None else maker.made.operation or ""
    if takes_masks:
        return operation in ADDS_UP
    return operation not in FILLS and not (operation in _ADDS and reads_unknown(maker.node))


def _behind(node: Node, values: Values) -> list[_Edge]:
    """The unknown results that a node may have its Inf or NaN from, and bad ones behind these."""
    waiting, seen, found = _inputs_of(node), set[Node](), list[_Edge]()
    while waiting:
        reader, edge = waiting.pop()
        if edge[0] is None or edge[0] in seen:
            continue
        seen.add(edge[0])
        value = values.reading(*edge)
        if value is None:
            waiting += _inputs_of(edge[0])
        is_mask = value is not None and value.state == "mask"
        if value is None or value.state == "bad" or (is_mask and _is_no_mask(reader, edge, values)):
            found.append(edge)
    return sorted(found, key=_order)


def _inputs_of(node: Node) -> list[tuple[Node, _Edge]]:
    return [(node, edge) for edge in node.next_functions]


def _order(edge: _Edge) -> int:
    """The place of an edge in the order of the forward pass."""
    return int(edge[0]._sequence_nr())


def _most_suspect(edge: _Edge, values: Values) -> _Edge:
    """Of a node and the unknown results that it reads, the one that most likely made a bad number.

    A division by 0 made it, else most likely a node that hides many operations, or the logarithm of
    a determinant. A sum of two is rarely Inf, but it is NaN if one of the two is, which no node may
    have made.
    """
    suspects = [each for each in _behind(edge[0], values) if not is_form(each[0])]
    if by_0 := [each for each in (*suspects, edge) if smallest_divisor(each[0], values) == 0]:
        return by_0[0]
    hidden = [e for e in suspects if is_opaque(e[0]) or operation_of(e[0]) == LOGDET]
    if hidden:
        return hidden[0]
    if _is_nan_in_all_rows(edge, values):  # a mask that is added
        return next((each for each in suspects if _adds_unknown(each[0])), edge)
    if _is_risky(edge, values):
        return edge
    return min([*suspects, edge], key=lambda e: (operation_of(e[0]) in _ADDS) != values.has_nan)


def _is_nan_in_all_rows(edge: _Edge, values: Values) -> bool:
    """Whether a softmax gives NaN alone, as no mask leaves out each row."""
    made = values.tensor(*edge) if operation_of(edge[0]) in TAKES_MASKS else None
    return made is not None and made.ndim > 1 and len(made) > 1 and bool(made.isnan().all())


def _adds_unknown(node: Node) -> bool:
    return operation_of(node) in _ADDS and reads_unknown(node)


def _is_risky(edge: _Edge, values: Values) -> bool:
    """Whether a node often makes such a bad number of finite ones.

    No division by 1 or more does, and no exponential makes a NaN.
    """
    node, operation = edge[0], operation_of(edge[0])
    made = values.tensor(*edge) if operation in _EXPONENTIATES else None
    if made is not None and bool(made.isnan().any()):
        return False
    divisor = smallest_divisor(node, values)
    return operation in RISKY and not (divisor is not None and divisor >= 1)


def largest_input(node: Node, values: Values) -> float:
    """The largest magnitude of a node's inputs; NaN if one of them is unknown."""
    found = list(_inputs(node, values))
    is_known = bool(found) and None not in found and not has_packed(node)
    return largest_of(each.largest for each in found if each is not None) if is_known else math.nan


def smallest_divisor(node: Node, values: Values) -> float | None:
    """The smallest magnitude of a division's divisor; None if there is none, or it is unknown."""
    if operation_of(node) not in _DIVIDES:
        return None
    divisor = values.constants.get(node, {}).get("other")
    if divisor is None:  # it may be a whole number in the code, of which no NaN comes
        divisor = saved(node, "other")
    before, number = node.next_functions[-1]
    if divisor is None and before is not None:
        divisor = values.tensor(before, number)
    return None if divisor is None else float(divisor.detach().abs().min())


def _inputs(node: Node, values: Values) -> Iterator[Reading | None]:
    """What the inputs of a node hold; None for one that is unknown."""
    for before, number in node.next_functions:
        if before is not None:
            yield values.reading(before, number)
    yield from map(read, values.constants.get(node, {}).values())
