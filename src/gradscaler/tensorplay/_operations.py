"""The engine's tensor operations for TensorPlay."""

from __future__ import annotations

import tensorplay
from tensorplay.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gradscaler._eager.operations import Device, GradientsRefusedError, Optimizer, Tensor
from gradscaler._torch_like.operations import TorchLikeOperations, parameters_of


class UnsupportedGradientsError(GradientsRefusedError, NotImplementedError):
    """TensorPlay cannot unscale such gradients."""


class TensorPlayOperations(TorchLikeOperations):
    """Works around three faults of TensorPlay's kernel.

    The kernel reads any tensor as if it were contiguous. It unscales nothing if the flag is already
    set. And it divides a buffer twice if two gradients share it, as those of ``a + b`` do.
    """

    def __init__(self) -> None:
        super().__init__(tensorplay, _group_tensors_by_device_and_dtype)

    def gradients(self, optimizer: Optimizer, allow_fp16: bool = True) -> list[Tensor]:
        """The optimizer's gradients, each contiguous and in memory of its own.

        Raises:
            NotImplementedError: a gradient is sparse, or not of a floating-point dtype.
            ValueError: a gradient is float16 and ``allow_fp16`` is False.
        """
        grads = super().gradients(optimizer, allow_fp16)
        for grad in grads:
            if grad.is_sparse:
                raise UnsupportedGradientsError(
                    "GradScaler does not support sparse gradients yet: TensorPlay cannot check them"
                )
            if not grad.is_floating_point():
                raise UnsupportedGradientsError(
                    f"TensorPlay cannot unscale gradients of {grad.dtype}"
                )
        buffers: set[int] = set()
        if all(grad.is_contiguous() and _is_new(grad, buffers) for grad in grads):
            return grads
        buffers.clear()
        for parameter in parameters_of(optimizer):
            grad = parameter.grad
            if grad is not None and not (grad.is_contiguous() and _is_new(grad, buffers)):
                parameter.grad = grad.detach().clone().contiguous()
        return super().gradients(optimizer)

    def check_and_unscale_(self, grads: list[Tensor], flag: Tensor, inv_scale: Tensor) -> None:
        """Multiply tensors in place, and set the flag if any is not finite."""
        found_inf = tensorplay.zeros_like(flag) if flag.item() else flag
        super().check_and_unscale_(grads, found_inf, inv_scale)
        if found_inf.item():
            self.framework._foreach_mul_(grads, inv_scale)
            flag.fill_(1.0)

    def are_new(self, gradients: list[Tensor], stale: list[Tensor]) -> bool:
        """Whether ``stale`` is empty. Addresses say nothing: TensorPlay adds into new tensors."""
        return not stale

    def scalar(self, value: float, device: Device) -> Tensor:
        """A float32 scalar, by TensorPlay's fastest constructor."""
        return tensorplay.full((), value, dtype=tensorplay.float32, device=device)

    def device_key(self, device: Device) -> tuple[str, int]:
        """The device's type and index, by which TensorPlay keys its own flags."""
        return device.type, device.index


def _is_new(grad: Tensor, buffers: set[int]) -> bool:
    """Whether no earlier gradient has the same buffer; adds this one's to ``buffers``."""
    seen = len(buffers)
    if grad.numel():
        buffers.add(grad.data_ptr())
    return not grad.numel() or len(buffers) > seen
