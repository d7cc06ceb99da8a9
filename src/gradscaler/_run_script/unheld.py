"""Parameters of a model that have a gradient and that no optimizer holds, in Paddle, TensorPlay."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from gradscaler.diagnose._gradients.arrays import sample_of
from gradscaler.diagnose._gradients.reading import largest

Parameter = Any

_STEPS = 3  # in which what is trained by code that is not seen has moved
_ELEMENTS = 16  # of a parameter; one that moves changes in these, too


class Unheld:
    """Finds those that stand in the first steps of a run.

    Those before the first that is held are left out: a backbone may be meant to stay.

    Args:
        model: the model; None if it is not known.
        held: the ids of the parameters that optimizers hold.
    """

    def __init__(self, model: Any, held: Container[int]) -> None:
        self._model, self._held = model, held
        self._steps = 0
        self._parts: dict[str, tuple[bytes, bytes]] = {}  # of a parameter, and of its gradient

    def take(self) -> tuple[str, ...]:
        """Note a step that begins; return the names in the step that shows them, else none."""
        self._steps += 1
        if self._model is None or self._steps not in (1, _STEPS):
            return ()
        now = {name: (_part_of(p), _part_of(p.grad)) for name, p in self._used()}
        before, self._parts = self._parts, now
        both = {name: (before[name], now[name]) for name in now if name in before}
        # The gradient of a model of before stands, too.
        return tuple(n for n, (old, new) in both.items() if old[0] == new[0] and old[1] != new[1])

    def _used(self) -> Iterator[tuple[str, Parameter]]:
        is_after = False
        for name, parameter in self._model.named_parameters():
            is_held = id(parameter) in self._held
            is_after |= is_held
            if is_after and not is_held and parameter.grad is not None and largest(parameter.grad):
                yield name, parameter


def _part_of(array: Any) -> bytes:
    return sample_of(array, _ELEMENTS).tobytes()
