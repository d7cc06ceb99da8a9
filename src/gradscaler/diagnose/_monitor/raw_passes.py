"""Backward passes of losses themselves, where a scaler has scaled them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._monitor import backward_calls


class RawPasses(backward_calls.BackwardListener):
    """Whether all backward passes of a step take losses that were given to a scaler.

    What the scaler returned for a loss is another tensor, whatever is computed from it.
    """

    def __init__(self) -> None:
        self._given: list[weakref.ref[Tensor]] = []
        self._num_passes = self._num_raw = 0

    def begin(self, loss: Tensor) -> None:
        """See the backward passes from here on, as a loss is given to a scaler."""
        self._given.append(weakref.ref(loss))
        backward_calls.listen(self)

    def before_backward(self, losses: Sequence[Tensor]) -> None:
        """Count a pass, and whether it is of such a loss."""
        given = [each() for each in self._given]
        self._num_passes += 1
        self._num_raw += any(loss is each for loss in losses for each in given)

    def are_all(self) -> bool:
        """Whether there were passes, all of them of such losses."""
        return self._num_raw == self._num_passes > 0

    def end(self) -> None:
        """See no more passes, and forget these."""
        if self._given:
            backward_calls.ignore(self)
            self._given.clear()
        self._num_passes = self._num_raw = 0
