"""Loss scaling for PyTorch: :class:`GradScaler`, in place of ``torch.amp.GradScaler``.

:class:`~gradscaler.torch.sharded.ShardedGradScaler` replaces the class of that name in
``torch.distributed.fsdp``. :func:`install` gives ours to packages that construct torch's scaler
themselves. :func:`flat_gradients` keeps gradients side by side in memory, so that a scaler takes
them as one tensor. :class:`MasterWeights` is an optimizer for 16-bit parameters. ``OptState`` is
torch's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradscaler._frameworks import require

require("torch")

from torch.amp.grad_scaler import OptState

from gradscaler._on_torch.compile import keep_out_of_graphs
from gradscaler._on_torch.flat import FlatGradients, flat_gradients
from gradscaler.torch._install import install, uninstall
from gradscaler.torch.scaler import GradScaler
from gradscaler.torch.weights import MasterWeights

if TYPE_CHECKING:
    from gradscaler.torch.sharded import ShardedGradScaler

__all__ = [
    "FlatGradients",
    "GradScaler",
    "MasterWeights",
    "OptState",
    "ShardedGradScaler",
    "flat_gradients",
    "install",
    "uninstall",
]


def __getattr__(name: str) -> type[ShardedGradScaler]:
    """Import FSDP's scaler when it is first used, because importing FSDP's modules takes long."""
    if name == "ShardedGradScaler":
        from gradscaler.torch.sharded import ShardedGradScaler

        keep_out_of_graphs()
        return ShardedGradScaler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


keep_out_of_graphs()
