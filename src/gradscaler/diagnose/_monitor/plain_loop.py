"""A training loop of PyTorch without a scaler, which announces what a scaler would announce."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from gradscaler.diagnose._gradients.arrays import has_numbers
from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.hooks import StepHooks, weakly
from gradscaler.diagnose._monitor import backward_calls
from gradscaler.diagnose._monitor.by_identity import ByIdentity
from gradscaler.diagnose._monitor.gradient_check import total_norm
from gradscaler.diagnose._monitor.parameters import held_by
from gradscaler.outcome import Observer, StepOutcome

Optimizer = Any


class BackwardObserver(Observer, Protocol):
    """An observer that is told of backward passes, too."""

    def backward_ended(self) -> None:
        """A backward pass has ended, and nothing has clipped its gradients yet."""

    def outcome_of(self, optimizer: object) -> StepOutcome:
        """The outcome of a step that is done."""

    def is_left_out(self) -> bool:
        """Whether the latest backward passes failed, and the script goes on without a step."""


class PlainLoop(backward_calls.BackwardListener):
    """Announces the losses and the steps of a loop to an observer, as a scaler with a scale of 1.

    An iteration is a run of backward passes and the steps that follow them. It ends at the next
    backward pass or, after the first iteration, when all optimizers that have stepped so far have
    stepped in it. It also ends if the script leaves out its step because it failed. Steps come from
    PyTorch's hooks of optimizers, and losses from ``backward``.

    Args:
        model: the model. An optimizer is watched if it holds one of the model's parameters.
        optimizers: the optimizers to watch; None for all that hold the model's parameters.
        has_scaler: whether the script has a scaler, which is disabled and announces nothing.

    Attributes:
        scale: 1.
        is_enabled: True, as losses are to be observed.
    """

    scale, is_enabled, policy = 1.0, True, None

    def __init__(
        self, model: Any, optimizers: Iterable[Optimizer] | None, has_scaler: bool = False
    ) -> None:
        self.has_scaler = has_scaler
        given = None if optimizers is None else list(optimizers)
        self._given = None if given is None else ByIdentity[None](given)
        self._model = model
        self._first = set() if model is None else {id(p) for p in model.parameters()}
        self._is_own = ByIdentity[bool | None]()
        self._observer: BackwardObserver | None = None
        self._hooks = StepHooks(self)
        self._stepping: list[int] = []  # ids of optimizers whose step is running, the inner last
        self._known = ByIdentity[None]()  # optimizers that have stepped
        self._stepped: set[int] = set()  # ids of those in this iteration
        self._has_known_all = False  # whether an iteration has ended
        self._is_dry = False  # whether the losses of the backward pass hold no numbers

    @property
    def observed(self) -> PlainLoop:
        """The loop, as a scaler's observers see it."""
        return self

    @property
    def state(self) -> PlainLoop:
        """The state, which is the scale alone."""
        return self

    def last_steps(self) -> list[tuple[Optimizer, StepOutcome]]:
        """No steps, as none can be missed."""
        return []

    def total_norm(self, optimizer: Optimizer) -> float:
        """The 2-norm of an optimizer's gradients as they are; waits for the device."""
        return total_norm(held_by(optimizer))

    def add_observer(self, observer: BackwardObserver) -> None:
        """Announce all calls to an observer from now on."""
        self._observer = observer
        self._hooks.add(weakly(self._before_step), weakly(self._after_step))
        backward_calls.listen(self)

    def remove_observer(self, observer: BackwardObserver) -> None:
        """Announce nothing more."""
        self._hooks.remove()
        backward_calls.ignore(self)
        self._observer = None

    def before_backward(self, losses: Sequence[Tensor]) -> None:
        """Announce the losses of a backward pass."""
        if self._observer is None:
            return
        if self._stepped and not self._stepping:
            self._end()
            self._has_known_all = True
        elif not self._stepping and self._observer.is_left_out():
            self._end()
        real = [loss for loss in losses if has_numbers(loss)]
        self._is_dry = bool(losses) and not real
        for loss in real:
            self._observer.scaled(loss)

    def after_backward(self) -> None:
        """Announce the end of a backward pass."""
        if self._observer is not None and not self._is_dry:
            self._observer.backward_ended()

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._observer is None:
            return
        if id(optimizer) in self._stepping:  # its step before has raised an error
            self._stepping.clear()
        if not self._is_watched(optimizer):
            return
        self._stepping.append(id(optimizer))
        if len(self._stepping) == 1:
            self._observer.stepping(optimizer, None)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._observer is None:
            return
        if id(optimizer) not in self._stepping:  # its step, of a closure, began before the observer
            self._before_step(optimizer)
        if id(optimizer) not in self._stepping:  # it is not watched
            return
        is_outer = self._stepping[0] == id(optimizer)
        del self._stepping[self._stepping.index(id(optimizer)) :]
        if not is_outer:  # such as the one that a wrapper steps
            return
        known, outcome = self._known.ids, self._observer.outcome_of(optimizer)
        self._observer.stepped(optimizer, outcome)
        if outcome.known_reason != "no_gradients":
            if id(optimizer) not in known:
                self._known[optimizer] = None
            self._stepped.add(id(optimizer))
        is_over = self._has_known_all and bool(self._stepped)
        if is_over and known <= self._stepped:
            self._end()

    def _end(self) -> None:
        self._stepped.clear()
        if self._observer is not None:
            self._observer.updating()
        if self._observer is not None:  # the monitor may have been closed
            self._observer.updated()

    def _is_watched(self, optimizer: Optimizer) -> bool:
        if self._given is not None:
            return optimizer in self._given
        is_own = self._is_own.get(optimizer, None)
        if is_own is None:
            own = self._first.union(map(id, self._model.parameters()))  # layers may be replaced
            is_own = any(id(p) in own and has_numbers(p) for p in held_by(optimizer))
            self._is_own[optimizer] = is_own
        return is_own
