"""The errors that gradscaler raises, and the line of the user that a warning points at.

Frameworks raise different types in these situations, so each class here is a subclass of every type
that a user may catch.
"""

from __future__ import annotations

import inspect


class CallOrderError(RuntimeError, AssertionError):
    """A scaler's methods were called out of order; the message names the missing call."""


class ParameterError(ValueError, AssertionError):
    """A parameter's value is out of range; the message names the parameter and the value."""


class ParameterTypeError(TypeError, ValueError):
    """A parameter's value has the wrong type; the message names the parameter and the value."""


class ScaleMismatchError(RuntimeError):
    """Processes that decide together hold different loss scales; the message names two of them."""


def levels_to_caller(*libraries: str) -> int:
    """The stack frames to the first caller outside gradscaler and ``libraries`` (``stacklevel``).

    A library is named with a dot at its end, such as ``"keras."``.
    """
    inside = ("gradscaler.", *libraries)
    frame, levels = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith(inside):
        frame, levels = frame.f_back, levels + 1
    return levels
