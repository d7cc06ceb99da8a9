"""Each row of the table of operations: it fails where it says so, and its repairs cure that."""

import math
import re
from collections import Counter
from contextlib import suppress

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd import grad

# The texts of findings show a row only for a failure that a training has.
from gradscaler.diagnose._operations import repairs as to
from gradscaler.diagnose._operations.operation import Role, Seen
from gradscaler.diagnose._operations.rows import OPERATIONS, names_with, row_of

INF, HALF, SINGLE, DOUBLE = math.inf, torch.float16, torch.float32, torch.float64
DTYPES = HALF, torch.bfloat16, SINGLE
GRID = [x / 4 for x in range(-14, 15)]
ELSEWHERE = {"betainc", "cbrt"}  # of JAX alone: see tests/jax/test_operations.py
# How an operation is called with the one number that decides.
CALLS = {
    "addcdiv": lambda x: torch.addcdiv(torch.zeros_like(x), torch.ones_like(x), x),
    "atan2": lambda x: torch.atan2(x, torch.ones_like(x)),
    "div": lambda x: 1 / x,
    "floor_divide": lambda x: torch.floor_divide(torch.ones_like(x), x.detach()),  # has no slope
    "fmod": lambda x: torch.fmod(torch.ones_like(x), x),
    "hypot": lambda x: torch.hypot(x, 0 * x),
    "igamma": lambda x: torch.igamma(torch.full_like(x, 0.5), x),
    "igammac": lambda x: torch.igammac(torch.full_like(x, 0.5), x),
    "log_sigmoid": F.logsigmoid,
    "polygamma": lambda x: torch.polygamma(1, x),
    "pow": lambda x: x**-1.0,
    "remainder": lambda x: torch.remainder(torch.ones_like(x), x),
    "softplus": F.softplus,
    "special_zeta": lambda x: torch.special.zeta(2.0, x),
    "special_xlog1py": lambda x: torch.special.xlog1py(2.0, x),
    "xlogy": lambda x: torch.xlogy(2.0, x),
}
WITH_POLES = [row.name for row in OPERATIONS if row.bad_at or row.steep_at]
WITH_LARGEST = [(row.name, dtype) for row in OPERATIONS for dtype in row.largest]
WITHOUT = "asinh", "atan", "atan2", "log_sigmoid", "softplus", "square", "tan", "special_log_ndtr"


def function_of(name):
    if name in ELSEWHERE:
        pytest.skip("PyTorch has none")
    return CALLS.get(name) or getattr(torch, name, None) or getattr(torch.special, name[8:])


def gives(function, numbers, dtype=DOUBLE):
    """What an operation gives for numbers, and its gradient in them."""
    x = torch.tensor(numbers, dtype=dtype, requires_grad=True)
    made = function(x)
    slope = grad(made.sum(), x)[0] if made.requires_grad else torch.zeros(())
    return made.detach(), slope


def seen_of(made, slope, numbers, **more):
    """What a diagnosis sees of an operation that failed."""
    is_backward = more.pop("is_backward", bool(made.isfinite().all()))
    bad, given = slope if is_backward else made, torch.tensor(numbers).flatten().double()
    known = {
        "dtype": str(bad.dtype).removeprefix("torch."),
        "has_inf": bool(bad.isinf().any()),
        "has_nan": bool(bad.isnan().any()),
        "size": bad.numel(),
        "largest": max(given[given.isfinite()].abs().tolist(), default=math.nan),
    }
    return Seen(is_backward=is_backward, **{**known, **more})


def is_in(x, span):
    return span[0] < x < span[1] if isinstance(span, tuple) else x == span


def holds(x, spans):
    return any(is_in(x, span) for span in spans)


def at_least(least):
    return lambda function: lambda x: function(x.clamp(min=least))


def at_most(most):
    return lambda function: lambda x: function(x.clamp(max=most))


def within(low, high):
    return lambda function: lambda x: function(x.clamp(low, high))


def in_single(function):
    return lambda x: function(x.float())


def regular(function):
    return lambda x: function(x + 1e-3 * torch.eye(len(x), dtype=x.dtype))


# What each repair says to do, of a function of one tensor; a bound beside another number than 0 is
# the one that it says for the dtype.
BESIDE_1 = {
    to.LOG1P: lambda margin: at_least(-1 + margin),
    to.LOG1P_SLOPE: lambda margin: at_least(-1 + margin),
    to.LOGIT: lambda margin: within(margin, 1 - margin),
    to.OPEN_UNIT: lambda margin: within(margin, 1 - margin),
    to.NO_COSINE: lambda most: within(-most, most),
    to.ANGLE: lambda most: within(-most, most),
    to.ANGLE_SLOPE: lambda most: within(-most, most),
    to.ACOSH: lambda margin: at_least(1 + margin),
    to.ATANH: lambda margin: within(-1 + margin, 1 - margin),
}
# A bound near 0, which a text may say for float16.
NEAR_0 = {
    to.LOG,
    to.LOG_OF_0,
    to.LOG_SLOPE,
    to.ROOT_SLOPE,
    to.RSQRT_OF_NEGATIVE,
    to.RSQRT,
    to.POWER_OF_0,
    to.POWER_SLOPE,
    to.DIVISION,
    to.ZERO_BY_0,
}
CURES = {
    to.LOG_OF_NEGATIVE: lambda function: lambda x: function(F.softplus(x)),
    to.XLOGY: at_least(1e-6),
    to.ENTROPY: at_least(1e-6),
    to.LOG_NDTR: at_least(-30.0),
    to.MASKED_SUMS: at_least(-1e4),
    to.PROBABILITIES_TO_KL: at_least(-1e4),
    to.ROOT_OF_NEGATIVE: at_least(1e-6),
    to.POWER_OF_NEGATIVE: lambda function: lambda x: function(x.abs()),
    to.SQUARE: in_single,
    to.POWER: in_single,
    to.HIGH_POWER: at_most(10.0),
    to.POWER_OR_0: within(1e-2, 10.0),
    to.SQUARES: in_single,
    to.EXP_IN_FLOAT16: at_most(10.0),
    to.EXP: at_most(80.0),
    to.EXP2_IN_FLOAT16: at_most(15.0),
    to.EXP2: at_most(120.0),
    to.OF_EXPONENTIALS: at_most(10.0),
    to.SCALED_BESSEL: at_most(80.0),
    to.OF_SQUARES: at_least(-9.0),
    to.LOG_RATE: at_most(10.0),
    to.MATRIX_EXP: lambda function: lambda x: function(x / x.norm()),
    to.QUOTIENT: in_single,
    to.WEIGHT_NORM: lambda function: lambda x: function(x + 1),
    to.NORM_SLOPE: lambda _: lambda x: torch.sqrt((x * x).sum(-1) + 1e-6),
    to.TAN_SLOPE: within(-1.5, 1.5),
    to.LGAMMA_IN_FLOAT16: in_single,
    to.GAMMA: at_least(1e-6),
    to.GAMMA_SLOPE: at_least(1e-6),
    to.ZETA: at_least(1e-6),
    to.BESSEL_AT_0: at_least(1e-6),
    to.GAMMA_OF_MATRIX: at_least(0.5 + 1e-2),
    to.INCOMPLETE_GAMMA: at_least(1e-6),
    to.SUM: in_single,
    to.SUM_OF_PARTS: in_single,
    to.MATMUL: in_single,
    to.LINEAR_IN_FLOAT32: in_single,
    to.GROWS: lambda function: lambda x: function(x * 1e-6),
    to.FACTOR: in_single,
    to.MASKED: at_least(-1e4),
    to.FAR_APART: in_single,
    to.TOO_LARGE: lambda function: lambda x: function(x * 1e-3),
    to.ALL_MASKED: at_least(-1e4),
    to.MASKED_CLASS: at_least(-1e4),
    to.SINGULAR: regular,
    to.NOT_DEFINITE: regular,
    to.DEPENDENT: regular,
}
# These are advice on code, not on numbers; tests of the graph have them. What PyTorch has no
# slope or NaN for is tried in tests/jax/test_operations.py.
UNTRIED = {
    to.COMPILED,
    to.CHECKPOINTED,
    to.HOOK,
    to.BOTH_0,
    to.DEVIATION_SLOPE,
    to.INCOMPLETE_BETA,
    to.OUT_OF_RANGE,
}


def cross_entropy(labels, **options):
    return lambda x: F.cross_entropy(x, torch.tensor(labels), **options)


def ctc(**options):
    lengths = torch.tensor([1]), torch.tensor([2])  # of the input and of the target
    return lambda x: F.ctc_loss(x.log_softmax(-1), torch.ones(1, 2, dtype=int), *lengths, **options)


def gaussian(**options):
    return lambda x: F.gaussian_nll_loss(x, 0 * x, torch.zeros_like(x), **options)


ZEROS, EQUAL = [[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]
# By the operation: the function that fails, its numbers, their dtype, what is seen of it besides,
# and the cured function, if that is not the same for all operations.
CASES = [
    ("log", torch.log, [0.0, -1.0]),
    ("special_log_ndtr", torch.special.log_ndtr, [-1e10]),
    ("logcumsumexp", lambda x: x.logcumsumexp(0), [-INF, 0.0], DOUBLE, {"is_backward": True}),
    ("logaddexp", lambda x: torch.logaddexp(x, x), [-INF], DOUBLE, {"is_backward": True}),
    ("kl_div", lambda x: F.kl_div(x, 0.5 * torch.ones(1), reduction="sum"), [-INF]),
    ("gaussian_nll_loss", gaussian(), [1.0], HALF, {}, gaussian(eps=1e-2)),
    ("poisson_nll_loss", lambda x: F.poisson_nll_loss(x, 0 * x), [800.0]),
    (
        "binary_cross_entropy",
        lambda x: F.binary_cross_entropy(x, torch.ones_like(x)),
        [0.0],
        HALF,
        {},
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    ),
    ("pow", lambda x: x**0.5, [-1.0]),
    ("pow", lambda x: x**0.5, [0.0]),
    ("pow", lambda x: x**-0.5, [0.0, 400.0], SINGLE, {"exponent": -0.5}),
    ("pow", lambda x: x**-0.5, [0.0, 11.0], HALF, {"exponent": -0.5}),
    ("pow", lambda x: x**2, [300.0], HALF, {"exponent": 2.0}),
    ("pow", lambda x: x**16, [2.0], HALF, {"exponent": 16.0}, lambda x: (x / 2) ** 16),
    ("pow", lambda x: x**20, [100.0], SINGLE, {"exponent": 20.0}),
    ("pow", lambda x: x**-0.5, [0.0, 400.0], SINGLE),  # as where an exponent is learned
    ("pow", lambda x: x**-0.5, [0.0, 11.0], HALF),
    ("pow", lambda x: x**20, [100.0], SINGLE),
    ("square", torch.square, [300.0], HALF),
    ("hypot", lambda x: torch.hypot(x, x), [6e4], HALF),
    ("norm", torch.linalg.vector_norm, [6e4] * 4, HALF),
    ("special_erfcx", torch.special.erfcx, [-9.5], SINGLE),
    ("soft_margin_loss", lambda x: F.soft_margin_loss(x, -torch.ones_like(x)), [800.0]),
    ("softplus", lambda x: F.softplus(x, threshold=1000), [800.0], DOUBLE, {}, F.softplus),
    ("linalg_matrix_exp", torch.linalg.matrix_exp, [[800.0, 0.0], [0.0, 800.0]]),
    ("div", lambda x: x / 0.5, [6e4], HALF, {"divisor": 0.5}),
    ("div", lambda x: x / 0.5, [3e38], SINGLE, {"divisor": 0.5}, lambda x: x / 2),
    ("div", lambda x: (x - x) / x, [0.0], DOUBLE, {"divisor": 0.0}),
    ("normalize", F.normalize, [[0.0, 0.0]], HALF, {}, lambda x: F.normalize(x, eps=1e-4)),
    (
        "cosine_similarity",
        lambda x: F.cosine_similarity(x, torch.ones_like(x)),
        [[0.0, 0.0]],
        HALF,
        {},
        lambda x: F.cosine_similarity(x, torch.ones_like(x), eps=1e-4),
    ),
    ("weight_norm", lambda x: torch._weight_norm(x, torch.ones(2, 1).to(x)), ZEROS),
    (
        "layer_norm",
        lambda x: F.layer_norm(x, (2,), eps=0.0),
        [1.0, 1.0],
        DOUBLE,
        {},
        lambda x: F.layer_norm(x, (2,), eps=1e-5),
    ),
    ("std", torch.std, [1.0], DOUBLE, {}, lambda x: x.std(correction=0)),
    ("mean", torch.mean, [], DOUBLE, {}, lambda x: x.sum() / max(1, len(x))),
    ("nanmean", torch.nanmean, [], DOUBLE, {}, lambda x: x.sum() / max(1, len(x))),
    ("median", torch.median, [], DOUBLE, {}, torch.sum),  # without such a batch
    ("sum", torch.sum, [6e4, 6e4], HALF),
    (
        "index_add",
        lambda x: torch.zeros_like(x).index_add(0, torch.tensor([0, 0]), x),
        [6e4, 6e4],
        HALF,
    ),
    ("acos", torch.acos, [1.004]),
    ("asin", torch.asin, [-2.27]),
    ("tan", torch.tan, [1.5703], HALF),
    ("lgamma", torch.lgamma, [1e4], HALF),
    (
        "special_zeta",
        lambda x: torch.special.zeta(1.0, x),
        [2.0],
        DOUBLE,
        {},
        lambda x: torch.special.zeta(1.5, x),
    ),
    ("mvlgamma", lambda x: torch.mvlgamma(x, 2), [0.5]),
    ("matmul", lambda x: x @ x.T, [[300.0, 300.0]], HALF),
    ("matmul", lambda x: x @ x.T, [[300.0, 300.0]], HALF, {"type": "Linear"}),
    ("matmul", lambda x: x @ x.T, [[1e20]], SINGLE, {"is_in_model": True}),
    (
        "mul",
        lambda x: x * INF,
        [0.0],
        DOUBLE,
        {},
        lambda x: x.masked_fill(torch.ones(1, dtype=bool), 0.0),
    ),
    ("mul", lambda x: x * x, [300.0], HALF, {"is_in_model": True}),
    ("prod", torch.prod, [1e200, 1e200], DOUBLE, {}, lambda x: x.abs().log().sum()),
    ("prod", torch.prod, [1e200, 1e200, 0.0], DOUBLE, {}, lambda x: (x / x.abs().max()).prod()),
    ("cumprod", lambda x: x.cumprod(0), [1e200] * 2, DOUBLE, {}, lambda x: x.log().cumsum(0)),
    ("softmax", lambda x: x.softmax(0), [-INF, -INF]),
    ("log_softmax", lambda x: x.log_softmax(0), [-INF, -INF]),
    ("logsumexp", lambda x: x.logsumexp(0), [-INF, -INF]),
    ("log_softmax", lambda x: x.log_softmax(0), [6e4, -6e4], HALF),
    ("cross_entropy", cross_entropy([1]), [[6e4, -6e4]], HALF),
    ("cross_entropy", cross_entropy([1]), [[3e38, -3e38]], SINGLE),
    ("cross_entropy", cross_entropy([1, 1], reduction="none"), [[-INF, -INF], [0.0, 0.0]]),
    ("cross_entropy", cross_entropy([1]), [[0.0, -INF]]),
    (
        "cross_entropy",
        cross_entropy([-100]),
        [[0.0, 0.0]],
        DOUBLE,
        {},
        lambda x: F.cross_entropy(x, torch.tensor([-100]), reduction="sum"),
    ),
    ("ctc_loss", ctc(), [[[0.0, 0.0]]], DOUBLE, {}, ctc(zero_infinity=True)),
    ("logdet", torch.logdet, ZEROS, DOUBLE, {}, lambda x: (x @ x.T + torch.eye(2)).logdet()),
    ("linalg_slogdet", lambda x: x.slogdet()[1], ZEROS, DOUBLE, {"is_backward": True}),
    ("linalg_cholesky", lambda x: torch.linalg.cholesky_ex(x)[0], ZEROS),
    ("linalg_inv", lambda x: torch.linalg.inv_ex(x)[0], ZEROS),
    ("linalg_cond", torch.linalg.cond, [[1.0, 0.0], [0.0, 0.0]]),
    ("linalg_lu_factor", lambda x: torch.linalg.lu_factor_ex(x)[0], ZEROS),
    (
        "linalg_pinv",
        lambda x: torch.linalg.pinv(x, rtol=0.0),
        [[1.0, 0.0], [0.0, 1e-310]],
        DOUBLE,
        {},
        torch.linalg.pinv,
    ),
    ("linalg_svd", lambda x: torch.linalg.svd(x)[2], EQUAL, DOUBLE, {}, torch.linalg.svdvals),
    (
        "linalg_eigh",
        lambda x: torch.linalg.eigh(x)[1],
        EQUAL,
        DOUBLE,
        {},
        regular(torch.linalg.cholesky),
    ),
    ("linalg_qr", lambda x: torch.linalg.qr(x)[0], ZEROS),
    ("to", torch.Tensor.half, [1e6], SINGLE, {}, torch.clone),
    (
        "copy",
        lambda x: torch.zeros(1, dtype=HALF).copy_(x),
        [1e6],
        SINGLE,
        {},
        lambda x: torch.zeros(1).copy_(x),
    ),
    (
        "masked_fill",
        lambda x: x.masked_fill(x > 0, INF),
        [1.0],
        DOUBLE,
        {},
        lambda x: x.masked_fill(x > 0, 1e4),
    ),
]


def failure(name, function, numbers, dtype=DOUBLE, more=None, cured=None):
    """The repair that the row of an operation has for a failure, and the cured function."""
    made, slope = gives(function, numbers, dtype)
    assert not (made.isfinite().all() and slope.isfinite().all()), "it does not fail"
    seen = seen_of(made, slope, numbers, **(more or {}))
    repair = row_of(name).repair(seen)
    assert repair is not None, "it has no repair"
    return repair, cured or cure_of(repair, seen)(function)


def cure_of(repair, seen):
    if repair in NEAR_0:
        return at_least(near_0(repair, seen))
    if repair not in BESIDE_1:
        return CURES[repair]
    return BESIDE_1[repair](float(re.search(r"1e-\d|0\.99+", repair.said_of(seen))[0]))


def near_0(repair, seen):
    said = re.search(r"take (1e-\d)", repair.said_of(seen))
    return float(said[1]) if said else 1e-6


def check_cured(cured, numbers, dtype=DOUBLE):
    made, slope = gives(cured, numbers, dtype)
    assert made.isfinite().all()
    assert slope.isfinite().all()


def at_poles(name, dtype=DOUBLE):
    """The failures of an operation of one number, as the arguments of ``failure``."""
    row, function = row_of(name), function_of(name)
    for x in GRID:
        if holds(x, row.bad_at):
            yield name, function, [x], dtype
        if holds(x, row.steep_at):  # as where the result is left out
            yield name, function, [x], dtype, {"is_backward": True}


def all_failures():
    """Each failure that a row has."""
    yield from CASES
    for name in set(WITH_POLES) - ELSEWHERE:
        yield from at_poles(name)
    for name, dtype in WITH_LARGEST:
        largest = row_of(name).largest[dtype]
        yield name, function_of(name), [1.02 * largest], getattr(torch, dtype)


HARMLESS = {
    "renorm": (lambda x: torch.renorm(x, 2, 0, 1.0), ZEROS, HALF),
    "prod": (torch.prod, [0.0, 0.0, 2.0]),
    "cumprod": (lambda x: x.cumprod(0), [0.0, 0.0, 2.0]),
    "linalg_det": (torch.linalg.det, ZEROS),
    "norm": (torch.linalg.vector_norm, [0.0, 0.0]),
    "cdist": (lambda x: torch.cdist(x, x), ZEROS),
    "std": (torch.std, [1.0, 1.0]),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_steep_on_paper_but_not_in_pytorch_has_no_pole(name):
    made, slope = gives(*HARMLESS[name])
    assert made.isfinite().all()
    assert slope.isfinite().all()
    row = row_of(name)
    assert row is None or not row.steep_at


def test_no_name_is_in_two_rows():
    names = Counter(name for row in OPERATIONS for name in (row.name, *row.also))
    assert [name for name, count in names.items() if count > 1] == []


OF_ROLE = {  # what a search or a finding asks for
    Role.TAKES_MASKS: (
        "gumbel_softmax log_softmax logsumexp multi_head_attention scaled_dot_product_attention"
        " softmax softmin"
    ),
    Role.FILLS: (
        "diagonal_scatter fill fill_diagonal index_fill index_put masked_fill masked_scatter "
        "scatter scatter_reduce select_scatter slice_scatter where"
    ),
    Role.ADDS_UP: (
        "bilinear conv conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
        "cumsum einsum index_add linalg_multi_dot matmul nansum reduce_window_sum scatter_add "
        "sum tensordot"
    ),
    Role.ADDS: "add sub",
    Role.STACKS: "cat stack",
    Role.DIVIDES: "addcdiv div reciprocal rsqrt",
    Role.EXPONENTIATES: "exp exp2 expm1",
    Role.MOVES: (
        "alias clone expand permute reshape select slice squeeze t to transpose unsafe_view "
        "unsqueeze view"
    ),
    Role.RISKY: (
        "batch_norm cdist group_norm gumbel_softmax instance_norm layer_norm linalg_slogdet "
        "log_softmax logdet logsumexp norm pdist rms_norm scaled_dot_product_attention softmax "
        "softmin weight_norm"
    ),
    Role.SOLVES: (
        "linalg_cholesky linalg_eig linalg_eigh linalg_lu linalg_lu_factor linalg_qr linalg_svd"
    ),
    Role.STEPS: "ceil floor round sgn sign trunc",
    Role.SATURATES: "hardsigmoid sigmoid softmax tanh",
    Role.ENDS: "clamp clamp_max clamp_min hardtanh relu relu6 threshold",
    Role.NEVER_NEGATIVE: "binary_cross_entropy binary_cross_entropy_with_logits nll_loss",
    Role.TAKES_LOGITS: "binary_cross_entropy_with_logits log_softmax",
    Role.MAKES_PROBABILITIES: "sigmoid softmax",
    Role.COMPARES: "huber_loss mse_loss smooth_l1_loss",
}


@pytest.mark.parametrize("role", Role)
def test_a_role_is_that_of_these_operations(role):
    assert names_with(role) == {*OF_ROLE[role].split()}


@pytest.mark.parametrize("name", [*WITH_POLES, *WITHOUT])
def test_an_operation_is_bad_where_its_row_says_so_and_nowhere_else(name):
    row, found = row_of(name), {}
    for x in GRID:
        made, slope = gives(function_of(name), [x])
        found[x] = not made.isfinite().all(), not slope.isfinite().all()
    assert found == {x: (holds(x, row.bad_at), holds(x, row.steep_at)) for x in GRID}


@pytest.mark.parametrize("name", WITH_POLES)
def test_a_repair_cures_each_pole(name):
    for case in at_poles(name):
        check_cured(failure(*case)[1], case[2])


def cures_beside_1(name, dtype):
    """The failures with such a cure, and the cured functions; PyTorch may lack the operation."""
    for case in at_poles(name, dtype):
        with suppress(NotImplementedError):
            repair, cured = failure(*case)
            if repair in BESIDE_1:
                yield case[2], cured


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted({*WITH_POLES} - ELSEWHERE))
def test_a_bound_beside_1_is_not_rounded_away(name, dtype):
    for numbers, cured in cures_beside_1(name, dtype):
        check_cured(cured, numbers, dtype)


def test_most_bounds_beside_1_are_tried_in_each_dtype():
    for dtype in DTYPES:
        tried = {name for name in WITH_POLES if any(cures_beside_1(name, dtype))}
        assert tried >= {"log1p", "logit", "acos", "asin", "acosh", "atanh", "erfinv"}


def at_0(name):
    """The repairs of an operation at 0 in float16 that say a bound, and the cured functions."""
    for case in at_poles(name, HALF):
        with suppress(NotImplementedError):
            repair, cured = failure(*case)
            if case[2] == [0.0] and repair in NEAR_0:
                yield repair, cured


@pytest.mark.parametrize("name", sorted({*WITH_POLES} - ELSEWHERE))
def test_a_bound_near_0_is_wide_enough_for_float16(name):
    for repair, cured in at_0(name):
        bound = near_0(repair, Seen("float16"))
        for number in (0.0, 1e-3, bound, 1.01 * bound):
            check_cured(cured, [number], HALF)


def test_most_bounds_near_0_are_tried_in_float16():
    tried = {name for name in {*WITH_POLES} - ELSEWHERE if any(at_0(name))}
    assert tried >= {"addcdiv", "div", "log", "pow", "reciprocal", "remainder", "rsqrt", "sqrt"}


@pytest.mark.parametrize(("name", "dtype"), WITH_LARGEST)
def test_an_operation_is_inf_beyond_its_largest_input(name, dtype):
    largest, dtype, function = row_of(name).largest[dtype], getattr(torch, dtype), function_of(name)
    made, slope = gives(function, [0.98 * largest], dtype)
    assert made.isfinite().all()
    assert slope.isfinite().all()
    assert gives(function, [1.02 * largest], dtype)[0].isinf().all()
    _, cured = failure(name, function, [1.02 * largest], dtype)
    check_cured(cured, [1.02 * largest], dtype)


@pytest.mark.filterwarnings("ignore:std..:UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_repair_cures_each_failure(case):
    _, cured = failure(*case)
    _, _, numbers, dtype, *_ = *case, DOUBLE
    check_cured(cured, numbers, dtype)


@pytest.mark.filterwarnings("ignore:std..:UserWarning")
def test_each_repair_is_tried():
    every = {repair for row in OPERATIONS for repair in (*row.of_value, *row.of_slope)}
    assert {failure(*each)[0] for each in all_failures()} == every - UNTRIED
    assert CURES.keys() | BESIDE_1.keys() | NEAR_0 <= every
