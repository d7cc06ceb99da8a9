"""Policies as a user writes them on the command line."""

from __future__ import annotations

import ast
from typing import Any

from gradscaler.policies import AmaxScale, DynamicScale, FixedScale, Policy

_CLASSES = {kind.__name__: kind for kind in (AmaxScale, DynamicScale, FixedScale)}
_PRESETS = tuple(
    name
    for kind in DynamicScale.__mro__
    for name, found in vars(kind).items()
    if isinstance(found, classmethod)
)
NAMES = (*_PRESETS, *_CLASSES)
"""What a policy can be called."""


def policy_of(text: str) -> Policy:
    """A policy from a preset's or a class' name, or from a call of it with literals.

    A preset may be written as in Python, such as ``DynamicScale.paddle()``. Numbers may be powers,
    such as ``2**20``. No code in the text is run.

    Raises:
        ValueError: the text is something else, or its parameters cannot work.

    >>> policy_of("AmaxScale(margin=10)").margin
    10
    >>> policy_of("torch(2.0**10, growth_interval=100)").init_scale
    1024.0
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        name = ast.unparse(call.func)
        if name.removeprefix("DynamicScale.") in _PRESETS:
            name = name.removeprefix("DynamicScale.")
        elif name not in _CLASSES:
            raise SyntaxError
        positional = [_literal(value) for value in call.args]
        named = {_name(keyword): _literal(keyword.value) for keyword in call.keywords}
        make: Any = _CLASSES.get(name) or getattr(DynamicScale, name)
        policy: Policy = make(*positional, **named)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(
            f"{text!r} is not a policy: write one of {', '.join(NAMES)}, or one of them with "
            "parameters, such as AmaxScale(margin=10)"
        ) from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text}: {error}") from None
    return policy


def _name(keyword: ast.keyword) -> str:
    if keyword.arg is None:  # **parameters
        raise SyntaxError
    return keyword.arg


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = _literal(node.left), _literal(node.right)
        try:
            power = float(base) ** float(exponent)
        except (OverflowError, ZeroDivisionError):
            raise ValueError(f"{ast.unparse(node)} is out of range") from None
        is_whole = isinstance(base, int) and isinstance(exponent, int) and exponent >= 0
        return int(power) if is_whole else power
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise SyntaxError from None
