"""A driver of scalers with PyTorch's methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gradscaler import DynamicScale
from tests.conformance import replay
from tests.conformance.replay import INTERVAL, RATE, SCALE, Mode, Network, State, Train, Update


class Driver:
    """One weight for each optimizer, whose gradient is 1 or inf.

    Args:
        library: torch or tensorplay.
        policy: the rule.
        make: a new scaler with a rule.
    """

    def __init__(
        self, library: Any, policy: DynamicScale, make: Callable[[DynamicScale], Any]
    ) -> None:
        self.policy, self.make = policy, make
        self.scaler = make(policy)
        self.weights = [library.nn.Parameter(library.tensor([1.0])) for _ in range(3)]
        self.optimizers = [library.optim.SGD([weight], lr=0.0) for weight in self.weights]

    def step(self, overflows: list[bool]) -> None:
        for weight, optimizer, overflow in zip(
            self.weights, self.optimizers, overflows, strict=False
        ):
            optimizer.zero_grad()
            self.scaler.scale((weight * (float("inf") if overflow else 1.0)).sum()).backward()
        for optimizer in self.optimizers[: len(overflows)]:
            self.scaler.step(optimizer)
        self.scaler.update()

    def set_scale(self, scale: float) -> None:
        if self.scaler._scale is None:  # nothing was scaled yet
            self.scaler.scale(self.weights[0].sum())
        self.scaler.update(scale)

    def set_interval(self, interval: int) -> None:
        self.policy = dataclasses.replace(self.policy, growth_interval=interval)
        self.scaler.set_growth_interval(interval)

    def resume(self) -> None:
        saved = self.scaler.state_dict()
        self.scaler = self.make(self.policy)
        self.scaler.load_state_dict(saved)

    def state(self) -> State:
        saved = self.scaler.state_dict()
        return saved["scale"], saved["_growth_tracker"], saved.get("_nonfinite_steps")


def train(library: Any, scaler: Any, steps: int, network: Network) -> list[float]:
    """The scale after each step."""
    hidden, output = (library.nn.Parameter(library.tensor(w)) for w in network[:2])
    inputs, targets = (library.tensor(array) for array in network[2:])
    optimizer = library.optim.SGD([hidden, output], lr=RATE)
    scales = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ((library.tanh(inputs @ hidden) @ output - targets) ** 2).mean()
        scaler.scale(loss).backward()
        for weight in (hidden, output):
            weight.grad.copy_(weight.grad.to(library.float16).to(library.float32))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def modes_and_training(
    library: Any, ours: Any, rule: Update, differs: dict[str, str]
) -> tuple[list[Mode], dict[str, Train]]:
    """The modes of a library, ours and its own, and both with real gradients."""

    def make_ours(policy: DynamicScale) -> Any:
        return ours(policy=policy)

    def make_native(policy: DynamicScale) -> Any:
        numbers = {"init_scale": policy.init_scale, "growth_interval": policy.growth_interval}
        return library.amp.GradScaler("cpu", **numbers)

    def driver(make: Callable[[DynamicScale], Any]) -> Callable[[DynamicScale], Driver]:
        return lambda policy: Driver(library, policy, make)

    def trained(make: Callable[[DynamicScale], Any]) -> Train:
        return lambda policy, steps, network: train(library, make(policy), steps, network)

    name, preset = library.__name__, DynamicScale.torch(SCALE, growth_interval=INTERVAL)
    native = Mode(name, driver(make_native), preset, rule, differs)
    modes = [*replay.ours(f"gradscaler.{name}", driver(make_ours), preset), native]
    return modes, {f"gradscaler.{name}": trained(make_ours), name: trained(make_native)}
