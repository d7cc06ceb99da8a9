"""Functions of whole pytrees, and how a class of ours becomes one."""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from gradscaler.errors import ParameterError

T = TypeVar("T")
Array = Any
AxisName = Hashable | Sequence[Hashable]

_lax: Any = jax.lax  # typed in part

_serialised: set[type] = set()


def all_finite(tree: Any, axis_name: AxisName | None = None) -> Array:
    """Whether no leaf of a pytree holds an Inf or a NaN, a boolean scalar.

    Leaves of other than floating or complex dtypes count as finite, and so does an empty tree.

    Args:
        tree: any pytree of arrays.
        axis_name: one or more named axes (of ``pmap``, ``shard_map`` or ``vmap``) to reduce over:
            one device's Inf is then everyone's.
    """
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree) if _is_inexact(leaf)]
    everywhere = functools.reduce(operator.and_, finite, jnp.array(True))
    if axis_name is None:
        return everywhere
    return _lax.pmin(everywhere.astype(jnp.int32), axis_name) == 1


def mean(tree: T, axis_name: AxisName) -> T:
    """The mean of every leaf over named axes."""
    averaged: T = _lax.pmean(tree, axis_name)
    return averaged


def select_tree(pred: Any, a: T, b: T) -> T:
    """``a`` if ``pred``, else ``b``, leaf by leaf; not a bit of either is changed.

    Args:
        pred: a boolean scalar.
        a: any pytree.
        b: another of the same structure, shapes and dtypes.

    Raises:
        ValueError: ``pred`` is not a boolean scalar.
    """
    pred = as_flag("pred", pred)
    selected: T = jax.tree.map(functools.partial(_select, pred), a, b)
    return selected


def as_flag(name: str, value: Any) -> Array:
    """A boolean scalar, or ValueError."""
    flag = jnp.asarray(value)
    if flag.ndim or flag.dtype != jnp.bool_:
        raise ParameterError(
            f"{name} must be a boolean scalar, got {flag.dtype} of shape {flag.shape}"
        )
    return flag


def map_inexact(function: Callable[[Array], Array], tree: T) -> T:
    """Apply a function to the leaves of floating or complex dtypes."""
    mapped: T = jax.tree.map(lambda leaf: function(leaf) if _is_inexact(leaf) else leaf, tree)
    return mapped


def register(cls: type[T], static: Sequence[str] = ()) -> type[T]:
    """Make a dataclass a pytree; the fields named ``static`` are compared, and never traced."""
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type] # it is one
    data = [name for name in names if name not in static]
    jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=list(static))
    return cls


def serialise(instance: Any, *names: str) -> None:
    """Let ``flax.serialization`` save and restore these fields of ``instance``'s class.

    It asks for that at import, which would take longer than all else here, so this is called with
    the instances that are made: it does something once, when flax has been imported by its user.
    """
    cls = type(instance)
    flax = sys.modules.get("flax.serialization")
    if flax is None or cls in _serialised:
        return
    _serialised.add(cls)

    def to_state_dict(target: Any) -> dict[str, Any]:
        return {name: flax.to_state_dict(getattr(target, name)) for name in names}

    def from_state_dict(target: Any, state: dict[str, Any]) -> Any:
        if state.keys() != set(names):
            raise ValueError(f"the state of a {cls.__name__} has {names}, got {tuple(state)}")
        restored = {
            name: flax.from_state_dict(getattr(target, name), state[name], name=name)
            for name in names
        }
        return dataclasses.replace(target, **restored)

    flax.register_serialization_state(cls, to_state_dict, from_state_dict)


def _is_inexact(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def _select(pred: Array, a: Any, b: Any) -> Array:
    a, b = jnp.asarray(a), jnp.asarray(b)
    return jax.lax.select(pred, a, b)
