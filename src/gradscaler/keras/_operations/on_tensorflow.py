"""Gradients and steps on TensorFlow, also under ``tf.distribute``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from gradscaler._keras_like.on_tensorflow import largest as largest
from gradscaler._keras_like.wrapper import (
    Loss,
    Optimizer,
    ScaledOptimizer,
    Tape,
    Tensor,
    Variable,
    unconverted,
)

multiply, divide = keras.ops.multiply, keras.ops.divide


def all_finite(gradients: list[Tensor | None]) -> Tensor:
    """Whether no gradient holds an Inf or a NaN."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    flags = [tf.reduce_all(tf.math.is_finite(value)) for value in values if value is not None]
    return tf.reduce_all(tf.stack(flags or [True]))


def check_compiled(scale: Variable) -> None:
    """Do nothing: compiled code reads the variable in each step."""


def build(optimizer: Optimizer, variables: list[Variable]) -> None:
    """Build the inner optimizer."""
    optimizer.build(variables)


def apply_if_finite(
    optimizer: ScaledOptimizer,
    apply: Callable[..., None],
    gradients: list[Tensor | None],
    variables: list[Variable],
    amax: Tensor | None,
) -> None:
    """Apply if all replicas' gradients are finite. They are checked before they are summed."""
    replica = tf.distribute.get_replica_context()
    if replica is None:
        raise ValueError("apply() must be called in a replica context.")
    finite = all_finite(gradients)
    if replica.num_replicas_in_sync > 1:  # the optimizer sums the replicas' gradients later
        count = replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(finite, tf.float32))
        finite = count >= replica.num_replicas_in_sync
        if amax is not None:
            amax = tf.reduce_max(replica.all_gather(tf.reshape(amax, [1]), axis=0))

    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(finite, lambda: apply(gradients, variables), lambda: None)
        optimizer._move_scale(~finite, amax)
        return

    # The step merges the replicas, so the branch must be around all of them.
    @unconverted
    def across_replicas(
        strategy: tf.distribute.Strategy, finite: Tensor, amax: Tensor | None, *arguments: Any
    ) -> None:
        finite = strategy.experimental_local_results(finite)[0]  # the same in each replica
        amax = strategy.experimental_local_results(amax)[0]
        run = strategy.extended.call_for_each_replica
        tf.cond(finite, lambda: run(apply, args=arguments), lambda: None)
        optimizer._move_scale(~finite, amax)

    replica.merge_call(across_replicas, args=(finite, amax, gradients, variables))


def gradients(
    loss: Loss,
    scale_loss: Callable[[Tensor], Tensor],
    variables: Callable[[], list[Variable]],
    tape: Tape | None,
) -> tuple[list[Tensor | None], list[Variable]]:
    """The gradients and variables of a loss: a function, or a tensor with its tape."""
    if tape is None:
        if not callable(loss):
            raise ValueError(
                f"`tape` is required when a `Tensor` loss is passed. Received: loss={loss}."
            )
        tape = tf.GradientTape()
    if callable(loss):  # AutoGraph converts it if it converts the step
        autograph = tf.__internal__.autograph
        loss = autograph.tf_convert(loss, autograph.control_status_ctx())
    with tape:
        scaled_loss = scale_loss(loss() if callable(loss) else loss)
    found = variables()
    return tape.gradient(scaled_loss, found), found
