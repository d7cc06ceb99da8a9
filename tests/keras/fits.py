"""Trainings by ``fit``, of which some batches are NaN; prints a digest of each, and of its file.

python fits.py FOLDER
"""

import hashlib
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np

INPUTS = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
TARGETS = INPUTS.sum(1, keepdims=True)


def trained(policy, inputs, epochs):
    """A model, trained in batches of 16 without a new order."""
    keras.utils.set_random_seed(0)
    layers = keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((8,)), *layers])
    for layer in model.layers:
        layer.dtype_policy = policy
    model.compile(keras.optimizers.Adam(), "mse")
    if policy == "mixed_float16":
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
    model.fit(inputs, TARGETS, 16, epochs, verbose=0, shuffle=False, validation_split=0.25)
    return model


def digest(model, path):
    model.save(path)
    with zipfile.ZipFile(path) as file:
        config = file.read("config.json")
    numbers = [*model.variables, *model.optimizer.variables]
    data = b"".join(keras.ops.convert_to_numpy(each).tobytes() for each in numbers)
    return hashlib.sha256(data + config.partition(b'"build_config"')[0]).hexdigest()[:16]


if __name__ == "__main__":
    with_nan = INPUTS.copy()
    with_nan[40] = np.nan  # in the third batch
    for policy in ("float32", "mixed_float16"):
        for inputs in (INPUTS, with_nan):
            path = Path(sys.argv[1], "model.keras")
            print(policy, digest(trained(policy, inputs, epochs=2), path))
