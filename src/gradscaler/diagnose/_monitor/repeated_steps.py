"""Steps of a PyTorch optimizer that are taken twice: by a scaler, and by a call of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradscaler.diagnose._graph.hooks import Handle, remove_all, weakly
from gradscaler.diagnose._monitor.gradient_mark import GradientMark
from gradscaler.diagnose._monitor.parameters import groups_of

_Marks = Sequence[GradientMark | None]


@dataclass(eq=False)
class _Watched:
    """An optimizer's first and last parameter, which stand for all, and their used gradients."""

    parameters: tuple[Callable[[], Any], ...]
    by_scaler: _Marks = ()
    by_own: _Marks = ()

    def gradients(self) -> list[Any]:
        return [getattr(alive(), "grad", None) for alive in self.parameters]

    def marks(self) -> _Marks:
        return [None if g is None else GradientMark.of(g) for g in self.gradients()]

    def has_used(self, marks: _Marks) -> bool:
        """Whether a step that left these marks used the gradients as they are now."""
        known = zip(marks, self.gradients(), strict=False)
        return bool(marks) and all(m is not None and m.is_of(g) for m, g in known)


class RepeatedSteps:
    """Notes each ``optimizer.step()`` beside ``scaler.step(optimizer)`` with the same gradients.

    Args:
        model: the model, whose optimizers are watched; None for all.
        note: called for each step that repeats another one.
    """

    def __init__(self, model: Any, note: Callable[[], object]) -> None:
        self._model, self._note = model, note
        self._all = weakref.WeakKeyDictionary[Any, _Watched | None]()  # by optimizer
        self._running: list[object] = []  # the optimizer that the scaler is stepping
        self._handles: list[Handle] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False

    def begin(self, optimizer: Any) -> None:
        """Begin a scaler's step."""
        if optimizer not in self._all:
            self._all[optimizer] = self._watch(optimizer)
        watched = self._all[optimizer]
        if watched is not None and watched.by_own:
            if watched.has_used(watched.by_own):
                self._note()
            watched.by_own = ()
        self._running[:] = [optimizer]

    def end(self, optimizer: Any) -> None:
        """End a scaler's step, whether it was applied or skipped."""
        self._running.clear()
        watched = self._all.get(optimizer)
        if watched is not None:
            watched.by_scaler = watched.marks()

    def stop(self) -> None:
        """Watch no more steps."""
        self._running.clear()
        remove_all(self._handles)

    def _watch(self, optimizer: Any) -> _Watched | None:
        """Hook an optimizer; None if it has no hooks, or no gradient of the model's."""
        held = (p for group in groups_of(optimizer) for p in group["params"])
        own = None if self._model is None else {id(p) for p in self._model.parameters()}
        used = [p for p in held if p.grad is not None and (own is None or id(p) in own)]
        if not used or not hasattr(optimizer, "register_step_post_hook"):
            return None
        hook = partial(_unless, self._running, weakly(self._after_own))
        self._handles.append(optimizer.register_step_post_hook(hook))
        return _Watched((weakref.ref(used[0]), weakref.ref(used[-1])))

    def _after_own(self, optimizer: Any, *_: object) -> None:
        watched = self._all.get(optimizer)
        if watched is None:
            return
        if watched.has_used(watched.by_scaler):
            self._note()
        watched.by_scaler, watched.by_own = (), watched.marks()


def _unless(running: list[object], call: Callable[..., object], *args: object) -> None:
    """Call a function if the list is empty."""
    if not running:
        call(*args)
