"""The product or exponential before a logarithm that underflows to 0."""

from __future__ import annotations

import math

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.call_site import Node, is_form, operation_of
from gradscaler.diagnose._graph.masks import FILLS
from gradscaler.diagnose._graph.nodes import is_leaf, saved
from gradscaler.diagnose._graph.values import Values
from gradscaler.diagnose._operations.operation import Role
from gradscaler.diagnose._operations.rows import names_with

_LOGARITHMS = {"log", "log2", "log10"}
_EXPONENTIATES = names_with(Role.EXPONENTIATES)
_PASSED = {"mul", "div", "sum", "mean", *names_with(Role.ADDS), *names_with(Role.STACKS)}
_MOST_BEFORE = 50  # operations between the two


def underflow_before(node: Node, values: Values) -> Node | None:
    """The operation that makes the 0 that a logarithm takes, of numbers that are not 0, or None."""
    waiting = list(node.next_functions) if operation_of(node) in _LOGARITHMS else []
    for _ in range(_MOST_BEFORE):
        if not waiting:
            break
        before, number = waiting.pop()
        if before is None or is_leaf(before):
            continue
        operation, made = operation_of(before), values.tensor(before, number)
        if made is not None and bool((made != 0).all()):
            continue
        if operation in ("prod", "cumprod") or operation in _EXPONENTIATES:
            given = values.tensor(*before.next_functions[0])
            if operation in _EXPONENTIATES:
                is_cause = made is not None and _is_of_finite(before, given, made)
            else:
                is_cause = made is not None and given is not None and _is_0(before, given, made)
            if is_cause:
                return before
        if operation in _PASSED or operation == "prod" or is_form(before):
            waiting += before.next_functions
    return None


def _is_of_finite(node: Node, given: Tensor | None, made: Tensor) -> bool:
    """Whether an exponential is 0 of a finite number, and not of a mask."""
    if given is None:
        maker = node.next_functions[0][0]
        return maker is not None and not is_leaf(maker) and operation_of(maker) not in FILLS
    return given.shape == made.shape and bool(((made == 0) & (given > -math.inf)).any())


def _is_0(node: Node, given: Tensor, made: Tensor) -> bool:
    """Whether a product is 0 though none of its factors is."""
    factors, dim = given != 0, saved(node, "dim")
    if dim is None:
        return bool(factors.all()) and not bool(made.any())
    if made.shape == given.shape and saved(node, "keepdim") is None:  # of cumprod
        whole = factors.cumprod(dim).bool()
    else:
        whole = factors.all(dim, keepdim=made.ndim == given.ndim)
    return bool((whole & (made == 0)).any())
