"""The rows of operations that are primitives of JAX: their names, poles and largest inputs."""

import re
from itertools import product

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from gradscaler.diagnose._operations import repairs as to
from gradscaler.diagnose._operations.operation import Seen
from gradscaler.diagnose._operations.rows import canonical, row_of

GRID = [x / 4 for x in range(-14, 15)]
# How the primitive of a row is called with the one number that decides.
CALLS = {
    "acos": lax.acos,
    "acosh": lax.acosh,
    "asin": lax.asin,
    "asinh": lax.asinh,
    "atan": lax.atan,
    "atanh": lax.atanh,
    "betainc": lambda x: lax.betainc(0.5, 0.5, x),
    "cbrt": lax.cbrt,
    "cosh": lax.cosh,
    "digamma": lax.digamma,
    "div": lambda x: lax.div(1.0, x),
    "erfinv": lax.erf_inv,
    "exp": lax.exp,
    "exp2": lax.exp2,
    "expm1": lax.expm1,
    "fmod": lambda x: lax.rem(1.0, x),
    "igamma": lambda x: lax.igamma(0.5, x),
    "igammac": lambda x: lax.igammac(0.5, x),
    "lgamma": lax.lgamma,
    "log": lax.log,
    "log1p": lax.log1p,
    "pow": lambda x: lax.integer_pow(x, -1),
    "rsqrt": lax.rsqrt,
    "sinh": lax.sinh,
    "sqrt": lax.sqrt,
    "square": lax.square,
    "tan": lax.tan,
}
NAMED = {
    **CALLS,
    "cat": lambda x: lax.concatenate([x, x], 0),
    "clamp": lambda x: lax.clamp(0.0, x, 1.0),
    "conv": lambda x: lax.conv(x[None, None], x[None, None], (1,), "SAME"),
    "cumprod": lax.cumprod,
    "cumsum": lax.cumsum,
    "expand": lambda x: lax.broadcast_in_dim(x, (2, *x.shape), (1,)),
    "gather": lambda x: jnp.take(x, jnp.array([0])),
    "linalg_cholesky": lambda x: lax.linalg.cholesky(jnp.diag(x)),
    "linalg_eigh": lambda x: lax.linalg.eigh(jnp.diag(x)),
    "linalg_qr": lambda x: lax.linalg.qr(jnp.diag(x)),
    "linalg_svd": lambda x: lax.linalg.svd(jnp.diag(x)),
    "logcumsumexp": lax.cumlogsumexp,
    "matmul": lambda x: lax.dot(x, x),
    "prod": jnp.prod,
    "round": lax.round,
    "scatter_add": lambda x: x.at[0].add(1.0),
    "sigmoid": lax.logistic,
    "sum": jnp.sum,
    "to": lambda x: lax.convert_element_type(x, jnp.float16),
    "where": lambda x: lax.select(x > 0, x, x),
}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        yield


def holds(x, spans):
    return any(s[0] < x < s[1] if isinstance(s, tuple) else x == s for s in spans)


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for held in equation.params.values():
            yield from primitives(held.jaxpr) if hasattr(held, "jaxpr") else ()


@pytest.mark.parametrize("name", NAMED)
def test_a_primitive_has_the_name_that_users_know(name):
    jaxpr = jax.make_jaxpr(NAMED[name])(jnp.ones(3))
    assert name in map(canonical, primitives(jaxpr.jaxpr))


# PyTorch's slope there is a large number, as its sine of pi is not 0.
DIFFERS = {"digamma": dict.fromkeys((-1.0, -2.0, -3.0), (True, True))}


IN_PYTORCH = pytest.mark.rare(
    "tests/diagnose/operations/test_operations.py evaluates each row in PyTorch"
)


@IN_PYTORCH
@pytest.mark.parametrize("name", CALLS)
def test_a_primitive_is_bad_where_its_row_says_so_and_nowhere_else(name):
    row, grid = row_of(name), jnp.array(GRID)
    made = jax.vmap(CALLS[name])(grid)
    slope = jax.vmap(jax.grad(CALLS[name]))(grid)
    found = {
        x: (not bool(jnp.isfinite(m)), not bool(jnp.isfinite(s)))
        for x, m, s in zip(GRID, made, slope, strict=True)
    }
    expected = {x: (holds(x, row.bad_at), holds(x, row.steep_at)) for x in GRID}
    assert found == expected | DIFFERS.get(name, {})


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in CALLS for dtype in row_of(name).largest]
)
def test_a_primitive_is_inf_beyond_its_largest_input(name, dtype):
    largest = row_of(name).largest[dtype]
    assert jnp.isfinite(CALLS[name](jnp.asarray(0.98 * largest, dtype)))
    assert jnp.isinf(CALLS[name](jnp.asarray(1.02 * largest, dtype)))


# A slope that is 0 in PyTorch where the numbers are 0: by its row, what fails, the repair, and what
# that says to do.
STEEP = [
    ("atan2", lambda x: jnp.arctan2(x, x), to.BOTH_0, lambda x: jnp.arctan2(x, x + 1e-3)),
    (
        "norm",
        lambda x: jnp.linalg.norm(x[None], axis=-1),
        to.NORM_SLOPE,
        lambda x: jnp.sqrt((x[None] * x[None]).sum(-1) + 1e-6),
    ),
    (
        "std",
        lambda x: jnp.array([x, x]).std(),
        to.DEVIATION_SLOPE,
        lambda x: jnp.sqrt(jnp.array([x, x]).var() + 1e-6),
    ),
]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("at", [-0.5, 0.0, 1.0, 1.5])
def test_a_repair_cures_an_incomplete_beta_function(at, dtype):
    repair = row_of("betainc").repair(Seen(dtype, is_backward=True, has_nan=True))
    assert repair is to.INCOMPLETE_BETA
    margin = float(re.search(r"1e-\d", repair.said_of(Seen(dtype)))[0])

    def cured(x):
        return lax.betainc(*jnp.array([0.5, 0.5], dtype), jnp.clip(x, margin, 1 - margin))

    made, slope = jax.value_and_grad(cured)(jnp.asarray(at, dtype))
    assert jnp.isfinite(made)
    assert jnp.isfinite(slope)


# Where a number is clipped, JAX multiplies the slope at the bound by 0: one of Inf gives NaN.
@pytest.mark.parametrize(
    ("name", "is_backward"),
    [*product(("div", "rsqrt", "pow", "log"), (True, False)), ("sqrt", True)],
)
def test_a_bound_near_0_is_wide_enough_for_float16(name, is_backward):
    seen = Seen("float16", is_backward, has_inf=True, divisor=0.0, exponent=-1.0)
    said = row_of(name).repair(seen).said_of(seen)
    bound = float(re.search(r"take (1e-\d)", said)[1])
    function = {**CALLS, "div": lambda x: 1 / x}[name]
    for number in (0.0, 1e-3, bound):
        x = jnp.asarray(number, jnp.float16)
        made, slope = jax.value_and_grad(lambda x: function(jnp.clip(x, bound)))(x)
        assert made.dtype == jnp.float16
        assert jnp.isfinite(made)
        assert jnp.isfinite(slope)


@pytest.mark.parametrize(("name", "function", "repair", "cured"), STEEP)
def test_a_repair_cures_a_slope_that_pytorch_does_not_have(name, function, repair, cured):
    assert jnp.isnan(jax.grad(lambda x: function(x).sum())(0.0))
    assert row_of(name).repair(Seen(is_backward=True, has_nan=True)) is repair
    assert jnp.isfinite(jax.grad(lambda x: cured(x).sum())(0.0))


@pytest.mark.parametrize(
    "read",
    [
        jnp.take,
        lambda x, i: jnp.take_along_axis(x, i, 0),
        lambda x, i: x.at[i].get(mode="fill", fill_value=jnp.nan),
    ],
)
def test_an_index_out_of_range_gives_nan_which_one_within_it_does_not(read):
    x, index = jnp.ones(3), jnp.array([0, 3])
    assert jnp.isnan(read(x, index)).tolist() == [False, True]
    assert jnp.isfinite(read(x, jnp.clip(index, 0, 2))).all()
    row = row_of("gather")
    assert row.repair(Seen(has_nan=True)) is to.OUT_OF_RANGE
    assert row.repair(Seen(has_inf=True)) is None
