"""The tensor operations of TensorPlay that the engine is written in."""

from __future__ import annotations

from typing import Any

import tensorplay
from tensorplay.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gradscaler.torch_like.operations import TorchLikeOperations


class TensorPlayOperations(TorchLikeOperations):
    """Refuses sparse gradients, as TensorPlay does."""

    def __init__(self) -> None:
        super().__init__(tensorplay, _group_tensors_by_device_and_dtype)

    def gradients(self, optimizer: Any, allow_fp16: bool = True) -> list[Any]:
        """The optimizer's gradients, none of which may be sparse."""
        grads = super().gradients(optimizer, allow_fp16)
        if any(grad.is_sparse for grad in grads):
            raise NotImplementedError(
                "GradScaler does not support sparse gradients yet: TensorPlay cannot check them"
            )
        return grads

    def device_key(self, device: Any) -> tuple[str, int]:
        """Type and index, which TensorPlay keys its own flags by."""
        return device.type, device.index
