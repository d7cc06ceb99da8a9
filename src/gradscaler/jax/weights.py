"""Lets an optax optimizer update 16-bit parameters in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from gradscaler._frameworks import require
from gradscaler.errors import ParameterError, ParameterTypeError
from gradscaler.jax import _rounding, _trees
from gradscaler.jax._callers import check_last
from gradscaler.jax._operations import KeyPath, Transformation, Tree

if TYPE_CHECKING:
    import optax

Store = Literal["float32", "remainder16", "stochastic"]


class _Store(NamedTuple):
    """The functions that split a float32 value into parameter and state, and restore it."""

    rounded: Callable[[Array, DTypeLike, Array], Array]  # (float32 value, dtype, key) -> parameter
    kept: Callable[[Array, Array], Array | None]  # (float32 value, parameter) -> kept in the state
    completed: Callable[[Array, Array], Array]  # (parameter, kept in the state) -> float32 value


_STORES = {
    "float32": _Store(
        rounded=lambda wide, dtype, key: _rounding.nearest(wide, dtype),
        kept=lambda wide, narrow: wide,
        completed=lambda narrow, kept: _rounding.master(kept, narrow, _rounding.nearest),
    ),
    "remainder16": _Store(
        rounded=lambda wide, dtype, key: _rounding.with_remainder(wide, dtype),
        kept=_rounding.remainder,
        completed=lambda narrow, kept: _rounding.master(
            _rounding.completed(narrow, kept), narrow, _rounding.with_remainder
        ),
    ),
    "stochastic": _Store(
        rounded=_rounding.stochastic,
        kept=lambda wide, narrow: None,
        completed=lambda narrow, kept: narrow.astype(jnp.float32),
    ),
}

_STORE_THAT_KEEPS = {jnp.dtype("float32"): "float32", jnp.dtype("int16"): "remainder16"}


class MasterWeightsState(NamedTuple):
    """The state of :func:`master_weights`.

    Attributes:
        kept: for each 16-bit parameter, its float32 master or its int16 remainder. None for wider
            parameters, and for the store ``"stochastic"``.
        key: the PRNG key of the next step's stochastic rounding; None for other stores.
        inner_state: the state of the wrapped optimizer, as for float32 parameters.
    """

    kept: Tree
    key: Array | None
    inner_state: Tree


@dataclass(frozen=True, eq=False)
class BitUpdate:
    """The update of a 16-bit parameter: an integer to add to its bits.

    ``parameter + update`` is the new parameter, bit for bit. A floating update cannot reach every
    value: for example, none leads from 1.0 to 1e-30.

    Args:
        steps: an int16 for each element. 0 leaves the parameter as it is.
    """

    steps: Array

    __array_ufunc__ = None  # makes NumPy's arrays leave the addition to __radd__, as JAX's do

    def __radd__(self, parameter: ArrayLike) -> Array:
        """The new parameter.

        Raises:
            TypeError: the parameter does not have 16 bits, or the update was scaled.
        """
        parameter = jnp.asarray(parameter)
        integers = jnp.result_type(self.steps) == jnp.int16
        if not (integers and _rounding.is_narrow(parameter)):
            raise ParameterTypeError(
                f"cannot add an update of {jnp.result_type(self.steps)} to a parameter of "
                f"{parameter.dtype}: master_weights updates 16-bit parameters by int16. Put "
                "transformations that change updates inside it: master_weights(optax.chain(...))"
            )
        new = _rounding.bits(parameter) + self.steps
        return jax.lax.bitcast_convert_type(new, parameter.dtype)


_trees.register(BitUpdate, static=[])


def master_weights(
    optimizer: Transformation,
    store: Store = "float32",
    *,
    cast: Callable[[Tree], Tree] | None = None,
    key: Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax optimizer so that it updates 16-bit parameters in float32.

    For each leaf of ``params`` that is float16 or bfloat16::

        master = float32 value of the parameter and of what the state keeps
        master += the optimizer's update, from the gradient in float32
        parameter = master rounded to 16 bits

    The optimizer updates other leaves as usual. `store` says what the state keeps:

    - ``"float32"``: the master. 4 bytes a parameter.
    - ``"remainder16"``: 16 bits that restore the master from the parameter. With bfloat16, they are
      the lower half of float32's bits, and the master is exact. With float16, the master is exact
      from 2**-17 up to float16's overflow. Below 2**-17, it is rounded to a multiple of 2**-40: the
      error is at most 2**-41. A master halfway between two bfloat16 values is rounded away from
      zero, and so is one halfway between two float16 values below 2**-16. 2 bytes a parameter.
    - ``"stochastic"``: nothing. The parameter is rounded up or down at random, so that its mean is
      the master's value. No bytes.

    Put :func:`loss_scaled` outside: it passes the gradients on in float32. Put transformations that
    change updates inside, as in ``master_weights(optax.chain(...))``; ``MultiSteps`` and
    ``apply_if_finite`` belong inside too. ``masked``, ``multi_transform`` and
    ``inject_hyperparams`` may be on either side. Outside, ``MultiSteps`` adds up 16-bit gradients.

    ``optax.apply_updates`` and ``parameter + update`` give exactly the new parameters. The updates
    of 16-bit parameters are instances of :class:`BitUpdate`, which cannot be scaled or measured.
    ``equinox.apply_updates`` does not accept them; pass the arrays of the model to optax's.

    Args:
        optimizer: any optax transformation. In place of 16-bit leaves, it gets float32 ones.
        store: how the state keeps the masters, as listed above.
        cast: a function that casts the parameters that ``init`` gets to the parameters to train,
            some or all of them in 16 bits. The masters then start from the values before the cast.
            Without `cast`, ``init`` gets 16-bit parameters, and the masters start from these.
        key: a key of ``jax.random`` for ``"stochastic"``. Devices that hold the same parameter need
            the same key.

    Raises:
        TypeError: `optimizer` is not an optax transformation, `cast` is not a function, or
            ``update`` gets a state of another type.
        ValueError: `store` is not one of the three, `key` is missing for ``"stochastic"``, or is
            given for another store.
        ValueError: in ``init``, `cast` makes a parameter an integer, or narrower than 16 bits.
        ValueError: ``update`` gets no ``params``, or the state of another store; a parameter has 16
            bits only in ``init`` or only in ``update``; or more transformations follow in an
            ``optax.chain``.

    >>> import jax, optax
    >>> weight = jax.numpy.float16(1.0)
    >>> optimizer = master_weights(optax.sgd(2.0**-12))
    >>> state = optimizer.init(weight)
    >>> for _ in range(3):  # each moves it by a quarter of float16's spacing below 1
    ...     updates, state = optimizer.update(jax.numpy.float16(0.5), state, weight)
    ...     weight = optax.apply_updates(weight, updates)
    >>> float(weight) == 1 - 2.0**-11, float(state.kept) == 1 - 3 * 2.0**-13
    (True, True)
    """
    require("optax", "jax")
    import optax

    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(f"optimizer must be an optax transformation, got {optimizer!r}")
    if store not in tuple(_STORES):
        raise ParameterError(f"store must be one of {', '.join(_STORES)}, got {store!r}")
    _check_key(key, store)
    if not (cast is None or callable(cast)):
        raise ParameterTypeError(f"cast must be a function of the parameters, got {cast!r}")
    inner = optax.with_extra_args_support(optimizer)
    rounded, kept_of, completed = _STORES[store]

    def masters_of(params: Tree, kept: Tree) -> Tree:
        return _map_narrow(completed, params, kept, others=params)

    def init(params: Tree) -> MasterWeightsState:
        narrow = params if cast is None else cast(params)
        jax.tree_util.tree_map_with_path(_check_cast, narrow, params)
        kept = _map_narrow(lambda new, old: kept_of(_wide(old), new), narrow, params)
        return MasterWeightsState(kept, key, inner.init(masters_of(narrow, kept)))

    def update(
        updates: Tree, state: MasterWeightsState, params: Tree = None, **extra_args: object
    ) -> tuple[Tree, MasterWeightsState]:
        check_last()
        if params is None:
            raise ParameterError("master_weights needs params: update(grads, state, params)")
        _check_state(params, state, store)
        masters = masters_of(params, state.kept)
        grads = _map_narrow(lambda leaf, grad: _wide(grad), params, updates, others=updates)
        updates, inner_state = inner.update(grads, state.inner_state, masters, **extra_args)
        # The parameter and the kept value must come from the same sum. The barrier asks XLA not to
        # compute the sum twice, because the two results might be rounded differently.
        masters = _rounding.lax.optimization_barrier(optax.apply_updates(masters, updates))
        next_key, keys = _split(state.key, params)
        new = _map_narrow(
            lambda leaf, master, key: rounded(master, leaf.dtype, key), params, masters, keys
        )
        kept = _map_narrow(lambda leaf, master, new: kept_of(master, new), params, masters, new)
        updates = _map_narrow(
            lambda leaf, new: BitUpdate(_rounding.bits(new) - _rounding.bits(leaf)),
            params,
            new,
            others=updates,
        )
        return updates, MasterWeightsState(kept, next_key, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _map_narrow(
    function: Callable[..., object], params: Tree, *trees: Tree, others: Tree = None
) -> Tree:
    """Map the 16-bit leaves of `params`; a wider leaf becomes that of `others`, or None."""
    if others is None:
        others = jax.tree.map(lambda leaf: None, params)
    return jax.tree.map(
        lambda leaf, other, *more: function(leaf, *more) if _rounding.is_narrow(leaf) else other,
        params,
        others,
        *trees,
    )


def _wide(leaf: ArrayLike) -> Array:
    return jnp.asarray(leaf, jnp.float32)


def _check_key(key: Any, store: Store) -> None:
    """Refuse a wrong key, a missing one for "stochastic", and any key for another store."""
    if (store == "stochastic") is (key is None):
        raise ParameterError(
            f"key belongs to store='stochastic': got store={store!r} and key={key!r}. Write "
            "master_weights(optimizer, 'stochastic', key=jax.random.key(0))"
        )
    dtype = getattr(key, "dtype", None)
    is_new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    is_old = dtype == jnp.uint32 and key.ndim == 1
    if not (key is None or is_new or is_old):
        raise ParameterTypeError(f"key must be a key of jax.random, got {key!r}")


def _split(key: Array | None, params: Tree) -> tuple[Array | None, Tree]:
    """Split a key into the next step's key, and one for each leaf in this step."""
    if key is None:
        return None, jax.tree.map(lambda leaf: None, params)
    leaves, structure = jax.tree.flatten(params)
    following, *keys = jax.random.split(key, 1 + len(leaves))
    return following, jax.tree.unflatten(structure, keys)


def _check_cast(path: KeyPath, new: ArrayLike, old: ArrayLike) -> None:
    """ValueError if a cast makes a floating leaf an integer, or narrower than 16 bits."""
    dtype, before = jnp.result_type(new), jnp.result_type(old)
    is_wide_enough = jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 2
    if dtype != before and jnp.issubdtype(before, jnp.inexact) and not is_wide_enough:
        raise ParameterError(
            f"cast makes leaf {jax.tree_util.keystr(path)} {dtype}, but master_weights has masters "
            "for float16 and bfloat16 alone. Cast to one of these, and to "
            f"{dtype} in the forward pass"
        )


def _check_state(params: Tree, state: MasterWeightsState, store: Store) -> None:
    """Refuse a state of another type, of another store, or for parameters of other dtypes.

    Dtypes are all that tells the stores apart. Checkpoints keep them, but orbax casts to those of
    the tree that it restores into.
    """
    if not isinstance(state, MasterWeightsState):
        raise ParameterTypeError(
            f"state must be a MasterWeightsState, got a {type(state).__name__}. Restore a "
            "checkpoint into the tree that optimizer.init(params) returns"
        )

    def check(path: KeyPath, leaf: ArrayLike, kept: Array | None) -> None:
        is_narrow = _rounding.is_narrow(leaf)
        found = _store_of(kept, state.key)
        if is_narrow and found not in (store, None):
            raise ParameterError(
                f"the state is of store={found!r}, and the optimizer of store={store!r}. Continue "
                "with the state's store. To change it and lose only the masters' low bits, write "
                "state = optimizer.init(params)._replace(inner_state=state.inner_state)"
            )
        if found is None if is_narrow else kept is not None:
            raise ParameterError(
                f"leaf {jax.tree_util.keystr(path)} is {jnp.result_type(leaf)} in update, and was "
                f"{'wider' if kept is None else 'of 16 bits'} in init. Either cast the parameters "
                "before init, or pass master_weights(cast=...) the function that casts them "
                "between init and update. If the state is from a checkpoint, restore it by the "
                "store that wrote it"
            )

    jax.tree_util.tree_map_with_path(check, params, state.kept)


def _store_of(kept: Array | None, key: Array | None) -> str | None:
    """The store whose state keeps this for a 16-bit parameter; None if none does."""
    if kept is None:
        return None if key is None else "stochastic"
    dtype = jnp.result_type(kept)
    return _STORE_THAT_KEEPS.get(dtype, dtype.name)
