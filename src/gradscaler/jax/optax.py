"""Loss scaling as an optax transformation around an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from gradscaler._frameworks import require
from gradscaler.errors import ParameterError
from gradscaler.jax._callers import check_outermost
from gradscaler.jax._operations import AxisName, Leaf, Transformation, Tree, select_tree
from gradscaler.jax._trees import holds
from gradscaler.jax.scaler import GradScaler
from gradscaler.jax.weights import MasterWeightsState
from gradscaler.policies import DynamicScale, Policy
from gradscaler.policies._spelling import check_policy

if TYPE_CHECKING:
    import optax


class LossScaledState(NamedTuple):
    """The state of :func:`loss_scaled`.

    Attributes:
        scaler: the scaler for the next loss.
        grads_finite: whether the latest gradients were finite, so that the step was taken.
        inner_state: the optimizer's own state.
    """

    scaler: GradScaler
    grads_finite: Array
    inner_state: Tree


def loss_scaled(
    optimizer: Transformation,
    policy: Policy = DynamicScale(),  # noqa: B008 # immutable
    axis_name: AxisName | None = None,
    *,
    finite_axis: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax optimizer so that it takes gradients of a scaled loss.

    If the gradients are finite, the optimizer gets them divided by the scale. If not, the updates
    are zero, and the optimizer's state stays bit for bit as it was, step counts included. Either
    way the scale moves by the policy's rule. Scale the loss with ``state.scaler.scale(loss)``.

    Put this outermost: ``loss_scaled(optax.chain(clip, adam))``. Inside ``chain``,
    ``multi_transform``, ``masked``, ``MultiSteps`` or any other transformation, the transformations
    before or beside it would see scaled gradients: a clip would cut them to almost nothing, and an
    accumulator would keep an Inf. A transformation of optax's around this one raises an error.
    Transformations of other packages, and code that changes gradients before ``update``, cannot be
    detected. ``inject_hyperparams`` changes no gradients and may be inside or outside. Outside, its
    schedules count skipped steps, too.

    The optimizer gets gradients in their own dtype or that of the parameters, whichever is wider.
    So pass ``params`` to ``update``; without them, float16 gradients of float32 parameters
    underflow again. If :func:`master_weights` is inside, all of them are float32 at least. Extra
    arguments are passed on unchanged, so pass an unscaled ``value``.

    Variables that flax's fp8 layers mark as ``_overwrite_with_gradient`` are not divided, because
    their gradients are new values. Keep these from the optimizer, as flax's ``TrainState`` does.

    Args:
        optimizer: any optax transformation.
        policy: the rule: a :class:`gradscaler.DynamicScale`, a :class:`gradscaler.FixedScale`, a
            :class:`gradscaler.AmaxScale`, or any other :class:`gradscaler.Policy`.
        axis_name: named axes whose devices decide together. Needed if the gradients were not
            averaged over them before.
        finite_axis: more such axes. Needed inside ``shard_map`` if they shard the weights. There
            ``optax.clip_by_global_norm`` takes the norm of one device's part only.

    Raises:
        TypeError: `optimizer` is not an optax transformation, or `policy` is not a policy.
        ValueError: in ``init``, if a transformation of optax's or another ``loss_scaled`` is around
            this one.

    >>> import jax, optax
    >>> optimizer = loss_scaled(optax.sgd(0.5), DynamicScale(init_scale=1024.0))
    >>> weight = jax.numpy.float32(1.0)
    >>> state = optimizer.init(weight)
    >>> grads = jax.grad(lambda weight: state.scaler.scale(weight**2))(weight)
    >>> updates, state = optimizer.update(grads, state, weight)
    >>> float(grads), float(optax.apply_updates(weight, updates)), bool(state.grads_finite)
    (2048.0, 0.0, True)
    """
    require("optax", "jax")
    import optax  # here, because the rest of gradscaler.jax does not need it

    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(f"optimizer must be an optax transformation, got {optimizer!r}")
    check_policy(policy)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> LossScaledState:
        check_outermost()
        inner_state = inner.init(params)
        if holds(inner_state, LossScaledState):
            raise ParameterError(
                "loss_scaled is inside loss_scaled, so gradients would be divided by both scales. "
                "Write it once, outermost: loss_scaled(optax.adam(0.001))"
            )
        return LossScaledState(GradScaler(policy), jnp.array(True), inner_state)

    def update(
        updates: Tree, state: LossScaledState, params: Tree = None, **extra_args: object
    ) -> tuple[Tree, LossScaledState]:
        structure: Any = jax.tree.structure
        alike = structure(params) == structure(updates)
        dtypes = jax.tree.map(jnp.result_type, updates, *([params] if alike else []))
        grads = state.scaler.unscale(updates)
        if not holds(state.inner_state, MasterWeightsState):
            grads = jax.tree.map(jnp.asarray, grads, dtypes)
        grads_finite, scaler = state.scaler._measured(grads, axis_name, finite_axis)
        updates, inner_state = inner.update(grads, state.inner_state, params, **extra_args)
        updates = select_tree(grads_finite, updates, jax.tree.map(jnp.zeros_like, updates))
        inner_state = jax.tree.map(_in_dtype_of, inner_state, state.inner_state)
        inner_state = select_tree(grads_finite, inner_state, state.inner_state)
        return updates, LossScaledState(scaler, grads_finite, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _in_dtype_of(new: Leaf, old: Leaf) -> Leaf:
    """``new`` in the dtype of ``old``: after wider gradients, the state must not become wider."""
    dtype = jnp.result_type(old)
    return new if jnp.result_type(new) == dtype else jnp.asarray(new, dtype)
