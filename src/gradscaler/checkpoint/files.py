"""Files that hold a state dict: JSON, and what torch and Paddle save. No code in one is run."""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

TORCH_SUFFIXES = (".pt", ".pth")
PADDLE_SUFFIXES = (".pdparams", ".pdopt", ".pdstates")


class FileError(ValueError):
    """A file that cannot be read or written; the message is one line."""


def load(path: Path) -> dict[str, Any]:
    """The dict in a file, whose first bytes tell of what kind it is.

    Raises:
        FileError: there is none, or it is damaged, or it would run code.
    """
    try:
        data = path.read_bytes()
        if data.startswith(b"PK\x03\x04"):
            loaded = _torch().load(path, map_location="cpu", weights_only=True)
        elif data.startswith(b"\x80"):
            loaded = _arrays_in(_NumbersOnly(io.BytesIO(data)).load())
        else:
            loaded = json.loads(data)
    except FileError:
        raise
    except OSError as error:
        raise FileError(error.strerror or str(error)) from None
    except Exception as error:  # a damaged file may fail anywhere on the way
        reason = str(error).partition("\n")[0].strip()[:200]
        raise FileError(f"damaged, or no state dict: {reason or type(error).__name__}") from None
    if not isinstance(loaded, dict):
        raise FileError(f"holds a {type(loaded).__name__}, not a dict")
    return loaded


def save(path: Path, state_dict: Mapping[str, Any]) -> None:
    """Write a dict to a file of the kind that its suffix says, whole or not at all.

    Raises:
        FileError: the suffix is none of those, or the file cannot be written.
    """
    plain = {
        key: value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
        for key, value in state_dict.items()
    }
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                if path.suffix == ".json":
                    file.write(json.dumps(plain, indent=2).encode() + b"\n")
                elif path.suffix in TORCH_SUFFIXES:
                    _torch().save(plain, file)
                elif path.suffix in PADDLE_SUFFIXES:
                    arrays = {k: v for k, v in state_dict.items() if isinstance(v, np.ndarray)}
                    pickle.dump({**plain, **arrays}, file, protocol=4)
                else:
                    suffixes = ", ".join((".json", *TORCH_SUFFIXES, *PADDLE_SUFFIXES))
                    raise FileError(f"the name must end in one of {suffixes}")
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(error.strerror or str(error)) from None


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise FileError("torch's files need torch: pip install 'gradscaler[torch]'") from None


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


_ARRAYS = (
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("builtins", "tuple"),  # of a Paddle tensor's name and its array
)


class _NumbersOnly(pickle.Unpickler):
    """Refuses every name in a pickle but those that NumPy's arrays are made of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        module = module.replace("numpy.core", "numpy._core")  # as NumPy 1 called it
        if (module, name) in _ARRAYS:
            return super().find_class(module, name)
        raise FileError(f"refused: it would run {module}.{name}")


def _arrays_in(loaded: Any) -> Any:
    if not isinstance(loaded, dict):
        return loaded
    return {
        key: value[1] if isinstance(value, tuple) and len(value) == 2 else value
        for key, value in loaded.items()
    }


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise FileError(f"refused: an encoding {encoding!r}")
    return text.encode("latin1")
