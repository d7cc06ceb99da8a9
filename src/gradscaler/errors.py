"""The errors that gradscaler itself raises.

Frameworks disagree on the types of these errors, so each is a subclass of all that a user of one
of them may be catching.
"""

from __future__ import annotations


class CallOrderError(RuntimeError, AssertionError):
    """A scaler's methods were called out of order; the message names the call that is missing."""


class ParameterError(ValueError, AssertionError):
    """A parameter's value cannot work; the message names both."""
