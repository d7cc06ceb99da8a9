"""What the latest step of a scaler took that it should not have, where its calls are watched."""

from gradscaler.diagnose._monitor.by_identity import ByIdentity

undivided = ByIdentity[bool]()
"""Whether its gradients were still multiplied by the loss scale, by the scaler."""

unskipped = ByIdentity[bool]()
"""Whether they had left their dtype by the loss scale alone, by the same."""
