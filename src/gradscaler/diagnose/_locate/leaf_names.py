"""Names of arrays in arguments and results of a function of JAX, as its user knows them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any


def parameters_of(fn: Callable[..., object]) -> list[str]:
    """The names of the parameters that a function takes by place; empty if they are not known."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    by_place = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [each.name for each in parameters if each.kind in by_place]


def is_opaque(value: object) -> bool:
    """Whether JAX cannot take a value apart: a dict with keys of several kinds, without an order.

    It passes one on as it is, where it takes no gradient by it and compiles nothing.
    """
    try:
        return isinstance(value, dict) and sorted(value) is None
    except TypeError:
        return True


def opaque_in(values: object) -> Callable[[object], bool] | None:
    """What tells JAX the leaves of values that it cannot take apart; None if it can."""
    try:
        import_module("jax").tree_util.tree_leaves(values)
    except ValueError:
        return is_opaque
    return None


def arguments_of(fn: Callable[..., object], args: Sequence[object]) -> list[str]:
    """The name of each leaf of a function's arguments, such as ``params['w']``.

    An argument whose name is not known is ``args[0]``.
    """
    tree: Any = import_module("jax").tree_util
    parameters, in_states = parameters_of(fn), names_in_states(args)
    names = []
    for path, leaf in tree.tree_leaves_with_path(tuple(args), opaque_in(args)):
        at = path[0].idx
        name = parameters[at] if at < len(parameters) else f"args[{at}]"
        within = in_states.get(id(leaf))
        names.append(name + (tree.keystr(path[1:]) if within is None else f".{within}"))
    return names


def names_in_states(values: object) -> dict[int, str]:
    """The names of the arrays in states of NNX, such as ``first.bias``, by the ids of arrays.

    Its transformations give JAX, in place of a model, a state that has no names.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return {}
    tree: Any = import_module("jax").tree_util

    def is_state(value: Any) -> bool:
        return isinstance(value, nnx.State) or hasattr(value, "graphdef")

    names = {}
    for each in filter(is_state, tree.tree_leaves(values, lambda x: is_state(x) or is_opaque(x))):
        with suppress(Exception):  # a model that shares a part with another has no state alone
            is_named = isinstance(each, nnx.State)
            state = each if is_named else nnx.state(nnx.merge(each.graphdef, *each.states))
            for path, leaf in tree.tree_leaves_with_path(nnx.to_pure_dict(state)):
                names[id(leaf)] = ".".join(str(key.key) for key in path)
    return names
