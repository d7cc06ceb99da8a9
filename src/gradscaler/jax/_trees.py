"""Registers our classes as pytrees, with JAX and with flax."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import jax

T = TypeVar("T")
Values = tuple[object, ...]

_unknown_to_flax: dict[type, tuple[str, ...]] = {}


def register(cls: type, static: Sequence[str]) -> None:
    """Make a dataclass a pytree whose leaves are all fields but those in ``static``.

    JAX compares static fields and never traces them. flax saves only the leaves.
    """
    data = [field.name for field in dataclasses.fields(cls) if field.name not in static]
    names, keys = [*data, *static], [jax.tree_util.GetAttrKey(name) for name in data]

    def flatten(instance: object) -> tuple[Values, Values]:
        value_of = vars(instance).__getitem__
        return tuple(map(value_of, data)), tuple(map(value_of, static))

    def flatten_with_keys(instance: object) -> tuple[list[tuple[object, object]], Values]:
        leaves, metadata = flatten(instance)
        return list(zip(keys, leaves, strict=True)), metadata

    def unflatten(metadata: Values, leaves: Iterable[object]) -> object:
        return rebuilt(cls, names, (*leaves, *metadata))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    serialise(cls, *data)


def holds(tree: object, kind: type) -> bool:
    """Whether a tree includes a node of a class."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return any(isinstance(node, kind) for node in nodes)


def rebuilt(cls: type[T], names: Sequence[str], values: Iterable[object]) -> T:
    """An instance made without its constructor: JAX may replace leaves by any object."""
    instance = object.__new__(cls)
    vars(instance).update(zip(names, values, strict=True))
    serialise()
    return instance


def replaced(instance: T, **changes: object) -> T:
    """A copy of a dataclass with other values, made without calling its constructor."""
    changed = copy.copy(instance)
    vars(changed).update(changes)
    return changed


def serialise(cls: type | None = None, *names: str) -> None:
    """Let ``flax.serialization`` save and restore these fields of a class.

    flax has a registry, but importing flax takes longer than importing all of ``gradscaler.jax``.
    So every new instance calls this without arguments, and once the user has imported flax, the
    classes are registered.
    """
    if cls is not None:
        _unknown_to_flax[cls] = names
    while _unknown_to_flax and "flax.serialization" in sys.modules:
        _serialise(sys.modules["flax.serialization"], *_unknown_to_flax.popitem())


def _serialise(flax: ModuleType, cls: type, names: Sequence[str]) -> None:
    def to_state_dict(target: object) -> dict[str, object]:
        return {name: flax.to_state_dict(getattr(target, name)) for name in names}

    def from_state_dict(target: Any, state: dict[str, object]) -> object:
        if state.keys() != set(names):
            raise ValueError(f"the state of a {cls.__name__} has {names}, got {tuple(state)}")
        restored = {
            name: flax.from_state_dict(getattr(target, name), state[name], name=name)
            for name in names
        }
        return dataclasses.replace(target, **restored)

    flax.register_serialization_state(cls, to_state_dict, from_state_dict)
