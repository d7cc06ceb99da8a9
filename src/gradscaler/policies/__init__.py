"""Policies: pure rules for the next loss scale, which import no tensor library."""

from gradscaler.policies.amax import AmaxScale
from gradscaler.policies.dynamic import DynamicScale
from gradscaler.policies.fixed import FixedScale
from gradscaler.policies.state import (
    AmaxState,
    Policy,
    Scalar,
    ScaleState,
    State,
    amax_interval,
    counts_nonfinite_steps,
    first_scale,
    is_fixed,
    leaf_dtypes,
    name_of_first_scale,
)

Rule = DynamicScale | FixedScale
"""The policies whose parameters every framework's format can describe."""

OwnPolicy = Rule | AmaxScale
"""The policies of this package."""

__all__ = [
    "AmaxScale",
    "AmaxState",
    "DynamicScale",
    "FixedScale",
    "OwnPolicy",
    "Policy",
    "Rule",
    "Scalar",
    "ScaleState",
    "State",
    "amax_interval",
    "counts_nonfinite_steps",
    "first_scale",
    "is_fixed",
    "leaf_dtypes",
    "name_of_first_scale",
]
