"""The flags of XLA, which it reads once, when JAX starts."""

import os


def flags(devices):
    """The environment's flags, and a CPU that is split into this many devices."""
    given = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in given if "device_count" not in flag]
    return " ".join([*kept, f"--xla_force_host_platform_device_count={devices}"])
