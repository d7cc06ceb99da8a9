"""The state of a loss scale, where tf-keras' optimizers look for it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tf_keras.src.mixed_precision import loss_scale_optimizer as native

from gradscaler._keras_like.wrapper import next_values
from gradscaler.policies import FixedScale, Rule

Tensor = Any

VARIABLES = ("current_loss_scale", "good_steps", "bad_steps")
"""The names in a checkpoint of the fields of :class:`gradscaler.ScaleState`, in their order."""


class State(native._DynamicLossScaleState):  # type: ignore[misc] # untyped base
    """A loss scale, with tf-keras' variables in a checkpoint; a fixed scale has no variables.

    They are a float32 and an int64, and another int64 if the policy has a hysteresis.
    """

    def __init__(self, policy: Rule) -> None:
        self._policy = policy
        if isinstance(policy, FixedScale):
            tf.__internal__.tracking.Trackable.__init__(self)
            self._current_loss_scale = policy.scale
            self.variables: dict[str, tf.Variable] = {}
            self._weights = self.variables
            return
        super().__init__(policy.init_scale, policy.growth_interval, policy.growth_factor)
        self.variables = {"current_loss_scale": self.current_loss_scale, "good_steps": self.counter}
        if policy.hysteresis > 1:
            self.variables["bad_steps"] = self._add_weight("bad_steps", 0, tf.int64)

    def update(self, grads: Any) -> tuple[Any, Tensor]:
        """Move the scale; the operations that do, if any, and whether to apply the gradients."""
        finite = _all_finite(tf.nest.flatten(grads))
        if not self.variables:
            return tf.no_op(), finite
        kept = self.variables.values()
        moved = next_values(self._policy, list(map(tf.convert_to_tensor, kept)), ~finite)
        assigned = [variable.assign(value) for variable, value in zip(kept, moved, strict=False)]
        return tf.group(*assigned), finite


def _all_finite(gradients: list[Any]) -> Tensor:
    """Whether the gradients are finite in every replica."""
    if tf.distribute.in_cross_replica_context():
        strategy = tf.distribute.get_strategy()
        in_each = strategy.extended.call_for_each_replica(_all_finite_here, args=(gradients,))
        return tf.reduce_all(tf.stack(strategy.experimental_local_results(in_each)))
    return _all_finite_here(gradients)


def _all_finite_here(gradients: list[Any]) -> Tensor:
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in values]))
