"""Whether all devices of all processes hold the same loss scale."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gradscaler.errors import ScaleMismatchError


def check_same(scaler: Any) -> None:
    """Compare what all devices of all processes hold of a loss scale and its counters.

    Call it outside of ``jit`` and on every process, such as after a checkpoint is loaded: a
    compiled step takes each device's own copy, and never looks at the others'. It waits for the
    devices, and gathers two numbers for each leaf from each process.

    Args:
        scaler: a :class:`GradScaler`, or any pytree whose leaves are the same everywhere.

    Raises:
        ScaleMismatchError: a leaf has two values; all processes raise it.

    >>> from gradscaler.jax import GradScaler
    >>> check_same(GradScaler())
    """
    leaves = jax.tree_util.tree_leaves_with_path(scaler)
    bounds = multihost_utils.process_allgather([_bounds(leaf) for _, leaf in leaves])
    for (path, _), values in zip(leaves, bounds, strict=True):
        if values.min() != values.max():
            name = jax.tree_util.keystr(path).removeprefix(".")
            raise ScaleMismatchError(
                "devices that decide together hold different loss scales or counters: "
                f"{name} is {values.min()} on one and {values.max()} on another. Construct the "
                "scaler with the same arguments in each process, or load the same checkpoint; "
                "inside shard_map, decide over every axis that the gradients vary over"
            )


def _bounds(leaf: Any) -> np.ndarray[Any, Any]:
    """The smallest and the largest value that this process holds."""
    shards = leaf.addressable_shards if isinstance(leaf, jax.Array) else []
    values = np.stack([np.asarray(shard.data) for shard in shards] or [np.asarray(leaf)])
    return np.stack([values.min(), values.max()])
