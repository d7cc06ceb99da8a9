"""Steps of PyTorch that are taken twice: by a scaler and by a call, or by two optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.hooks import (
    Handle,
    remove_all,
    remove_unless_stepping,
    uncompiled,
    weakly,
)
from gradscaler.diagnose._monitor.gradient_mark import Mark, is_unchanged, mark_of
from gradscaler.diagnose._monitor.parameters import held_by

_Marks = Sequence[Mark | None]


@dataclass(eq=False)
class _Watched:
    """An optimizer, and the used gradients of its first and last parameter, which stand for all."""

    optimizer: Callable[[], object]
    parameters: tuple[Callable[[], Any], ...] = ()  # none if it is not watched
    by_scaler: _Marks = ()
    by_own: _Marks = ()

    def marks(self) -> _Marks:
        """The marks of the gradients as they are now."""
        marks: list[Mark | None] = []
        for alive in self.parameters:  # each step makes these calls, so they are few
            gradient = getattr(alive(), "grad", None)
            marks.append(None if gradient is None else (weakref.ref(gradient), gradient._version))
        return marks

    def has_used(self, marks: _Marks) -> bool:
        """Whether a step that left these marks used the gradients as they are now."""
        now = [getattr(alive(), "grad", None) for alive in self.parameters]
        return bool(marks) and all(map(is_unchanged, marks, now))


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
        if watched.by_own:
            if watched.has_used(watched.by_own):
                self._note()
            watched.by_own = ()
        self._running[:] = [optimizer]

    def end(self, optimizer: Any) -> None:
        """End a scaler's step, whether it was applied or skipped."""
        self._running.clear()
        watched = self._all.get(id(optimizer))
        if watched is not None and watched.parameters:
            watched.by_scaler = watched.marks()

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
        if watched.has_used(watched.by_scaler):
            self._note()
        watched.by_scaler, watched.by_own = (), watched.marks()


def _unless(running: list[object], call: Callable[..., object], *args: object) -> None:
    """Call a function if the list is empty."""
    if not running:
        call(*args)


class _Stepped(NamedTuple):
    """An optimizer's step: the parameters that had a gradient, and the first one's gradient."""

    optimizer: int
    parameters: set[int]
    mark: Mark | None


class SharedParameters:
    """Finds steps that repeat the step of another optimizer, in one iteration.

    Optimizers that share an encoder, and have heads of their own, hold different parameters. Those
    that take turns have gradients of their own.
    """

    def __init__(self) -> None:
        self._stepped: list[_Stepped] = []

    def stepped(self, optimizer: object) -> None:
        """Note a step that has ended."""
        if trained := _trained(optimizer):
            mark = mark_of(trained[0].grad)
            self._stepped.append(_Stepped(id(optimizer), set(map(id, trained)), mark))

    def repeats(self, optimizer: object) -> bool:
        """Whether a step that begins repeats one of another optimizer; told once for each."""
        trained = _trained(optimizer) if self._stepped else []
        parameters = set(map(id, trained))
        for each in self._stepped:
            is_other = each.optimizer != id(optimizer) and each.parameters == parameters
            if is_other and is_unchanged(each.mark, trained[0].grad):
                self._stepped.remove(each)
                return True
        return False

    def end(self) -> None:
        """End the iteration."""
        self._stepped.clear()


def _trained(optimizer: object) -> list[Any]:
    return [p for p in held_by(optimizer) if p.grad is not None]
