"""Keras on JAX over four devices trains as on one, whichever device's data or weights overflow."""

import functools

import pytest

from tests.support import keras_like  # makes the devices

if keras_like.BACKEND != "jax":
    pytest.skip("of JAX", allow_module_level=True)

import jax
import keras
import numpy as np
from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel

from gradscaler.keras import LossScaleOptimizer

DEVICES = 4
STEPS = 6
INPUTS = np.random.default_rng(0).standard_normal((STEPS * 8, 4)).astype("float32")
LABELS = np.ones((STEPS * 8, 1), "float32")


def data_parallel():
    return DataParallel(devices=keras.distribution.list_devices("cpu"), auto_shard_dataset=False)


def model_parallel():
    mesh = DeviceMesh((2, 2), ["batch", "model"], keras.distribution.list_devices("cpu"))
    layouts = LayoutMap(mesh)
    layouts[".*dense.*kernel"] = (None, "model")
    return ModelParallel(layout_map=layouts, batch_dim_name="batch", auto_shard_dataset=False)


class AfterEachStep(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.model.jax_state_sync()
        optimizer = self.model.optimizer
        counts = int(optimizer.dynamic_counter), int(optimizer.iterations)
        self.seen.append((float(optimizer.loss_scale), *counts))


def replicas_are_equal(value):
    parts = {}
    for shard in value.addressable_shards:
        parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    return all(len(replicas) == 1 for replicas in parts.values())


def trained(distribution, bad):
    """The scale and the counters after each step; all weights and variables at the end."""
    inputs = INPUTS.copy()
    inputs[8 + 2 * bad] = inputs[24 + 2 * bad] = np.inf  # of the second step, and of the fourth
    if distribution is not None:
        keras.distribution.set_distribution(distribution)
    try:
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense
        model = keras.Sequential([keras.Input((4,)), dense(8, "tanh"), dense(2)])
        adam = keras.optimizers.Adam(0.1, global_clipnorm=0.1)
        optimizer = LossScaleOptimizer(adam, initial_scale=1024.0, dynamic_growth_steps=2)
        model.compile(optimizer, "mse")
        after = AfterEachStep()
        arguments = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": [after]}
        model.fit(inputs, np.tile(LABELS, 2), **arguments)
        values = [v.value for v in (*model.trainable_variables, *optimizer.variables)]
        assert all(map(replicas_are_equal, values))
        shards = [value.sharding.shard_shape(value.shape) for value in values]
        placed = {len(value.sharding.device_set) for value in values}
        return after.seen, [np.array(value) for value in values], shards, placed
    finally:
        keras.distribution.set_distribution(None)


@functools.cache
def trained_on_one_device():
    expected = trained(None, 0)
    assert [scale for scale, *_ in expected[0]] == [1024.0, 512.0, 512.0, 256.0, 256.0, 512.0]
    return expected


@pytest.mark.parametrize("bad", range(DEVICES))
@pytest.mark.parametrize("distribution", [data_parallel, model_parallel])
def test_devices_act_as_one(distribution, bad):
    assert len(jax.devices()) == DEVICES
    expected, values, whole, _ = trained_on_one_device()
    seen, found, shards, placed = trained(distribution(), bad)
    assert seen == expected
    assert placed == {DEVICES}
    assert (shards == whole) == (distribution is data_parallel)
    for value, other in zip(found, values, strict=True):
        assert np.allclose(value, other, rtol=1e-4, atol=1e-6)
