"""What the next loss scale is: pure rules that know no tensor library."""

from gradscaler.policies.amax import AmaxScale, AmaxState
from gradscaler.policies.dynamic import DynamicScale
from gradscaler.policies.fixed import FixedScale
from gradscaler.policies.state import Policy, ScaleState

Rule = DynamicScale | FixedScale
"""The policies whose parameters every framework's format can describe."""

__all__ = ["AmaxScale", "AmaxState", "DynamicScale", "FixedScale", "Policy", "Rule", "ScaleState"]
