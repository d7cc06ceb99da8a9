"""The parameters and the optimizer states that a monitor reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._findings.evidence import STATISTICS
from gradscaler.diagnose._gradients.arrays import (
    dtype_name,
    has_numbers,
    local,
    sample_of,
    to_numpy,
)
from gradscaler.diagnose._gradients.reading import Tensor, inspect, read
from gradscaler.diagnose._record.thresholds import FEW_MOVES
from gradscaler.outcome import NonfiniteGradient

_IN_16_BITS = "float16", "bfloat16"
_EPS = "eps", "_epsilon", "epsilon"  # of an optimizer of MindSpore, Paddle and Keras
# Optimizers whose steps have a size of their own, so that an eps makes none of them tiny.
_NORMALIZED = {"lamb", "lars", "muon"}


class OptimizersParameters:
    """The parameters of the optimizers that an eager scaler steps.

    Attributes:
        optimizers: the optimizers of the latest iteration that ended.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.optimizers: list[object] = []
        self._norms: dict[int, list[Tensor]] = {}  # before the first step; may be on a device
        self._parts: dict[int, dict[str, NDArray[Any]]] = {}  # at an earlier sample
        self._parts_at: dict[int, int] = {}  # the step of that sample

    def named(self, optimizer: Any, place: int = 0) -> dict[str, Tensor]:
        """An optimizer's parameters, by the names in the model, else by group and index.

        Those without numbers are left out, such as those of a lazy module that was not called yet.
        ``place`` is the index of the optimizer in its iteration.
        """
        groups = groups_of(optimizer)
        names = {}
        if self._model is not None:
            names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        which = f"optimizer {place}, " if place else ""
        return {
            names.get(id(parameter), f"{which}group {g}, parameter {p}"): parameter
            for g, group in enumerate(groups)
            for p, parameter in enumerate(group["params"])
            if has_numbers(parameter)
        }

    def nonfinite(self) -> tuple[NonfiniteGradient, ...]:
        """The parameters of the latest optimizers, and of the model, that are not finite.

        In buffers and in parameters that no optimizer steps, only NaN counts: a mask may hold Inf.
        """
        each = (self.named(optimizer, o) for o, optimizer in enumerate(self.optimizers))
        trained = dict(chain.from_iterable(named.items() for named in each))
        rest = {name: array for name, array in self._of_model() if name not in trained}
        found = inspect(rest)
        return inspect(trained) + tuple(array for array in found if array.num_nan)

    def of_optimizers(self, is_stuck: bool) -> dict[str, Any]:
        """The fields of evidence that the optimizers give; more fields if the run is stuck."""
        found: dict[str, Any] = {
            "state": self._nonfinite_state(),
            "statistic": self._nonfinite_statistic(),
        }
        if is_stuck:
            found |= {"weights": self._growth(), "lost_eps": self.lost_eps()}
        return found

    def _nonfinite_statistic(self) -> str | None:
        """The first running statistic that is not finite, such as ``"bn.running_var"``."""
        every = dict(self._of_model())
        kept = (each for each in every.items() if each[0].endswith(STATISTICS))
        bad = (name for name, array in kept if read(array).bad)
        counts = ((name, f"{name.rpartition('.')[0]}.num_batches_tracked") for name in bad)
        return next((name for name, count in counts if count not in every or every[count]), None)

    def _of_model(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters and the buffers of the model; Paddle's statistics are parameters."""
        if self._model is not None:
            buffers: Any = getattr(self._model, "named_buffers", tuple)()
            every = chain(self._model.named_parameters(), buffers)
            yield from (each for each in every if has_numbers(each[1]))

    def _nonfinite_state(self) -> str | None:
        """The first state that is not finite, such as ``"exp_avg of fc.bias"``; else None."""
        for place, optimizer in enumerate(self.optimizers):
            names = {id(p): name for name, p in self.named(optimizer, place).items()}
            for parameter, values in _items(getattr(optimizer, "state", None)):
                for key, value in _items(values):
                    if read(value).bad:
                        name = names.get(id(parameter))
                        return f"{key} of {name}" if name else str(key)
        return None

    def note_norms(self, optimizer: object) -> None:
        """Note the norms of an optimizer's parameters, once, before its first step."""
        if id(optimizer) not in self._norms:
            self._norms[id(optimizer)] = _norms_of(self.named(optimizer).values())

    def was_bad(self, name: str) -> bool:
        """Whether the parameter of a name was Inf or NaN before its optimizer's first step."""
        for place, optimizer in enumerate(self.optimizers):
            norms = self._norms.get(id(optimizer), ())
            for own, norm in zip(self.named(optimizer, place), norms, strict=False):
                if own == name:
                    return not bool(norm.isfinite())
        return False

    def _growth(self) -> tuple[float, float] | None:
        """The norm of all parameters before the first step, and the norm now; None if unknown."""
        held = (self.named(optimizer).values() for optimizer in self.optimizers)
        now = [norm for parameters in held for norm in _norms_of(parameters)]
        before = [self._norms.get(id(optimizer)) for optimizer in self.optimizers]
        if None in before or not now:
            return None
        first = [norm for norms in before for norm in norms or ()]
        return math.hypot(*map(float, first)), math.hypot(*map(float, now))

    def matrices_growth(self, optimizer: object, held: list[Tensor]) -> tuple[float, float] | None:
        """The norm of an optimizer's matrices before its first step, and now; None if unknown.

        Biases may stay large while a weight decay shrinks the rest.
        """
        is_matrix = [p.ndim > 1 for p in held]
        both = self._norms.get(id(optimizer), []), _norms_of(held)
        if any(len(norms) != len(is_matrix) for norms in both):  # parameters were added
            return None
        first, now = (math.hypot(*map(float, compress(norms, is_matrix))) for norms in both)
        return (first, now) if math.isfinite(first) and math.isfinite(now) else None

    def lost_eps(self) -> float | None:
        """An optimizer's eps that is 0, also in its parameters' float16; None if there is none."""
        for optimizer in self.optimizers:
            for group in getattr(optimizer, "param_groups", ()):
                eps = group.get("eps")
                if not isinstance(eps, (int, float)) or np.float16(eps):
                    continue
                is_in_float16 = any(dtype_name(p) == "float16" for p in group["params"])
                if not eps or (is_in_float16 and not _steps_in_float32(optimizer)):
                    return float(eps)
        return None

    def _steps_since(self, optimizer: object, step: int) -> int | None:
        """The steps since an optimizer's parameters were kept; None if they were not."""
        at = self._parts_at.get(id(optimizer))
        return None if at is None else step - at

    def unmoved(
        self, optimizer: object, parameters: Mapping[str, Tensor], step: int
    ) -> float | None:
        """The share of 16-bit elements unchanged since the sample before; None if unknown.

        An update smaller than half the distance to the next number is lost in rounding, at every
        step. Samples that are too close together show nothing. Elements whose gradient is 0 do not
        count. The share is None if the optimizer steps float32 copies, which keep such updates.
        """
        if _steps_in_float32(optimizer):
            return None
        before, now = self._parts.get(id(optimizer), {}), dict[str, NDArray[Any]]()
        since = self._steps_since(optimizer, step)
        if since is not None and since < FEW_MOVES:
            return None
        self._parts[id(optimizer)], self._parts_at[id(optimizer)] = now, step
        # A learning rate of 0, as at the start of a warm-up, means to move nothing: no rounding.
        if not any(group.get("lr") for group in getattr(optimizer, "param_groups", ())):
            return None
        num_unmoved = num_seen = 0
        for name, parameter in parameters.items():
            if parameter.grad is None or not is_in_16_bits(parameter):
                continue
            now[name] = np.array(sample_of(parameter))
            if name in before and before[name].size == now[name].size:
                has_gradient = sample_of(parameter.grad) != 0
                num_seen += int(has_gradient.sum())
                num_unmoved += int((has_gradient & (now[name] == before[name])).sum())
        return num_unmoved / num_seen if num_seen else None


def _norms_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The norm of each parameter, which may be on a device; empty if they cannot be taken."""
    with suppress(Exception):
        return [local(p).detach().norm() for p in parameters]
    return []


def groups_of(optimizer: Any) -> Sequence[Mapping[str, Any]]:
    """An optimizer's groups of parameters; a Paddle optimizer may have none, and is one group."""
    groups = getattr(optimizer, "param_groups", None) or getattr(optimizer, "_param_groups", None)
    if not groups or not isinstance(groups[0], dict):
        return [{"params": getattr(optimizer, "_parameter_list", None) or ()}]
    return groups  # type: ignore[no-any-return]


def held_by(optimizer: Any) -> Iterator[Any]:
    """The parameters of an optimizer, of all groups."""
    return (p for group in groups_of(optimizer) for p in group["params"])


def any_gradient(optimizer: Any) -> bool:
    """Whether a parameter of an optimizer has a gradient; each step asks, so no generator does."""
    for group in groups_of(optimizer):
        for parameter in group["params"]:
            if parameter.grad is not None:
                return True
    return False


def rates_of(optimizer: object) -> list[float]:
    """The learning rates of an optimizer's groups, as far as they are on the host."""
    return numbers_of(optimizer, "lr")


def numbers_of(optimizer: object, setting: str) -> list[float]:
    """The numbers that a setting has in an optimizer's groups, as far as they are on the host."""
    groups = groups_of(optimizer)
    return [float(n) for each in groups if isinstance(n := each.get(setting), (int, float))]


def is_in_16_bits(parameter: Tensor) -> bool:
    """Whether a parameter has a dtype in which small updates are lost in rounding."""
    return dtype_name(parameter) in _IN_16_BITS


def eps_of(optimizer: object) -> float | None:
    """The largest eps that an optimizer adds to what divides its gradients; None without one.

    It may wait for the device.
    """
    names = "".join(kind.__name__.lower() for kind in type(optimizer).__mro__)
    if any(each in names for each in _NORMALIZED):
        return None
    found = numbers_of(optimizer, "eps")
    for own in (getattr(optimizer, each) for each in _EPS if hasattr(optimizer, each)):
        with suppress(Exception):  # it may be anything, such as the pair of an Adafactor
            found.append(float(to_numpy(own).item()))
    return max(found, default=None)


def has_stepped(optimizer: object) -> bool:
    """Whether an optimizer's state shows that it has stepped before; False if unknown."""
    for _, values in _items(getattr(optimizer, "state", None)):
        kept = dict(_items(values))
        with suppress(Exception):  # "step" may hold anything
            return float(kept["step"]) > 0 if "step" in kept else "momentum_buffer" in kept
    return False


def _steps_in_float32(optimizer: object) -> bool:
    """Whether an optimizer is a ``gradscaler.torch.MasterWeights``, which alone has the method."""
    return hasattr(optimizer, "widen_gradients_")


def _items(mapping: object) -> Iterable[tuple[Any, Any]]:
    return mapping.items() if isinstance(mapping, Mapping) else ()
