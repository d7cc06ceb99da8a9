"""Operations on whole pytrees, and checks of their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from numbers import Number
from types import ModuleType
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from gradscaler.errors import ParameterError

T = TypeVar("T")
Tree = Any
Leaf = Any
KeyPath = tuple[Any, ...]
AxisName = Hashable | Sequence[Hashable]


class Transformation(Protocol):
    """An ``optax.GradientTransformation``, also where optax's own types are not read."""

    @property
    def init(self) -> Callable[..., Any]: ...

    @property
    def update(self) -> Callable[..., Any]: ...


lax: ModuleType = jax.lax  # partly untyped

OVERWRITTEN = "_overwrite_with_gradient"
"""flax's mark of variables whose gradient is their new value: a collection, or a type in NNX.

flax's fp8 layers compute the new values of their scales and histories of maxima in this way.
"""


def all_finite(
    tree: Tree, axis_name: AxisName | None = None, *, finite_axis: AxisName | None = None
) -> Array:
    """Whether no leaf of a pytree holds an Inf or a NaN, a boolean scalar.

    Leaves that are neither floating nor complex count as finite, and so does an empty tree. So do
    variables that flax's fp8 layers mark as ``_overwrite_with_gradient``: they hold new values, not
    gradients.

    Args:
        tree: any pytree of arrays.
        axis_name: one or more named axes (of ``pmap``, ``shard_map`` or ``vmap``) to reduce over.
            An Inf on one device then gives False on all.
        finite_axis: more named axes to reduce over, such as those that shard the weights.

    Raises:
        TypeError: a leaf is neither an array nor a number.
    """
    flags = [_nonfinite(leaf) for leaf in _gradients(tree)]
    # Not `&` of a flag for each leaf: XLA would repeat the whole chain in each fusion that reads
    # the flag, so that the code would grow with the square of the number of leaves.
    everywhere = (jnp.stack(flags) == 0).all() if flags else jnp.array(True)
    axes = _axes(axis_name, finite_axis)
    return lax.pmin(everywhere.astype(jnp.int32), axes) == 1 if axes else everywhere


def amax(
    tree: Tree, axis_name: AxisName | None = None, *, finite_axis: AxisName | None = None
) -> Array:
    """The largest magnitude in a pytree of unscaled gradients, a float32 scalar.

    :meth:`GradScaler.adjust` takes it, for a policy that needs it. Leaves that :func:`all_finite`
    ignores do not count, and an empty tree gives 0.

    Args:
        tree: any pytree of arrays.
        axis_name: one or more named axes to reduce over, as in :func:`all_finite`.
        finite_axis: more named axes to reduce over.

    Raises:
        TypeError: a leaf is neither an array nor a number.
    """
    largest = [jnp.abs(leaf).max(initial=0).astype(jnp.float32) for leaf in _gradients(tree)]
    everywhere: Array = functools.reduce(jnp.maximum, largest, jnp.float32(0))
    axes = _axes(axis_name, finite_axis)
    return lax.pmax(everywhere, axes) if axes else everywhere


def _gradients(tree: Tree) -> list[Array]:
    """The leaves that are gradients, in float32 or wider."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_marked)
    gradients = [jnp.asarray(leaf) for path, leaf in leaves if _is_gradient(path, leaf)]
    return [leaf.astype(jnp.float32) if leaf.dtype.itemsize < 4 else leaf for leaf in gradients]


def _nonfinite(leaf: Array) -> Array:
    """1.0 if an element is Inf or NaN, else 0.0.

    It is a maximum of float flags. XLA would repeat a reduction of booleans in each fusion that
    reads the result. And a maximum of the values themselves may drop a NaN, on the CPU and between
    devices.
    """
    return jnp.where(jnp.isfinite(leaf), jnp.float32(0), jnp.float32(1)).max(initial=0)


def varying(tree: T, axis_name: AxisName, is_weight: Callable[[KeyPath, Leaf], bool]) -> T:
    """Mark the weights of a replicated tree as varying over axes of ``shard_map``.

    ``shard_map`` would sum the gradients of replicated weights over devices; those of varying
    weights stay apart, so that they can be averaged.

    Args:
        tree: any pytree.
        axis_name: the axes.
        is_weight: whether a leaf, given its path and itself, is a weight.

    Raises:
        ValueError: a leaf is sharded over one of the axes.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        sharding = is_weight(path, leaf) and varies_over(leaf) & {*_axes(axis_name)}
        if sharding:
            raise ParameterError(
                f"{_place(path)} varies over {spelled(sharding)}: each device holds another part "
                "of it, and axis_name would average the gradients of different parts. Let fun "
                f"return jax.lax.pmean(loss, {spelled(sharding)}), and call "
                f"GradScaler.value_and_grad with finite_axis={spelled(sharding)} instead. If every "
                f"device holds all of it, leave {spelled(sharding)} out of its in_specs"
            )
    here = lax.axis_index(axis_name) >= 0  # always true, but to JAX it varies over the axes

    def vary(path: KeyPath, leaf: Leaf) -> Leaf:
        return jnp.where(here, leaf, lax.stop_gradient(leaf)) if is_weight(path, leaf) else leaf

    varied: T = jax.tree_util.tree_map_with_path(vary, tree)
    return varied


def averaged(grads: T, axis_name: AxisName) -> T:
    """The mean of gradients over the axes, and the maximum of flax's overwriting values."""

    def reduce(path: KeyPath, leaf: Leaf) -> Leaf:
        together = lax.pmax if _is_overwriting(path, leaf) else lax.pmean
        return together(leaf, axis_name)

    reduced: T = jax.tree_util.tree_map_with_path(reduce, grads, is_leaf=_is_marked)
    return reduced


def check_not_averaged(loss: Array, axis_name: AxisName) -> None:
    """Raise ValueError if ``fun`` itself has averaged or summed its loss over one of the axes.

    Each device's gradients are then 1/n of its own already, and averaging would divide again.
    """
    averaged = varies_over(lax.axis_index(axis_name)) - varies_over(loss)
    if averaged:
        raise ParameterError(
            f"the loss does not vary over {spelled(averaged)}: fun has averaged it, and "
            "axis_name would average it again. Return each device's own loss from fun"
        )


def varies_over(leaf: Leaf) -> frozenset[Hashable]:
    """The axes over which ``shard_map`` takes a value to vary. None with ``check_vma=False``."""
    aval: Any = jax.typeof(leaf)
    if hasattr(aval, "vma"):  # its name before JAX 0.10
        axes: frozenset[Hashable] = aval.vma
    else:
        axes = aval.manual_axis_type.varying
    return axes


def select_tree(pred: ArrayLike, a: T, b: T) -> T:
    """``a`` if ``pred``, else ``b``, leaf by leaf and bit for bit.

    A leaf that is not an array, such as an activation function or a setting of a model, must be the
    same in both trees.

    Args:
        pred: a boolean scalar.
        a: any pytree.
        b: another of the same structure, shapes and dtypes.

    Raises:
        ValueError: ``pred`` is not a boolean scalar, or the trees do not match.
    """
    pred = as_flag("pred", pred)

    def select(path: KeyPath, a: Leaf, b: Leaf) -> Leaf:
        if not (_is_array(a) or _is_array(b)) and _are_the_same(a, b):
            return a
        try:
            a, b = jnp.asarray(a), jnp.asarray(b)
        except TypeError:
            raise ParameterError(
                f"{_place(path)}: cannot choose between {a!r} and {b!r}, which are not arrays"
            ) from None
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ParameterError(
                f"{_place(path)}: cannot choose between {a.dtype}{list(a.shape)} and "
                f"{b.dtype}{list(b.shape)}"
            )
        return lax.select(pred, a, b)

    selected: T = jax.tree_util.tree_map_with_path(select, a, b)
    return selected


def _are_the_same(a: Leaf, b: Leaf) -> bool:
    """Whether two leaves that are not arrays have the same type, value and text.

    So 1, True and 1.0 differ, and so do 0.0 and -0.0.
    """
    return a is b or (type(a) is type(b) and a == b and str(a) == str(b))


def check_scale(
    name: str, value: Leaf, dtype: DTypeLike | None = None, *, zero: bool = False
) -> None:
    """Check that a loss scale, or every element of an array of them, is positive and finite.

    It must be so in the dtype in which it is used, and not subnormal there: devices may flush such
    a number to 0, or its reciprocal is Inf.

    Args:
        name: the parameter's name, for the error.
        value: the loss scale.
        dtype: the dtype in which it is used; by default, the one in which JAX takes it.
        zero: whether it may also be 0, or subnormal.

    Raises:
        ValueError: the value is not positive, or not finite.
        TypeError: the value is not a number.
    """
    used = jnp.dtype(dtype or jnp.result_type(value if hasattr(value, "dtype") else float))
    untyped: ModuleType = jnp
    is_floating = jnp.issubdtype(used, jnp.floating)
    lowest = 0 if zero else float(untyped.finfo(used).smallest_normal) if is_floating else 1
    positive, least = ("0 or positive", "") if zero else ("positive", f" (at least {lowest:.4g})")
    check_number(name, value, used, lowest, f"{positive} and finite in {used}{least}")


def check_number(
    name: str, value: Leaf, dtype: DTypeLike, lowest: float, demand: str | None = None
) -> None:
    """Check that a dtype can hold a number, or every element of an array, above a bound.

    An integer dtype must hold it exactly. Traced values and placeholders pass, because their values
    are not known.

    Raises:
        ValueError: the dtype cannot hold it, or it is too low.
        TypeError: it is not a number.
    """
    if isinstance(value, jax.core.Tracer) or is_placeholder(value):
        return
    try:
        given = np.asarray(value, np.float64)
    except OverflowError:  # an int that no float can hold
        given = np.asarray(np.inf)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    with np.errstate(all="ignore"):
        held = given.astype(dtype).astype(np.float64)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if not np.all((held == given if is_integer else np.isfinite(held)) & (held >= lowest)):
        kind = "an integer" if is_integer else "a finite number"
        at_least = f" of at least {lowest}" if np.isfinite(lowest) else ""
        demand = demand or f"{kind}{at_least} in {np.dtype(dtype)}"
        raise ParameterError(f"{name} must be {demand}, got {value}")


def is_placeholder(leaf: Leaf) -> bool:
    """Whether a leaf is neither a number nor an array.

    JAX and its users put shardings, shapes and other objects in place of leaves. A list of numbers
    counts as an array. A string counts as a number, so that it is refused as a scale.
    """
    is_list = type(leaf) in (list, tuple)  # not PartitionSpec, a tuple in JAX's earlier versions
    return not (is_list or isinstance(leaf, (Number, str)) or hasattr(leaf, "__array__"))


def are_axes(counter: Leaf, scale: Leaf) -> bool:
    """Whether two leaves are axes for ``vmap`` rather than values.

    They are if both are the same int, 0 or less, which no scale is; or if one is None, and the
    other is None or an int.
    """
    kinds = {type(counter), type(scale)}
    if kinds == {int}:
        return bool(counter == scale <= 0)
    return kinds <= {int, type(None)}


def strong(value: Leaf, dtype: DTypeLike | None = None) -> Leaf:
    """An array of a strong dtype; a placeholder is returned as it is.

    With a weak dtype, jit would trace the second call again.
    """
    if is_placeholder(value):
        return value
    if isinstance(value, (jax.Array, jax.core.Tracer)):
        return lax.convert_element_type(value, dtype or value.dtype)
    return np.asarray(value, dtype or jnp.result_type(value))


def as_flag(name: str, value: Leaf) -> Array:
    """``value`` as a boolean scalar; ValueError if it is not one."""
    flag = jnp.asarray(value)
    if flag.ndim or flag.dtype != jnp.bool_:
        raise ParameterError(
            f"{name}: expected boolean scalar, got {flag.dtype} of shape {flag.shape}"
        )
    return flag


def as_amax(value: Leaf) -> Array:
    """``value`` as a float32 scalar; ValueError if it is not a scalar."""
    amax = jnp.asarray(value)
    if amax.ndim:
        raise ParameterError(f"amax: expected a scalar, got the shape {amax.shape}")
    return amax.astype(jnp.float32)


def map_gradients(function: Callable[[Array], Array], tree: T) -> T:
    """Apply a function to floating and complex leaves, except flax's overwriting values."""
    mapped: T = jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(leaf) if _is_gradient(path, leaf) else leaf,
        tree,
        is_leaf=_is_marked,
    )
    return mapped


def spelled(axes: Iterable[Hashable]) -> str:
    """Axes as a user would write them: ``'a'`` or ``('a', 'b')``."""
    first, *others = sorted(axes, key=str)
    return repr((first, *others) if others else first)


def _axes(*names: AxisName | None) -> tuple[Hashable, ...]:
    """The axes in some arguments, each once. A tuple or a list names several, as in JAX."""
    several = (name if isinstance(name, (tuple, list)) else (name,) for name in names)
    return tuple(dict.fromkeys(axis for axes in several for axis in axes if axis is not None))


def _is_marked(node: object) -> bool:
    """Whether a node of a pytree is an NNX variable that its gradient overwrites."""
    return type(node).__name__ == OVERWRITTEN


def _is_overwriting(path: KeyPath, leaf: Leaf) -> bool:
    keys = (getattr(key, "key", getattr(key, "name", None)) for key in path)
    return _is_marked(leaf) or OVERWRITTEN in keys


def _is_gradient(path: KeyPath, leaf: Leaf) -> bool:
    return not _is_overwriting(path, leaf) and is_inexact(path, leaf)


def _is_array(leaf: Leaf) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def is_inexact_array(path: KeyPath, leaf: Leaf) -> bool:
    """Whether a leaf is an array with a floating or complex dtype. It may be any object."""
    return _is_array(leaf) and is_inexact(path, leaf)


def is_inexact(path: KeyPath, leaf: Leaf) -> bool:
    """Whether a leaf is floating or complex; TypeError if it is neither an array nor a number."""
    try:
        if isinstance(leaf, (str, type, np.dtype)):  # names of dtypes, to result_type
            raise TypeError
        return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))
    except TypeError:
        raise TypeError(f"{_place(path)} is neither an array nor a number: {leaf!r}") from None


def _place(path: KeyPath) -> str:
    return f"leaf {jax.tree_util.keystr(path)}" if path else "the tree"
