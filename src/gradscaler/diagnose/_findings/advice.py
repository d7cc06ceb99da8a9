"""Advice against an Inf or NaN, by the operation that made it."""

from __future__ import annotations

import math

from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._record.located import Located

_SOFTMAXES = "softmax", "attention", "transformer"
_TINY = 2.0**-14  # the smallest normal number of float16

_IN_FLOAT32 = "run this module in bfloat16 or float32, or lower its inputs"
_LOSS_IN_FLOAT32 = (
    "compute the loss in float32 (outputs.float()), or bring outputs and targets closer to 1"
)
_BEYOND_FLOAT32 = (
    "its numbers leave the range of float32, too: look for outliers in inputs and labels, and for "
    "an exponential or a power before it"
)
_ENLARGED = (
    "its inputs are so large after {}: clamp what that takes (the logarithm of a variance to at "
    "most 20), and normalize the inputs of the model"
)
_PRODUCT = (
    "a product of finite numbers is never NaN, so a factor is a constant Inf or NaN: mask with "
    "where() or masked_fill() instead"
)
_GROWS = (
    "numbers grow from layer to layer, or from one time step to the next: clip gradients before "
    "optimizer.step(), lower the learning rate, and start from smaller weights"
)
_POWER = "the square of more than 255 is too large for float16, and higher powers sooner"
_CAST = (
    "a number beyond 65504 becomes Inf when it is cast to float16: keep the next "
    "operations in float32 too, or lower the numbers before the cast"
)
_MASKED = (
    "a row of the softmax is masked entirely (0 / 0: leave one place unmasked, or mask with a "
    "large finite number), or holds +Inf, as of -log(0)"
)
_SCORES = (
    "the scores leave the range of float16: divide them by the root of their width first, or "
    "compute them in float32"
)
_EXP = (
    "the exponential of more than 11 leaves float16: raise the temperature, subtract the "
    "largest exponent first, clamp it (a ratio of probabilities), or compute it in float32"
)
_EXP_IN_FLOAT32 = (
    "the exponential of more than 88 leaves float32 and bfloat16: subtract the largest exponent "
    "first, clamp it (a ratio of probabilities), or stay in logarithms (logsumexp, softplus)"
)
_LOG = (
    "the logarithm of 0 is -Inf, of a negative number NaN: clamp its input, or take logits "
    "(cross_entropy, log_softmax, logsigmoid)"
)
_LOG_OF_NEGATIVE = (
    "the input of the logarithm is negative, as its result is NaN and not -Inf: look for a wrong "
    "sign or a wrong range in the formula, which a clamp would only hide, or for a parameter that "
    "became negative: take its exp() or softplus()"
)
_LOG_OF_0 = (
    "the input of the logarithm is 0: clamp it to a small number, or take logits (cross_entropy, "
    "log_softmax, logsigmoid)"
)
_LOG1P = (
    "log1p of -1 is -Inf, of less NaN: clamp its input to more than -1, in float32 by at least 1e-6"
)
_ROOT_OF_NEGATIVE = (
    "the root of a negative number is NaN, as where a variance is a difference of large squares: "
    "clamp its input at 0, or compute it in float32"
)
_POWER_OF_NEGATIVE = "a fractional power of a negative number is NaN: take its magnitude, or clamp"
_POWER_OF_0 = "a negative power of 0 is Inf: clamp the base"
_0_BY_0 = "0 / 0 is NaN: clamp the divisor (an empty mask, a deviation or norm of 0)"
_LOST_EPS = "an eps below 3e-8 is 0: add 1e-5"  # in float16
_LOST_IN_BFLOAT16 = "bfloat16 rounds 1 - 1e-6 to 1: take 1 - 2**-8, or float32"
_DIVISION = "clamp the divisor (an empty mask, a deviation or norm of 0)"
_DIVISION_IN_BFLOAT16 = "compute it in float32, as 1 - 1e-3 is 1 in bfloat16"
_QUOTIENT = "divide by a larger number, or compute the quotient in float32"
_RSQRT = "1 / sqrt of 0 is Inf, and of a negative number NaN"
_NAN = (
    "compute this module in float32 to see whether it is 0 / 0, Inf - Inf, a logarithm or root of "
    "a negative number, or a softmax row that is masked entirely"
)
_NAN_IN_FLOAT32 = (
    "look in it for 0 / 0, Inf - Inf, a root or logarithm of a negative number (a variance below "
    "0), or a softmax row that is masked entirely"
)
_HIDDEN = {
    "CompiledFunction": "compiled code is one operation here: watch such a step (gradscaler run "
    '--watch), or run some uncompiled, by torch.compiler.set_stance("force_eager"), which names '
    "the operation inside",
    "CheckpointFunction": "a reentrant checkpoint hides its operations: pass use_reentrant=False, "
    "which shows them",
}
_FORWARD = {
    **_HIDDEN,
    "softmax log_softmax scaled_dot_product logsumexp": _MASKED,
    "exp": _EXP_IN_FLOAT32,
    "log": _LOG,
    "log1p": _LOG1P,
    "xlogy": "the logarithm of 0 is -Inf: clamp what it is taken of, or move targets off the "
    "border of their range (0 and 1 for a Beta or Dirichlet)",
    "logdet slogdet": "its matrix is not positive definite, so the determinant is 0 or negative: "
    "make it one (A @ A.T + eps * I), or take cholesky()",
    "div reciprocal normalize": _DIVISION,
    "weight_norm": "the norm of a row of weights is 0: initialise them with other numbers than 0",
    "rsqrt": _RSQRT,
    "sqrt": _ROOT_OF_NEGATIVE,
    "acos asin": "rounding takes a cosine or sine beyond 1: clamp it to within -1 and 1 before "
    "this",
    "atanh erfinv": "it is Inf at 1 and -1, and NaN beyond: clamp its input to less than that, in "
    "float32 by at least 1e-6",
    "cross_entropy nll_loss": "a class masked with -inf costs Inf: mask with a large finite number",
    "ctc_loss": "a target that is longer than its input has no alignment: set zero_infinity=True, "
    "or leave such samples out",
    "copy fill masked_fill index_put": "the code writes Inf or NaN there: write a finite number",
}
_FORWARD_IN_FLOAT16 = {
    "exp": _EXP,
    "norm linalg_vector_norm cdist": "its squares leave the range of float16 beyond 255: take it "
    "in float32 (dtype=torch.float32)",
    "sum cumsum index_add scatter_add mean": "the sum is larger than float16 can hold: take it in "
    "float32 (dtype=torch.float32)",
    "matmul einsum": "a sum of products leaves float16: divide an input first (queries by the root "
    "of their width), or multiply in float32, under autocast(enabled=False)",
}
_ALL_MASKED = (
    "all classes of a row are -Inf, as the logarithm of 0 or a mask is: clamp the input of the "
    "logarithm, or leave one class unmasked"
)
_TOO_LARGE = (
    "its inputs come near the end of float32's range: lower the learning rate, warm it up, or clip "
    "gradients"
)
_OF_TOO_FEW = {  # if they make NaN but no Inf, of numbers whose squares are finite
    "layer_norm group_norm instance_norm": "numbers that are all equal have a deviation "
    "of 0: give it an eps, such as 1e-5",
    "mean cross_entropy nll_loss": "the mean of no elements is 0 / 0 (an empty mask, all labels "
    "ignored): leave such batches out, or divide their sum by at least 1",
    "std var": "the deviation of one element is 0 / 0: set correction=0, or take more elements",
}
OF_INPUT_IN_FLOAT16 = (
    "compute it in float32: a sum or product beyond 65504, such as that of a mask, is Inf in "
    "float16; else look for Inf in inputs and labels"
)
_SLOPE = "add a small number under the root, or clamp its input, as its slope at 0 is Inf"
_LOG_SLOPE = "clamp the input of the logarithm, as its slope at 0 is Inf"
_POWER_SLOPE = "clamp the base: a power below 1 is too steep at 0"
_ANGLE_SLOPE = "clamp its input to within -0.999 and 0.999, as its slope at 1 is Inf"
_BACKWARD = {
    **_HIDDEN,
    "sqrt norm linalg_vector_norm cdist hypot": _SLOPE,
    "rsqrt": _RSQRT,
    "div": _DIVISION,
    "log xlogy special_entr": _LOG_SLOPE,
    "logit": "clamp its input to within 1e-6 and 1 - 1e-6 (eps=1e-6), as its slope is Inf at 0 and "
    "1",
    "lgamma digamma polygamma": "clamp its input (a concentration) to more than 0, where its slope "
    "is Inf",
    "logdet slogdet linalg_slogdet": "its matrix is singular: add a small multiple of the identity",
    "pow": _POWER_SLOPE,
    "acos asin": _ANGLE_SLOPE,
    "exp": _EXP_IN_FLOAT32,
    "softmax": _MASKED,
    "hook": "look there for a division by 0, such as by the norm of a gradient of 0",
    "linalg_svd": "its vectors have no slope where singular values are equal or 0: take the values "
    "alone (svdvals), or detach() the vectors",
    "linalg_eig": "its vectors have no slope where eigenvalues are equal, as several of 0 are: "
    "take cholesky() of the matrix plus a small multiple of the identity, or detach() the vectors",
}
_BACKWARD_IN_FLOAT16 = {"exp": _EXP}
_AT_0 = _DIVISION, _RSQRT, _SLOPE, _LOG_SLOPE, _POWER_SLOPE
_OF_NAN = (
    "look for 0 * Inf, as by the root or norm of 0 (add an eps), an exp or log before a clamp "
    "(clamp its input), a masked softmax row, or where()'s other branch"
)
_FACTOR = (
    "a product leaves float16: lower a factor (clamp one that is learned, such as a temperature), "
    "or multiply in float32"
)
_OF_OWN_FUNCTION = (
    "look in its own backward() for a division by 0 (a norm of 0), 0 * Inf, and what overflows"
)
_POWERS = "pow", "square"
_WIDE = "bfloat16", "float32", "float64", "complex64", "complex128"  # with at least float32's range
_SPOKEN = {"to": "casting", "hook": "what a hook changed"}  # for operations with unclear names


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
    may_exponentiate = located.num_inf and located.largest_input < math.log(65504)
    if may_exponentiate and located.dtype not in _WIDE:
        return f"{_in_float32(located)}; if it exponentiates, {_EXP}"
    return _in_float32(located)


def of_operation(located: Located) -> str | None:
    """Advice against an Inf or NaN of a forward operation; None if the operation is unknown."""
    if located.operation is None:
        return None
    operation, has_inf = located.operation.strip("_"), located.num_inf > 0
    is_power, is_wide = operation in _POWERS, located.dtype in _WIDE
    is_large = located.largest_input > 1e18  # its square leaves float32
    is_small = not (has_inf or is_large)
    cases = {
        _ENLARGED.format(located.enlarged_by): located.enlarged_by is not None and has_inf,
        _POWER_OF_NEGATIVE: is_power and not has_inf,
        _POWER_OF_0: is_power and located.largest_input <= 1,
        f"{_POWER}: {_in_float32(located)}": is_power and not is_wide,
        _CAST: operation == "to" or (operation == "copy" and located.largest_input > 0 and has_inf),
        _PRODUCT: operation == "mul" and located.num_nan > 0,
        _FACTOR: operation == "mul" and located.module is not None and not is_wide,
        _QUOTIENT: operation == "div" and (located.smallest_divisor or 0.0) >= _TINY,
        # The user cannot divide an input inside PyTorch's own layer.
        _IN_FLOAT32: operation == "matmul" and located.type == "Linear" and not is_wide,
        _GROWS: operation == "matmul" and located.module is not None and is_large,
        _TOO_LARGE: operation in ("cross_entropy", "nll_loss") and located.largest_input > 1e30,
        _ALL_MASKED: operation in ("cross_entropy", "nll_loss")
        and located.size > 1
        and not has_inf,
        **{text: operation in few.split() and is_small for few, text in _OF_TOO_FEW.items()},
    }
    special = next((advice for advice, holds in cases.items() if holds), None)
    table = {**_FORWARD, **_by_result(located)}
    named = special or _named(table, _FORWARD_IN_FLOAT16, located)
    return named or _of_nan(located) or _in_float32(located)


def _by_result(located: Located) -> dict[str, str]:
    """Advice where the result alone, Inf or NaN, tells the input: NaN of a negative one."""
    if located.num_inf and not located.num_nan:
        return {"log": _LOG_OF_0}
    if located.num_inf:
        return {}
    of_nan = {"log": _LOG_OF_NEGATIVE, "sqrt": _ROOT_OF_NEGATIVE, "rsqrt": _ROOT_OF_NEGATIVE}
    return {**of_nan, "div": _0_BY_0} if located.smallest_divisor == 0 else of_nan


def _of_nan(located: Located) -> str | None:
    if located.num_inf or not located.num_nan:
        return None
    if any(name in located.type.lower() for name in _SOFTMAXES):
        return f"either {_MASKED}; or {_SCORES}"
    if located.dtype in _WIDE:
        return _NAN_IN_FLOAT32
    return _NAN if located.operation is None else None


def _in_float32(located: Located) -> str:
    if located.dtype in _WIDE:  # float32 would not help
        return _BEYOND_FLOAT32
    is_loss = located.module is None and not located.type
    return _LOSS_IN_FLOAT32 if is_loss else _IN_FLOAT32


def of_backward(located: Located | None) -> str:
    """Advice against a gradient that is NaN at every scale, by the operation located, if any."""
    advice = None if located is None else of_gradient(located) or of_own(located)
    return advice or _OF_NAN


def of_own(located: Located) -> str | None:
    """Advice against a bad gradient of a Function of the user's; None if it is another operation.

    PyTorch's operations are in lower case; a Function has a class' name.
    """
    is_own = located.operation is not None and not located.operation.islower()
    return _OF_OWN_FUNCTION if is_own else None


def of_gradient(located: Located) -> str | None:
    """Advice against an Inf or NaN that an operation's gradient makes; None if there is none."""
    return _named(_BACKWARD, _BACKWARD_IN_FLOAT16, located, ", also in where()'s other branch")


def _named(
    table: dict[str, str], in_float16: dict[str, str], located: Located, hidden: str = ""
) -> str | None:
    """The advice that a table has for an operation, or None.

    ``hidden`` is appended where the cause may be in a branch of ``where`` that is not taken.
    """
    if is_in_float16 := located.dtype == "float16":
        table = {**table, **in_float16}
    named = {name: advice for names, advice in table.items() for name in names.split()}
    operation = (located.operation or "").strip("_")
    longest = max(filter(operation.startswith, named), key=len, default=None)
    if longest is None:
        return None
    advice = named[longest]
    where = hidden if advice in (*_AT_0, _ANGLE_SLOPE) else ""
    lost_eps = (
        f"; {_LOST_EPS}" if is_in_float16 and advice in (*_AT_0, _0_BY_0, _LOG, _LOG_OF_0) else ""
    )
    if located.dtype == "bfloat16" and advice in (_LOG, _LOG1P, _LOG_OF_0, _LOG_SLOPE):
        lost_eps = f"; {_LOST_IN_BFLOAT16}"
    if located.dtype == "bfloat16" and advice in (_DIVISION, _0_BY_0):
        lost_eps = f"; {_DIVISION_IN_BFLOAT16}"
    return f"{advice}{where}{lost_eps}"


def is_inf_in_float16(found: Located | None) -> bool:
    """Whether a tensor that was given to an operation is Inf, as sums in float16 may be."""
    if found is None or (found.kind, found.dtype) != ("input", "float16"):
        return False
    return found.num_inf > 0 and not found.num_nan


def at_line(found: Located | None, before: str = "by") -> str:
    """A clause with the operation and the line of an Inf or NaN; empty if it is unknown."""
    if found is None or found.operation is None:
        return ""
    line = f" at {found.line}" if found.line else ""
    likely = ", probably" if found.is_likely else ","
    inside = f" in {found.module}" if found.kind == "backward" and found.module else ""
    operation = _SPOKEN.get(found.operation, found.operation)
    is_of_loss = found.summand is not None and found.kind != "backward"
    number = (found.summand or "").removesuffix(f" ({found.operation} at {found.line})")
    summand = f", in summand {number} of the loss" if is_of_loss else ""
    return f"{likely} {before} {operation}{inside}{line}{summand}"


def seen_in(found: Located | None) -> str:
    """A clause that says where an Inf or NaN of the loss was first seen; empty if it is unknown."""
    if found is not None and found.kind == "input":
        of = f"{found.rows} of " if found.rows else ""
        return at_line(found, f"from {of}a tensor without a gradient, first read by")
    return at_line(found, "first seen in")
