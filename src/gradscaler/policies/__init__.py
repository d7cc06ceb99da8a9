"""What the next loss scale is: pure rules that know no tensor library."""

from gradscaler.policies.dynamic import DynamicScale
from gradscaler.policies.fixed import FixedScale
from gradscaler.policies.state import Policy, ScaleState

__all__ = ["DynamicScale", "FixedScale", "Policy", "ScaleState"]
