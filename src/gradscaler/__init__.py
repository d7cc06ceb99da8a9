"""Loss scaling for mixed-precision training, one rule in every framework's own API.

This package's top level knows no framework: it holds the policies (what the next loss scale is),
the record of a step, and the errors. The scalers are in ``gradscaler.torch`` and its siblings.
"""

from gradscaler.errors import CallOrderError, ParameterError
from gradscaler.outcome import NonfiniteGradient, StepOutcome
from gradscaler.policies import DynamicScale, FixedScale, Policy, ScaleState

__all__ = [
    "CallOrderError",
    "DynamicScale",
    "FixedScale",
    "NonfiniteGradient",
    "ParameterError",
    "Policy",
    "ScaleState",
    "StepOutcome",
]
