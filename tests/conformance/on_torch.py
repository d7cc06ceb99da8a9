"""PyTorch."""

from functools import partial

import rules
import torch
import torch_like
from replay import COMMON, INTERVAL, SCALE, Mode

from gradscaler import DynamicScale
from gradscaler.torch import GradScaler


def ours(policy):
    return torch_like.Driver(torch, policy, lambda policy: GradScaler(policy=policy))


def native(policy):
    def make(policy):
        return torch.amp.GradScaler(
            "cpu", init_scale=policy.init_scale, growth_interval=policy.growth_interval
        )

    return torch_like.Driver(torch, policy, make)


PRESET = DynamicScale.torch(SCALE, growth_interval=INTERVAL)
MODES = [
    Mode("gradscaler.torch", ours, PRESET),
    Mode("gradscaler.torch, common rule", ours, COMMON),
    Mode(
        "torch",
        native,
        PRESET,
        rules.torch,
        {"interval lowered": rules.FREEZES, "overflow at every scale": rules.SINKS},
    ),
]


def train(make, policy, steps, network):
    return torch_like.train(torch, make(policy).scaler, steps, network)


TRAIN = {"gradscaler.torch": partial(train, ours), "torch": partial(train, native)}
