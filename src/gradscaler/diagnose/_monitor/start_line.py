"""What the first line of a run file says: framework, versions, script, policy and rank."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from platform import python_version
from typing import Any

from gradscaler.diagnose._monitor.engine_scaler import EngineScaler
from gradscaler.diagnose._monitor.recorded_loop import Unscaled


def framework_of(scaler: object) -> str:
    """The framework of a scaler, or of the optax state that holds one."""
    if isinstance(scaler, (EngineScaler, Unscaled)):
        return scaler.framework
    for base in type(scaler).__mro__:
        package, _, rest = base.__module__.partition(".")
        framework = rest.partition(".")[0]
        if package in ("keras", "tf_keras", "mindspore"):  # its own scaler
            return package
        if package == "gradscaler" and not framework.startswith("_"):  # shared by adapters
            return framework
    return "jax"  # the state of an optax optimizer


def script() -> str:
    """The Python file that was started, relative to the working directory if it is in it."""
    path = Path(getattr(sys.modules["__main__"], "__file__", None) or "")  # a notebook has none
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def versions_of(framework: str) -> dict[str, str]:
    """The versions of Python, gradscaler and a framework, and of Keras' backend."""
    names = ["gradscaler", framework]
    if framework == "keras":
        names.append(sys.modules["keras"].backend.backend())
    packages = {name: sys.modules.get(name) for name in names}
    found = {name: getattr(each, "__version__", "unknown") for name, each in packages.items()}
    return {"Python": python_version(), **{name: str(each) for name, each in found.items()}}


def described(policy: object) -> dict[str, Any]:
    """The name and the parameters of a policy."""
    names = [field.name for field in fields(policy)] if is_dataclass(policy) else []
    values = {name: getattr(policy, name) for name in names if not name.startswith("_")}
    plain = {name: value for name, value in values.items() if isinstance(value, (int, float, str))}
    return {"name": type(policy).__name__, **plain}


def rank_and_world_size() -> tuple[int, int]:
    """The rank of this process, and how many processes there are; (0, 1) if it trains alone.

    Both come from torch.distributed if it is initialized, else from the environment variables that
    launchers set, ``RANK`` and ``WORLD_SIZE``.
    """
    torch: Any = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return _number_in("RANK", 0), _number_in("WORLD_SIZE", 1)


def _number_in(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else otherwise
