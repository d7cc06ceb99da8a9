"""TensorPlay."""

from functools import partial

import rules
import tensorplay
import torch_like
from replay import COMMON, INTERVAL, SCALE, Mode

from gradscaler import DynamicScale
from gradscaler.tensorplay import GradScaler


def ours(policy):
    return torch_like.Driver(tensorplay, policy, lambda policy: GradScaler(policy=policy))


def native(policy):
    def make(policy):
        return tensorplay.amp.GradScaler(
            "cpu", init_scale=policy.init_scale, growth_interval=policy.growth_interval
        )

    return torch_like.Driver(tensorplay, policy, make)


PRESET = DynamicScale.tensorplay(SCALE, growth_interval=INTERVAL)
MODES = [
    Mode("gradscaler.tensorplay", ours, PRESET),
    Mode("gradscaler.tensorplay, common rule", ours, COMMON),
    Mode(
        "tensorplay",
        native,
        PRESET,
        rules.tensorplay,
        {
            "interval lowered": rules.FREEZES,
            "overflow at every scale": rules.SINKS,
            "towards the largest": rules.TO_INF,
        },
    ),
]


def train(make, policy, steps, network):
    return torch_like.train(tensorplay, make(policy).scaler, steps, network)


TRAIN = {"gradscaler.tensorplay": partial(train, ours), "tensorplay": partial(train, native)}
