"""Drop-ins for the loss scales of jmp (0.0.4), with its names."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from gradscaler.jax import _operations, _trees
from gradscaler.jax._operations import Leaf
from gradscaler.policies import ScaleState, _checks
from gradscaler.policies.dynamic import Constants, next_values

T = TypeVar("T")


@dataclass(frozen=True)
class NoOpLossScale:
    """No loss scaling: every method returns its argument, and ``loss_scale`` is 1."""

    loss_scale: ClassVar[int] = 1

    def scale(self, tree: T) -> T:
        """Return ``tree`` unchanged."""
        return tree

    def unscale(self, tree: T) -> T:
        """Return ``tree`` unchanged."""
        return tree

    def adjust(self, grads_finite: ArrayLike) -> NoOpLossScale:
        """Return this loss scale unchanged."""
        return self


@dataclass(frozen=True)
class StaticLossScale:
    """A loss scale that does not move. As a pytree it has no leaves.

    Args:
        loss_scale: the scale. If it is not above 0, ``scale`` and ``unscale`` raise ValueError.
    """

    loss_scale: Leaf

    def scale(self, tree: T) -> T:
        """Multiply every leaf by the loss scale."""
        _operations.check_scale("loss_scale", self.loss_scale)
        return _multiplied(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Multiply every leaf by 1 / the loss scale."""
        _operations.check_scale("loss_scale", self.loss_scale)
        return _multiplied(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: ArrayLike) -> StaticLossScale:
        """Return this loss scale unchanged."""
        return self


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that moves: a drop-in for ``jmp.DynamicLossScale`` whose floor survives jit.

    ``adjust`` computes::

        non-finite:  counter = 0;  loss_scale = max(loss_scale / factor, min_loss_scale)
        finite:      counter += 1;  if counter == period: counter = 0, and
                     loss_scale *= factor, unless the product is above the largest float32

    Args:
        loss_scale: the scale, a float32 scalar.
        counter: finite steps since the scale moved or a step was not finite, an int32 scalar.
        period: finite steps in a row before the scale grows.
        factor: the factor of growth, and the divisor of a backoff.
        min_loss_scale: the floor, a float32 scalar. jmp's own class loses it when an object is
            rebuilt from its leaves, as jit does. With 0 the floor is the smallest normal number of
            the scale's dtype; jmp's own scale sinks to 0.

    The arrays may be other objects, such as shardings or axes for ``vmap``. Only numbers and arrays
    are checked. If ``counter`` and ``loss_scale`` are the same int, 0 or less, they count as axes.
    As in jmp, a subclass must be registered to be a pytree.

    Raises:
        TypeError: the period or the factor is not a number.
        ValueError: a parameter is out of range; the message names it.

    >>> import jax
    >>> loss_scale = DynamicLossScale(jax.numpy.float32(16), min_loss_scale=jax.numpy.float32(8))
    >>> for grads_finite in [False, False]:
    ...     loss_scale = jax.jit(lambda s, f: s.adjust(f))(loss_scale, grads_finite)
    ...     print(loss_scale.loss_scale)
    8.0
    8.0
    """

    loss_scale: Leaf
    counter: Leaf = field(default_factory=lambda: np.zeros([], np.int32))
    period: int = 2000
    factor: int = 2
    min_loss_scale: Leaf = field(default_factory=lambda: np.ones([], np.float32))

    def __post_init__(self) -> None:
        axes = _operations.are_axes(self.counter, self.loss_scale)
        for name in ("min_loss_scale",) if axes else ("loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            if _operations.is_placeholder(value):
                continue
            _operations.check_scale(name, value, zero=name == "min_loss_scale")
            dtype = jnp.result_type(value)
            if not _is_floating(dtype):
                warnings.warn(f"Expected floating type for {name}, got {dtype}", stacklevel=3)
        if not axes:
            _operations.check_number("counter", self.counter, np.int32, lowest=0)
        period: Any = self.period
        if isinstance(period, float) and period.is_integer():  # jmp accepts 5.0
            period = int(period)
        object.__setattr__(self, "period", _checks.count("period", period))
        _checks.growth_factor("factor", self.factor)
        floor = self.min_loss_scale
        unknown = isinstance(floor, jax.core.Tracer) or _operations.is_placeholder(floor)
        if not unknown and jnp.ndim(floor) == 0:
            object.__setattr__(self, "min_loss_scale", np.asarray(floor)[()])
        for name in () if axes else ("loss_scale", "counter"):
            object.__setattr__(self, name, _operations.strong(getattr(self, name)))
        _trees.serialise()

    def tree_flatten(self) -> tuple[tuple[Leaf, ...], tuple[object, ...]]:
        """The leaves and the static values. A floor that is not traced is static."""
        if isinstance(self.min_loss_scale, np.generic):
            leaves = self.loss_scale, self.counter
            return leaves, (self.period, self.factor, self.min_loss_scale)
        return (self.loss_scale, self.counter, self.min_loss_scale), (self.period, self.factor)

    @classmethod
    def tree_unflatten(
        cls, metadata: tuple[object, ...], leaves: tuple[Leaf, ...]
    ) -> DynamicLossScale:
        """Rebuild a loss scale from the values that ``tree_flatten`` returned."""
        (loss_scale, counter, *floor), (period, factor, *static_floor) = leaves, metadata
        values = loss_scale, counter, period, factor, *floor, *static_floor
        return _trees.rebuilt(cls, DynamicLossScale.__match_args__, values)

    def scale(self, tree: T) -> T:
        """Multiply every leaf by the loss scale."""
        return _multiplied(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Multiply every leaf by 1 / the loss scale."""
        return _multiplied(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: ArrayLike) -> DynamicLossScale:
        """The loss scale for the next step.

        Args:
            grads_finite: whether the step's gradients were finite, a boolean scalar.

        Raises:
            ValueError: `grads_finite` is not a boolean scalar.
        """
        found_inf = ~_operations.as_flag("grads_finite", grads_finite)
        dtype = jnp.result_type(self.loss_scale)
        untyped: ModuleType = jnp
        finfo = untyped.finfo(dtype) if _is_floating(dtype) else None  # an int only warns
        smallest = finfo.smallest_normal if finfo else 1
        constants = Constants(
            growth_factor=self.factor,
            backoff_factor=_Reciprocal(self.factor),
            min_scale=jnp.maximum(jnp.asarray(self.min_loss_scale, dtype), smallest),
            max_scale=float(finfo.max) if finfo else math.inf,
            growth_interval=self.period,
            hysteresis=1,
            finite_step_resets=True,
            backoff_resets=True,
        )
        state = ScaleState(jnp.asarray(self.loss_scale), jnp.asarray(self.counter), 0)
        state = ScaleState(*next_values(constants, *state, found_inf, jnp.where))
        return _trees.replaced(self, loss_scale=state.scale, counter=state.finite_steps)


LossScale: TypeAlias = NoOpLossScale | StaticLossScale | DynamicLossScale
"""Any of the three classes, for annotations."""


@dataclass(frozen=True)
class _Reciprocal:
    """A factor that divides by ``divisor``, as jmp's backoff does. So 1/divisor is not rounded."""

    divisor: float

    def __rmul__(self, scale: Array) -> Array:
        return scale / self.divisor


def _multiplied(tree: T, factor: Leaf) -> T:
    product: T = jax.tree.map(lambda leaf: leaf * factor, tree)
    return product


def _is_floating(dtype: DTypeLike) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


for _empty in (NoOpLossScale, StaticLossScale):
    jax.tree_util.register_pytree_node(_empty, lambda scale: ((), scale), lambda scale, _: scale)
jax.tree_util.register_pytree_node_class(DynamicLossScale)
_trees.serialise(DynamicLossScale, "loss_scale", "counter", "min_loss_scale")
