"""Finds the optax transformations around one of ours in the stack.

An optax transformation is a pair of functions, and does not learn which transformation it is part
of. Only the frames that call it show it, so this file looks at frames, by the public
``inspect.currentframe()``. It relies on the names of optax's modules, tested with optax 0.2.8 on
CPython 3.11. If a Python has no frames, or a release of optax has other names, no error is raised:
a wrong order of transformations then goes unnoticed, and a right one still works.
"""

from __future__ import annotations

import inspect
from types import FrameType

from gradscaler.errors import ParameterError

# Where optax calls the parts of a chain, and the wrappers that may lie between.
_CHAINS = "optax.transforms._combining", "optax.schedules.", "optax._src.base"


def check_outermost() -> None:
    """Raise ParameterError if optax calls the function that calls this.

    ``inject_hyperparams`` is allowed.
    """
    frame = inspect.currentframe()
    own = frame and frame.f_back
    caller = own and own.f_back
    while caller and _module_of(caller).startswith("optax.schedules."):
        # inject_hyperparams does not change gradients, but a transformation around it may.
        caller = caller.f_back
    module = _module_of(caller) if caller else ""
    if module.startswith("optax.") and not module.startswith("optax.tree_utils"):
        raise ParameterError(
            f"loss_scaled is inside another transformation ({module}), which would see scaled "
            "gradients. Put it outermost: "
            "loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.001)))"
        )


def check_last() -> None:
    """Raise ParameterError if more transformations follow in an ``optax.chain``.

    Those outside of ``masked`` and ``multi_transform`` may be for other parameters.
    """
    frame = inspect.currentframe()
    own = frame and frame.f_back
    caller = own and own.f_back
    while caller and _module_of(caller).startswith(_CHAINS):
        in_chain = caller.f_locals.get("update_fns", caller.f_locals.get("transforms", ()))
        if len(in_chain) > len(caller.f_locals.get("new_state", in_chain)) + 1:
            raise ParameterError(
                "master_weights is followed by other transformations in optax.chain, which would "
                "change updates that are differences of bits. Put them inside: "
                "master_weights(optax.chain(...))"
            )
        caller = caller.f_back


def _module_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name
