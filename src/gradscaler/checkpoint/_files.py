"""Files that hold a state dict: JSON, and what torch and Paddle save. Their code is never run."""

from __future__ import annotations

import importlib
import io
import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gradscaler._atomic import replacing
from gradscaler.checkpoint import _pickles

TORCH_SUFFIXES = (".pt", ".pth")
PADDLE_SUFFIXES = (".pdparams", ".pdopt", ".pdstates")

_MOST_BYTES = 2**20  # the state of a loss scale is a few hundred
_MOST_DIGITS = 400  # the largest float64 has 309
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle in a file of torch before 1.6
_PADDLE_NAMES = "StructuredToParameterName@@"  # beside tensors


class FileError(ValueError):
    """A file that cannot be read or written."""


def load(path: Path) -> dict[str, Any]:
    """The dict of numbers and texts in a file. The first bytes say which kind of file it is.

    Raises:
        FileError: the file is missing, damaged or too large, or holds anything else.
    """
    try:
        if path.exists() and not path.is_file():
            raise FileError("is not a file")
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise FileError("is too large for the state of a loss scale")
        loaded = _parse(data)
    except (FileError, _pickles.RefusedError) as error:
        raise FileError(str(error)) from None
    except OSError as error:
        raise FileError(error.strerror or str(error)) from None
    except RecursionError:
        raise FileError("is nested too deeply for a state dict") from None
    except Exception as error:  # a damaged file may fail anywhere on the way
        reason = str(error).partition("\n")[0].strip()[:200]
        raise FileError(f"damaged, or not a state dict: {reason or type(error).__name__}") from None
    if not isinstance(loaded, dict):
        raise FileError(f"holds a {type(loaded).__name__}, not a dict")
    loaded.pop(_PADDLE_NAMES, None)
    for key, value in loaded.items():
        one = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(one, (bool, int, float, str, type(None))):
            raise FileError(f"{key[:80]} is a {type(value).__name__}, not a number")
    return loaded


def _parse(data: bytes) -> Any:
    if data.startswith(b"PK\x03\x04"):
        return _pickles.load(io.BytesIO(_pickle_in_zip(data)))
    if not data.startswith(b"\x80"):
        return json.loads(data, parse_int=_integer)
    file = io.BytesIO(data)
    loaded = _pickles.load(file)
    if loaded == _TORCH_MAGIC:
        for _ in range(3):  # the protocol, the machine, and then the dict
            loaded = _pickles.load(file)
    return loaded


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:  # some versions of Python take long for these, others raise
        raise FileError(f"holds a number of {len(digits)} digits")
    return int(digits)


def _pickle_in_zip(data: bytes) -> bytes:
    """The pickle in torch's file, with its checksum verified.

    Torch does not compress, so the result is never larger than the file.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if len(names) != 1 or names[0].compress_type != zipfile.ZIP_STORED:
            raise FileError("is a zip file, but not one of torch's")
        return archive.read(names[0])


def save(path: Path, state_dict: Mapping[str, Any]) -> None:
    """Write a dict to a file, whole or not at all; the suffix says which kind of file.

    Raises:
        FileError: the suffix is unknown, or the file cannot be written.
    """
    plain = {
        key: value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
        for key, value in state_dict.items()
    }
    data = io.BytesIO()
    if path.suffix == ".json":
        data.write(json.dumps(plain, indent=2).encode() + b"\n")
    elif path.suffix in TORCH_SUFFIXES:
        try:
            importlib.import_module("torch").save(plain, data)
        except ImportError:
            message = "writing torch's files needs torch: pip install 'gradscaler[torch]'"
            raise FileError(message) from None
    elif path.suffix in PADDLE_SUFFIXES:
        arrays = {k: v for k, v in state_dict.items() if isinstance(v, np.ndarray)}
        pickle.dump({**plain, **arrays}, data, protocol=4)
    else:
        suffixes = ", ".join((".json", *TORCH_SUFFIXES, *PADDLE_SUFFIXES))
        raise FileError(f"the name must end in one of {suffixes}")
    try:
        with replacing(path) as file:
            file.write(data.getbuffer())
    except OSError as error:
        raise FileError(error.strerror or str(error)) from None
