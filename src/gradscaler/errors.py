"""The errors that gradscaler itself raises.

Frameworks disagree on the types of these errors, so each is a subclass of every type that a user
may catch.
"""

from __future__ import annotations


class CallOrderError(RuntimeError, AssertionError):
    """A scaler's methods were called out of order; the message names the missing call."""


class ParameterError(ValueError, AssertionError):
    """A parameter's value cannot work; the message names the parameter and the value."""


class ParameterTypeError(TypeError, ValueError):
    """A parameter is not the kind of number it should be; the message names it and the value."""


class ScaleMismatchError(RuntimeError):
    """Processes that decide together hold different loss scales; the message names both."""
