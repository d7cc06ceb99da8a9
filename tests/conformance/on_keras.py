"""Keras 3, on the backend that KERAS_BACKEND names."""

import dataclasses
from functools import partial

import keras
import numpy as np

from gradscaler import DynamicScale
from gradscaler.keras import LossScaleOptimizer
from tests.conformance import replay, rules
from tests.conformance.replay import INTERVAL, RATE, SCALE, Mode

BACKEND = keras.backend.backend()


class Driver:
    """One weight, to which gradients of the scaled loss are applied: the scale, or inf."""

    def __init__(self, make, compiled, policy):
        self.make, self.compiled, self.policy = make, compiled, policy
        self.start()

    def start(self):
        self.weight = keras.Variable(1.0)
        self.optimizer = self.make(self.policy)
        self.optimizer.build([self.weight])
        self.apply = applied(self.optimizer, [self.weight], self.compiled)

    def step(self, overflows):
        grad = keras.ops.multiply(
            keras.ops.convert_to_tensor(self.optimizer.dynamic_scale),
            np.float32("inf" if any(overflows) else 1),
        )
        self.apply([grad])

    def set_scale(self, scale):
        self.optimizer.dynamic_scale.assign(scale)

    def set_interval(self, interval):
        self.policy = dataclasses.replace(self.policy, growth_interval=interval)
        self.optimizer.dynamic_growth_steps = interval
        self.apply = applied(self.optimizer, [self.weight], self.compiled)  # compiled again

    def resume(self):
        saved = {}
        self.optimizer.save_own_variables(saved)
        self.start()
        self.optimizer.load_own_variables(saved)

    def state(self):
        counters = [self.optimizer.step_counter]
        if hasattr(self.optimizer, "nonfinite_counter"):
            counters.append(self.optimizer.nonfinite_counter)
        counts = [int(keras.ops.convert_to_numpy(counter)) for counter in counters]
        scale = float(keras.ops.convert_to_numpy(self.optimizer.dynamic_scale))
        return scale, *counts, *[None] * (2 - len(counts))


def applied(optimizer, variables, compiled):
    """A function that applies gradients, as the backend compiles it."""
    if not compiled:
        return lambda grads: optimizer.apply(grads, variables)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(lambda grads: optimizer.apply(grads, variables), jit_compile=True)
    import jax

    step = jax.jit(optimizer.stateless_apply)

    def apply(grads):
        values, state = step(
            [v.value for v in optimizer.variables], grads, [v.value for v in variables]
        )
        for variable, value in zip(
            [*variables, *optimizer.variables], [*values, *state], strict=True
        ):
            variable.assign(value)

    return apply


def ours(policy):
    return LossScaleOptimizer(keras.optimizers.SGD(RATE), policy=policy)


def native(policy):
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(RATE), policy.init_scale, policy.growth_interval
    )


PRESET = DynamicScale.keras(SCALE, INTERVAL)
DIFFERS = {
    "interval lowered": rules.FREEZES,
    "overflow at every scale": rules.SINKS,
    "towards the largest": rules.TO_INF,
}
RULE = rules.keras if BACKEND == "torch" else rules.keras_by_xla
WAYS = {"eager": False, "compiled": True} if BACKEND != "torch" else {"eager": False}
if BACKEND == "jax":
    del WAYS["eager"]  # Keras' own leaks tracers; ours is in the list below
MODES = [
    mode
    for way, compiled in {"eager": False, **WAYS}.items()
    for mode in replay.ours(
        f"gradscaler.keras, {BACKEND}, {way}", partial(Driver, ours, compiled), PRESET
    )
]
MODES += [
    Mode(f"keras, {BACKEND}, {way}", partial(Driver, native, compiled), PRESET, RULE, DIFFERS)
    for way, compiled in WAYS.items()
]


def train(make, policy, steps, network):
    weights = [keras.Variable(array) for array in network[:2]]
    inputs, targets = (keras.ops.convert_to_tensor(array) for array in network[2:])
    optimizer = make(policy)
    optimizer.build(weights)
    apply = applied(optimizer, weights, BACKEND == "jax")

    def scaled_loss(hidden, output):
        error = keras.ops.tanh(inputs @ hidden) @ output - targets
        return optimizer.scale_loss(keras.ops.mean(error**2))

    scales = []
    for _ in range(steps):
        grads = gradients(scaled_loss, weights)
        with np.errstate(over="ignore"):
            grads = [np.asarray(grad).astype(np.float16).astype(np.float32) for grad in grads]
        apply([keras.ops.convert_to_tensor(grad) for grad in grads])
        scales.append(float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)))
    return scales


def gradients(function, variables):
    """The gradients of a function of the variables' values."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = function(*variables)
        return tape.gradient(value, [v.value for v in variables])
    if BACKEND == "jax":
        import jax

        values = [v.value for v in variables]
        return jax.grad(function, argnums=range(len(values)))(*values)
    import torch

    return torch.autograd.grad(function(*variables), [v.value for v in variables])


TRAIN = {
    f"gradscaler.keras, {BACKEND}": partial(train, ours),
    f"keras, {BACKEND}": partial(train, native),
}
