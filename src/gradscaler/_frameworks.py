"""The one list of frameworks, for the package, its tests and the Makefile.

    python -I src/gradscaler/_frameworks.py     # prints the list as assignments for make

docs/contributing.md names the files that belong to each.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import NamedTuple


class Framework(NamedTuple):
    """What the rest of the project needs to know about a framework.

    Its tests run in ``.venv/ENVIRONMENT``, from ``requirements/ENVIRONMENT.txt``. Frameworks that
    agree on their dependencies share one.
    """

    environment: str
    formats: tuple[str, ...]  # the names of its checkpoint formats
    seed: str = ""  # its function that seeds all its random numbers; empty if seeds are arguments
    runs: tuple[str, ...] = ()  # an environment variable for each run of its tests; () is one run


KERAS_BACKENDS = ("KERAS_BACKEND=tensorflow", "KERAS_BACKEND=jax", "KERAS_BACKEND=torch")

FRAMEWORKS = {
    "torch": Framework("torch", ("torch",), "manual_seed"),
    "tensorplay": Framework("paddle", ("tensorplay",), "manual_seed"),
    "paddle": Framework("paddle", ("paddle",), "seed"),
    "keras": Framework("keras", ("keras",), runs=KERAS_BACKENDS),
    "tf_keras": Framework("keras", ("tf_keras",)),
    "mindspore": Framework("mindspore", ("mindspore",), "set_seed"),
    "jax": Framework("keras", ("jmp", "flax")),
}
"""By the names of their packages, which are those of their adapters."""

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
    """Say what to install if a package is missing that a module of gradscaler needs.

    By default, the module has the package's name, and the extra the module's.

    Raises:
        ModuleNotFoundError: the package is not installed; the message names the extra.
    """
    module = module or package
    if not installed(package):
        extra = extra or module.replace("_", "-")
        message = f"gradscaler.{module} needs {package}: pip install 'gradscaler[{extra}]'"
        raise ModuleNotFoundError(message, name=package)


if __name__ == "__main__":
    for package, framework in FRAMEWORKS.items():
        extra = package.replace("_", "-")  # names of distributions and of make's targets
        print(f"FRAMEWORKS+={extra}", f"{extra}_ENVIRONMENT+={framework.environment}")
        print(*(f"{extra}_RUNS+={run}" for run in framework.runs))
