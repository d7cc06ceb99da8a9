"""The user's lines of the code that TensorFlow's AutoGraph has written in their place."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import cache
from typing import Any

_GENERATED = "__autograph_generated_file"  # how the names of its temporary files begin


@cache  # each of these files has a name of its own
def written_at(file: str, number: int) -> tuple[str, int]:
    """The file and the number of the line that the user wrote; as given for any other code.

    AutoGraph puts lines of its own between those of the user's, which belong to the one before.
    """
    if _GENERATED not in file:
        return file, number
    with suppress(Exception):  # another version of TensorFlow may keep it elsewhere
        api: Any = sys.modules["tensorflow.python.autograph.impl.api"]
        for made in list(api._TRANSPILER._cache._cache.values()):
            origins = (known.source_map for known in made.values())
            lines = {
                at.lineno: of.loc
                for each in origins
                for at, of in each.items()
                if at.filename == file and at.lineno <= number
            }
            if lines:
                nearest = lines[max(lines)]
                return nearest.filename, nearest.lineno
    return file, number
