"""Recorded traces, replayed by every adapter and by every framework's own scaler.

A trace is a list of events. ``"..!"`` is a step of three optimizers, where the last one overflows;
``"scale 8.0"`` sets the scale by hand, ``"interval 2"`` the growth interval; ``"resume"`` saves the
state and goes on from it in a new scaler. After each event the scale and the counts are compared
with the host's policy, bit for bit.

    python -m tests.conformance.replay torch    # prints a JSON line for each mode and trace
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradscaler import DynamicScale, ScaleState

RECORDED = json.loads((Path(__file__).parent / "traces.json").read_text())
TRACES: dict[str, list[str]] = RECORDED["traces"]

SCALE, INTERVAL = 2.0**10, 4  # for every preset
COMMON = DynamicScale(
    init_scale=SCALE, growth_interval=3, hysteresis=2, min_scale=2.0**-4, max_scale=2.0**126
)
"""A rule that none of the frameworks has, for all adapters that take a policy."""

State = tuple[float, int, int | None]  # scale, finite steps, non-finite steps if they are kept
Update = Callable[[DynamicScale, ScaleState, list[bool]], ScaleState]


class Driver(Protocol):
    """A scaler, ours or a framework's own, that can play a trace."""

    def step(self, overflows: list[bool]) -> None:
        """One step of as many optimizers; a driver of only one overflows if any of them does."""

    def set_scale(self, scale: float) -> None:
        """Set the scale by hand."""

    def set_interval(self, interval: int) -> None:
        """Set the growth interval."""

    def resume(self) -> None:
        """Save the state, and go on from it in a new scaler."""

    def state(self) -> State:
        """The scale and the counts."""


class Mode(NamedTuple):
    """A way to run a scaler.

    Attributes:
        name: for the table.
        make: makes a driver with a policy.
        policy: the framework's preset, or the common one.
        rule: how a framework's own scaler moves. None for ours, which move as the policy does.
        differs: for a framework's own, by trace: how it differs from the policy. It must differ
            there, and nowhere else.
        late: how many steps after its interval the scale grows: 1 for flax.
    """

    name: str
    make: Callable[[DynamicScale], Driver]
    policy: DynamicScale
    rule: Update | None = None
    differs: dict[str, str] = {}  # noqa: RUF012 # never changed
    late: int = 0


def ours(name: str, make: Callable[[DynamicScale], Driver], preset: DynamicScale) -> list[Mode]:
    """Modes of one of our scalers: by its framework's preset, and by the common rule."""
    return [Mode(name, make, preset), Mode(f"{name}, common rule", make, COMMON)]


def by_policy(policy: DynamicScale, state: ScaleState, overflows: list[bool]) -> ScaleState:
    """The next state by the host's policy, for which an overflow of any optimizer counts."""
    return policy.update(state, any(overflows))


def replay(mode: Mode, trace: str) -> str | None:
    """How a scaler differs from the host's policy on a trace; None if it does not, in any bit.

    Raises:
        AssertionError: it differs, and not as it is known to.
    """
    events = TRACES[trace]
    states = list(on_driver(mode.make(mode.policy), events))
    first = first_difference(on_host(mode, events, by_policy), states)
    if mode.rule is None:
        assert first is None, f"{mode.name}, {trace}: {first}"
        return None
    unknown = first_difference(on_host(mode, events, mode.rule), states)
    assert unknown is None, f"{mode.name}, {trace}: not by its known rule: {unknown}"
    if first is None:
        assert trace not in mode.differs, f"{mode.name}, {trace}: no longer differs"
        return None
    assert trace in mode.differs, f"{mode.name}, {trace}: {first}"
    return mode.differs[trace]


def first_difference(expected: Iterator[State], states: list[State]) -> str | None:
    """The first event after which two runs differ; counts that are None are ignored."""
    for number, (wanted, state) in enumerate(zip(expected, states, strict=True)):
        known = tuple(w if s is not None else None for w, s in zip(wanted, state, strict=True))
        if state != known:
            return f"{state} in place of {wanted} after event {number}"
    return None


def on_host(mode: Mode, events: list[str], update: Update) -> Iterator[State]:
    """The states that a rule goes through."""
    policy, state = mode.policy, mode.policy.init()
    for event in events:
        word, _, value = event.partition(" ")
        if word == "scale":
            state = state._replace(scale=np.float32(value))
        elif word == "interval":
            policy = dataclasses.replace(policy, growth_interval=int(value) + mode.late)
        elif word != "resume":
            with np.errstate(over="ignore"):
                state = update(policy, state, overflows_of(event))
        yield float(state.scale), int(state.finite_steps), int(state.nonfinite_steps)


def on_driver(driver: Driver, events: list[str]) -> Iterator[State]:
    """The states that a scaler goes through."""
    for event in events:
        word, _, value = event.partition(" ")
        if word == "scale":
            driver.set_scale(float(value))
        elif word == "interval":
            driver.set_interval(int(value))
        elif word == "resume":
            driver.resume()
        else:
            driver.step(overflows_of(event))
        yield driver.state()


def overflows_of(event: str) -> list[bool]:
    """Which optimizers' gradients overflow in a step."""
    return [flag == "!" for flag in event]


# Real gradients.

Train = Callable[[DynamicScale, int, "Network"], list[float]]


class Network(NamedTuple):
    """``tanh(inputs @ hidden) @ output``, to be fitted to targets: float32 arrays."""

    hidden: Any
    output: Any
    inputs: Any
    targets: Any


def network() -> Network:
    """The same numbers everywhere: the legacy generator's, which never change."""
    random = np.random.RandomState(0)
    shapes = (16, 32), (32, 1), (64, 16), (64, 1)
    hidden, output, inputs, targets = (random.randn(*shape).astype(np.float32) for shape in shapes)
    return Network(hidden / 4, output / 6, inputs, targets)


TRAINING = DynamicScale(init_scale=2.0**24, growth_interval=6)
STEPS = 40
RATE = 0.05
SCALES: list[float] = RECORDED["scales"]
"""The scale after each step of plain SGD on the mean square, gradients rounded to float16."""


# The command.


def results(framework: str) -> Iterator[dict[str, str]]:
    """A row for each mode and trace."""
    module = importlib.import_module(f"tests.conformance.on_{framework}")
    for mode in module.MODES:
        for trace in TRACES:
            try:
                result = replay(mode, trace) or "equal"
            except AssertionError as error:
                result = f"WRONG: {error}"
            yield {"mode": mode.name, "trace": trace, "result": result}
    for name, train in module.TRAIN.items():
        equal = train(TRAINING, STEPS, network()) == SCALES
        yield {"mode": name, "trace": "real gradients", "result": "equal" if equal else "WRONG"}


if __name__ == "__main__":
    for row in results(sys.argv[1]):
        print(json.dumps(row), flush=True)
