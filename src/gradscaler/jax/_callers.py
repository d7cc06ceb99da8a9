"""Who calls a transformation's ``init``, read from the stack.

An optax transformation is a pair of functions, and nothing hands it what it is a part of. The
frame that calls ``init`` is the one thing that tells, so this file alone looks at frames. It asks
by the public ``inspect.currentframe()``. The modules' names are optax's own: tried with optax 0.2.8
on CPython 3.11. Where a Python has no frames, or another release of optax has other names, nothing
is refused: a wrong order of transformations then goes unnoticed, and a right one works the same.
"""

from __future__ import annotations

import inspect
from types import FrameType

from gradscaler.errors import ParameterError


def check_outermost() -> None:
    """ParameterError if it is optax that calls the function that calls this.

    ``inject_hyperparams`` may call it.
    """
    frame = inspect.currentframe()
    own = frame and frame.f_back
    caller = own and own.f_back
    while caller and _module_of(caller).startswith("optax.schedules."):
        # inject_hyperparams does not change gradients. What is around it may.
        caller = caller.f_back
    module = _module_of(caller) if caller else ""
    if module.startswith("optax.") and not module.startswith("optax.tree_utils"):
        raise ParameterError(
            f"loss_scaled is inside another transformation ({module}), which would take scaled "
            "gradients for true ones. Put it outermost: "
            "loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.001)))"
        )


def _module_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name
