"""``Monitor.record(replay=)`` of Keras on JAX, as of JAX: a function and its arguments."""

from pathlib import Path

import keras
import numpy as np
import pytest

from gradscaler.diagnose import Monitor
from gradscaler.keras import LossScaleOptimizer

BACKEND = keras.backend.backend()
INPUTS = np.ones((8, 4), np.float32)


def log_of_0(inputs):
    return keras.ops.log(inputs * 0)


LINE = f"{Path(__file__).relative_to(Path.cwd())}:{log_of_0.__code__.co_firstlineno + 1}"


@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
def test_the_verdict_names_the_operation_and_the_user_s_line():
    import jax

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.add(keras.layers.Lambda(log_of_0))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
    monitor = Monitor(optimizer, model, on_stuck="continue")

    def loss_of(trainable, others):
        return (model.stateless_call(trainable, others, INPUTS)[0] ** 2).mean()

    def replay():
        variables = model.trainable_variables, model.non_trainable_variables
        return loss_of, *([variable.value for variable in each] for each in variables)

    loss = jax.jit(loss_of)(*replay()[1:])
    for _ in range(20):
        monitor.record(finite=False, loss=loss, replay=replay)
    assert f"makes 24 Inf in float32, by log at {LINE}" in monitor.verdict.text
