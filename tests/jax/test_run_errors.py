"""What a watch of JAX leaves alone: results, output and objects, also where code of ours fails."""

import copy
import pickle
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradscaler
from tests.support.injected import wrong_after_errors


def batches():
    data = np.random.default_rng(0).standard_normal((5, 3, 4)).astype("float32")
    data[3, 0] = np.inf
    return map(jnp.asarray, data)


def norm_of(params, x):
    return jnp.sqrt(jnp.square(jnp.tanh(x @ params)).sum())


def trained(loss_of, is_compiled=True):
    """The bits of a training whose fourth batch is bad."""

    def step(params, x):
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        return params - 0.1 * jnp.nan_to_num(gradients), loss

    step, params, losses = jax.jit(step) if is_compiled else step, jnp.ones(4), []
    for x in batches():
        params, loss = step(params, x)
        losses.append(loss)
    jax.effects_barrier()
    return [np.asarray(each).tobytes() for each in (params, *losses)]


@pytest.mark.rare("the guard is the same one, which PyTorch's test of each function tries")
def test_an_error_wherever_we_are_called_changes_no_bit(tmp_path):
    assert wrong_after_errors(lambda: trained(norm_of), tmp_path) == {}


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_step_that_is_run_again_prints_nothing_and_uses_up_no_random_number(
    is_compiled, tmp_path, capfd
):
    called = []

    def loss_of(params, x):
        print("Python runs")
        random.random()
        np.random.rand()  # noqa: NPY002 # the state that all share
        loss = norm_of(params, x)
        jax.debug.print("the loss is {}", loss)
        jax.debug.callback(lambda value: called.append(float(value)), loss)
        known = jax.lax.stop_gradient(loss)
        jax.experimental.io_callback(lambda value: called.append(float(value)), None, known)
        return loss

    def run():
        called.clear()
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        bits = trained(loss_of, is_compiled)
        numbers = random.random(), np.random.rand()  # noqa: NPY002
        return bits, list(called), numbers, capfd.readouterr().out

    native = run()
    with gradscaler.watch(tmp_path) as watch:
        assert run() == native
    assert "step 4" in watch.verdict.text


def test_a_loss_that_cannot_be_traced_is_no_warning_and_the_training_goes_on(tmp_path):
    def loss_of(params, x):
        return norm_of(params, x) if x.sum() < jnp.inf else norm_of(params, x + 1)

    native = trained(loss_of, is_compiled=False)
    with gradscaler.watch(tmp_path):
        assert trained(loss_of, is_compiled=False) == native


def double(x):
    return x * 2


def test_functions_are_copied_and_pickled_as_jax_s_own(tmp_path, monkeypatch):
    with gradscaler.watch(tmp_path):
        compiled, gradient = jax.jit(double), jax.grad(double)
    assert copy.copy(compiled)(3.0) == copy.deepcopy(compiled)(3.0) == 6.0
    assert copy.deepcopy(gradient)(3.0) == 2.0
    monkeypatch.setattr(sys.modules[__name__], "double", gradient)  # as a decorator does
    assert b"gradscaler" not in pickle.dumps(gradient).replace(__name__.encode(), b"")
    assert pickle.loads(pickle.dumps(gradient)) is gradient
