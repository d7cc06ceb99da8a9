"""Loss scaling for Paddle: :class:`GradScaler`, in place of ``paddle.amp.GradScaler``."""

from gradscaler._frameworks import require

require("paddle")

from gradscaler.paddle.scaler import GradScaler

__all__ = ["GradScaler"]
