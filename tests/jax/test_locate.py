"""Which primitive of JAX made the first Inf or NaN: each failure is marked HERE."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from gradscaler.diagnose import locate_jax

WEIGHTS, INPUTS = jnp.ones((4, 4)), jnp.ones((2, 4))
FAILURES = {}


def fails(operation, *ways):
    """A loss of weights and inputs; it fails in these ways of calling it."""

    def add(function):
        FAILURES.update({(function.__name__, way): (operation, function) for way in ways})
        return function

    return add


def line_of(function):
    lines, first = inspect.getsourcelines(function)
    (number,) = (first + n for n, line in enumerate(lines) if line.rstrip().endswith("# HERE"))
    return f"{Path(__file__).relative_to(Path.cwd())}:{number}"


WAYS = {
    "eager": lambda function: function,
    "jit": jax.jit,
    "gradient": jax.value_and_grad,
    "jit gradient": lambda function: jax.jit(jax.value_and_grad(function)),
}


@fails("log", *WAYS)
def log_of_0(weights, inputs):
    chances = jnp.maximum(inputs @ weights * 0, 0)
    return -jnp.log(chances).mean()  # HERE


@fails("dot_general", *WAYS)
def matmul_in_float16(weights, inputs):
    hidden = (inputs @ weights).astype(jnp.float16) * 300
    return (hidden @ hidden.T).astype(jnp.float32).mean()  # HERE


@fails("reduce_sum", *WAYS)
def sum_in_float16(weights, inputs):
    hidden = (inputs @ weights).astype(jnp.float16) * 5000
    return jnp.sum(hidden, dtype=jnp.float16).astype(jnp.float32)  # HERE


@fails("sub", *WAYS)
def softmax_of_a_masked_row(weights, inputs):
    scores = jnp.where(jnp.zeros((2, 4), bool), inputs @ weights, -jnp.inf)
    return jax.nn.softmax(scores).sum()  # HERE


@fails("mul", *WAYS)
def carry_of_a_scan(weights, inputs):
    def step(carry, _):
        return carry * 1e20, carry  # HERE

    last, _ = jax.lax.scan(step, (inputs @ weights).sum(), jnp.arange(4))
    return last


@fails("mul", "eager", "jit")
def while_loop(weights, inputs):
    def body(value):
        return value * 1e10  # HERE

    return jax.lax.while_loop(lambda value: value < 1e38, body, (inputs @ weights).sum())


@fails("exp", *WAYS)
def checkpoint(weights, inputs):
    def block(hidden):
        return jnp.exp(hidden * 100)  # HERE

    return jax.checkpoint(block)(inputs @ weights).sum()


@fails("log", *WAYS)
def branch(weights, inputs):
    def first(hidden):
        return jnp.log(hidden * 0).sum()  # HERE

    return jax.lax.cond(inputs.sum() > 0, first, jnp.sum, inputs @ weights)


@fails("div", "gradient", "jit gradient")
def square_root_of_0(weights, inputs):
    hidden = inputs @ weights
    return (jnp.sqrt(hidden * 0) + hidden).sum()  # HERE


@pytest.mark.parametrize("case", FAILURES, ids=" by ".join)
def test_the_primitive_and_the_line_are_those_that_failed(case):
    operation, function = FAILURES[case]
    found = locate_jax(WAYS[case[1]](function), WEIGHTS, INPUTS)
    assert (found.operation, found.line) == (operation, line_of(function))
    assert found.module is None


def transposed(weights, inputs):
    hidden = (inputs @ weights * 0).astype(jnp.float16)
    return (hidden * 300).astype(jnp.float32).sum() * 300  # HERE


@pytest.mark.skipif(jax.__version__.startswith("0.6."), reason="JAX 0.6 records no backward pass")
def test_the_backward_pass_is_told_from_the_forward_pass():
    found = locate_jax(jax.jit(jax.grad(transposed)), WEIGHTS, INPUTS)
    assert (found.kind, found.operation, found.dtype) == ("backward", "mul", "float16")
    assert found.line == line_of(transposed)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: jnp.where(x > 0, x @ w, jax.lax.stop_gradient(x / 0)).sum(),
        lambda w, x: jax.nn.softmax(jnp.where(jnp.eye(2, 4, dtype=bool), x @ w, -jnp.inf)).sum(),
        lambda w, x: jax.nn.softmax(x @ w + jnp.log(jnp.eye(2, 4))).sum(),
    ],
    ids=["what where leaves out", "a mask", "a mask that a logarithm makes"],
)
def test_what_does_no_harm_is_not_named(function, way):
    assert locate_jax(WAYS[way](function), WEIGHTS, INPUTS) is None


def test_an_argument_that_is_not_finite_is_named():
    def loss(params, inputs):
        return (inputs @ params["w"]).sum()  # HERE

    params = {"b": INPUTS, "w": WEIGHTS.at[0, 0].set(jnp.nan)}
    found = locate_jax(jax.value_and_grad(loss), params, INPUTS)
    assert (found.kind, found.parameter, found.num_nan) == ("input", "args[0]['w']", 1)
    assert (found.operation, found.line) == ("dot_general", line_of(loss))
