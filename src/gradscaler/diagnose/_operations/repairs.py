"""The repairs of operations: what to do, and when that is right."""

from __future__ import annotations

from dataclasses import replace

from gradscaler.diagnose._operations.operation import Repair, Seen

_TINY = 2.0**-14  # the smallest normal number of float16
# Unit vectors in bfloat16, whose eps is 2**-7, have a product of at most about 1 + 2**-7.
_LARGEST_BY_ROUNDING = 1.01
_LARGEST_OF_LGAMMA = 8000.0  # in float16


def _in_float16(seen: Seen) -> bool:
    return seen.dtype == "float16"


def _in_bfloat16(seen: Seen) -> bool:
    return seen.dtype == "bfloat16"


# Appended to others.
_WHERE = Repair(", also in where()'s other branch", lambda seen: seen.is_backward)
# 1 / 1e-5 is beyond float16's 65504, and so is the slope of 1 / x at 1e-3, which is 1 / x**2.
_LOST_EPS = Repair("; an eps/min below 3e-8 is 0: take 1e-4", _in_float16)
_LOST_1 = Repair("; bfloat16 rounds 1 - 1e-6 to 1: take 1 - 2**-8, or float32", _in_bfloat16)
_LOST_BESIDE_MINUS_1 = Repair(
    "; 16 bits round -1 + 1e-6 to -1", lambda seen: seen.dtype in ("float16", "bfloat16")
)
_LOST_BESIDE_1 = Repair("; compute it in float32, as 1 - 1e-3 is 1 in bfloat16", _in_bfloat16)
_STEEP_EPS = Repair("; an eps/min below 3e-8 is 0: take 1e-2", _in_float16)
_AT_0 = _WHERE, _LOST_EPS
_BY_0 = _WHERE, _STEEP_EPS

IN_FLOAT32 = Repair("run this module in bfloat16 or float32, or lower its inputs")
LOSS_IN_FLOAT32 = Repair(
    "compute the loss in float32 (outputs.float()), or bring outputs and targets closer to 1",
    lambda seen: seen.is_in_loss,
)

# Logarithms, and what has one in it.
LOG = Repair(
    "the logarithm of 0 is -Inf, of a negative number NaN: clamp its input, or take logits "
    "(cross_entropy, log_softmax, logsigmoid)",
    clauses=(_LOST_EPS, _LOST_1),
)
_ALL_0 = Repair(
    "; all of it is 0: look first at what makes it so, such as data, a "
    "whole-number division or a mask",
    lambda seen: seen.largest == 0 and seen.size > 1,
)
LOG_OF_0 = Repair(
    "the input of the logarithm is 0: clamp it to a small number, or take logits (cross_entropy, "
    "log_softmax, logsigmoid)",
    lambda seen: seen.is_inf_alone,
    (_ALL_0, _LOST_EPS, _LOST_1),
)
LOG_OF_NEGATIVE = Repair(
    "the input of the logarithm is negative, as its result is NaN and not -Inf: look for a wrong "
    "sign or a wrong range in the formula, which a clamp would only hide, or for a parameter that "
    "became negative: take its exp() or softplus()",
    lambda seen: not seen.has_inf,
)
LOG_SLOPE = Repair(
    "clamp the input of the logarithm, as its slope at 0 is Inf",
    clauses=(_WHERE, _LOST_EPS, _LOST_1),
)
LOG1P = Repair(
    "log1p of -1 is -Inf, of less NaN: clamp its input to at least -1 + {margin}",
    clauses=(_LOST_BESIDE_MINUS_1,),
)
LOG1P_SLOPE = Repair(
    "clamp its input to at least -1 + {margin}, as its slope at -1 is Inf",
    clauses=(_WHERE, _LOST_BESIDE_MINUS_1),
)
XLOGY = Repair(
    "the logarithm of 0 is -Inf: clamp what it is taken of, or move targets off the border of "
    "their range (0 and 1 for a Beta or Dirichlet)"
)
LOGIT = Repair(
    "clamp its input to within {margin} and 1 - {margin}, as its slope is Inf at 0 and 1",
    clauses=(_WHERE,),
)
OPEN_UNIT = Repair(
    "it is Inf at 0 and 1, and NaN beyond: clamp its input to within {margin} and 1 - {margin}",
)
ENTROPY = Repair("it is -Inf of a negative number: clamp its input to a small number")
LOG_NDTR = Repair(
    "its slope is computed as exp(a - b) of two large numbers: clamp its input to at least -30"
)
MASKED_SUMS = Repair(
    "sums of nothing but -Inf have no slope: mask with a large finite number in place of -Inf"
)
PROBABILITIES_TO_KL = Repair(
    "its input holds -Inf, as the logarithm of 0 is: take log_softmax() for it, or mask with a "
    "large finite number"
)
VARIANCE = Repair(
    "a variance near 0 divides by its eps: pass a larger one (eps=1e-2), or compute the loss in "
    "float32"
)
PROBABILITIES = Repair(
    "the slope of a probability of 0 or 1 leaves the dtype: take logits "
    "(binary_cross_entropy_with_logits)"
)

# Roots and powers.
ROOT_OF_NEGATIVE = Repair(
    "the root of a negative number is NaN, as where a variance is a difference of large squares: "
    "clamp its input to at least 1e-6, or compute it in float32",
    lambda seen: not seen.has_inf,
)
ROOT_SLOPE = Repair(
    "add a small number under the root, or clamp its input, as its slope at 0 is Inf", clauses=_AT_0
)
# It is one call of the user's, of signed differences: no root to add to, and nothing to clamp.
NORM_SLOPE = Repair(
    "the norm of 0 has no slope: write it out as a root of more than 0, such as "
    "torch.sqrt((x * x).sum(-1) + 1e-6)",
    clauses=(_WHERE,),
)
RSQRT = Repair(
    "1 / sqrt of 0 is Inf, and of a negative number NaN: clamp its input to a small number",
    clauses=_BY_0,
)
RSQRT_OF_NEGATIVE = replace(
    ROOT_OF_NEGATIVE, clauses=(Repair("; in float16 take 1e-2", _in_float16),)
)
POWER_OF_NEGATIVE = Repair(
    "a fractional power of a negative number is NaN: take its magnitude, or clamp",
    lambda seen: not seen.has_inf,
)
# A degree, a count or a deviation has a base of 0.
POWER_OF_0 = Repair(
    "a negative power of 0 is Inf: clamp the base",
    lambda seen: (seen.exponent or 0.0) < 0,
    (_STEEP_EPS,),
)
POWER_SLOPE = Repair("clamp the base: a power below 1 is too steep at 0", clauses=_BY_0)
_IN_FLOAT32 = (
    Repair(f": {LOSS_IN_FLOAT32.text}", lambda seen: seen.is_in_loss),
    Repair(f": {IN_FLOAT32.text}", lambda seen: not seen.is_in_loss),
)
SQUARE = Repair(
    "the square of more than 255 is too large for float16",
    lambda seen: not seen.is_wide,
    _IN_FLOAT32,
)
POWER = Repair(
    "the square of more than 255 is too large for float16, and higher powers sooner",
    lambda seen: not seen.is_wide and seen.exponent is not None,
    _IN_FLOAT32,
)
HIGH_POWER = Repair(
    "a high power of a large number leaves the dtype: clamp the base, or take a lower power",
    lambda seen: seen.exponent is not None,
)
POWER_OR_0 = Repair(
    "a negative power of 0 is Inf, and a high one of a large number: clamp the base",
    clauses=(_STEEP_EPS,),
)
SQUARES = Repair(
    "its squares leave the range of float16 beyond 255: take it in float32 (dtype=torch.float32)",
    _in_float16,
)

# Exponentials.
EXP_IN_FLOAT16 = Repair(
    "the exponential of more than 11 leaves float16: raise the temperature, subtract the "
    "largest exponent first, clamp it at its source (log-variance, ratio), or compute it in "
    "float32",
    _in_float16,
)
EXP = Repair(
    "the exponential of more than 88 leaves float32 and bfloat16: subtract the largest exponent "
    "first, clamp it (a ratio of probabilities), or stay in logarithms (logsumexp, softplus)"
)
EXP2_IN_FLOAT16 = replace(
    EXP_IN_FLOAT16,
    text=EXP_IN_FLOAT16.text.replace("the exponential of more than 11", "an exp2 of more than 16"),
)
EXP2 = replace(
    EXP, text=EXP.text.replace("the exponential of more than 88", "an exp2 of more than 128")
)
OF_EXPONENTIALS = Repair(
    "it grows as exp() does, which leaves float16 beyond 11 and float32 beyond 88: clamp its input"
)
SCALED_BESSEL = Repair(
    "it grows as exp() does: take the scaled one (torch.special.i0e, i1e) and its logarithm, or "
    "clamp its input"
)
OF_SQUARES = Repair(
    "it grows as exp(x * x) below 0, which leaves float32 at -9.4: clamp its input to at least -9"
)
THRESHOLD = Repair(
    "beyond its threshold it is its input, before it an exponential: leave threshold at 20"
)
LOG_RATE = Repair(
    "its input is a logarithm, whose exponential leaves float16 beyond 11 and float32 beyond 88: "
    "clamp it"
)
MATRIX_EXP = Repair(
    "the exponential of a large matrix leaves the dtype: divide the matrix by its norm, or clip it"
)

# Quotients.
DIVISION = Repair(
    "clamp the divisor (an empty mask, a deviation or norm of 0)", clauses=(*_BY_0, _LOST_BESIDE_1)
)
ZERO_BY_0 = Repair(
    "0 / 0 is NaN: clamp the divisor (an empty mask, a deviation or norm of 0)",
    lambda seen: seen.divisor == 0 and not seen.has_inf,
    (_STEEP_EPS, _LOST_BESIDE_1),
)
QUOTIENT = Repair(
    "divide by a larger number",
    lambda seen: (seen.divisor or 0.0) >= _TINY,
    (Repair(", or compute the quotient in float32", lambda seen: not seen.is_wide),),
)
WEIGHT_NORM = Repair("the norm of a row of weights is 0: initialise them with other numbers than 0")
DIRECTION = Repair(
    "a vector of 0 has no direction: pass eps=1e-4",
    clauses=(Repair(", as 1e-8 is 0 in float16", _in_float16),),
)
EQUAL_NUMBERS = Repair(
    "numbers that are all equal have a deviation of 0: give it an eps, such as 1e-5",
    lambda seen: seen.is_of_few,
)
MEAN_OF_NONE = Repair(
    "the mean of no elements is 0 / 0 (an empty mask, labels all ignored or of weight 0): leave "
    "such batches out, or divide their sum by at least 1",
    lambda seen: seen.is_of_few,
)
# In PyTorch, it is 0.
DEVIATION_SLOPE = Repair(
    "numbers that are all equal have a deviation of 0, which has no slope: write it as a root, "
    "such as torch.sqrt(x.var() + 1e-6)",
    clauses=(_WHERE,),
)
MEDIAN_OF_NONE = Repair(
    "the median of no elements is NaN (an empty mask): leave such batches out",
    lambda seen: seen.is_of_few,
)
DEVIATION_OF_ONE = Repair(
    "the deviation of one element is 0 / 0: set correction=0, or take more elements",
    lambda seen: seen.is_of_few,
)

# Angles, and other functions of a range.
NO_COSINE = Repair(
    "its input is beyond 1 by more than rounding, so it is no cosine or sine: normalize the "
    "vectors that it is a product of, or clamp it to within -{below_1} and {below_1}",
    lambda seen: seen.largest > _LARGEST_BY_ROUNDING,
)
ANGLE = Repair(
    "rounding takes a cosine or sine beyond 1: clamp it to within -{below_1} and {below_1} "
    "before this"
)
ANGLE_SLOPE = Repair(
    "clamp its input to within -{below_1} and {below_1}, as its slope at 1 is Inf",
    clauses=(_WHERE,),
)
BOTH_0 = Repair(
    "both of its arguments are 0, or so small that their squares underflow, where an angle has no "
    "slope: add 1e-3 to one of them, or mask such places before it",
    clauses=(_WHERE,),
)
TAN_SLOPE = Repair("its slope leaves float16 near pi / 2: clamp its input to within -1.5 and 1.5")
ACOSH = Repair(
    "it is NaN below 1, and its slope at 1 is Inf: clamp its input to at least 1 + {margin}",
    clauses=(_WHERE,),
)
ATANH = Repair(
    "it is Inf at 1 and -1, and NaN beyond: clamp its input to within -1 + "
    "{margin} and 1 - {margin}",
    clauses=(_WHERE,),
)
# lgamma(1e4) is 82100.
LGAMMA_IN_FLOAT16 = Repair(
    "it leaves float16 beyond 8000: compute it in float32",
    lambda seen: _in_float16(seen) and seen.largest > _LARGEST_OF_LGAMMA,
)
GAMMA = Repair("it is Inf at 0: clamp its input (a concentration) to more than 0")
GAMMA_SLOPE = Repair(
    "clamp its input (a concentration) to more than 0, where its slope is Inf", clauses=(_WHERE,)
)
ZETA = Repair(
    "it is Inf where its first argument is 1, and where its second is 0: take a first one above 1, "
    "and clamp the second to more than 0",
    clauses=(_WHERE,),
)
BESSEL_AT_0 = Repair("it is Inf at 0, and NaN below: clamp its input to a small number")
INCOMPLETE_BETA = Repair(
    "it is NaN outside of 0 and 1, where its slope may be Inf: clamp its input to within {margin} "
    "and 1 - {margin}",
    clauses=(_WHERE,),
)
GAMMA_OF_MATRIX = Repair(
    "it is Inf at (p - 1) / 2: clamp its input (degrees of freedom) to at least that + 1e-2"
)
INCOMPLETE_GAMMA = Repair(
    "it is NaN below 0, and its slope at 0 is Inf: clamp its input to a small number",
    clauses=(_WHERE,),
)

# Sums, means and products of many.
SUM = Repair(
    "the sum is larger than float16 can hold: take it in float32 (dtype=torch.float32)", _in_float16
)
SUM_OF_PARTS = Repair(
    "the sum is larger than float16 can hold: add up in float32 (x.float())", _in_float16
)
MATMUL = Repair(
    "a sum of products leaves float16: divide an input first (queries by the root "
    "of their width), or multiply in float32, under autocast(enabled=False)",
    _in_float16,
)
# The user cannot divide an input inside PyTorch's own layer.
LINEAR_IN_FLOAT32 = Repair(IN_FLOAT32.text, lambda seen: seen.type == "Linear" and not seen.is_wide)
GROWS = Repair(
    "numbers grow from layer to layer, or from one time step to the next: clip gradients before "
    "optimizer.step(), lower the learning rate, and start from smaller weights",
    lambda seen: seen.is_in_model and seen.largest > 1e18,  # their square leaves float32
)
PRODUCT = Repair(
    "a product of finite numbers is never NaN, so a factor is a constant Inf or NaN: mask with "
    "where() or masked_fill() instead",
    lambda seen: seen.has_nan,
)
FACTOR = Repair(
    "a product leaves float16: lower a factor (clamp one that is learned, such as a temperature), "
    "or compute it and what follows in float32 or bfloat16",
    lambda seen: seen.is_in_model and not seen.is_wide,
)
PRODUCT_OF_MANY = Repair(
    "a product of many numbers leaves the dtype: divide each by their largest first, or, if none "
    "is 0, add up the logarithms of their magnitudes"
)

# Masks, and losses of classes.
MASKED = Repair(
    "a row of the softmax is masked entirely (leave one place unmasked, or take a finite mask), or "
    "holds +Inf (-log(0))",
    clauses=(Repair("; two masks of -65504 make -Inf: take -1e4", _in_float16),),
)
# Two numbers differ by at most twice the larger one.
FAR_APART = Repair(
    "logits that far apart have a difference beyond the 65504 that float16 ends at: compute the "
    "loss in float32 (outputs.float())",
    lambda seen: _in_float16(seen) and seen.has_inf and 2 * seen.largest > 65504,
)
TOO_LARGE = Repair(
    "its inputs come near the end of float32's range: lower the learning rate, warm it up, or clip "
    "gradients",
    lambda seen: seen.largest > 1e30,
)
ALL_MASKED = Repair(
    "all classes of a row are -Inf, as the logarithm of 0 or a mask is: clamp the input of the "
    "logarithm, or leave one class unmasked",
    lambda seen: seen.size > 1 and not seen.has_inf,
)
MASKED_CLASS = Repair(
    "a class masked with -inf costs Inf: mask with a large finite number",
    clauses=(Repair("; a sum of many costs may, too: compute the loss in float32", _in_float16),),
)
ALIGNMENT = Repair(
    "a target that is longer than its input has no alignment: set zero_infinity=True, "
    "or leave such samples out"
)

# Matrices.
DETERMINANT = Repair(
    "its matrix is not positive definite, so the determinant is 0 or negative: "
    "make it one (A @ A.T + eps * I), or take cholesky()"
)
SINGULAR = Repair("its matrix is singular: add a small multiple of the identity")
NOT_DEFINITE = Repair(
    "its matrix is not positive definite: add a small multiple of the identity, or take it in "
    "float32 or float64"
)
CUTOFF = Repair(
    "a singular value near 0 is divided by: pass a larger rtol, or add a small multiple of the "
    "identity"
)
SINGULAR_VECTORS = Repair(
    "its vectors have no slope where singular values are equal or 0: take the values "
    "alone (svdvals), or detach() the vectors"
)
EIGENVECTORS = Repair(
    "its vectors have no slope where eigenvalues are equal, as several of 0 are: "
    "take cholesky() of the matrix plus a small multiple of the identity, or detach() the vectors"
)
DEPENDENT = Repair(
    "it has no slope where columns depend on each other: add a small multiple of the identity"
)

# Reads by an index; PyTorch raises an error.
OUT_OF_RANGE = Repair(
    "an index is out of range, and NaN is filled in there: look at labels and ids, which go from 0 "
    "to the number of rows or classes - 1, and at padding",
    lambda seen: seen.has_nan and not seen.has_inf,
)

# What writes, casts and hides.
CAST = Repair(
    "a number beyond 65504 becomes Inf when it is cast to float16: keep the next "
    "operations in float32 too, or lower the numbers before the cast"
)
CAST_BY_COPY = Repair(CAST.text, lambda seen: seen.largest > 0 and seen.has_inf)
WRITTEN = Repair("the code writes Inf or NaN there: write a finite number")
COMPILED = Repair(
    "compiled code is one operation here: watch such a step (gradscaler run "
    '--watch), or run some uncompiled, by torch.compiler.set_stance("force_eager"), which names '
    "the operation inside"
)
CHECKPOINTED = Repair(
    "a reentrant checkpoint hides its operations: pass use_reentrant=False, which shows them"
)
HOOK = Repair("look there for a division by 0, such as by the norm of a gradient of 0")
