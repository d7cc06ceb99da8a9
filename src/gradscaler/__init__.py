"""Loss scaling for mixed-precision training, one rule in every framework's own API.

This package's top level knows no framework: it holds the policies (what the next loss scale is),
the record of a step, and the errors. The scalers are in ``gradscaler.torch`` and its siblings, each
imported with its framework when it is first used.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from gradscaler._frameworks import FRAMEWORKS
from gradscaler.errors import (
    CallOrderError,
    ParameterError,
    ParameterTypeError,
    ScaleMismatchError,
)
from gradscaler.outcome import NonfiniteGradient, StepOutcome
from gradscaler.policies import AmaxScale, AmaxState, DynamicScale, FixedScale, Policy, ScaleState

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
]


if not TYPE_CHECKING:  # type checkers would take any name for a module's

    def __getattr__(name: str) -> ModuleType:
        """Import a submodule when it is first used."""
        if name in (*FRAMEWORKS, "checkpoint", "diagnose", "simulate"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
