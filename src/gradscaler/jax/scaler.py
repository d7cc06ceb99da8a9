"""The loss scale as a pytree, with pure methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from gradscaler.errors import ParameterError
from gradscaler.jax import _operations, _trees
from gradscaler.jax._operations import AxisName, all_finite
from gradscaler.policies import DynamicScale, Policy, ScaleState
from gradscaler.policies._spelling import check_policy

T = TypeVar("T")
Array = Any


class ScaledGradients(NamedTuple):
    """What ``GradScaler.value_and_grad`` returns.

    Attributes:
        scaler: the scaler for the next step.
        grads_finite: whether no gradient holds an Inf or a NaN, a boolean scalar.
        value: what the function returned: its value, or the pair of value and aux.
        grads: the unscaled gradients, in float32 at least.
    """

    scaler: GradScaler
    grads_finite: Array
    value: Any
    grads: Any


@dataclass(frozen=True, eq=False)
class GradScaler:
    """Loss scaling for JAX: a pytree of three scalars, and a policy that is static.

    Pass it through ``jit``, ``scan``, ``vmap`` or ``shard_map`` like any other state; each method
    is pure. With a loss scale ``s``::

        grads = d(s * fun) / s
        scaler.adjust(all_finite(grads)) moves s by the policy's rule

    Args:
        policy: the rule: a :class:`gradscaler.DynamicScale` or a :class:`gradscaler.FixedScale`.
        state: where it stands: a float32 and two int32 scalars. By default ``policy.init()``.

    Raises:
        TypeError: `policy` is not a policy, or `state` is not a ScaleState.
        ValueError: the scale in the state is not above 0.

    >>> import jax
    >>> scaler = GradScaler(DynamicScale(init_scale=8.0, growth_interval=1))
    >>> scaler, finite, value, grads = scaler.value_and_grad(lambda x: x**2)(3.0)
    >>> float(value), float(grads), bool(finite), float(scaler.loss_scale)
    (9.0, 6.0, True, 16.0)
    """

    policy: Policy = field(default_factory=DynamicScale)
    state: Any = None  # a ScaleState from __post_init__ on

    def __post_init__(self) -> None:
        check_policy(self.policy)
        state = self.policy.init() if self.state is None else self.state
        if not isinstance(state, ScaleState):
            raise TypeError(f"state must be a ScaleState, got {state!r}")
        _operations.check_scale("the scale in state", state.scale)
        arrays = map(jnp.asarray, state, (jnp.float32, jnp.int32, jnp.int32))
        object.__setattr__(self, "state", ScaleState(*arrays))
        _trees.serialise()

    @property
    def loss_scale(self) -> Array:
        """The loss scale, a float32 scalar."""
        return self.state.scale

    def scale(self, tree: T) -> T:
        """Multiply a loss, or every leaf of a pytree, by the loss scale.

        Leaves narrower than float32 become float32, because most scales are above the largest
        float16. Leaves that are neither floating nor complex stay as they are.
        """
        return _operations.map_inexact(lambda leaf: jnp.multiply(*self._beside(leaf)), tree)

    def unscale(self, tree: T) -> T:
        """Divide the gradients by the loss scale.

        As in ``scale``, leaves narrower than float32 become float32: in their own dtype they would
        underflow again.
        """
        return _operations.map_inexact(lambda leaf: jnp.divide(*self._beside(leaf)), tree)

    def _beside(self, leaf: Any) -> tuple[Array, Array]:
        """A leaf in float32 at least, and the scale in its precision."""
        leaf = jnp.asarray(leaf)
        if leaf.dtype.itemsize < 4:
            leaf = leaf.astype(jnp.float32)
        return leaf, self.loss_scale.astype(leaf.real.dtype)

    def adjust(self, grads_finite: Any) -> GradScaler:
        """The scaler for the next step, by the policy's rule.

        Args:
            grads_finite: whether the step's gradients were finite, a boolean scalar.

        Raises:
            ValueError: `grads_finite` is not a boolean scalar, or ``shard_map`` knows it to differ
                between devices that hold one loss scale.
        """
        found_inf = ~_operations.as_flag("grads_finite", grads_finite)
        apart = _operations.varies_over(found_inf) - _operations.varies_over(self.loss_scale)
        if apart:
            raise ParameterError(
                f"grads_finite varies over {_operations.spelled(apart)} and the loss scale does "
                "not, so each device would move the scale alone. Decide together: pass "
                f"finite_axis={_operations.spelled(apart)} to value_and_grad, all_finite or "
                "loss_scaled"
            )
        return _trees.replaced(self, state=self.policy.update(self.state, found_inf, jnp.where))

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: AxisName | None = None,
        *,
        finite_axis: AxisName | None = None,
    ) -> Callable[..., ScaledGradients]:
        """``jax.value_and_grad`` of the scaled function, unscaled and checked.

        Args:
            fun: returns a scalar, or a pair of a scalar and anything.
            argnums: what to differentiate with respect to.
            has_aux: whether ``fun`` returns a pair.
            axis_name: named axes to average the gradients over: each device holds all the weights,
                and ``fun`` returns the loss of its own batch. One device's Inf is then in
                everyone's gradients, and every device takes the same decision.
            finite_axis: named axes that shard the weights: the devices take one decision, and the
                gradients are not averaged. If they have different batches, ``fun`` returns
                ``jax.lax.pmean(loss, finite_axis)``.

        Returns:
            A function with the arguments of ``fun`` that returns :class:`ScaledGradients`.

        Raises:
            ValueError: in that function, inside ``shard_map``: a weight is sharded over
                ``axis_name``, ``fun`` has averaged the loss over it, or devices would decide
                differently. With ``check_vma=False`` JAX cannot tell, and nothing is raised; there
                a ``pmean`` in ``fun`` leaves the gradients summed, so divide the loss by the number
                of devices instead.
        """

        def scaled(*args: Any, **kwargs: Any) -> tuple[Array, Any]:
            value = fun(*args, **kwargs)
            if has_aux and not (isinstance(value, (tuple, list)) and len(value) == 2):
                raise TypeError(
                    f"with has_aux, fun must return a pair of a scalar and anything, got {value!r}"
                )
            loss = self.scale(value[0] if has_aux else value)
            if axis_name is not None:
                _operations.check_not_averaged(loss, axis_name)
            return loss, value

        differentiated = jax.value_and_grad(scaled, argnums, has_aux=True)

        @functools.wraps(fun)
        def unscaled(*args: Any, **kwargs: Any) -> ScaledGradients:
            if axis_name is not None:
                places = (argnums,) if isinstance(argnums, int) else argnums
                chosen = {place % len(args) for place in places}
                args = tuple(
                    _operations.varying(arg, axis_name) if place in chosen else arg
                    for place, arg in enumerate(args)
                )
            (_, value), grads = differentiated(*args, **kwargs)
            grads = self.unscale(grads)
            if axis_name is not None:
                grads = _operations.lax.pmean(grads, axis_name)
            grads_finite = all_finite(grads, finite_axis=finite_axis)
            return ScaledGradients(self.adjust(grads_finite), grads_finite, value, grads)

        return unscaled


_trees.register(GradScaler, static=["policy"])
