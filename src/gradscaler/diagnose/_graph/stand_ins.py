"""Functions that stand in for those of PyTorch, and pass for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FrameType, FunctionType
from typing import Any

# Python counts no frame of importlib's bootstrap for a warning's `stacklevel`, so a warning names
# the user's line as if the function that we call were called there. It looks for these two words.
# PyTorch's compiler knows such files by "<frozen importlib", and would compile no call from one.
FILE = "<gradscaler like importlib._bootstrap>"


def in_place_of(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Make a decorated function that calls another one pass for it, in warnings too."""

    def passing(own: Any) -> Any:
        own.__code__ = own.__code__.replace(co_filename=FILE)
        return wraps(function)(own)

    return passing


def _call(function_of_theirs: Any, args: Any, kwargs: Any) -> Any:
    return function_of_theirs(*args, **kwargs)


def calling_for(frame: FrameType | None) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """What calls a function for a frame: a warning names the frame's line, and is given once.

    Python keeps which warnings were given in the globals of the function that gives them.
    """
    if frame and gives_to_a_mode(frame) and frame.f_back:
        frame = frame.f_back.f_back
    if frame is None:
        return _call
    code = _call.__code__.replace(
        co_filename=frame.f_code.co_filename,
        co_name=frame.f_code.co_name,
        co_firstlineno=(frame.f_lineno or 1) - 1,
    )
    return FunctionType(code, frame.f_globals)


def calls_for(frame: FrameType) -> bool:
    """Whether a frame is that of a function of :func:`calling_for`."""
    return frame.f_code.co_varnames == _call.__code__.co_varnames


def gives_to_a_mode(frame: FrameType) -> bool:
    """Whether a function of PyTorch's that is written in Python gives itself to a mode in a frame.

    That function is the frame's caller, and is called once more.
    """
    return frame.f_code.co_name == "handle_torch_function"
