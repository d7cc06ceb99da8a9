"""Loss scaling for PyTorch: :class:`GradScaler`, in place of ``torch.amp.GradScaler``."""

from torch.amp.grad_scaler import OptState

from gradscaler.torch.scaler import GradScaler

__all__ = ["GradScaler", "OptState"]
