"""What to try, by the operation that made an Inf or a NaN."""

from __future__ import annotations

import math

from gradscaler.diagnose._locate.located import Located
from gradscaler.diagnose._run.lines import Watched

_SOFTMAXES = "softmax", "attention", "transformer"
_LARGE = 1e3  # inputs that a sum of products may take beyond 65504

_IN_FLOAT32 = (
    "run this module in bfloat16 or float32, which a model trained in those may need, or lower its "
    "inputs"
)
_LOSS_IN_FLOAT32 = (
    "compute the loss in float32 (outputs.float()), or bring outputs and targets closer to 1"
)
_POWER = "the square of more than 255 is too large for float16, and higher powers sooner"
_BASE = (
    "a negative power of 0 is Inf, and a fractional power of a negative number NaN: clamp the base"
)
_CAST = (
    "a number beyond 65504 becomes Inf when it is cast to float16: keep what follows in float32 "
    "too, or lower the numbers before the cast"
)
_MASKED = (
    "a row of the softmax is masked entirely, -inf in all places, and is 0 / 0: leave at least one "
    "place unmasked, mask with a large finite number, or set such rows to 0 afterwards"
)
_SCORES = (
    "the scores leave the range of float16: divide them by the root of their width first, or "
    "compute them in float32"
)
_EXP = (
    "the exponential of more than 11 is too large for float16: raise the temperature, subtract the "
    "largest exponent first (as softmax and logsumexp do), or compute it in float32"
)
_LOG = (
    "the logarithm of 0 is -Inf, and of a negative number NaN: take a loss of logits "
    "(cross_entropy, binary_cross_entropy_with_logits), log_softmax or logsigmoid, or clamp it"
)
_DIVISION = (
    "look for a division by 0 (an empty mask, a deviation or norm of 0) and clamp the divisor; a "
    "small constant such as 1e-8 is 0 in float16"
)
_ROOT = "add a small number under the root, or clamp its input, as its slope at 0 is Inf"
_SUM = "the sum is larger than float16 can hold: take it in float32 (dtype=torch.float32)"
_NAN = (
    "Inf - Inf, 0 / 0, a logarithm or root of a negative number, or a softmax row that is masked "
    "entirely makes NaN of small numbers, and the exponential of a small temperature Inf: compute "
    "this module in float32 to see which"
)
_BY_OPERATION = {
    "softmax": _MASKED,
    "log_softmax": _MASKED,
    "scaled_dot_product": _MASKED,
    "logsumexp": _MASKED,
    "exp": _EXP,
    "log": _LOG,
    "div": _DIVISION,
    "reciprocal": _DIVISION,
    "sqrt": _ROOT,
    "norm": _ROOT,
    "cdist": _ROOT,
    "sum": _SUM,
    "mean": _SUM,
}
_POWERS = "pow", "square"
_SPOKEN = {"to": "a cast"}  # operations whose names are no nouns


def of_forward(located: Located) -> str:
    """What to try against an Inf or NaN of the forward pass."""
    operation = (located.operation or "").strip("_")
    in_float32 = _LOSS_IN_FLOAT32 if located.module is None else _IN_FLOAT32
    if operation in _POWERS and (not located.num_inf or located.largest_input <= 1):
        return _BASE
    if operation in _POWERS:
        return f"{_POWER}: {in_float32}"
    if operation == "to":
        return _CAST
    for name, advice in _BY_OPERATION.items():
        if operation.startswith((name, f"_{name}", f"r{name}")):
            return advice
    is_nan = located.num_nan > 0 and located.num_inf == 0
    if is_nan and any(name in located.type.lower() for name in _SOFTMAXES):
        return f"either {_MASKED}; or {_SCORES}"
    if operation or (located.num_inf and located.largest_input >= _LARGE):
        return in_float32
    if is_nan:
        return _NAN
    if located.num_inf and located.largest_input < math.log(65504):
        return f"{in_float32}; if it exponentiates, {_EXP}"
    return in_float32


def at_line(found: Located | Watched | None, before: str = ", by") -> str:
    """The operation and the line of an Inf or NaN, if they are known."""
    if found is None or found.operation is None:
        return ""
    line = f" at {found.line}" if found.line else ""
    return f"{before} {_SPOKEN.get(found.operation, found.operation)}{line}"
