"""Checks that all devices of all processes hold the same loss scale."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from gradscaler.errors import ScaleMismatchError
from gradscaler.jax._operations import Leaf, Tree


def check_same(scaler: Tree) -> None:
    """Check that all devices of all processes hold the same loss scale and counters.

    Call it on every process and outside of ``jit``, for example after loading a checkpoint. A
    compiled step cannot check this: each device reads only its own copy. This waits for the
    devices, and gathers from each process two numbers for each number in a leaf.

    Args:
        scaler: a :class:`GradScaler`, or any pytree whose leaves are the same everywhere.

    Raises:
        ScaleMismatchError: a leaf differs between devices. Every process raises it.

    >>> from gradscaler.jax import GradScaler
    >>> check_same(GradScaler())
    """
    leaves = jax.tree_util.tree_leaves_with_path(scaler)
    own = [_bounds(leaf) for _, leaf in leaves]
    bounds = multihost_utils.process_allgather(own)
    for (path, _), of_one, of_all in zip(leaves, own, bounds, strict=True):
        values = of_all.reshape(2 * jax.process_count(), *of_one.shape[1:])
        differs = values.min(0) != values.max(0)
        if differs.any():
            name = jax.tree_util.keystr(path).removeprefix(".")
            values = values[:, differs][:, 0]  # of the first element that differs
            raise ScaleMismatchError(
                "devices that decide together hold different loss scales or counters: "
                f"{name} is {values.min()} on one and {values.max()} on another. Construct the "
                "scaler with the same arguments in each process, or load the same checkpoint; "
                "inside shard_map, decide over every axis that the gradients vary over"
            )


def _bounds(leaf: Leaf) -> np.ndarray:
    """The smallest and the largest value of each element of a leaf on this process's devices."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    shards = leaf.addressable_shards if isinstance(leaf, jax.Array) else []
    values = np.stack([np.asarray(shard.data) for shard in shards] or [np.asarray(leaf)])
    return np.stack([values.min(0), values.max(0)])
