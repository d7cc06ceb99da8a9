"""Keras 2."""

import atexit
import dataclasses
import shutil
import tempfile
from functools import partial

import numpy as np
import tensorflow as tf
import tf_keras

from gradscaler import DynamicScale
from gradscaler.tf_keras import LossScaleOptimizer
from tests.conformance import replay
from tests.conformance.replay import INTERVAL, RATE, SCALE, Mode, by_policy

FOLDER = tempfile.mkdtemp()  # checkpoints are read again when there are more variables
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
FAMILIES = {"new family": tf_keras.optimizers.SGD, "legacy family": tf_keras.optimizers.legacy.SGD}


class Driver:
    """One weight, to which a gradient of the unscaled loss is applied: 1 or inf."""

    def __init__(self, make, compiled, policy):
        self.make, self.compiled, self.policy = make, compiled, policy
        self.start()

    def start(self):
        self.weight = tf.Variable(1.0)
        self.optimizer = optimizer = self.make(self.policy)
        if hasattr(optimizer.inner_optimizer, "_create_all_weights"):  # before they are saved
            optimizer.inner_optimizer._create_all_weights([self.weight])
        optimizer.get_scaled_loss(tf.constant(1.0))  # or it warns that nobody did
        optimizer.get_unscaled_gradients([])

        def apply(grad):
            optimizer.apply_gradients([(grad, self.weight)])

        self.apply = tf.function(apply) if self.compiled else apply
        self.weights = {name: w for (name, _), w in optimizer._loss_scale._weights.items()}

    def step(self, overflows):
        self.apply(tf.constant(np.float32("inf" if any(overflows) else 1)))

    def set_scale(self, scale):
        self.weights["current_loss_scale"].assign(scale)

    def set_interval(self, interval):
        self.policy = dataclasses.replace(self.policy, growth_interval=interval)
        self.resume()  # the interval is the constructor's

    def resume(self):
        path = tf.train.Checkpoint(optimizer=self.optimizer).write(
            f"{tempfile.mkdtemp(dir=FOLDER)}/state"
        )
        self.start()
        tf.train.Checkpoint(optimizer=self.optimizer).read(path).expect_partial()

    def state(self):
        counts = (self.weights.get(name) for name in ("good_steps", "bad_steps"))
        good_steps, bad_steps = (None if count is None else int(count) for count in counts)
        return float(self.weights["current_loss_scale"]), good_steps, bad_steps


def ours(family, policy):
    return LossScaleOptimizer(family(RATE), policy=policy)


def native(family, policy):
    return tf_keras.mixed_precision.LossScaleOptimizer(
        family(RATE),
        initial_scale=policy.init_scale,
        dynamic_growth_steps=policy.growth_interval,
    )


PRESET = DynamicScale.tf_keras(SCALE, INTERVAL)
WAYS = [
    (f"{name}, {way}", family, compiled)
    for name, family in FAMILIES.items()
    for way, compiled in {"eager": False, "tf.function": True}.items()
]
MODES = [
    *(
        mode
        for name, family, way in WAYS
        for mode in replay.ours(
            f"gradscaler.tf_keras, {name}", partial(Driver, partial(ours, family), way), PRESET
        )
    ),
    *(
        Mode(f"tf_keras, {name}", partial(Driver, partial(native, family), way), PRESET, by_policy)
        for name, family, way in WAYS
    ),
]


def train(make, policy, steps, network):
    weights = [tf.Variable(array) for array in network[:2]]
    inputs, targets = map(tf.constant, network[2:])
    optimizer = make(policy)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            error = tf.tanh(inputs @ weights[0]) @ weights[1] - targets
            loss = optimizer.get_scaled_loss(tf.reduce_mean(error**2))
        grads = [tf.cast(tf.cast(g, "float16"), "float32") for g in tape.gradient(loss, weights)]
        grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(zip(grads, weights, strict=True))

    scales = []
    for _ in range(steps):
        step()
        scales.append(float(optimizer.loss_scale))
    return scales


TRAIN = {
    f"{owner}.tf_keras, {name}".replace("native.", ""): partial(train, partial(make, family))
    for owner, make in {"gradscaler": ours, "native": native}.items()
    for name, family in FAMILIES.items()
}
