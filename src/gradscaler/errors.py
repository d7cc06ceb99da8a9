"""The errors that gradscaler raises.

Frameworks raise different types in these situations, so each class here is a subclass of every type
that a user may catch.
"""

from __future__ import annotations


class CallOrderError(RuntimeError, AssertionError):
    """A scaler's methods were called out of order; the message names the missing call."""


class ParameterError(ValueError, AssertionError):
    """A parameter's value is out of range; the message names the parameter and the value."""


class ParameterTypeError(TypeError, ValueError):
    """A parameter's value has the wrong type; the message names the parameter and the value."""


class ScaleMismatchError(RuntimeError):
    """Processes that decide together hold different loss scales; the message names two of them."""
