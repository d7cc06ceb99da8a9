"""A copy of a tensor on the host that no one waits for."""

from __future__ import annotations

import sys
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor


class HostCopy:
    """A copy of a PyTorch tensor, which arrives on the host when its device gets there.

    A tensor that is on the host already is kept as it is.
    """

    def __init__(self, tensor: Tensor) -> None:
        torch: Any = sys.modules["torch"]
        self._copy = tensor.to("cpu", non_blocking=True)
        self._event = None if tensor.device.type == "cpu" else torch.Event(tensor.device)
        if self._event is not None:
            self._event.record()

    @property
    def is_on_host(self) -> bool:
        """Whether the tensor was on the host from the start."""
        return self._event is None

    @property
    def has_arrived(self) -> bool:
        """Whether the values are on the host."""
        return self._event is None or bool(self._event.query())

    def values(self) -> Tensor:
        """The tensor on the host; waits until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy

    def item(self) -> float:
        """The only value; waits until it has arrived."""
        return float(self.values())
