"""Keeps ``paddle.jit.to_static`` out of the scaler, so that a compiled step acts as an eager one.

A step decides on the host, which a graph cannot do, and SOT, the tracer of ``to_static``, fails on
such code. So each call of a scaler breaks the graph and runs untraced, and SOT traces the code
around it.
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
    """Let SOT run a class's methods untraced, and those that it inherits from this package."""
    core.eval_frame_skip_file_prefix((_PACKAGE,))
    for base in cls.__mro__:
        if base.__module__.startswith("gradscaler."):
            for method in filter(inspect.isfunction, vars(base).values()):
                paddle.jit.marker.force_dynamic(method)
    return cls


def static_graph_error() -> NotImplementedError:
    """The error of an enabled scaler in a static graph."""
    return NotImplementedError(
        "gradscaler.paddle.GradScaler scales losses of the dynamic graph, and this is a static "
        "graph: use paddle.amp.GradScaler there, or keep the scaler out of "
        "to_static(full_graph=True)"
    )
