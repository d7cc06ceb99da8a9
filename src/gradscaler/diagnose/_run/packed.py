"""The parameters of many samples in little memory."""

from __future__ import annotations

import marshal
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from gradscaler.diagnose._run.checks import value_as


class PackedMapping(Mapping[str, Any]):
    """A mapping of a JSON object's values, as instances of a type, packed until they are used.

    Verdicts and figures look at the parameters of a few samples, and a file may hold thousands.
    The constructor checks the values, and raises as :func:`value_as` does.
    """

    __slots__ = "_data", "_kind", "_length"

    def __init__(self, kind: Any, value: Any) -> None:
        self._length = len(value_as(Mapping[str, kind], value))
        self._kind = kind
        self._data = zlib.compress(marshal.dumps(value), 1)

    def __getitem__(self, key: str) -> Any:
        return _unpacked(self._kind, self._data)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(_unpacked(self._kind, self._data))

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return repr(dict(self))


@lru_cache(maxsize=20)
def _unpacked(kind: Any, data: bytes) -> Mapping[str, Any]:
    unpacked: Mapping[str, Any] = value_as(Mapping[str, kind], marshal.loads(zlib.decompress(data)))
    return unpacked
