"""The list of frameworks. docs/contributing.md names the files that belong to each."""

from __future__ import annotations

import os
import re
import shlex
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


def require(package: str, module: str | None = None, *extras: str) -> None:
    """Raise an error that says what to install, if a package is missing.

    Args:
        package: the package.
        module: the module of gradscaler that needs it; by default, the one of that name.
        extras: the extras that install the package; by default, the one with the module's name.

    Raises:
        ModuleNotFoundError: the package is not installed; the message has the command.
    """
    module = module or package
    if not installed(package):
        command = install_command(*extras or (module.replace("_", "-"),))
        raise ModuleNotFoundError(f"gradscaler.{module} needs {package}: {command}", name=package)


def install_command(*extras: str) -> str:
    """The command that installs what extras require, such as ``pip install 'torch>=2.6'``.

    It works in any folder, whether gradscaler comes from a package index or from a checkout.
    """
    wanted = [requirement for extra in extras for requirement in requirements_of(extra)]
    if not wanted:  # a checkout that is not installed
        wanted = [f".[{','.join(extras)}]"]
    return f"pip install {' '.join(map(quoted, wanted))}"


def quoted(word: str) -> str:
    """A word as the shell of this platform takes it."""
    if os.name != "nt":
        return shlex.quote(word)
    return word if re.fullmatch(r"[\w.:\\/,+=@~-]+", word) else f'"{word}"'


def requirements_of(extra: str) -> list[str]:
    """The requirements of an extra; none if gradscaler is not installed."""
    from importlib import metadata  # slow

    try:
        requirements = metadata.requires("gradscaler") or []
    except metadata.PackageNotFoundError:
        return []
    of_extra = re.compile(rf"(.+?) *; *extra == ['\"]{extra}['\"]")
    return [found[1] for found in map(of_extra.fullmatch, requirements) if found]
