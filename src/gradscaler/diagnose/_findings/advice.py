"""Advice against an Inf or NaN, by the operation that made it."""

from __future__ import annotations

import math

from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._operations import repairs
from gradscaler.diagnose._operations.operation import Seen
from gradscaler.diagnose._operations.rows import row_of
from gradscaler.diagnose._record.located import BadGradient, Given, Located, Made

_SOFTMAXES = "softmax", "attention", "transformer"

_BEYOND_FLOAT32 = (
    "its numbers leave the range of float32, too: look for outliers in inputs and labels, and for "
    "an exponential or a power before it"
)
_ENLARGED = (
    "its inputs are so large after {}: clamp what that takes (the logarithm of a variance to at "
    "most 20), and normalize the inputs of the model"
)
_SCORES = (
    "the scores leave the range of float16: divide them by the root of their width first, or "
    "compute them in float32"
)
_NAN = (
    "compute this module in float32 to see whether it is 0 / 0, Inf - Inf, a logarithm or root of "
    "a negative number, or a softmax row that is masked entirely"
)
_NAN_IN_FLOAT32 = (
    "look in it for 0 / 0, Inf - Inf, a root or logarithm of a negative number (a variance below "
    "0), or a softmax row that is masked entirely"
)
OF_INPUT_IN_FLOAT16 = (
    "compute sums and masks in float32, as float16 ends at 65504; else look for Inf in the data"
)
_OF_NAN = (
    "look for 0 * Inf, as by the root or norm of 0 (add an eps), an exp or log before a clamp "
    "(clamp its input), a masked softmax row, or where()'s other branch"
)
_OF_INF_IN_FLOAT16 = (
    "this gradient leaves float16, which ends at 65504: normalize the inputs, divide the loss (a "
    "mean in place of a sum), or compute this layer in bfloat16 or float32"
)
_OF_OWN_FUNCTION = (
    "look in its own backward() for a division by 0 (a norm of 0), 0 * Inf, and what overflows"
)

_UNDERFLOWS = (
    "numbers that are not 0 underflow to 0 in {}, which a clamp does not cure: compute their "
    "logarithms, and add those up in place of it (logsumexp over the terms of a mixture)"
)


def at_any_scale(action: str, evidence: Evidence) -> str:
    """A sentence that says what to try, and that no loss scale replaces it, if there is one."""
    if evidence.has_scaler:
        return f"No loss scale fixes this: {action}."
    return f"{action[0].upper()}{action[1:]}."


def of_forward(located: Located) -> str:
    """Advice against an Inf or NaN of the forward pass."""
    advice = of_operation(located) or _of_nan(located)
    if advice is not None:
        return advice
    seen = Seen.at(located)
    if seen.has_inf and seen.largest < math.log(65504) and not seen.is_wide:
        return f"{_in_float32(seen)}; if it exponentiates, {repairs.EXP_IN_FLOAT16.text}"
    return _in_float32(seen)


def of_operation(located: Located) -> str | None:
    """Advice against an Inf or NaN of a forward operation; None if the operation is unknown."""
    if located.operation is None:
        return None
    seen = Seen.at(located)
    if located.enlarged_by is not None and seen.has_inf:
        return _ENLARGED.format(located.enlarged_by)
    if located.zeroed_by is not None and seen.is_inf_alone:
        return _UNDERFLOWS.format(located.zeroed_by)
    return _repair(located, seen) or _of_nan(located) or _in_float32(seen)


def _repair(located: Located, seen: Seen) -> str | None:
    """What repairs the operation that was located; None if that is not known."""
    row = row_of((located.operation or "").strip("_"))
    repair = None if row is None else row.repair(seen)
    return None if repair is None else repair.said_of(seen)


def _of_nan(located: Located) -> str | None:
    if located.num_inf or not located.num_nan:
        return None
    if any(name in located.type.lower() for name in _SOFTMAXES):
        return f"either {repairs.MASKED.text}; or {_SCORES}"
    if Seen.at(located).is_wide:
        return _NAN_IN_FLOAT32
    return _NAN if located.operation is None else None


def _in_float32(seen: Seen) -> str:
    if seen.is_wide:  # float32 would not help
        return _BEYOND_FLOAT32
    return repairs.LOSS_IN_FLOAT32.text if seen.is_in_loss else repairs.IN_FLOAT32.text


def of_result(located: Located | None) -> str | None:
    """What repairs the operation that made an Inf or NaN of the forward pass, if that is known."""
    return _repair(located, Seen.at(located)) if isinstance(located, Made) else None


def of_result_alone(located: Located | None) -> str | None:
    """Likewise, of an operation whose gradient alone makes none."""
    return None if located is None or of_gradient(located) else of_result(located)


def of_backward(located: Located | None) -> str:
    """Advice against a gradient that is NaN at every scale, by the operation located, if any."""
    if located is None:
        return _OF_NAN
    is_overflow = located.dtype == "float16" and located.num_inf > 0
    otherwise = _OF_INF_IN_FLOAT16 if is_overflow else _OF_NAN
    return of_gradient(located) or of_own(located) or otherwise


def of_own(located: Located) -> str | None:
    """Advice against a bad gradient of a Function of the user's; None if it is another operation.

    PyTorch's operations are in lower case; a Function has a class' name.
    """
    is_own = located.operation is not None and not located.operation.islower()
    return _OF_OWN_FUNCTION if is_own else None


def of_gradient(located: Located) -> str | None:
    """Advice against an Inf or NaN that an operation's gradient makes; None if there is none."""
    return _repair(located, Seen.at(located, is_backward=True))


def is_inf_in_float16(located: Located | None) -> bool:
    """Whether a tensor that was given to an operation is Inf, as sums in float16 may be."""
    if not isinstance(located, Given) or located.dtype != "float16":
        return False
    return located.num_inf > 0 and not located.num_nan


def at_line(located: Located | None, before: str = "by") -> str:
    """A clause with the operation and the line of an Inf or NaN; empty if it is unknown."""
    if located is None or located.operation is None:
        return ""
    line = f" at {located.line}" if located.line else ""
    likely = ", probably" if located.is_likely else ","
    is_backward = isinstance(located, BadGradient)
    inside = f" in {located.spoken_module}" if is_backward and located.module else ""
    row = row_of(located.operation)
    operation = (row and row.spoken) or located.operation
    is_of_loss = located.summand is not None and not is_backward
    number = (located.summand or "").removesuffix(f" ({located.operation} at {located.line})")
    summand = f", in summand {number} of the loss" if is_of_loss else ""
    return f"{likely} {before} {operation}{inside}{line}{summand}"


def seen_in(located: Located | None) -> str:
    """A clause that says where an Inf or NaN of the loss was first seen; empty if it is unknown."""
    if isinstance(located, Given):
        of = f"{located.rows} of " if located.rows else ""
        return at_line(located, f"from {of}a tensor without a gradient, first read by")
    return at_line(located, "first seen in")
