"""The scale and its counters, read from a scaler of a traced framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from gradscaler.diagnose.gradients._arrays import to_numpy


class Reading(NamedTuple):
    """The state of a scaler, in scalars that may be on a device and will not change.

    Attributes:
        scale: the loss scale.
        finite_steps: finite steps in a row; None if the scale does not move.
        finite: whether the latest step's gradients were finite, if the scaler knows.
        applied: how many steps its optimizer took, if the scaler knows.
    """

    scale: Any
    finite_steps: Any = None
    finite: Any = None
    applied: Any = None

    def on_host(self) -> Reading:
        """The same as Python numbers; waits for the device."""
        return Reading(*(None if value is None else number(value) for value in self))

    def was_finite(self, before: Reading, growth_interval: float) -> bool:
        """Whether the step since ``before`` had finite gradients; both are on the host.

        A fixed scale gives no evidence; the step is assumed to be finite.
        """
        if self.finite is not None:
            return bool(self.finite)
        if self.applied is not None and before.applied is not None:
            return bool(self.applied != before.applied)
        if self.finite_steps is None or before.finite_steps is None:
            return True
        grew = self.scale > before.scale
        at_its_largest = self.scale == before.scale and before.finite_steps + 1 >= growth_interval
        return bool(self.finite_steps > 0 or grew or at_its_largest)


def read(scaler: Any) -> Reading:
    """The state of a gradscaler scaler for JAX, Keras, tf-keras or MindSpore.

    Raises:
        TypeError: ``scaler`` is not one of these.
    """
    for part in _parts(scaler):
        for attribute, reader in _READERS.items():
            if hasattr(part, attribute):
                return reader(part)
    raise TypeError(
        f"scaler must be one of gradscaler's, or an optax state that holds one, got {scaler!r} "
        f"({type(scaler).__name__}); of an update cell, give the train step that calls it"
    )


def policy_of(scaler: Any) -> Any:
    """The rule by which a scaler moves; the scaler itself if it holds no policy."""
    for part in _parts(scaler):
        part = getattr(part, "scaler", part)
        part = getattr(part, "loss_scaling_manager", None) or part
        return getattr(part, "policy", part)
    return scaler


def number(scalar: Any) -> float:
    """A scalar of any framework, or the mean of an array, as a Python number."""
    return float(to_numpy(scalar).mean())


def _parts(scaler: Any) -> Iterator[Any]:
    """A scaler, or each part of an optax state, which may hold one."""
    if isinstance(scaler, (tuple, list, Mapping)) and not hasattr(scaler, "grads_finite"):
        for item in scaler.values() if isinstance(scaler, Mapping) else scaler:
            yield from _parts(item)
    else:
        yield scaler


# Adding 0 copies what may change later, or what JAX may delete when it is donated.


def _of_optax(state: Any) -> Reading:
    return read(state.scaler)._replace(finite=state.grads_finite + 0)


def _of_jax(scaler: Any) -> Reading:
    scale, finite_steps, _ = scaler.state
    moves = hasattr(scaler.policy, "growth_interval")
    return Reading(scale + 0, finite_steps + 0 if moves else None)


def _of_keras(optimizer: Any) -> Reading:
    counter = optimizer.dynamic_counter
    # tf-keras counts the steps that it skips, too.
    applied = optimizer.inner_optimizer.iterations + 0 if _is_keras_3(optimizer) else None
    return Reading(optimizer.loss_scale, None if counter is None else counter + 0, None, applied)


def _is_keras_3(optimizer: Any) -> bool:
    return hasattr(optimizer, "dynamic_scale")


def _of_cell(step: Any) -> Reading:
    cell = step.loss_scaling_manager
    moves = hasattr(cell, "last_overflow_iter")
    steps = cell.cur_iter - 1 - cell.last_overflow_iter if moves else None
    return Reading(step.scale_sense + 0, steps)


def _of_manager(manager: Any) -> Reading:
    moves = hasattr(manager, "last_overflow_iter")
    steps = manager.cur_iter - 1 - manager.last_overflow_iter if moves else None
    return Reading(manager.get_loss_scale(), steps)


def _of_functional(scaler: Any) -> Reading:
    moves = hasattr(scaler, "counter")
    return Reading(scaler.scale_value + 0, scaler.counter + 0 if moves else None)


def _of_jmp(scaler: Any) -> Reading:
    moves = hasattr(scaler, "counter")
    return Reading(scaler.loss_scale + 0, scaler.counter + 0 if moves else None)


_READERS: dict[str, Callable[[Any], Reading]] = {
    "grads_finite": _of_optax,
    "state": _of_jax,
    "fin_steps": lambda scaler: Reading(scaler.scale + 0, scaler.fin_steps + 0),  # flax's
    "inner_optimizer": _of_keras,
    "scale_sense": _of_cell,
    "scale_value": _of_functional,
    "update_loss_scale": _of_manager,
    "adjust": _of_jmp,
}
"""Each kind of scaler by an attribute that none of the kinds after it has."""
