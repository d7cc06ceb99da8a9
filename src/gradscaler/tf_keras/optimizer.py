"""``tf_keras.mixed_precision.LossScaleOptimizer``, with gradscaler's policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras.src.mixed_precision import loss_scale_optimizer as native

from gradscaler._keras_like.on_tensorflow import Gradient, largest
from gradscaler._keras_like.wrapper import (
    Config,
    Loss,
    Tensor,
    Wrapper,
    advice_on,
    next_values,
    own_fields,
    policy_from,
    unconverted,
)
from gradscaler.policies import DynamicScale, Policy, amax_interval, first_scale, is_fixed

Pair = tuple[Gradient | None, tf.Variable]
Pairs = list[Pair]


@unconverted
class LossScaleOptimizer(Wrapper, native.BaseLossScaleOptimizer):  # type: ignore[misc] # untyped base
    """Loss scaling for Keras 2: a drop-in for ``tf_keras.mixed_precision.LossScaleOptimizer``.

    It wraps optimizers of both families. For ``tf_keras.optimizers`` it makes a
    ``LossScaleOptimizerV3``, and for ``tf_keras.optimizers.legacy`` a ``LossScaleOptimizerV2``;
    these two can be subclassed. With a loss scale ``s``, ``minimize`` computes::

        g = gradients of (s * loss) / s
        finite:      inner_optimizer.apply_gradients(g)
                     after dynamic_growth_steps in a row: s = 2 * s
        non-finite:  iterations += 1, nothing else is applied;  s = max(s / 2, 1)

    Args:
        inner_optimizer: the optimizer to wrap.
        dynamic: whether the scale moves. If not, steps with non-finite gradients are still skipped.
        initial_scale: the scale before the first step, by default 2**15. Required if not
            ``dynamic``: it is the scale of all steps.
        dynamic_growth_steps: finite steps in a row before the scale doubles, by default 2000; None
            if not ``dynamic``.
        policy: the rule, in place of the three arguments before: a
            :class:`gradscaler.DynamicScale`, with any factors, bounds and hysteresis, a
            :class:`gradscaler.FixedScale`, a :class:`gradscaler.AmaxScale`, or any other
            :class:`gradscaler.Policy`.

    Raises:
        TypeError: an argument is of the wrong type, or ``inner_optimizer`` is not an optimizer.
        ValueError: an argument is out of range, two contradict each other, ``inner_optimizer`` is
            already wrapped, or the ``tf.distribute`` strategy keeps one variable for many replicas.

    Some attributes are read and set on the inner optimizer: hyperparameters of legacy optimizers
    (``lr``, ``beta_1``, ``momentum``, ...), and arguments of every optimizer (``clipnorm``,
    ``use_ema``, ...). Other attributes, such as ``epsilon``, are not.

    >>> import tensorflow as tf, tf_keras
    >>> optimizer = LossScaleOptimizer(tf_keras.optimizers.SGD(0.25))
    >>> variable = tf.Variable(1.0)
    >>> optimizer.minimize(lambda: variable**2, variable)
    >>> float(variable), float(optimizer.loss_scale), int(optimizer.dynamic_counter)
    (0.5, 32768.0, 1)
    """

    _inner_name = "_optimizer"
    _preset = DynamicScale.tf_keras
    _saving = tf_keras.saving

    def __new__(
        cls, inner_optimizer: object = None, *args: object, **kwargs: object
    ) -> LossScaleOptimizer:
        """Make an object of the class for the family of ``inner_optimizer``."""
        if cls is LossScaleOptimizer:
            cls = _class_for(inner_optimizer)
        elif not issubclass(cls, LossScaleOptimizerV2 | LossScaleOptimizerV3):
            raise TypeError(
                f"{cls.__name__} belongs to neither family: subclass LossScaleOptimizerV3, for "
                "tf_keras.optimizers, or LossScaleOptimizerV2, for tf_keras.optimizers.legacy"
            )
        optimizer: LossScaleOptimizer = super().__new__(cls)
        return optimizer

    def __init__(
        self,
        inner_optimizer: Any,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        policy: Policy | None = None,
    ) -> None:
        policy = policy_from(self._preset, dynamic, initial_scale, dynamic_growth_steps, policy)
        super().__init__(inner_optimizer, dynamic=False, initial_scale=1.0)  # creates no variables
        self._follow(policy)

    @tf.__internal__.tracking.no_automatic_dependency_tracking  # type: ignore[untyped-decorator]
    def _follow(self, policy: Policy) -> None:
        self._policy = policy
        self._loss_scale = _State(policy)
        if self.dynamic:
            self._track_trackable(self._loss_scale, "loss_scale")

    @property
    def dynamic_counter(self) -> Tensor | None:
        """Finite steps since the scale moved or a step was skipped, an int64 scalar variable.

        None if the scale is fixed.
        """
        return self._loss_scale.counter if self.dynamic else None

    def get_scaled_loss(self, loss: Loss) -> Loss:
        """The loss times the scale, in float32 or wider. For a callable loss, a callable."""
        self._loss_has_been_scaled = True
        return super().get_scaled_loss(loss)

    def _scaled(self, loss: Tensor) -> Tensor:
        if not tf.is_tensor(loss):  # an array; a ragged tensor is a tensor, and stays one
            loss = tf.convert_to_tensor(loss)
        if loss.dtype.size < 4:  # the scale may be above the dtype's largest value
            loss = tf.cast(loss, tf.float32)
        return loss * tf.cast(self.loss_scale, loss.dtype)

    def get_unscaled_gradients(self, grads: Iterable[Gradient | None]) -> list[Gradient | None]:
        """The gradients divided by the scale, each in its own dtype and kind; None stays None."""
        self._gradients_have_been_unscaled = True
        inv_scale = 1.0 / self.loss_scale
        return [None if grad is None else _multiplied(grad, inv_scale) for grad in grads]

    def apply_gradients(self, grads_and_vars: Iterable[Pair], *args: Any, **kwargs: Any) -> Any:
        """Apply all gradients, or none if any is not finite, and move the scale.

        The first call warns if no loss was scaled, or if no gradients were unscaled, by this
        optimizer.

        Args:
            grads_and_vars: pairs of unscaled gradient and variable. If there are none, because the
                model is frozen, the call has no effect.
            args: further positional arguments of the inner optimizer's ``apply_gradients``.
            kwargs: further keyword arguments of it.

        Raises:
            ValueError: all gradients are None, or the call is in a cross-replica context.
        """
        pairs = list(grads_and_vars)
        if not pairs:
            return None
        result = super().apply_gradients(pairs, *args, **kwargs)
        self._loss_has_been_scaled = self._gradients_have_been_unscaled = True  # no more warnings
        return result

    def get_config(self) -> Config:
        """The inner optimizer, and the arguments for the policy.

        tf-keras' own class accepts the config, too, unless it lacks such a policy.
        """
        inner_optimizer = super().get_config()["inner_optimizer"]
        return {"inner_optimizer": inner_optimizer, **self._policy_config()}

    @classmethod
    def from_config(
        cls, config: Config, custom_objects: dict[str, object] | None = None
    ) -> LossScaleOptimizer:
        """The optimizer for a config, which may come from tf-keras' own class."""
        if cls is LossScaleOptimizer:
            return _class_of_config(config).from_config(config, custom_objects)
        return super().from_config(config, custom_objects)


@unconverted
@tf_keras.saving.register_keras_serializable("gradscaler")
class LossScaleOptimizerV2(LossScaleOptimizer, native.LossScaleOptimizer):  # type: ignore[misc] # untyped base
    """The wrapper of optimizers from ``tf_keras.optimizers.legacy``."""


@unconverted
@tf_keras.saving.register_keras_serializable("gradscaler")
class LossScaleOptimizerV3(LossScaleOptimizer, native.LossScaleOptimizerV3):  # type: ignore[misc] # untyped base
    """The wrapper of optimizers from ``tf_keras.optimizers``."""

    def compute_gradients(
        self, loss: Loss, var_list: Any, tape: tf.GradientTape | None = None
    ) -> Pairs:
        """Pairs of unscaled gradient and variable.

        Args:
            loss: a function without arguments that returns the loss, or the loss.
            var_list: the variable or variables, or a function that returns them.
            tape: the tape that recorded the loss, if that is not a function.

        Raises:
            ValueError: there is neither a function nor a tape.
        """
        if tape is None and not callable(loss):
            raise ValueError(
                f"`tape` is required when a `Tensor` loss is passed. Received: loss={loss}."
            )
        if not callable(var_list):
            var_list = tf.nest.flatten(var_list)
        pairs: Pairs = super().compute_gradients(loss, var_list, tape)
        return pairs

    # tf-keras inherits these from a base class whose constructor it does not call.

    def set_weights(self, weights: list[Tensor]) -> None:
        """Set the inner optimizer's variables, in the order of ``variables``."""
        self._optimizer.set_weights(weights)

    def exclude_from_weight_decay(
        self, var_list: list[tf.Variable] | None = None, var_names: list[str] | None = None
    ) -> None:
        """Exclude variables from the inner optimizer's weight decay."""
        self._optimizer.exclude_from_weight_decay(var_list, var_names)

    @property
    def name(self) -> str:
        """The inner optimizer's name."""
        name: str = self._optimizer.name
        return name

    @name.setter
    def name(self, name: str) -> None:
        self._optimizer.name = name

    def add_variable(self, *args: Any, **kwargs: Any) -> tf.Variable:
        """Add a variable to the inner optimizer."""
        return self._optimizer.add_variable(*args, **kwargs)

    def add_variable_from_reference(self, *args: Any, **kwargs: Any) -> tf.Variable:
        """Add a variable to the inner optimizer that is like a variable of the model."""
        return self._optimizer.add_variable_from_reference(*args, **kwargs)

    def update_step(self, gradient: Gradient, variable: tf.Variable) -> None:
        """Step one variable by the inner optimizer, given an unscaled gradient."""
        self._optimizer.update_step(gradient, variable)

    def aggregate_gradients(self, grads_and_vars: Iterable[Pair]) -> Any:
        """Sum the gradients over the replicas."""
        return self._optimizer.aggregate_gradients(grads_and_vars)

    def save_own_variables(self, store: Any) -> None:
        """Put the inner optimizer's variables into a store, and the policy's by their names."""
        self._optimizer.save_own_variables(store)
        for name, variable in self._loss_scale.variables.items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Set the variables from a store.

        A store of tf-keras' own class has no variables of the policy, and leaves them as they are.
        If the store has a scale, other variables of the policy that it lacks become 0.
        """
        stored = {name: store[name] for name in store.keys()}  # noqa: SIM118 # not a mapping
        # The inner optimizer's are numbered; the policy's have the names in a checkpoint.
        values = {name: stored.pop(name) for name in [*stored] if not name.isdigit()}
        if "current_loss_scale" in values:
            for name, variable in self._loss_scale.variables.items():
                variable.assign(values.get(name, 0))
        self._optimizer.load_own_variables(stored)


def _class_for(inner_optimizer: object) -> type[LossScaleOptimizer]:
    if isinstance(inner_optimizer, tf_keras.optimizers.legacy.Optimizer):
        return LossScaleOptimizerV2
    if isinstance(inner_optimizer, tf_keras.optimizers.Optimizer):
        return LossScaleOptimizerV3
    raise TypeError(
        '"inner_optimizer" must be an instance of `tf.keras.optimizers.Optimizer` or '
        f"`tf.keras.optimizers.experimental.Optimizer`, but got: {inner_optimizer}."
        f"{advice_on(inner_optimizer)}"
    )


def _class_of_config(config: Config) -> type[LossScaleOptimizer]:
    inner_optimizer = config.get("inner_optimizer")
    if not isinstance(inner_optimizer, dict | None):
        return _class_for(inner_optimizer)
    legacy = inner_optimizer is None or inner_optimizer["config"].get("is_legacy_optimizer", True)
    return LossScaleOptimizerV2 if legacy else LossScaleOptimizerV3


def _multiplied(gradient: Gradient, factor: Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        values = _multiplied(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if not tf.is_tensor(gradient):
        gradient = tf.convert_to_tensor(gradient)
    if gradient.dtype.size < 4:  # 1/scale may underflow in the dtype
        return tf.cast(tf.cast(gradient, factor.dtype) * factor, gradient.dtype)
    return gradient * tf.cast(factor, gradient.dtype)


_DEFAULTS, _RULE = DynamicScale.tf_keras(), ("growth_interval", "growth_factor")


class _State(native._DynamicLossScaleState):  # type: ignore[misc] # untyped base
    """The state of a loss scale, which a checkpoint holds under tf-keras' names.

    The variables are the fields of the policy's state, in their order: a float32 scale and an int64
    count. A hysteresis adds an int64 count. An ``AmaxScale`` adds that count and two float32. A
    fixed scale has no variables.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.variables: dict[str, tf.Variable] = {}
        if is_fixed(policy):
            tf.__internal__.tracking.Trackable.__init__(self)
            self._current_loss_scale = first_scale(policy)
            self._weights: dict[object, object] = {}
            return
        rule = (getattr(policy, name, getattr(_DEFAULTS, name)) for name in _RULE)
        super().__init__(first_scale(policy), *rule)
        self.variables.update(current_loss_scale=self.current_loss_scale, good_steps=self.counter)
        for name, (value, is_float) in own_fields(policy, "bad_steps").items():
            dtype = tf.float32 if is_float else tf.int64
            self.variables[name] = self._add_weight(name, value, dtype)

    def update(self, grads: Any) -> tuple[tf.Operation, Tensor]:
        """Move the scale; return the operations that do, and whether to apply the gradients."""
        grads = tf.nest.flatten(grads)
        finite = _in_all(_all_finite, tf.reduce_all, grads)
        if not self.variables:
            return tf.no_op(), finite
        wanted = amax_interval(self._policy)
        amax = _in_all(largest, tf.reduce_max, grads) if wanted else None
        kept = self.variables.values()
        moved = next_values(self._policy, list(map(tf.convert_to_tensor, kept)), ~finite, amax)
        assigned = [variable.assign(value) for variable, value in zip(kept, moved, strict=False)]
        return tf.group(*assigned), finite


def _in_all(
    function: Callable[[list[Gradient | None]], Tensor],
    reduce: Callable[[Tensor], Tensor],
    grads: list[Gradient | None],
) -> Tensor:
    """A function of the gradients; in a cross-replica context, reduced over all replicas."""
    if not tf.distribute.in_cross_replica_context():
        return function(grads)
    strategy = tf.distribute.get_strategy()
    in_each = strategy.extended.call_for_each_replica(function, args=(grads,))
    return reduce(tf.stack(strategy.experimental_local_results(in_each)))


@unconverted
def _all_finite(gradients: list[Gradient | None]) -> Tensor:
    """Whether the gradients are finite in this replica."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in values]))
