"""The list of frameworks. docs/contributing.md names the files that belong to each."""

from __future__ import annotations

import sys
from importlib.util import find_spec

FRAMEWORKS = {
    "torch": ("torch",),
    "tensorplay": ("tensorplay",),
    "paddle": ("paddle",),
    "keras": ("keras",),
    "tf_keras": ("tf_keras",),
    "mindspore": ("mindspore",),
    "jax": ("jmp", "flax"),
}
"""The formats of each framework's checkpoints. A key is the name of its package and adapter."""

SCALERS = {
    "GradScaler": ("torch", "tensorplay", "paddle", "jax"),
    "ShardedGradScaler": ("torch",),
    "LossScaleOptimizer": ("keras", "tf_keras"),
    "DynamicLossScale": ("jax",),
    "DynamicLossScaler": ("mindspore",),
    "DynamicLossScaleManager": ("mindspore",),
}
"""The classes that users look for, and the adapters that have them."""


def installed(package: str) -> bool:
    """Whether a package can be imported; a folder of that name is not a package."""
    if package in sys.modules:
        return sys.modules[package] is not None
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def require(package: str, module: str | None = None, extra: str | None = None) -> None:
    """Raise an error that says what to install, if a package is missing.

    Args:
        package: the package.
        module: the module of gradscaler that needs it; by default, the one of that name.
        extra: the extra that installs the package; by default, the one with the module's name.

    Raises:
        ModuleNotFoundError: the package is not installed; the message names the extra.
    """
    module = module or package
    if not installed(package):
        extra = extra or module.replace("_", "-")
        message = f"gradscaler.{module} needs {package}: pip install 'gradscaler[{extra}]'"
        raise ModuleNotFoundError(message, name=package)
