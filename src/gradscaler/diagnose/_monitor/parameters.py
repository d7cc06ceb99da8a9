"""What a monitor reads of parameters and of optimizers' states, beside their gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.arrays import dtype_name, local, strided_sample, to_numpy
from gradscaler.diagnose._gradients.reading import inspect
from gradscaler.outcome import NonfiniteGradient

_MOST_ELEMENTS = 2**12  # of one parameter
_IN_16_BITS = "float16", "bfloat16"


class Parameters:
    """The parameters of a training, and what is wrong with them, where no optimizer is known."""

    def nonfinite(self) -> tuple[NonfiniteGradient, ...]:
        """The parameters that hold an Inf or a NaN."""
        raise NotImplementedError

    def nonfinite_state(self) -> str | None:
        """The first state of an optimizer that holds an Inf or a NaN, by name."""
        return None

    def norms(self) -> tuple[float, float] | None:
        """The norm of the parameters before the first step, and now; None if it is not known."""
        return None

    @property
    def lost_eps(self) -> float | None:
        """The eps of an optimizer that is 0 in its parameters' float16, or None."""
        return None


class OptimizersParameters(Parameters):
    """The parameters of a model's optimizers, which an eager scaler steps.

    Attributes:
        optimizers: those of the latest iteration that ended.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.optimizers: list[Any] = []
        self._before: dict[int, list[Any]] = {}  # norms, by optimizer; may be on a device
        self._unmoved: dict[int, UnmovedWeights] = {}  # by optimizer

    def named(self, optimizer: Any, place: int = 0) -> dict[str, Any]:
        """The parameters of an iteration's first, second... optimizer, by name or by place."""
        groups = getattr(optimizer, "param_groups", None) or getattr(
            optimizer, "_param_groups", None
        )
        if not groups or not isinstance(groups[0], dict):  # Paddle's without groups
            groups = [{"params": optimizer._parameter_list or ()}]
        names = {}
        if self._model is not None:
            names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        which = f"optimizer {place}, " if place else ""
        return {
            names.get(id(parameter), f"{which}group {g}, parameter {p}"): parameter
            for g, group in enumerate(groups)
            for p, parameter in enumerate(group["params"])
        }

    def nonfinite(self) -> tuple[NonfiniteGradient, ...]:
        """The parameters of the latest optimizers, and of the model, that are not finite.

        In a buffer, or in what is not trained, NaN counts but Inf does not: a mask may hold it.
        """
        each = (self.named(optimizer, o) for o, optimizer in enumerate(self.optimizers))
        trained = dict(chain.from_iterable(named.items() for named in each))
        if self._model is None:
            return inspect(trained)
        buffers: Any = getattr(self._model, "named_buffers", tuple)()
        rest = dict(chain(self._model.named_parameters(), buffers))
        found = inspect({name: array for name, array in rest.items() if name not in trained})
        return inspect(trained) + tuple(array for array in found if array.num_nan)

    def nonfinite_state(self) -> str | None:
        """The first state of the latest optimizers that is not finite: ``"exp_avg of fc.bias"``."""
        for place, optimizer in enumerate(self.optimizers):
            names = {id(p): name for name, p in self.named(optimizer, place).items()}
            for parameter, values in _items(getattr(optimizer, "state", None)):
                for key, value in _items(values):
                    with suppress(Exception):  # no tensor, or one without numbers
                        if not np.isfinite(to_numpy(local(value))).all():
                            name = names.get(id(parameter))
                            return f"{key} of {name}" if name else str(key)
        return None

    def note_norms(self, optimizer: Any) -> None:
        """Note the norms of an optimizer's parameters before its first step, once."""
        if id(optimizer) not in self._before:
            self._before[id(optimizer)] = self._norms_of(optimizer)

    def norms(self) -> tuple[float, float] | None:
        """The norm of the parameters before the first step, and now; None if it is not known."""
        now = [norm for optimizer in self.optimizers for norm in self._norms_of(optimizer)]
        before = [self._before.get(id(optimizer)) for optimizer in self.optimizers]
        if None in before or not now:
            return None
        first = [norm for norms in before for norm in norms or ()]
        return math.hypot(*map(float, first)), math.hypot(*map(float, now))

    def _norms_of(self, optimizer: Any) -> list[Any]:
        """The norm of each parameter, which may be on a device; empty if they have none."""
        with suppress(Exception):
            return [local(p).detach().norm() for p in self.named(optimizer).values()]
        return []

    def unmoved(self, optimizer: Any, named: Mapping[str, Any]) -> float | None:
        """The share of an optimizer's elements that have not moved since the sample before."""
        return self._unmoved.setdefault(id(optimizer), UnmovedWeights()).share(named, optimizer)

    @property
    def lost_eps(self) -> float | None:
        """The eps of one of the latest optimizers that is 0 in its parameters' float16, or None."""
        for optimizer in self.optimizers:
            for group in getattr(optimizer, "param_groups", ()):
                eps = group.get("eps")
                if not isinstance(eps, float) or not eps or np.float16(eps):
                    continue
                if any(dtype_name(p) == "float16" for p in group["params"]):
                    return eps
        return None


class UnmovedWeights:
    """Compares parameters of 16 bits at one sample with what they were at the sample before.

    An update of less than half of the distance to the next number is lost in rounding, at each step
    anew. Elements without a gradient do not count.
    """

    def __init__(self) -> None:
        self._before: dict[str, NDArray[Any]] = {}

    def share(self, parameters: Mapping[str, Any], optimizer: Any) -> float | None:
        """The share of their elements that have not moved since; None if it is not known."""
        before, self._before = self._before, {}
        rates = [group.get("lr") for group in getattr(optimizer, "param_groups", ())]
        if not any(rates):
            return None
        num_unmoved = num_seen = 0
        for name, parameter in parameters.items():
            if parameter.grad is None or dtype_name(parameter) not in _IN_16_BITS:
                continue
            now = self._before[name] = _part(parameter)
            if name in before and before[name].size == now.size:
                has_gradient = _part(parameter.grad) != 0
                num_seen += int(has_gradient.sum())
                num_unmoved += int((has_gradient & (now == before[name])).sum())
        return num_unmoved / num_seen if num_seen else None


@dataclass
class _Mark:
    """One parameter of an optimizer, and its gradient before a backward pass."""

    parameter: Any  # a weak reference
    gradient: Any = None  # a weak reference, if there is one
    version: int = 0
    largest: Any = None  # its largest magnitude, which may be on a device


class UsedGradients:
    """Sees whether a backward pass adds to gradients that a step has used.

    It compares one gradient of each optimizer before the backward pass and after. PyTorch counts
    the changes of a tensor: a backward pass that adds to a gradient is one,
    ``zero_grad(set_to_none=False)`` another, and ``zero_grad()`` leaves no tensor. Elsewhere there
    is no such count, and nothing is found. It waits for no device.
    """

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}

    def before_backward(self) -> None:
        """Note the gradients that steps have left."""
        for mark in self._marks.values():
            parameter = mark.parameter()
            gradient = None if parameter is None else parameter.grad
            mark.gradient = None
            if gradient is None or gradient.layout != parameter.layout:  # it is sparse
                continue
            mark.gradient = weakref.ref(gradient)
            mark.version, mark.largest = gradient._version, gradient.detach().abs().amax()

    def before_step(self, optimizer: Any) -> Any:
        """What the gradient held if a backward pass has only added to it, else None.

        That is its largest magnitude: where it is 0, someone set it to 0.
        """
        mark = self._marks.pop(id(optimizer), None)
        gradient = None if mark is None or mark.gradient is None else mark.gradient()
        groups = getattr(optimizer, "param_groups", ())
        with suppress(Exception):
            used = (p for g in groups for p in g["params"] if hasattr(p.grad, "_version"))
            if (parameter := next(used, None)) is not None and parameter.grad.numel():
                self._marks[id(optimizer)] = _Mark(weakref.ref(parameter))
        if mark is None or gradient is None or mark.parameter().grad is not gradient:
            return None
        return mark.largest if gradient._version == mark.version + 1 else None


def has_stepped(optimizer: Any) -> bool:
    """Whether an optimizer's state says that it has stepped before; False if it does not say."""
    for _, values in _items(getattr(optimizer, "state", None)):
        kept = dict(_items(values))
        with suppress(Exception):  # a step may be anything
            return float(kept["step"]) > 0 if "step" in kept else "momentum_buffer" in kept
    return False


def _items(mapping: Any) -> Iterable[tuple[Any, Any]]:
    return mapping.items() if isinstance(mapping, Mapping) else ()


def _part(array: Any) -> NDArray[Any]:
    return np.array(to_numpy(strided_sample(array, _MOST_ELEMENTS)))
