"""Loss scaling for TensorPlay: :class:`GradScaler`, in place of ``tensorplay.amp.GradScaler``.

``OptState`` is TensorPlay's own.
"""

from gradscaler._frameworks import require

require("tensorplay")

from tensorplay.amp.grad_scaler import OptState

from gradscaler.tensorplay.scaler import GradScaler

__all__ = ["GradScaler", "OptState"]
