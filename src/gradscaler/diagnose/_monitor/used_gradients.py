"""Gradients that a step has used, and that another step, or a backward pass, uses again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from gradscaler.diagnose._gradients.arrays import local
from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.hooks import (
    Handle,
    remove_all,
    remove_unless_stepping,
    uncompiled,
    weakly,
)
from gradscaler.diagnose._monitor.iterations import Iteration
from gradscaler.diagnose._monitor.parameters import held_by
from gradscaler.diagnose._record.events import Event

# A gradient, which is not kept alive, and the number of its changes that PyTorch counts. A backward
# pass and `zero_grad(set_to_none=False)` change a gradient, and `zero_grad()` leaves none. A write
# to its `.data` is not counted.
Mark = tuple[Callable[[], Any], int]


def mark_of(gradient: Tensor | None) -> Mark | None:
    """The mark of a gradient; None without one, or in a framework that counts no changes."""
    try:
        return weakref.ref(gradient), gradient._version  # type: ignore[union-attr]
    except (AttributeError, TypeError):
        return None


def is_unchanged(mark: Mark | None, gradient: Tensor | None, changes: int = 0) -> bool:
    """Whether a mark is that of a gradient as it is now, or as it was some changes before."""
    if mark is None or gradient is None:
        return False
    alive, version = mark
    return alive() is gradient and bool(version + changes == gradient._version)


class _Used(NamedTuple):
    """A gradient before the backward pass."""

    parameter: Callable[[], Tensor | None]
    mark: Mark | None
    largest: Tensor  # magnitude


class UsedGradients:
    """Detects a backward pass that adds to gradients that a step has used.

    It compares one gradient of each optimizer before and after the backward pass. PyTorch counts
    the changes of a tensor. A backward pass that adds to a gradient makes one change,
    ``zero_grad(set_to_none=False)`` makes another, and ``zero_grad()`` leaves no tensor. In other
    frameworks, and with several processes, which change a gradient more often, only an Inf or a NaN
    shows that a gradient was kept. The comparison waits for no device, except after ``unscale_``
    and ``update`` without a step.

    Args:
        counts_changes: whether a backward pass makes one change of a gradient.
    """

    def __init__(self, counts_changes: bool) -> None:
        self._counts_changes = counts_changes
        # One of each optimizer that has stepped since the backward pass before.
        self._parameters: dict[int, Callable[[], Tensor | None]] = {}
        self._used: dict[int, _Used] = {}
        self._latest: dict[int, Callable[[], Tensor | None]] = {}  # one of each that had a gradient

    def before_backward(self) -> None:
        """Note the gradients that earlier steps left.

        What a pass made after the step, and after they were zeroed, waits for a step of its own.
        """
        if self._used:  # a comprehension is a call
            before = self._used.items()
            self._used = {key: used for key, each in before if (used := self._added_to(each))}
        stepped, self._parameters = self._parameters, {}
        for key, alive in stepped.items():
            gradient = getattr(alive(), "grad", None)
            if gradient is not None:
                with suppress(Exception):  # a sparse gradient has no amax; it is left out
                    largest = local(gradient).detach().abs().max()
                    self._used[key] = _Used(alive, mark_of(gradient), largest)

    def _added_to(self, used: _Used) -> _Used | None:
        """A used gradient that a pass without a step has added to; None if it was zeroed."""
        gradient: Any = getattr(used.parameter(), "grad", None)
        is_added_to = self._counts_changes and is_unchanged(used.mark, gradient, changes=1)
        return used._replace(mark=mark_of(gradient)) if is_added_to else None

    def before_step(self, optimizer: object, iteration: Iteration, name: str) -> None:
        """Note in an iteration what the gradient held before a backward pass added to it.

        ``name`` is the optimizer's.
        """
        held = self._held(optimizer)
        if held is not None:
            iteration.added_to[name] = held if self._counts_changes else held * 0
        if iteration.follows_unstepped and (held is None or not float(held)):
            iteration.note(Event.LEFT_OUT)
            iteration.follows_unstepped = False

    def _held(self, optimizer: object) -> Tensor | None:
        """The largest magnitude that was in the gradient before the backward pass; None if gone.

        A magnitude of 0 means that the gradient was zeroed in place before the backward pass.
        """
        key = id(optimizer)
        used = self._used.pop(key, None)
        parameter = None if used is None else used.parameter()
        gradient: Any = None if parameter is None else parameter.grad
        if gradient is None:
            parameter = self._latest[key]() if key in self._latest else None
            if parameter is None or parameter.grad is None:
                parameter = _one_with_gradient(optimizer)
        if parameter is not None:
            self._parameters[key] = self._latest[key] = weakref.ref(parameter)
        if used is None or gradient is None:
            return None
        is_added_to = not self._counts_changes or is_unchanged(used.mark, gradient, changes=1)
        return used.largest if is_added_to else None


def _one_with_gradient(optimizer: object) -> Tensor | None:
    with suppress(Exception):
        held = (p for p in held_by(optimizer) if p.grad is not None)
        return next((p for p in held if local(p.grad).numel()), None)
    return None


@dataclass(eq=False)
class _Watched:
    """An optimizer, and the used gradients of its first and last parameter, which stand for all."""

    optimizer: Callable[[], object]
    parameters: tuple[Callable[[], Any], ...] = ()  # none if it is not watched
    marks: Sequence[Mark | None] = ()  # that the latest step left
    is_by_own: bool = False  # whether that was the optimizer's own step, not the scaler's

    def end_step(self, is_by_own: bool) -> None:
        """Note a step, and the gradients as they are now."""
        marks: list[Mark | None] = []
        for alive in self.parameters:  # each step makes these calls, so they are few
            gradient = getattr(alive(), "grad", None)
            marks.append(None if gradient is None else (weakref.ref(gradient), gradient._version))
        self.marks, self.is_by_own = marks, is_by_own

    @property
    def has_used(self) -> bool:
        """Whether the latest step used the gradients as they are now."""
        now = [getattr(alive(), "grad", None) for alive in self.parameters]
        return bool(self.marks) and all(map(is_unchanged, self.marks, now))


class RepeatedSteps:
    """Notes each ``optimizer.step()`` beside ``scaler.step(optimizer)`` with the same gradients.

    Args:
        model: the model, whose optimizers are watched; None for all.
        note: called for each step that repeats another one.
    """

    def __init__(self, model: Any, note: Callable[[], object]) -> None:
        self._model, self._note = model, note
        self._all: dict[int, _Watched] = {}  # by optimizers' ids
        self._running: list[object] = []  # the optimizer that the scaler is stepping
        self._handles: list[Handle] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False

    def begin(self, optimizer: Any) -> None:
        """Begin a scaler's step."""
        watched = self._all.get(id(optimizer))
        if watched is None or watched.optimizer() is not optimizer:
            watched = self._all[id(optimizer)] = self._watch(optimizer)
        if watched.is_by_own:
            if watched.has_used:
                self._note()
            watched.marks = ()
        self._running[:] = [optimizer]

    def end(self, optimizer: Any) -> None:
        """End a scaler's step, whether it was applied or skipped."""
        self._running.clear()
        watched = self._all.get(id(optimizer))
        if watched is not None and watched.parameters:
            watched.end_step(is_by_own=False)

    def stop(self) -> None:
        """Watch no more steps."""
        self._running.clear()
        remove_unless_stepping(self._handles)

    def _watch(self, optimizer: Any) -> _Watched:
        """Watch an optimizer, if it has hooks, and a gradient of the model's."""
        own = None if self._model is None else {id(p) for p in self._model.parameters()}
        used = [p for p in _trained(optimizer) if own is None or id(p) in own]
        if not used or not hasattr(optimizer, "register_step_post_hook"):
            return _Watched(weakref.ref(optimizer))
        if not self._handles:  # on all optimizers, as one on this would stay on its copies
            from torch.optim.optimizer import register_optimizer_step_post_hook

            hook = guarded(partial(_unless, self._running, weakly(self._after_own)))
            self._handles.append(register_optimizer_step_post_hook(uncompiled(hook)))
        first_and_last = weakref.ref(used[0]), weakref.ref(used[-1])
        return _Watched(weakref.ref(optimizer), first_and_last)

    def _after_own(self, optimizer: Any, *_: object) -> None:
        watched = self._all.get(id(optimizer))
        if watched is None or watched.optimizer() is not optimizer:
            return
        if not watched.is_by_own and watched.has_used:
            self._note()
        watched.end_step(is_by_own=True)


def _unless(running: list[object], call: Callable[..., object], *args: object) -> None:
    """Call a function if the list is empty."""
    if not running:
        call(*args)


class SharedParameters:
    """Finds steps that repeat the step of another optimizer, in one iteration.

    Optimizers that share an encoder, and have heads of their own, hold different parameters. Those
    that take turns have gradients of their own.
    """

    def __init__(self) -> None:
        # By optimizers' ids: the parameters that had a gradient, and the mark of the first's.
        self._stepped: dict[int, tuple[list[int], Mark | None]] = {}

    def stepped(self, optimizer: object) -> None:
        """Note a step that has ended."""
        if trained := _trained(optimizer):
            self._stepped[id(optimizer)] = sorted(map(id, trained)), mark_of(trained[0].grad)

    def repeats(self, optimizer: object) -> bool:
        """Whether a step that begins repeats one of another optimizer; told once for each."""
        trained = _trained(optimizer) if self._stepped else []
        parameters = sorted(map(id, trained))
        for other, (stepped, mark) in self._stepped.items():
            is_other = other != id(optimizer) and stepped == parameters
            if is_other and is_unchanged(mark, trained[0].grad):
                del self._stepped[other]
                return True
        return False

    def end(self) -> None:
        """End the iteration."""
        self._stepped.clear()


def _trained(optimizer: object) -> list[Any]:
    return [p for p in held_by(optimizer) if p.grad is not None]
