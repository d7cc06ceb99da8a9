"""The optimizers that a scaler steps, and the parameters that they hold or leave out."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.arrays import sample_of
from gradscaler.diagnose._gradients.reading import Tensor, largest
from gradscaler.diagnose._monitor.parameters import OptimizersParameters, groups_of
from gradscaler.diagnose._record.lines import Optimizers

_FEW_ELEMENTS = 16  # of a parameter; one that moves changes in these, too


class HeldParameters:
    """Notes which optimizers step, which never find a gradient, and what none of them holds.

    Attributes:
        names: the module of each optimizer's parameters, or the optimizer's class, by its id.
    """

    def __init__(self, model: Any, parameters: OptimizersParameters) -> None:
        self._model, self._parameters = model, parameters
        self._held: dict[int, set[int]] = {}  # ids of parameters, by optimizer
        self._idle: dict[int, int] = {}  # steps without a gradient, of those that made no other
        self.names: dict[int, str] = {}  # of optimizers, by their modules
        self._stepped: set[int] = set()
        self._parts: dict[str, NDArray[Any]] = {}  # at the sample before
        self._version: int | None = None  # of the model's first trained parameter

    def note(self, optimizer: object, has_gradients: bool) -> None:
        """Note a step of an optimizer."""
        key = id(optimizer)
        if key not in self._held:
            self._held[key] = {id(p) for p in self._parameters.named(optimizer).values()}
            self.names[key] = self._name_of(optimizer)
        if has_gradients:
            self._stepped.add(key)
            self._idle.pop(key, None)
        elif key not in self._stepped:
            self._idle[key] = self._idle.get(key, 0) + 1

    def has_moved(self) -> bool:
        """Whether PyTorch counted a change of the model since this was asked before."""
        parameters = () if self._model is None else self._model.parameters()
        first = next((p for p in parameters if getattr(p, "requires_grad", False)), None)
        before, self._version = self._version, getattr(first, "_version", None)
        return before is not None and self._version != before

    def at_sample(self, optimizer: object) -> Optimizers:
        """What is known before a sampled step of an optimizer."""
        self._held[id(optimizer)] = {id(p) for p in self._parameters.named(optimizer).values()}
        idle = {self.names[key]: count for key, count in self._idle.items()}
        rate, weights = max(rates_of(optimizer), default=None), self._weights_of(optimizer)
        return Optimizers(idle, self._outside(), rate, weights=weights)

    def holds_any(self, optimizer: object) -> bool:
        """Whether an optimizer holds a parameter of the model, if there is one."""
        if self._model is None:
            return True
        own = {id(p) for p in self._model.parameters()}
        return not own.isdisjoint(self._held.get(id(optimizer), own))

    def _weights_of(self, optimizer: object) -> tuple[float, float] | None:
        """The norm of an optimizer's matrices before its first step, and now.

        Biases may stay large while a weight decay shrinks the rest.
        """
        first, now = self._parameters.norms_of_matrices(optimizer)
        return (first, now) if math.isfinite(first) and math.isfinite(now) else None

    def _outside(self) -> tuple[str, ...]:
        """The parameters with a gradient that none holds, of modules that have not moved.

        What moves a module that none holds is an optimizer that is not seen, such as that of
        another scaler. In its steps the gradient of one parameter may be 0.
        Those before the first that is held are left out: a backbone may be meant to stay. If none
        is held, a wrong optimizer is stepped.
        """
        named = {} if self._model is None else dict(self._model.named_parameters())
        held = set[int]().union(*self._held.values())
        places = [place for place, p in enumerate(named.values()) if id(p) in held]
        first = places[0] if places else -1
        rest = {
            name: parameter
            for place, (name, parameter) in enumerate(named.items())
            if place > first and id(parameter) not in held and _is_used(parameter)
        }
        before = self._parts
        self._parts = {n: np.array(sample_of(p, _FEW_ELEMENTS)) for n, p in rest.items()}
        known = [name for name in rest if name in before]
        still = [name for name in known if np.array_equal(before[name], self._parts[name])]
        moved = {_module_of(name) for name in known if name not in still}
        return tuple(name for name in still if _module_of(name) not in moved)

    def _name_of(self, optimizer: object) -> str:
        """The name of the module that an optimizer's parameters have in common, or its class."""
        if self._model is None:
            return type(optimizer).__name__
        names = ["/" + name.replace(".", "/") for name in self._parameters.named(optimizer)]
        common = os.path.commonpath(names or ["/"])[1:].replace("/", ".")
        return common or type(optimizer).__name__


def rates_of(optimizer: object) -> list[float]:
    """The learning rates of an optimizer's groups, as far as they are on the host."""
    rates = [group.get("lr") for group in groups_of(optimizer)]
    return [float(rate) for rate in rates if isinstance(rate, (int, float))]


def is_made_to_move(optimizer: object) -> bool:
    """Whether an optimizer was made with a learning rate other than 0, as far as it tells."""
    defaults = getattr(optimizer, "defaults", None)
    rate = defaults.get("lr") if isinstance(defaults, Mapping) else None
    return isinstance(rate, (int, float)) and rate != 0


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _is_used(parameter: Tensor) -> bool:
    gradient = getattr(parameter, "grad", None)
    return gradient is not None and bool(largest(gradient) != 0)
