"""Policies as a user writes them on the command line."""

from __future__ import annotations

import ast
from typing import Any

from gradscaler.policies import AmaxScale, DynamicScale, FixedScale, Policy
from gradscaler.policies._presets import Presets

_CLASSES = {kind.__name__: kind for kind in (AmaxScale, DynamicScale, FixedScale)}
NAMES = (*(name for name in vars(Presets) if not name.startswith("_")), *_CLASSES)
"""What a policy can be called."""


def policy_of(text: str) -> Policy:
    """A policy from a preset's or a class' name, or from a call of it with literals.

    A preset may be written as in Python, ``DynamicScale.paddle()``. Numbers may be powers, such as
    ``2**20``. No code in the text is run.

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
        preset = name.removeprefix("DynamicScale.")
        name = preset if preset not in _CLASSES else name
        if name not in NAMES:
            raise SyntaxError
        positional = [_literal(value) for value in call.args]
        named = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
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


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = _literal(node.left), _literal(node.right)
        try:
            power = float(base) ** float(exponent)
        except (OverflowError, ZeroDivisionError) as error:
            raise ValueError(f"{ast.unparse(node)}: {error}") from None
        is_whole = isinstance(base, int) and isinstance(exponent, int) and exponent >= 0
        return int(power) if is_whole else power
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise SyntaxError from None
