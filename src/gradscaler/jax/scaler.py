"""The loss scale as a pytree, with pure methods."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from gradscaler.errors import ParameterError, ParameterTypeError
from gradscaler.jax import _operations, _trees
from gradscaler.jax._operations import AxisName, Leaf, Tree, all_finite, amax, select_tree
from gradscaler.policies import (
    DynamicScale,
    Policy,
    ScaleState,
    _checks,
    amax_interval,
    leaf_dtypes,
)
from gradscaler.policies._spelling import check_policy

T = TypeVar("T")


class ScaledGradients(NamedTuple):
    """The results of a function that ``GradScaler.value_and_grad`` returns.

    Attributes:
        scaler: the scaler for the next step.
        grads_finite: whether no gradient holds an Inf or a NaN, a boolean scalar.
        value: the result of the differentiated function: its value, or its pair of value and aux.
        grads: the unscaled gradients, in float32 or wider.
    """

    scaler: GradScaler
    grads_finite: Array
    value: Tree
    grads: Tree


@dataclass(frozen=True, eq=False)
class GradScaler:
    """Loss scaling for JAX: a pytree of a few scalars, with a static policy.

    Pass it through ``jit``, ``scan``, ``vmap`` or ``shard_map`` like any other state. Every method
    is pure. With a loss scale ``s``::

        grads = d(s * fun) / s
        scaler = scaler.adjust(all_finite(grads), amax(grads))  # moves s by the policy's rule

    Args:
        policy: the rule: a :class:`gradscaler.DynamicScale`, a :class:`gradscaler.FixedScale`, a
            :class:`gradscaler.AmaxScale`, or any other :class:`gradscaler.Policy`.
        state: the policy's current state: a float32 and two int32 scalars, and any further scalars
            of the policy. By default ``policy.init()``. Only numbers and arrays are checked; other
            objects, such as shardings or shapes, are taken as they are.

    Raises:
        TypeError: ``policy`` is not a policy, or ``state`` is not of the policy's type of state.
        ValueError: the scale in ``state`` is not positive and finite in float32, or another value
            is not a number of its dtype.

    >>> import jax
    >>> scaler = GradScaler(DynamicScale(init_scale=8.0, growth_interval=1))
    >>> scaler, finite, value, grads = scaler.value_and_grad(lambda x: x**2)(3.0)
    >>> float(value), float(grads), bool(finite), float(scaler.loss_scale)
    (9.0, 6.0, True, 16.0)
    """

    policy: Policy = field(default_factory=DynamicScale)
    state: Any = None  # after __post_init__: a state of the policy's type, of arrays

    def __post_init__(self) -> None:
        check_policy(self.policy)
        first = self.policy.init()
        kind = type(first)
        state = first if self.state is None else self.state
        if not isinstance(state, kind):
            raise TypeError(f"state must be of type {kind.__name__}, got {state!r}")
        dtypes = leaf_dtypes(first)
        _check_state(state, dtypes)
        object.__setattr__(self, "state", kind(*map(_as_leaf, state, dtypes)))
        _trees.serialise()

    @property
    def loss_scale(self) -> Array:
        """The loss scale, a float32 scalar."""
        scale: Array = self.state.scale
        return scale

    def scale(self, tree: T) -> T:
        """Multiply a loss, or every leaf of a pytree, by the loss scale.

        Leaves narrower than float32 become float32, because most scales are above the largest
        float16. Leaves that are neither floating nor complex stay as they are.
        """
        return _operations.map_gradients(lambda leaf: jnp.multiply(*self._beside(leaf)), tree)

    def unscale(self, tree: T) -> T:
        """Divide the gradients by the loss scale.

        As in ``scale``, leaves narrower than float32 become float32: in their own dtype they would
        underflow again. Variables that flax's fp8 layers mark as ``_overwrite_with_gradient`` are
        not divided, because their gradients are new values.
        """
        return _operations.map_gradients(lambda leaf: jnp.divide(*self._beside(leaf)), tree)

    def _beside(self, leaf: Leaf) -> tuple[Array, Array]:
        """A leaf in float32 or wider, and the scale in the leaf's precision."""
        leaf = jnp.asarray(leaf)
        if leaf.dtype.itemsize < 4:
            leaf = leaf.astype(jnp.float32)
        return leaf, self.loss_scale.astype(leaf.real.dtype)

    def adjust(self, grads_finite: ArrayLike, amax: ArrayLike | None = None) -> GradScaler:
        """The scaler for the next step, by the policy's rule.

        Args:
            grads_finite: whether the step's gradients were finite, a boolean scalar.
            amax: the largest magnitude of the unscaled gradients, a scalar, from
                :func:`gradscaler.jax.amax`. Required by a policy with an ``amax_interval``, ignored
                by others. If the interval is above 1, the policy needs it only in some steps; pass
                0.0 in the others to save the measurement:
                ``jax.lax.cond(scaler.state.finite_steps % interval == 0, amax, lambda _: 0.0,
                grads)``.

        Raises:
            TypeError: ``amax`` is left out, and the policy needs it.
            ValueError: ``grads_finite`` is not a boolean scalar, ``amax`` is not a scalar, or, in
                ``shard_map``, one of them varies between devices that share the loss scale.
        """
        found_inf = ~_operations.as_flag("grads_finite", grads_finite)
        self._check_together("grads_finite", "all_finite", found_inf)
        seen = {}
        if amax_interval(self.policy):
            if amax is None:
                raise ParameterTypeError(
                    f"amax is left out, but {self.policy!r} needs the largest gradient: write "
                    "adjust(all_finite(grads), amax(grads)). In steps in which the policy does "
                    "not need it, because amax_interval is above 1, amax may be 0.0"
                )
            seen["amax"] = _operations.as_amax(amax)
            self._check_together("amax", "amax", seen["amax"])
        state = self.policy.update(self.state, found_inf, jnp.where, **seen)
        return _trees.replaced(self, state=state)

    def _check_together(self, name: str, function: str, value: Array) -> None:
        apart = _operations.varies_over(value) - _operations.varies_over(self.loss_scale)
        if apart:
            raise ParameterError(
                f"{name} varies over {_operations.spelled(apart)} and the loss scale does "
                "not, so each device would move its own copy of the scale. Decide together: pass "
                f"finite_axis={_operations.spelled(apart)} to value_and_grad, {function} or "
                "loss_scaled"
            )

    def _measured(
        self, grads: Tree, axis_name: AxisName | None = None, finite_axis: AxisName | None = None
    ) -> tuple[Array, GradScaler]:
        """Whether unscaled gradients are finite, and the scaler for the next step."""
        grads_finite = all_finite(grads, axis_name, finite_axis=finite_axis)
        wanted = amax_interval(self.policy)
        largest = amax(grads, axis_name, finite_axis=finite_axis) if wanted else None
        return grads_finite, self.adjust(grads_finite, largest)

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: Any = 0,
        has_aux: bool = False,
        axis_name: AxisName | None = None,
        *,
        finite_axis: AxisName | None = None,
        transform: Callable[..., Any] | None = None,
        retries: int = 0,
    ) -> Callable[..., ScaledGradients]:
        """``jax.value_and_grad`` of the scaled function, unscaled and checked.

        Args:
            fun: returns a scalar, or a pair of a scalar and anything.
            argnums: the argument or arguments to differentiate with respect to: an int, several
                ints, or anything else that ``transform`` takes.
            has_aux: whether ``fun`` returns a pair.
            axis_name: named axes to average the gradients over. Each device must hold all weights,
                and ``fun`` must return the loss of the device's own batch. An Inf on one device
                is then in the average on all, so all devices decide alike.
            finite_axis: named axes that shard the weights. The devices decide together, and
                gradients are not averaged. If devices have different batches, ``fun`` must return
                ``jax.lax.pmean(loss, finite_axis)``.
            transform: the function that differentiates, by default ``jax.value_and_grad``.
                ``equinox.filter_value_and_grad`` and ``flax.nnx.value_and_grad`` take whole models.
            retries: the largest number of repetitions of a call that overflows and so lowers the
                scale. The loop is inside the compiled step, and ``fun`` is compiled twice; ``fun``
                must return arrays. A finite evaluation counts as one step. If no evaluation is
                finite, the scale backs off once: probably no scale would help.

        Returns:
            A function with the arguments of ``fun`` that returns :class:`ScaledGradients`.

        Raises:
            TypeError: ``retries`` is not an integer.
            ValueError: ``retries`` is negative, or ``axis_name`` or ``retries`` is combined with
                ``flax.nnx.value_and_grad``, which changes its model in place.
            ValueError: when the returned function is called inside ``shard_map``: a weight is
                sharded over ``axis_name``, ``fun`` has averaged the loss over it, or devices would
                decide differently. With ``check_vma=False`` JAX does not know this, and nothing is
                raised. There a ``pmean`` in ``fun`` leaves gradients summed over devices, so divide
                the loss by the number of devices instead.
        """
        natively = transform in (None, jax.value_and_grad)  # differentiates Python numbers, too
        transform = jax.value_and_grad if transform is None else transform
        in_place = transform.__module__.startswith("flax.nnx")
        if in_place and (axis_name is not None or retries):
            raise ParameterError(
                f"{transform.__name__} changes its model in place, so it takes neither axis_name "
                "nor retries: split the model by nnx.split, differentiate by jax.value_and_grad, "
                "and let fun merge the model again from its parameters"
            )
        if _checks.count("retries", retries, 0):
            return self._retried(
                fun,
                retries,
                argnums=argnums,
                has_aux=has_aux,
                axis_name=axis_name,
                finite_axis=finite_axis,
                transform=transform,
            )

        @functools.wraps(fun)
        def scaled(*args: object, **kwargs: object) -> tuple[Array, Tree]:
            value = fun(*args, **kwargs)
            if has_aux and not (isinstance(value, (tuple, list)) and len(value) == 2):
                raise TypeError(
                    f"with has_aux, fun must return a pair of a scalar and anything, got {value!r}"
                )
            loss = self.scale(value[0] if has_aux else value)
            if axis_name is not None:
                _operations.check_not_averaged(loss, axis_name)
            return loss, value

        # Equinox's transform has no argnums: it differentiates the first argument.
        wanted = {} if argnums == 0 else {"argnums": argnums}
        differentiated = transform(scaled, **wanted, has_aux=True)
        is_weight = _operations.is_inexact if natively else _operations.is_inexact_array

        @functools.wraps(fun)
        def unscaled(*args: object, **kwargs: object) -> ScaledGradients:
            if axis_name is not None:
                places = (argnums,) if isinstance(argnums, int) else argnums
                chosen = {place % len(args) for place in places}
                args = tuple(
                    _operations.varying(arg, axis_name, is_weight) if place in chosen else arg
                    for place, arg in enumerate(args)
                )
            (_, value), grads = differentiated(*args, **kwargs)
            grads = self.unscale(grads)
            if axis_name is not None:
                grads = _operations.averaged(grads, axis_name)
            grads_finite, scaler = self._measured(grads, finite_axis=finite_axis)
            return ScaledGradients(scaler, grads_finite, value, grads)

        return unscaled

    def _retried(
        self, fun: Callable[..., Any], retries: int, **options: Any
    ) -> Callable[..., ScaledGradients]:
        """:meth:`value_and_grad`, repeated while it overflows and the scale backs off."""

        @functools.wraps(fun)
        def evaluated(*args: object, **kwargs: object) -> ScaledGradients:
            def evaluate(scaler: GradScaler) -> ScaledGradients:
                return scaler.value_and_grad(fun, **options)(*args, **kwargs)

            def worth_a_retry(carry: tuple[Array, Array, ScaledGradients]) -> Array:
                tries, scale, result = carry
                lower = result.scaler.loss_scale < scale
                return ~result.grads_finite & lower & (tries < retries)

            def retry(
                carry: tuple[Array, Array, ScaledGradients],
            ) -> tuple[Array, Array, ScaledGradients]:
                tries, _, result = carry
                return tries + 1, result.scaler.loss_scale, evaluate(result.scaler)

            first = evaluate(self)
            carry = 0, self.loss_scale, first
            *_, last = _operations.lax.while_loop(worth_a_retry, retry, carry)
            scaler = select_tree(last.grads_finite, last.scaler, first.scaler)
            return ScaledGradients(scaler, *last[1:])

        return evaluated


def _check_state(state: Any, dtypes: Sequence[DTypeLike]) -> None:
    """Refuse a scale that is none in float32, a count that is none, and a float that is not finite.

    Fields that a policy adds may be negative.
    """
    _operations.check_scale("the scale in state", state.scale, np.float32)
    for name, value, dtype in list(zip(state._fields, state, dtypes, strict=True))[1:]:
        lowest = 0 if name in ScaleState._fields else -math.inf
        _operations.check_number(f"{name} in state", value, dtype, lowest)


def _as_leaf(value: Leaf, dtype: DTypeLike) -> Leaf:
    return value if _operations.is_placeholder(value) else jnp.asarray(value, dtype)


_trees.register(GradScaler, static=["policy"])
