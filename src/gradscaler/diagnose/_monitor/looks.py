"""One look at each optimizer where steps and backward passes begin and end, and what it shows."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradscaler.diagnose._gradients.arrays import dense, has_numbers, local
from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.hooks import StepHooks, weakly
from gradscaler.diagnose._monitor.iterations import Iteration
from gradscaler.diagnose._monitor.parameters import held_by
from gradscaler.diagnose._record.events import Event
from gradscaler.diagnose._record.thresholds import FEW_ELEMENTS

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
    """Whether a mark is that of a gradient as it is now, or as it was some changes before.

    Without a gradient, before and now, it is so too.
    """
    if mark is None or gradient is None:
        return mark is gradient
    alive, version = mark
    return alive() is gradient and bool(version + changes == gradient._version)


def _none() -> None:
    return None


@dataclass(eq=False)
class _Look:
    """What was seen of an optimizer. It keeps neither the optimizer nor its parameters alive.

    Two parameters stand for all: the first and the last that had a gradient, for as long as the
    first has one.
    """

    first: Callable[[], Tensor | None] = _none
    last: Callable[[], Tensor | None] = _none
    has_stepped: bool = False  # since the backward pass before
    used: Tensor | None = None  # the largest magnitude that a step left for the backward pass
    before: Mark | None = None  # of the first's gradient, before that pass
    after: Sequence[Mark | None] = ()  # of both gradients, after the latest step
    is_by_own: bool = False  # whether that was the optimizer's own step, not the scaler's
    optimizer: Callable[[], object] = _none  # if a scaler steps it
    is_watched: bool = False  # whether its own steps beside the scaler's are seen
    # Of its latest sampled step: the iteration, and the ids of parameters with a gradient, sorted.
    trained: tuple[int, list[int]] = (0, [])

    def choose(self, optimizer: object) -> bool:
        """Choose two parameters with a gradient; whether there is one."""
        with suppress(Exception):
            trained = _trained(optimizer)
            first = next(p for p in trained if local(p.grad).numel())
            self.first, self.last = weakref.ref(first), weakref.ref(trained[-1])
            return True
        return False

    def end_step(self, is_by_own: bool) -> None:
        """Note a step, and the gradients as they are now."""
        marks: list[Mark | None] = []
        for alive in (self.first, self.last):  # each step makes these calls, so they are few
            gradient = getattr(alive(), "grad", None)
            marks.append(None if gradient is None else (weakref.ref(gradient), gradient._version))
        self.after, self.is_by_own = marks, is_by_own

    @property
    def would_repeat(self) -> bool:
        """Whether the latest step used the gradients as they are now."""
        now = [getattr(alive(), "grad", None) for alive in (self.first, self.last)]
        return any(self.after) and all(map(is_unchanged, self.after, now))


class Looks:
    """Looks at each optimizer at four stations: before and after a backward pass and a step.

    It detects a backward pass that adds to gradients that a step has used. For this it compares one
    gradient of each optimizer before and after the backward pass. PyTorch counts the changes of a
    tensor. A backward pass that adds to a gradient makes one change,
    ``zero_grad(set_to_none=False)`` makes another, and ``zero_grad()`` leaves no tensor. In other
    frameworks, and with several processes, which change a gradient more often, only an Inf or a NaN
    shows that a gradient was kept. The comparison waits for no device, except after ``unscale_``
    and ``update`` without a step.

    It detects steps that use the gradients of another step: ``optimizer.step()`` beside
    ``scaler.step(optimizer)``, and a step of another optimizer of the same parameters. Optimizers
    that share an encoder, and have heads of their own, hold different parameters. Those that take
    turns have gradients of their own.

    It detects parameters that something else than a step has changed.

    Args:
        model: the model, of whose optimizers repeated steps are noted; None for all.
        counts_changes: whether a backward pass makes one change of a gradient.
        note_repeated: called for each step of an optimizer's own that repeats one of the scaler's,
            or is repeated by it.
    """

    def __init__(
        self, model: Any, counts_changes: bool, note_repeated: Callable[[], object]
    ) -> None:
        self._model, self._counts_changes = model, counts_changes
        self._note_repeated = note_repeated
        self._all = defaultdict[int, _Look](_Look)  # by optimizers' ids
        self._waiting: dict[int, _Look] = {}  # those that have stepped, or left gradients
        self._left: dict[int, Tensor] = {}  # by the latest sampled step; parts by parameters' ids
        self._running: list[object] = []  # the optimizer that the scaler is stepping
        self._hooks = StepHooks(self)

    def before_backward(self) -> None:
        """Note the gradients that earlier steps left.

        What a pass made after the step, and after they were zeroed, waits for a step of its own.
        """
        waiting, self._waiting = self._waiting, {}
        for key, look in waiting.items():
            gradient: Any = getattr(look.first(), "grad", None)
            if look.has_stepped:
                look.has_stepped, look.used = False, None
                if gradient is not None:
                    with suppress(Exception):  # a sparse gradient has no amax; it is left out
                        look.used = local(gradient).detach().abs().max()
            elif not (self._counts_changes and is_unchanged(look.before, gradient, changes=1)):
                look.used = None  # the pass before, without a step, has not added to it
            elif look.used is not None:  # a write of zeros is one change, too
                look.used = look.used.masked_fill(~local(gradient).detach().any(), 0.0)
            if look.used is not None:
                look.before, self._waiting[key] = mark_of(gradient), look

    def before_step(self, optimizer: object, iteration: Iteration, name: str) -> None:
        """Note in an iteration what has changed gradients and parameters beside its own passes.

        Of a gradient that a backward pass has added to, it is the largest magnitude before; it is 0
        if the gradient was zeroed in place. ``name`` is the optimizer's.
        """
        look = self._all[id(optimizer)]
        held, look.used = look.used, None
        gradient: Any = getattr(look.first(), "grad", None)
        if gradient is None:
            held = None
        elif held is not None and self._counts_changes:
            held = held if is_unchanged(look.before, gradient, changes=1) else None
        if gradient is not None or look.choose(optimizer):
            look.has_stepped = True
            self._waiting[id(optimizer)] = look
        if held is not None:
            iteration.added_to[name] = held if self._counts_changes else held * 0
        if iteration.follows_unstepped and (held is None or not float(held)):
            iteration.note(Event.LEFT_OUT)
            iteration.follows_unstepped = False
        if self._left:
            iteration.overwritten += self._overwritten(optimizer)

    def _overwritten(self, optimizer: object) -> list[Tensor]:
        """For each parameter, whether it changed since the noted step; may be on a device.

        The list is empty if this step is not the next one of its parameters.
        """
        left, self._left = self._left, {}
        parts = _parts_of(optimizer)
        if left.keys() != parts.keys():
            return []
        return [(part != left[key]).any() for key, part in parts.items()]

    def note_shared(self, optimizer: object, iteration: Iteration) -> None:
        """Note a sampled step that repeats one of another optimizer, once for each of these."""
        trained = iteration.number, sorted(map(id, _trained(optimizer)))
        others = (look for key, look in self._all.items() if key != id(optimizer))
        if other := next((o for o in others if o.trained == trained and o.would_repeat), None):
            iteration.note(Event.SHARED)
            other.trained = 0, []

    def after_step(self, optimizer: object, iteration: int) -> None:
        """Note what a sampled step has used and left, without waiting for a device."""
        look = self._all[id(optimizer)]
        look.end_step(is_by_own=False)
        look.trained = iteration, sorted(map(id, _trained(optimizer)))
        if self._counts_changes:
            self._left = {key: part.clone() for key, part in _parts_of(optimizer).items()}

    def begin_scaled(self, optimizer: Any) -> None:
        """Begin a scaler's step, after :meth:`before_step`."""
        look = self._all[id(optimizer)]
        if look.optimizer() is not optimizer:
            look.optimizer, look.after, look.is_by_own = weakref.ref(optimizer), (), False
            look.is_watched = self._watches(optimizer)
        if look.is_by_own:
            if look.would_repeat:
                self._note_repeated()
            look.after = ()
        self._running[:] = [optimizer]

    def _watches(self, optimizer: Any) -> bool:
        """Watch an optimizer's own steps, if it has hooks, and a gradient of the model's."""
        own = None if self._model is None else {id(p) for p in self._model.parameters()}
        is_own = any(own is None or id(p) in own for p in _trained(optimizer))
        if not is_own or not hasattr(optimizer, "register_step_post_hook"):
            return False
        # On all optimizers, as a hook on this one would stay on its copies.
        self._hooks.add(None, guarded(partial(_unless, self._running, weakly(self._after_own))))
        return True

    def _after_own(self, optimizer: Any, *_: object) -> None:
        look = self._all.get(id(optimizer))
        if look is not None and look.is_watched and look.optimizer() is optimizer:
            if not look.is_by_own and look.would_repeat:
                self._note_repeated()
            look.end_step(is_by_own=True)

    def end_scaled(self, optimizer: Any) -> None:
        """End a scaler's step, whether it was applied or skipped."""
        self._running.clear()
        look = self._all[id(optimizer)]
        if look.is_watched:
            look.end_step(is_by_own=False)

    def stop(self) -> None:
        """Watch no more steps."""
        self._running.clear()
        self._hooks.remove()


def _unless(running: list[object], call: Callable[..., object], *args: object) -> None:
    """Call a function if the list is empty."""
    if not running:
        call(*args)


def _trained(optimizer: object) -> list[Any]:
    return [p for p in held_by(optimizer) if p.grad is not None]


def _parts_of(optimizer: object) -> dict[int, Tensor]:
    """The first elements of each of an optimizer's parameters, by the parameter's id."""
    held = (p for p in held_by(optimizer) if has_numbers(p))
    return {id(p): part_of(p) for p in held}


def part_of(parameter: Tensor) -> Tensor:
    """The first elements of a parameter, where they are: nothing waits for a device."""
    return dense(parameter).reshape(-1)[:FEW_ELEMENTS]
