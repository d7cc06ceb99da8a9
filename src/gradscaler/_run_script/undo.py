"""What a watch changes in the process, and its undoing when the watch stops."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

on_stop = ExitStack()
"""What is called when the watch of this process stops, the latest first."""

_MISSING = object()


def replace(owner: Any, name: str, own: Any) -> None:
    """Set an attribute until the watch stops.

    If another tool has wrapped ours by then, it stays; ours does nothing then, as its watch is off.
    """
    theirs = vars(owner).get(name, _MISSING)  # not what it inherits
    setattr(owner, name, own)
    on_stop.callback(_restore, owner, name, own, theirs)


def _restore(owner: Any, name: str, own: Any, theirs: Any) -> None:
    if vars(owner).get(name) is not own:
        return
    if theirs is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, theirs)
