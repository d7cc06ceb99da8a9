"""Paddle."""

import contextlib
import dataclasses
import io
import sys
import warnings
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import paddle

from gradscaler import DynamicScale
from gradscaler.paddle import GradScaler
from tests.conformance import replay, rules
from tests.conformance.replay import INTERVAL, RATE, SCALE, Mode


def on_a_gpu():
    """Paddle's own scaler asks two functions where it is, and switches itself off on the CPU."""
    module = sys.modules["paddle.amp.grad_scaler"]
    gpu = SimpleNamespace(_expected_place=SimpleNamespace(is_gpu_place=lambda: True))
    return mock.patch.multiple(
        module,
        _dygraph_tracer=lambda: gpu,
        amp_global_state=lambda: SimpleNamespace(amp_dtype="float16"),
    )


class Driver:
    """One weight for each optimizer, whose gradient is 1 or inf."""

    def __init__(self, make, policy):
        self.make, self.policy = make, policy
        self.scaler = make(policy)
        self.weights = [paddle.create_parameter([1], "float32") for _ in range(3)]
        self.optimizers = [paddle.optimizer.SGD(0.0, parameters=[w]) for w in self.weights]

    @on_a_gpu()
    def step(self, overflows):
        used = self.optimizers[: len(overflows)]
        for weight, optimizer, overflow in zip(self.weights, used, overflows, strict=False):
            optimizer.clear_grad()
            self.scaler.scale((weight * (float("inf") if overflow else 1.0)).sum()).backward()
        for optimizer in used:
            self.scaler.unscale_(optimizer)
        for optimizer in used:
            self.scaler.step(optimizer)
        update(self.scaler)

    def set_scale(self, scale):
        self.scaler.set_init_loss_scaling(scale)

    def set_interval(self, interval):
        self.policy = dataclasses.replace(self.policy, growth_interval=interval)
        self.scaler.set_incr_every_n_steps(interval)

    def resume(self):
        saved = self.scaler.state_dict()
        self.scaler = self.make(self.policy)
        self.scaler.load_state_dict(saved)

    def state(self):
        saved = self.scaler.state_dict()
        return float(saved["scale"].item()), saved["incr_count"], saved["decr_count"]


def update(scaler):
    """Paddle's own prints, and calls float() on an array of shape [1] to do so."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
        scaler.update()


def ours(policy):
    return GradScaler(policy=policy)


@on_a_gpu()
def native(policy):
    return paddle.amp.GradScaler(
        init_loss_scaling=policy.init_scale,
        incr_every_n_steps=policy.growth_interval,
        decr_every_n_nan_or_inf=policy.hysteresis,
    )


PRESET = DynamicScale.paddle(SCALE, incr_every_n_steps=INTERVAL)
MODES = [
    *replay.ours("gradscaler.paddle", partial(Driver, ours), PRESET),
    Mode(
        "paddle",
        partial(Driver, native),
        PRESET,
        rules.paddle,
        {
            "interval lowered": rules.FREEZES,
            "several optimizers": "the flag of one optimizer decides for all",
            "towards the largest": rules.TO_INF,
        },
    ),
]


@on_a_gpu()
def train(make, policy, steps, network):
    scaler = make(policy)
    hidden, output, inputs, targets = map(paddle.to_tensor, network)
    hidden.stop_gradient = output.stop_gradient = False
    optimizer = paddle.optimizer.SGD(RATE, parameters=[hidden, output])
    scales = []
    for _ in range(steps):
        optimizer.clear_grad()
        loss = ((paddle.tanh(inputs @ hidden) @ output - targets) ** 2).mean()
        scaler.scale(loss).backward()
        for weight in (hidden, output):
            with np.errstate(over="ignore"):
                weight.grad.set_value(weight.grad.numpy().astype(np.float16).astype(np.float32))
        scaler.step(optimizer)
        update(scaler)
        scales.append(float(scaler.state_dict()["scale"].item()))
    return scales


TRAIN = {"gradscaler.paddle": partial(train, ours), "paddle": partial(train, native)}
