"""What a communication hook of PyTorch's keeps from step to step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from gradscaler._in_memory import in_memory
from gradscaler.diagnose._gradients.reading import inspect

_POWER_SGD = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
_MEMORIES = "error_dict", "p_memory_dict", "q_memory_dict"  # of its state, tensors by bucket


def bad_memory() -> str:
    """A memory of PowerSGD that holds an Inf or NaN, as ``"PowerSGDState.error_dict"``; or empty.

    The hook adds what it left out of a gradient to the next one, so an Inf stays for ever.
    """
    module: Any = sys.modules.get(_POWER_SGD)
    for state in () if module is None else in_memory(module.PowerSGDState):
        for name in _MEMORIES:
            memory: Mapping[int, Any] = getattr(state, name, {})
            if inspect({str(key): each for key, each in memory.items()}):
                return f"{type(state).__name__}.{name}"
    return ""
