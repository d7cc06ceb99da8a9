"""Which of several processes that train together this one is."""

from __future__ import annotations

import os
import sys
from typing import Any


def rank_and_world_size() -> tuple[int, int]:
    """The rank of this process, and how many processes there are; (0, 1) if it trains alone.

    From torch.distributed, if it is initialized, else from the environment variables that
    launchers set: ``RANK`` and ``WORLD_SIZE``.
    """
    torch: Any = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return _number_in("RANK", 0), _number_in("WORLD_SIZE", 1)


def _number_in(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else otherwise
