"""How gradients are unscaled, by the framework's operations or by what users put in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradscaler._eager.operations import FoundInf, Optimizer, Tensor
from gradscaler._torch_like.operations import TorchLikeOperations


class OwnUnscaler:
    """Unscales by the framework's operations.

    Args:
        operations: the framework's.
        optimizer: the one that owns the gradients.
        allow_fp16: whether float16 gradients are unscaled rather than refused.
        is_plain: whether nothing else happens, as in a subclass's ``unscale_``.
    """

    __slots__ = ("_allow_fp16", "_operations", "_optimizer", "is_plain")

    def __init__(
        self,
        operations: TorchLikeOperations,
        optimizer: Optimizer,
        allow_fp16: bool,
        is_plain: bool,
    ) -> None:
        self._operations, self._optimizer = operations, optimizer
        self._allow_fp16, self.is_plain = allow_fp16, is_plain

    def unscale_(self, inverse: Tensor) -> FoundInf:
        return self._operations.unscale_(self._optimizer, inverse, None, self._allow_fp16)

    def check(self) -> FoundInf:
        return self._operations.check(self._optimizer)


class ReplacedUnscaler:
    """Unscales by a ``_unscale_grads_`` that a subclass or a user has put in place of ours.

    Args:
        unscale_grads: that method.
        operations: the framework's.
        optimizer: the one that owns the gradients.
        allow_fp16: whether float16 gradients are unscaled rather than refused.
        device: of the scale.
    """

    is_plain = False

    def __init__(
        self,
        unscale_grads: Callable[..., Mapping[Any, Tensor]],
        operations: TorchLikeOperations,
        optimizer: Optimizer,
        allow_fp16: bool,
        device: Any,
    ) -> None:
        self._unscale_grads, self._optimizer = unscale_grads, optimizer
        self._scalar, self._device = operations.scalar, device
        self._allow_fp16 = allow_fp16

    def unscale_(self, inverse: Tensor) -> FoundInf:
        zero = self._scalar(0.0, inverse.device)
        # It may change what it is handed; ours is kept for the next step.
        return self._unscale_grads(self._optimizer, inverse.clone(), zero, self._allow_fp16)

    def check(self) -> FoundInf:
        # Dividing by 1 leaves gradients as they are; it is the one check that a replacement has.
        one, zero = (self._scalar(value, self._device) for value in (1.0, 0.0))
        return self._unscale_grads(self._optimizer, one, zero, True)
