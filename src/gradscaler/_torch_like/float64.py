"""Whether a device computes in float64: Apple's GPUs do not, and some of Intel's do not."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from gradscaler._eager.operations import Device

_known: dict[tuple[str, str, int | None], bool] = {}


def has_float64(framework: ModuleType, device: Device) -> bool:
    """Whether a device computes in float64. Each is asked once, and the host does not wait."""
    key = framework.__name__, device.type, device.index
    known = _known.get(key)
    return _asked(framework, device, key) if known is None else known


def widest(framework: ModuleType, device: Device) -> Any:
    """The dtype float64 if a device computes in it, else float32."""
    return framework.float64 if has_float64(framework, device) else framework.float32


def _asked(framework: ModuleType, device: Device, key: tuple[str, str, int | None]) -> bool:
    narrow = framework.ones((), dtype=framework.float32, device=device)
    try:
        # XPUs raise RuntimeError here. Some of them can make a float64 tensor, but not compute.
        wide = narrow.double().reciprocal()
    except (RuntimeError, TypeError):  # MPS raises TypeError
        _known[key] = False
        return False
    if type(wide) is framework.Tensor:  # a fake tensor asks no device
        _known[key] = True
    return True
