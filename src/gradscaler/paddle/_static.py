"""Keeps ``paddle.jit.to_static`` out of the scaler, so that a compiled step goes as an eager one.

A step decides on the host, which no graph can hold, and SOT, which traces a function for
``to_static``, fails on code of this kind. So it breaks the graph at each call of a scaler, runs the
call as it is, and traces what is around it.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import TypeVar

import paddle
from paddle.base import core

T = TypeVar("T")

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def run_dynamically(cls: type[T]) -> type[T]:
    """Have SOT run the methods of a class, those that it inherits from this package included."""
    core.eval_frame_skip_file_prefix((_PACKAGE,))
    for base in cls.__mro__:
        if base.__module__.startswith("gradscaler."):
            for method in filter(inspect.isfunction, vars(base).values()):
                paddle.jit.marker.force_dynamic(method)
    return cls


def static_graph_error() -> NotImplementedError:
    """What enabled scaling raises where the user builds a program."""
    return NotImplementedError(
        "gradscaler.paddle.GradScaler scales losses of the dynamic graph, and this is a static "
        "graph: use paddle.amp.GradScaler there, or keep the scaler out of "
        "to_static(full_graph=True)"
    )
