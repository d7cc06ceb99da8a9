"""The time of a training step with gradscaler.tf_keras.LossScaleOptimizer and with tf-keras' own.

    python benchmarks/tf_keras_optimizer.py

Both wrap the same optimizer of the same model, and take turns to train on the same batch. The step
is Keras' own ``train_step`` as a TensorFlow graph, with an optimizer of either family. Batches are
small, so the optimizer is a large part of the step.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import paired

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # or it warns about missing GPUs

import tensorflow as tf
import tf_keras

import gradscaler.tf_keras

BATCH = 16
CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A multilayer perceptron to train.

    Attributes:
        name: its name in the table.
        width: units in a layer, and values in an input.
        layers: the number of layers.
        calls: the number of steps in one measurement.
    """

    name: str
    width: int
    layers: int
    calls: int


WORKLOADS = [
    Workload("4 layers of 1024", width=1024, layers=4, calls=2),
    Workload("50 layers of 64", width=64, layers=50, calls=5),
    Workload("one layer of 16", width=16, layers=1, calls=50),
]


def compare(workload: Workload, family: Any, repetitions: int) -> paired.Comparison:
    """Time a step under both wrappers; raise an error if they end with different weights."""

    def model(wrapper: Any) -> Any:
        tf_keras.utils.set_random_seed(0)
        width = workload.width
        hidden = [tf_keras.layers.Dense(width, "relu") for _ in range(workload.layers)]
        net = tf_keras.Sequential(
            [tf_keras.Input((width,)), *hidden, tf_keras.layers.Dense(CLASSES)]
        )
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(wrapper(family.Adam(1e-4)), loss)
        return net

    rng = np.random.default_rng(0)
    images = rng.random((BATCH, workload.width)).astype("float32")
    batch = (tf.constant(images), tf.constant(rng.integers(CLASSES, size=BATCH)))
    models = {
        "ours": model(gradscaler.tf_keras.LossScaleOptimizer),
        "native": model(tf_keras.mixed_precision.LossScaleOptimizer),
    }
    steps = {name: partial(tf.function(net.train_step), batch) for name, net in models.items()}
    seconds = paired.interleave(steps, lambda: None, repetitions, workload.calls)
    weights = [net.get_weights() for net in models.values()]
    if not all(map(np.array_equal, *weights)):
        raise RuntimeError(f"{workload.name}: the wrappers end with different weights")
    name = "legacy" if family is tf_keras.optimizers.legacy else "new"
    return paired.Comparison(f"{name} Adam: {workload.name}", **seconds)


def main() -> None:
    """Run every workload with both families; print a table, and write JSON if asked."""
    arguments = paired.parse(
        argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    )
    comparisons = [
        compare(workload, family, arguments.repetitions)
        for family in (tf_keras.optimizers, tf_keras.optimizers.legacy)
        for workload in WORKLOADS
    ]
    setting = {"tensorflow": tf.__version__, "tf-keras": tf_keras.__version__}
    paired.report(arguments, setting, comparisons)


if __name__ == "__main__":
    main()
