"""Operations on TensorFlow's gradients, for Keras 3 and Keras 2."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gradscaler._keras_like.wrapper import Tensor, unconverted

Gradient = Any  # a tensor, or tf.IndexedSlices if it is sparse


@unconverted
def largest(gradients: list[Gradient | None]) -> Tensor:
    """The largest magnitude of this replica's gradients, a float32 scalar."""
    given = [_summed(gradient) for gradient in gradients if gradient is not None]
    maxima = [tf.cast(tf.reduce_max(tf.abs(value)), tf.float32) for value in given]
    # The constant is for gradients without elements, whose maximum is -inf.
    return tf.reduce_max(tf.stack([tf.constant(0.0), *maxima]))


def _summed(gradient: Gradient) -> Tensor:
    """The values of a gradient; in a sparse one, values with the same index are added up."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, places = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
