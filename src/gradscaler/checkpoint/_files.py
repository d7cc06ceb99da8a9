"""Reads and writes files with a scaler's state: JSON, and the files of torch and Paddle.

A file may hold the state alone or in a checkpoint. No code in a file is ever run.
"""

from __future__ import annotations

import importlib
import io
import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gradscaler._atomic import replacing
from gradscaler._formats.layouts import LAYOUTS, OPTIONAL
from gradscaler._formats.reading import layout_of
from gradscaler._frameworks import install_command
from gradscaler.checkpoint import _pickles
from gradscaler.checkpoint._search import find

# By suffix, because both libraries write zip files or pickles that look alike from outside.
TORCH_SUFFIXES = (".pt", ".pth")
PADDLE_SUFFIXES = (".pdparams", ".pdopt", ".pdstates")

_MOST_JSON = 2**20  # bytes; the state of a loss scale takes a few hundred
_MOST_AT_ONCE = 2**23  # bytes; enough for a zip file's list of 80,000 tensors
_MOST_DIGITS = 400  # the largest float64 has 309
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle in a file of torch before 1.6
_PADDLE_NAMES = "StructuredToParameterName@@"  # an entry that Paddle adds to dicts of tensors


class FileError(ValueError):
    """A file that cannot be read or written."""


class Saved(NamedTuple):
    """A scaler's state in a file."""

    key: str | None  # the key of the state; None if it is at the top level
    values: dict[str, object]
    is_all: bool  # whether the file holds nothing else


def load(path: Path, key: str | None = None) -> Saved:
    """The scaler's state in a file, which may be a checkpoint with models and optimizers.

    The kind of file is detected by its first bytes. The bytes of tensors are not read. ``key`` is
    that of :func:`checkpoint.convert`. If no keys match a format, the result is the dict that was
    searched.

    Raises:
        FileError: the file is missing, damaged or too large, it has no such key, it has several
            scalers' states and ``key`` is None, or a value of the state is not a number or text.
    """
    loaded = _read(path)
    if isinstance(loaded, _pickles.Unread):
        raise FileError(loaded.why)
    if not isinstance(loaded, dict):
        raise FileError(f"holds a {type(loaded).__name__}, not a dict")
    loaded.pop(_PADDLE_NAMES, None)
    try:
        key, values = find(loaded, key, "--key")
    except TypeError:
        raise FileError(f"{key:.80} is not a dict") from None
    except ValueError as error:
        raise FileError(str(error)) from None
    layout = layout_of(values)
    needed = {*layout.keys, *OPTIONAL} if layout else _KNOWN
    where = "" if key is None else f"{key:.80}: "
    for name, value in values.items():
        if name not in needed:
            continue
        if isinstance(value, _pickles.Unread):
            raise FileError(f"{where}{value.why}")
        one = value[0] if isinstance(value, list) and len(value) == 1 else value
        if layout and not isinstance(one, (bool, int, float, str, type(None))):
            raise FileError(f"{where}{name} is a {type(value).__name__}, not a number")
    return Saved(key, dict(values), key is None and loaded.keys() <= needed)


_KNOWN = {key for layout in LAYOUTS for key in (*layout.keys, *OPTIONAL)}


def _read(path: Path) -> object:
    try:
        if path.exists() and not path.is_file():
            raise FileError("is not a file")
        with _Frugal(io.FileIO(path)) as file:
            return _parse(file)
    except (FileError, _pickles.RefusedError) as error:
        raise FileError(str(error)) from None
    except OSError as error:
        raise FileError(error.strerror or str(error)) from None
    except RecursionError:
        raise FileError("is nested too deeply for a state dict") from None
    except Exception as error:  # a damaged file may fail anywhere on the way
        reason = str(error).partition("\n")[0].strip()[:200]
        raise FileError(f"damaged, or not a state dict: {reason or type(error).__name__}") from None


class _Frugal(io.BufferedReader):
    """A file that refuses to read much at once, as a hostile zip file may ask for."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MOST_AT_ONCE:
            raise FileError("lists too much for a checkpoint")
        return super().read(size)


def _parse(file: _Frugal) -> object:
    start = file.read(4)
    file.seek(0)
    if start == b"PK\x03\x04":
        return _parse_zip(file)
    if not start.startswith(b"\x80"):
        data = file.read(_MOST_JSON + 1)
        if len(data) > _MOST_JSON:
            raise FileError("is too large for the state of a loss scale")
        return json.loads(data, parse_int=_integer)
    loaded = _pickles.load(file)
    if loaded == _TORCH_MAGIC:
        for _ in range(3):  # the version of the protocol, facts about the machine, and the dict
            loaded = _pickles.load(file)
    return loaded


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:  # some versions of Python take long for these, others raise
        raise FileError(f"holds a number of {len(digits)} digits")
    return int(digits)


def _parse_zip(file: _Frugal) -> object:
    """The value of the pickle in torch's file, after its checksum is verified.

    Compressed entries are refused, so the pickle is not larger than the file. torch writes none.
    """
    with zipfile.ZipFile(file) as archive:
        names = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if len(names) != 1 or names[0].compress_type != zipfile.ZIP_STORED:
            raise FileError("is a zip file, but not one of torch's")
        with archive.open(names[0]) as member:
            while member.read(2**20):  # raises at the end if the checksum is wrong
                pass
        with io.BufferedReader(archive.open(names[0])) as member:  # type: ignore[type-var]
            return _pickles.load(member)


def save(path: Path, state_dict: Mapping[str, object]) -> None:
    """Write a dict to a file, whole or not at all. The suffix gives the kind of file.

    Raises:
        FileError: the suffix is unknown, or the file cannot be written.
    """
    numbers = {
        key: value.item() if isinstance(value, (np.generic, np.ndarray)) else value
        for key, value in state_dict.items()
    }
    arrays = {k: v for k, v in state_dict.items() if isinstance(v, np.ndarray)}  # Paddle's scale
    data = io.BytesIO()
    if path.suffix == ".json":
        lists = {key: value.tolist() for key, value in arrays.items()}
        data.write(json.dumps({**numbers, **lists}, indent=2).encode() + b"\n")
    elif path.suffix in TORCH_SUFFIXES:
        try:
            importlib.import_module("torch").save(numbers, data)
        except ImportError:
            message = f"writing torch's files needs torch: {install_command('torch')}"
            raise FileError(message) from None
    elif path.suffix in PADDLE_SUFFIXES:
        pickle.dump({**numbers, **arrays}, data, protocol=4)
    else:
        suffixes = ", ".join((".json", *TORCH_SUFFIXES, *PADDLE_SUFFIXES))
        raise FileError(f"the name must end in one of {suffixes}")
    try:
        with replacing(path) as file:
            file.write(data.getbuffer())
    except OSError as error:
        raise FileError(error.strerror or str(error)) from None
