"""The latest loss, whose gradients may be used after ``update``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradscaler._eager.operations import Optimizer, Tensor
from gradscaler._eager.references import reference


class Loss:
    """The latest loss that was scaled outside of a closure.

    Training loops may call ``update`` between two optimizers after one loss, as Lightning's manual
    optimization does. So this is kept from iteration to iteration, until another loss is scaled.

    Attributes:
        scale: the scale that it was multiplied by, once that of the scaler may be another.
        waiting: the gradients that await their step since an earlier iteration, by the ids of
            their optimizers.
    """

    # Defaults stand on the class: each call of scale() makes a new object.
    scale: Tensor | None = None
    waiting: Mapping[int, Any] = {}
    _stepped: Mapping[int, Callable[[], Optimizer | None]] = {}

    def scale_for(self, optimizer: Optimizer, in_force: Tensor) -> Tensor:
        """The scale of an optimizer's gradients; ``in_force`` is the scaler's.

        An optimizer that steps again without another loss has gradients that the user has made,
        with the scale in force.
        """
        stepped = self._stepped.get(id(optimizer), lambda: None)
        return in_force if self.scale is None or stepped() is optimizer else self.scale

    def forget(self, key: int) -> None:
        """Forget gradients that wait, because the optimizer with this id gets new ones."""
        if key in self.waiting:
            self.waiting = {other: each for other, each in self.waiting.items() if other != key}

    def outlive_update(self, key: int, gradients: Any) -> None:
        """Note the end of an iteration for the gradients of the optimizer with this id."""
        if gradients.is_over:
            self._stepped = {**self._stepped, key: reference(gradients.optimizer)}
            self.forget(key)
        elif gradients.awaits_step:
            self.waiting = {**self.waiting, key: gradients}
