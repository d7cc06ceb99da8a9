"""Loss scaling for mixed-precision training: one rule in every framework's own API.

This package's top level imports no framework. It has the policies (rules for the next loss scale),
the record of a step, and the errors. The scalers are in ``gradscaler.torch`` and its siblings, each
of which is imported, with its framework, when it is first used; policies with NumPy, in the same
way. ``AmaxScale``, ``AmaxState``, ``DynamicScale``, ``FixedScale``, ``Policy`` and ``ScaleState``
are those of :mod:`gradscaler.policies`. ``watch()``, which says why a training fails, and the
``Watch`` that it returns are those of the page on ``gradscaler run``.
"""

import inspect
from importlib import import_module
from typing import TYPE_CHECKING

from gradscaler._frameworks import FRAMEWORKS, SCALERS
from gradscaler.errors import (
    CallOrderError,
    ParameterError,
    ParameterTypeError,
    ScaleMismatchError,
)
from gradscaler.outcome import NonfiniteGradient, StepOutcome

if TYPE_CHECKING:
    from gradscaler._run_script.watch import Watch, watch
    from gradscaler.policies import (
        AmaxScale,
        AmaxState,
        DynamicScale,
        FixedScale,
        Policy,
        ScaleState,
    )

__version__ = "0.1.0"
__all__ = [
    "AmaxScale",
    "AmaxState",
    "CallOrderError",
    "DynamicScale",
    "FixedScale",
    "NonfiniteGradient",
    "ParameterError",
    "ParameterTypeError",
    "Policy",
    "ScaleMismatchError",
    "ScaleState",
    "StepOutcome",
    "Watch",
    "watch",
]

_SUBMODULES = *FRAMEWORKS, "checkpoint", "diagnose", "policies"


def load_ipython_extension(_: object) -> None:
    """Watch the cells of a notebook, for ``%load_ext gradscaler``."""
    import_module(f"{__name__}._run_script.watch").watch()


def unload_ipython_extension(_: object) -> None:
    """Watch no more, for ``%unload_ext gradscaler``."""
    import_module(f"{__name__}._run_script.watch").watch().stop()


if not TYPE_CHECKING:  # or type checkers would take any attribute for a module

    def __getattr__(name: str) -> object:
        """Import a submodule or a policy at its first use; the error names a scaler's places."""
        if name in _SUBMODULES:
            return import_module(f"{__name__}.{name}")
        if name in ("Watch", "watch"):
            return getattr(import_module(f"{__name__}._run_script.watch"), name)
        if name in __all__:
            return getattr(import_module(f"{__name__}.policies"), name)
        message = f"module {__name__!r} has no attribute {name!r}"
        if name in SCALERS:
            message += "; write " + " or ".join(f"{__name__}.{i}.{name}" for i in SCALERS[name])
            # `from gradscaler import GradScaler` replaces the message of an AttributeError, so it
            # gets an ImportError. Only the calling frame shows that it is such an import. In a
            # Python without frames, Python's own message remains.
            frame = inspect.currentframe()
            caller = frame and frame.f_back
            if caller and caller.f_code.co_name == "_handle_fromlist":
                raise ImportError(message, name=__name__)
        raise AttributeError(message)
