"""Scalers whose latest step took gradients that are still multiplied by the loss scale."""

from gradscaler.diagnose._monitor.by_identity import ByIdentity

undivided = ByIdentity[bool]()
"""Whether it did, by the scaler: as a watch of the user's calls has seen."""
