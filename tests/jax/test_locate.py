"""Which primitive of JAX made the first Inf or NaN: each failure is marked HERE."""

import inspect
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from gradscaler.diagnose import locate_jax
from gradscaler.diagnose._monitor.replay import located_in
from tests.support.marked_lines import lines_marked_in

WEIGHTS, INPUTS = jnp.ones((4, 4)), jnp.ones((2, 4))
FAILURES = {}
marked = lines_marked_in(__file__)


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
    "jit of grad": lambda function: jax.jit(jax.grad(function)),
}
WITH_LOSS = "eager", "jit", "gradient", "jit gradient"
BACKWARD = "gradient", "jit of grad"


@fails("log", *WITH_LOSS)
def log_of_0(weights, inputs):
    chances = jnp.maximum(inputs @ weights * 0, 0)
    return -jnp.log(chances).mean()  # HERE


@fails("log", *WITH_LOSS)
def minus_infinity_as_the_loss(weights, inputs):
    return jnp.log(inputs @ weights * 0).mean()  # HERE


@fails("dot_general", *WITH_LOSS)
def matmul_in_float16(weights, inputs):
    hidden = (inputs @ weights).astype(jnp.float16) * 300
    return (hidden @ hidden.T).astype(jnp.float32).mean()  # HERE


@fails("reduce_sum", *WITH_LOSS)
def sum_in_float16(weights, inputs):
    hidden = (inputs @ weights).astype(jnp.float16) * 5000
    return jnp.sum(hidden, dtype=jnp.float16).astype(jnp.float32)  # HERE


@fails("log_softmax", *WITH_LOSS)
def log_softmax_of_logits_far_apart(weights, inputs):
    logits = (inputs @ weights * jnp.array([1.5e4, -1.5e4, 0, 0])).astype(jnp.float16)
    costs = jax.nn.log_softmax(logits)  # HERE
    return -(costs * jnp.eye(2, 4, dtype=jnp.float16)).sum()


@fails("softmax", *WITH_LOSS)
def softmax_of_a_masked_row(weights, inputs):
    scores = jnp.where(jnp.zeros((2, 4), bool), inputs @ weights, -jnp.inf)
    return jax.nn.softmax(scores).sum()  # HERE


@fails("mul", *WITH_LOSS)
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


@fails("exp", *WITH_LOSS)
def checkpoint(weights, inputs):
    def block(hidden):
        return jnp.exp(hidden * 100)  # HERE

    return jax.checkpoint(block)(inputs @ weights).sum()


@fails("log", *WITH_LOSS)
def branch(weights, inputs):
    def first(hidden):
        return jnp.log(hidden * 0).sum()  # HERE

    return jax.lax.cond(inputs.sum() > 0, first, jnp.sum, inputs @ weights)


@fails("norm", *WITH_LOSS)
def norm_in_float16(weights, inputs):
    hidden = (inputs @ weights).astype(jnp.float16) * 1000
    return jnp.linalg.norm(hidden).astype(jnp.float32)  # HERE


@fails("sqrt", *WITH_LOSS, "jit of grad")
def root_of_a_negative_number(weights, inputs):
    roots = jnp.sqrt(inputs @ -weights)  # HERE
    return (roots * roots).sum()


@fails("div", *WITH_LOSS)
def a_scope_that_is_named_transpose(weights, inputs):
    with jax.named_scope("transpose"):
        return (inputs @ weights / jnp.zeros(4)).sum()  # HERE


@fails("log1p", *BACKWARD)
def log1p_of_minus_1_that_where_leaves_out(weights, inputs):
    chances = inputs @ weights
    logarithms = jnp.log1p(chances * 0 - 1)  # HERE
    return jnp.where(chances > 1e9, logarithms, chances).mean()


@fails("sqrt", *BACKWARD)
def square_root_of_0(weights, inputs):
    hidden = inputs @ weights
    return (jnp.sqrt(hidden * 0) + hidden).sum()  # HERE


@fails("norm", *BACKWARD)
def norm_of_0_after_another(weights, inputs):
    hidden = inputs @ weights
    first = jnp.linalg.norm(hidden)
    return first + jnp.linalg.norm(hidden * 0)  # HERE


@jax.jit
def norms(hidden):
    return jnp.linalg.norm(hidden, axis=-1)  # HERE


@fails("norm", *BACKWARD)
def norm_in_a_compiled_function(weights, inputs, line=norms):
    return (norms(inputs @ weights) + norms(inputs @ weights * 0)).sum()


@fails("div", *BACKWARD)
def division_that_where_leaves_out(weights, inputs):
    hidden = inputs @ weights * 0
    return jnp.where(hidden > 0, hidden / hidden, 0).sum()  # HERE


@fails("sqrt", *BACKWARD)
def square_root_of_0_in_a_scan(weights, inputs):
    def step(carry, _):
        return jnp.sqrt(carry * 0) + carry, carry  # HERE

    return jax.lax.scan(step, inputs @ weights, jnp.arange(3))[0].sum()


@fails("div", *BACKWARD)
def logarithm_of_0_in_a_branch(weights, inputs):
    def first(hidden):
        return jnp.maximum(jnp.log(hidden * 0), -9).sum()  # HERE

    return jax.lax.cond(inputs.sum() > 0, first, jnp.sum, inputs @ weights)


@fails("div", *BACKWARD)
def square_root_of_0_in_a_checkpoint(weights, inputs):
    def block(hidden):
        return jnp.sqrt(hidden * 0) + hidden  # HERE

    return jax.checkpoint(block)(inputs @ weights).sum()


@jax.custom_vjp
def twice(hidden):
    return hidden * 2


twice.defvjp(lambda hidden: (hidden * 2, hidden), lambda hidden, slope: (slope / (hidden * 0),))


@fails("div", *BACKWARD)
def a_gradient_of_the_user_s(weights, inputs):
    return twice(inputs @ weights).sum()  # HERE


@fails("exp", "jit of grad")
def recomputed_by_a_checkpoint(weights, inputs):
    def block(hidden):
        return 1 / jnp.exp(hidden * 100)  # HERE

    return jax.checkpoint(block)(inputs @ weights).sum()


no_backward_pass = pytest.mark.skipif(
    jax.__version__.startswith("0.6."), reason="JAX 0.6 records no backward pass"
)


@no_backward_pass
@pytest.mark.parametrize("case", FAILURES, ids=" by ".join)
def test_the_primitive_the_line_and_the_pass_are_those_that_failed(case):
    """The pass, too: an Inf or NaN of the forward pass is in the loss, of these functions."""
    operation, function = FAILURES[case]
    found = locate_jax(WAYS[case[1]](function), WEIGHTS, INPUTS)
    marked = inspect.signature(function).parameters.get("line")
    line = line_of(function if marked is None else marked.default)
    assert (found.operation, found.line) == (operation, line)
    assert found.module is None
    is_lost = not jnp.isfinite(function(WEIGHTS, INPUTS))
    assert found.kind == ("forward" if is_lost else "backward")


def transposed(weights, inputs):
    hidden = (inputs @ weights * 0).astype(jnp.float16)
    return (hidden * 300).astype(jnp.float32).sum() * 300  # HERE


@jax.jit
def enlarged(hidden):
    return (hidden * 300).astype(jnp.float32)  # HERE


def transposed_in_a_compiled_function(weights, inputs):
    return enlarged((inputs @ weights * 0).astype(jnp.float16)).sum() * 300


@no_backward_pass
@pytest.mark.parametrize(
    ("function", "marked"),
    [(transposed, transposed), (transposed_in_a_compiled_function, enlarged)],
)
def test_the_backward_pass_is_told_from_the_forward_pass(function, marked):
    found = locate_jax(jax.jit(jax.grad(function)), WEIGHTS, INPUTS)
    assert (found.kind, found.operation, found.dtype) == ("backward", "mul", "float16")
    assert found.line == line_of(marked)


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
    assert (found.kind, found.parameter, found.num_nan) == ("input", "params['w']", 1)
    assert (found.operation, found.line) == ("dot_general", line_of(loss))
    assert found.function == "loss"
    unnamed = locate_jax(lambda *both: loss(*both), params, INPUTS)
    assert (unnamed.parameter, unnamed.function) == ("args[0]['w']", "<lambda>")


class OfEquinox(eqx.Module):
    """A model with leaves that are no arrays, some of which decide the control flow."""

    layer: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    bias: None = None
    power: float = 2.0
    how: str = "square"

    def __call__(self, inputs):
        outputs = self.dropout(jax.vmap(self.layer)(inputs))
        if self.how == "square" and self.power > 1:
            return outputs**self.power
        return outputs


def test_leaves_of_an_equinox_model_that_are_no_arrays_are_static():
    layer = eqx.nn.MLP(4, 1, 4, 1, key=jax.random.key(0))
    model = OfEquinox(layer, eqx.nn.Dropout(0.5, inference=True))

    def loss(model, inputs, function):
        return function(model(inputs)).mean(), model

    gradient = eqx.filter_value_and_grad(loss, has_aux=True)
    assert locate_jax(gradient, model, INPUTS, jnp.square) is None
    found = locate_jax(gradient, model, INPUTS, lambda outputs: jnp.sqrt(outputs * 0))
    assert (found.kind, found.operation) == ("backward", "sqrt")
    found = locate_jax(loss, model, INPUTS, lambda outputs: outputs * float("nan"))
    assert (found.kind, found.operation) == ("input", "mul")


def test_a_result_that_is_a_constant_is_read():
    def loss(weight, inputs):
        return jnp.sqrt(weight * inputs * 0).mean(), 1.0

    found = locate_jax(jax.value_and_grad(loss, has_aux=True), jnp.float32(1), INPUTS)
    assert (found.kind, found.operation) == ("backward", "sqrt")
    assert locate_jax(lambda inputs: (inputs, jax.lax.stop_gradient(3.0)), INPUTS) is None


def test_the_forward_pass_comes_first_whatever_the_order_of_the_results():
    def step(x):
        loss, gradient = jax.value_and_grad(lambda x: -jnp.log(x))(x)
        return x - gradient, loss

    found = locate_jax(step, jnp.float32(0))
    assert (found.kind, found.operation) == ("forward", "log")


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("norm", jnp.linalg.norm),
        ("std", jnp.std),
        ("dot_general", lambda x: (x.T @ x).sum()),
        ("logit", lambda x: jax.scipy.special.logit(x).sum()),
        ("logit", lambda x: jax.scipy.special.logit(1 - x).sum()),
    ],
)
def test_a_function_that_is_several_primitives_is_named_as_it_was_called(name, function):
    factor = 1e30 if name == "dot_general" else 0

    def loss(inputs):
        return function(inputs * factor)

    found = locate_jax(jax.value_and_grad(loss), INPUTS)
    assert found.operation == name


@pytest.mark.parametrize(
    ("exponent", "shift", "name"),
    [(-0.7, 0, "pow"), (-1, 0, "integer_pow"), (100, 100, "integer_pow")],
)
def test_a_power_says_its_exponent_and_its_largest_base(exponent, shift, name):
    found = locate_jax(lambda x: ((x * 0 + shift) ** exponent).sum(), INPUTS)
    assert (found.operation, found.largest_input) == (name, shift)
    assert found.exponent == pytest.approx(exponent)


def test_a_power_whose_exponents_differ_says_none():
    found = locate_jax(lambda x: ((x * 0) ** -jnp.arange(1.0, 5.0)).sum(), INPUTS)
    assert (found.operation, found.exponent) == ("pow", None)


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_reaches_no_more_than_an_auxiliary_result_comes_last(is_alone):
    def loss(x, inputs):
        entropy = jnp.log(inputs * 0 - 1)  # beside the loss
        if is_alone:
            return (x * inputs).sum(), {"entropy": entropy}
        return jnp.sqrt(x * inputs * 0).sum(), {"entropy": entropy}  # its gradient

    gradients = jax.value_and_grad(loss, has_aux=True)
    found = locate_jax(gradients, jnp.float32(1), INPUTS)
    assert found.is_auxiliary is is_alone
    assert found.line == marked("beside the loss" if is_alone else "its gradient")
    assert ("beside the loss" in str(found)) is is_alone
    located = located_in(gradients, jnp.float32(1), INPUTS)  # why a step fails
    assert (located is None) is is_alone


def test_a_loss_that_is_an_auxiliary_result_too_is_the_loss():
    def loss(x):
        value = jnp.log(x)
        return value, value

    found = locate_jax(jax.value_and_grad(loss, has_aux=True), jnp.float32(0))
    assert (found.operation, found.is_auxiliary) == ("log", False)


def test_gradients_in_a_pair_are_no_auxiliary_results():
    def loss(scale, x):
        return scale * jnp.sqrt(x * 0).sum(), {}

    gradients = jax.grad(loss, (0, 1), has_aux=True)
    found = locate_jax(gradients, jnp.float32(1), INPUTS)
    assert (found.kind, found.operation, found.is_auxiliary) == ("backward", "sqrt", False)


def test_a_line_of_an_installed_package_has_the_users_line_that_led_to_it():
    installed, package = "/usr/lib/site-packages/their.py", {}
    exec(compile("def loss(log, x):\n    return log(x).mean()", installed, "exec"), package)

    @jax.jit
    def step(x):
        return package["loss"](jnp.log, x * 0)  # HERE

    assert locate_jax(step, INPUTS).line == f"{installed}:2 (called from {line_of(step)})"
