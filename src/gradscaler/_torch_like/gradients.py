"""The engine's gradients, readable as the dict that ``torch.amp.GradScaler`` keeps."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from enum import Enum
from typing import Any, ClassVar

from gradscaler._eager.gradients import Gradients


class TorchLikeGradients(Gradients, MutableMapping[str, Any]):
    """Gradients that are also a mapping, equal to the dict that torch keeps for an optimizer."""

    opt_state: ClassVar[type[Enum]]  # the framework's own enum of stages

    def __getitem__(self, key: str) -> Any:
        if key == "stage":
            return self.opt_state[self.framework_stage]
        if key == "found_inf_per_device":
            return {} if self.found_inf is None else self.found_inf
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "stage":
            self.framework_stage = value.name
        elif key == "found_inf_per_device":
            self.found_inf = value
        else:
            raise KeyError(key)

    def __delitem__(self, key: str) -> None:
        raise TypeError(f"{key!r} cannot be deleted: the scaler needs it for each optimizer")

    def __iter__(self) -> Iterator[str]:
        return iter(("stage", "found_inf_per_device"))

    def __len__(self) -> int:
        return 2
