"""Steps of a PyTorch optimizer that are taken twice: by a scaler, and by a call of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.hooks import Handle, remove_all, weakly
from gradscaler.diagnose._monitor.parameters import groups_of

# A gradient that a step has used, and the number of its changes.
_Used = tuple[Callable[[], Tensor | None], int]


class RepeatedSteps:
    """Notes each ``optimizer.step()`` beside ``scaler.step(optimizer)`` with the same gradients.

    One gradient of each optimizer stands for all. PyTorch counts its changes, such as those of
    ``zero_grad(set_to_none=False)`` and of a backward pass.

    Args:
        model: the model, whose optimizers are watched; None for all.
        note: called for each step that repeats another one.
    """

    def __init__(self, model: Any, note: Callable[[], object]) -> None:
        self._model, self._note = model, note
        self._parameters: dict[
            int, Callable[[], Tensor | None]
        ] = {}  # one of each optimizer, by its id
        self._by_scaler: dict[int, _Used] = {}
        self._by_own: dict[int, _Used] = {}
        self._running: list[int] = []  # the id of the optimizer that a scaler steps
        self._handles: list[Handle] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False

    def begin(self, optimizer: Any) -> None:
        """Begin a scaler's step, before it unscales the gradients."""
        key = id(optimizer)
        if key not in self._parameters:
            self._add(optimizer)
        if key in self._by_own:
            self._compare(key, self._by_own)
        self._running[:] = [key]

    def end(self, optimizer: object) -> None:
        """End a scaler's step, whether it was applied or skipped."""
        self._running.clear()
        self._keep(id(optimizer), self._by_scaler)

    def stop(self) -> None:
        """Watch no more steps."""
        remove_all(self._handles)

    def _add(self, optimizer: Any) -> None:
        held = (p for group in groups_of(optimizer) for p in group["params"])
        own = None if self._model is None else {id(p) for p in self._model.parameters()}
        used = (p for p in held if p.grad is not None and (own is None or id(p) in own))
        first = next(used, None)
        if first is not None and hasattr(optimizer, "register_step_post_hook"):
            self._parameters[id(optimizer)] = weakref.ref(first)
            hook = partial(_unless, self._running, weakly(self._after_own))
            self._handles.append(optimizer.register_step_post_hook(hook))

    def _after_own(self, optimizer: object, *_: object) -> None:
        self._compare(id(optimizer), self._by_scaler)
        self._keep(id(optimizer), self._by_own)

    def _compare(self, key: int, others: dict[int, _Used]) -> None:
        """Note a step if one of the other kind has used its gradients."""
        gradient: Any = getattr(self._parameters[key](), "grad", None)
        alive, version = others.pop(key, (None, 0))
        is_same = alive is not None and gradient is not None and alive() is gradient
        if is_same and version == gradient._version:
            self._note()

    def _keep(self, key: int, own: dict[int, _Used]) -> None:
        alive = self._parameters.get(key)
        gradient: Any = None if alive is None else getattr(alive(), "grad", None)
        if gradient is not None:
            own[key] = weakref.ref(gradient), gradient._version


def _unless(running: list[int], call: Callable[..., object], *args: object) -> None:
    """Call a function if nothing is running."""
    if not running:
        call(*args)
