"""Gradients of every dtype, accumulated, or missing: unscaled in place, and checked."""

import math

import numpy as np
import pytest

from tests.support.eager import library

BAD = [math.inf, -math.inf, math.nan]
SCALE = 1024.0
dtypes = pytest.mark.parametrize("dtype", library.dtypes)


def with_gradients(gradients, dtypes):
    """An optimizer with a learning rate of 1, and its parameters, which are ones."""
    ones = [np.ones_like(gradient, float) for gradient in gradients]
    parameters = library.make_parameters(*map(library.tensor, ones, dtypes))
    library.set_gradients(parameters, gradients)
    return library.sgd(parameters, lr=1.0), parameters


def placed(scale=SCALE):
    return library.placed(init_scale=scale, **library.with_float16)


def unscaled(gradients, dtypes, scale=SCALE):
    """The gradients after unscale_, each still in its tensor and of its dtype."""
    optimizer, parameters = with_gradients(gradients, dtypes)
    tensors = [parameter.grad for parameter in parameters]
    placed(scale).unscale_(optimizer)
    for parameter, tensor in zip(parameters, tensors, strict=True):
        assert library.exact(parameter.grad) == library.exact(tensor)
        assert parameter.grad.dtype == parameter.dtype
    return [library.numpy(parameter.grad) for parameter in parameters]


def rounded(values, dtype):
    return library.numpy(library.tensor(values, dtype))


# Values.


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**24, 2.0**25, 2.0**38, 2.0**-10])
@dtypes
def test_a_power_of_two_is_divided_out_exactly(dtype, scale):
    held = np.arange(-255, 256) * (128.0 if scale > 1 else 1 / 64)  # exact in every dtype
    expected = rounded(held / scale, dtype)
    assert np.count_nonzero(expected) > 200
    np.testing.assert_array_equal(*unscaled([held], [dtype], scale), expected)


@pytest.mark.parametrize("scale", [1000.0, 3.0, 50000.0, 0.1])
@dtypes
def test_gradients_are_multiplied_by_the_inverse_in_float32_and_rounded_once(dtype, scale):
    """Half precision too, as on a GPU."""
    held = rounded(np.random.default_rng(0).uniform(-200, 200, 500), dtype)
    (grad,) = unscaled([held], [dtype], scale)
    product = np.float32(held) * (np.float32(1.0) / np.float32(scale))
    rounding = 2.0 ** (-7 if dtype in ("float16", "bfloat16") else -23)
    np.testing.assert_allclose(grad, held / scale, rtol=rounding, atol=1e-7)
    if dtype != "float64":
        np.testing.assert_array_equal(grad, rounded(product, dtype))


@dtypes
def test_gradients_of_a_backward_pass_are_unscaled(dtype):
    (parameter,) = library.make_parameters(library.tensor([1.0, 2.0], dtype))
    scaler = library.scaler(init_scale=SCALE, **library.with_float16)
    loss = (parameter.double() * library.tensor([0.5, -2.0], "float64")).sum()
    scaler.scale(loss).backward()
    assert parameter.grad.dtype == parameter.dtype
    scaler.unscale_(library.sgd([parameter]))
    assert library.numpy(parameter.grad).tolist() == [0.5, -2.0]


# Overflows.


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("size", [1, 7, 64, 1025])
@dtypes
def test_a_non_finite_value_is_found_wherever_it_is(dtype, size, bad):
    scaler = placed()
    for place in {0, size // 2, size - 1}:
        gradient = np.ones(size)
        gradient[place] = bad
        optimizer, parameters = with_gradients([np.ones(3), gradient], ["float32", dtype])
        scaler.scale(library.tensor(1.0))
        scaler.step(optimizer)
        assert scaler.last_step(optimizer).reason == "overflow"
        assert all((library.numpy(parameter) == 1.0).all() for parameter in parameters)
        scaler.update()


def test_dtypes_may_be_mixed():
    expected = [[0.5, -2.0]] * 5
    grads = unscaled([[512.0, -2048.0]] * 5, [*library.dtypes, "float32"])
    assert [grad.tolist() for grad in grads] == expected


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("overflowed", range(len(library.dtypes)))
def test_an_overflow_in_one_dtype_skips_them_all_and_the_rest_is_unscaled(overflowed, bad):
    """TensorPlay's own kernel leaves it and later ones scaled; Paddle's zeroes gradients."""
    gradients = np.full((len(library.dtypes), 2), SCALE)
    gradients[overflowed, 0] = bad
    optimizer, parameters = with_gradients(gradients, library.dtypes)
    scaler = placed()
    scaler.unscale_(optimizer)
    for i, parameter in enumerate(parameters):
        grad = library.numpy(parameter.grad)
        assert grad.tolist() == pytest.approx([bad if i == overflowed else 1.0, 1.0], nan_ok=True)
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).reason == "overflow"
    assert [library.numpy(parameter).tolist() for parameter in parameters] == [[1.0, 1.0]] * 4


@dtypes
def test_an_overflow_in_one_gradient_leaves_the_others_unscaled(dtype):
    gradients = [[512.0, 1.0], [math.inf, 512.0], [256.0, 1.0]]
    grads = unscaled(gradients, [dtype] * 3)
    assert [grad[0] for grad in grads] == [0.5, math.inf, 0.25]
    assert grads[1][1] == 0.5


# No gradients.


@pytest.mark.parametrize("minimize", [False, True], ids=["step", "minimize"])
def test_an_optimizer_without_gradients_is_stepped_over(
    minimize, make_optimizer, scaler, parameters
):
    """It is neither an overflow nor a finite step."""
    optimizer = make_optimizer(parameters)
    scaled = scaler.scale(library.tensor([1.0]))
    before = library.everything(scaler, optimizer)
    if minimize:
        scaler.minimize(optimizer, scaled)
    else:
        assert scaler.step(optimizer) is None
        scaler.update()
    assert library.everything(scaler, optimizer) == before
    outcome = scaler.last_step(optimizer)
    assert (outcome.skipped, outcome.found_inf, outcome.reason) == (True, False, "no_gradients")


@pytest.mark.parametrize(
    ("factor", "scale", "reason"), [(1, 2048.0, "finite"), (math.inf, 512.0, "overflow")]
)
def test_an_optimizer_without_gradients_changes_nothing_for_another(
    factor, scale, reason, parameters, finite
):
    scaler = library.scaler(init_scale=1024.0, growth_interval=1)
    idle, busy = (library.sgd([parameter]) for parameter in parameters)
    library.backward(scaler, parameters[1:], [np.full_like(finite[1], factor)])
    for optimizer in (idle, busy):
        scaler.step(optimizer)
    scaler.update()
    assert library.scale_of(scaler) == scale
    assert scaler.last_step(idle).reason == "no_gradients"
    assert scaler.last_step(busy).reason == reason


def test_a_parameter_without_a_gradient_is_left_alone(scaler, parameters, finite):
    optimizer = library.sgd(parameters)
    before = library.exact(parameters)
    library.backward(scaler, parameters, [finite[0], None])
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).applied
    assert library.exact(parameters)[0] != before[0]
    assert library.exact(parameters)[1] == before[1]
    assert parameters[1].grad is None


# Accumulation.


def test_accumulated_passes_are_unscaled_once(finite):
    finals = []
    for passes in (1, 2):  # adding halves is exact
        parameters, scaler = library.parameters(), library.scaler(init_scale=1024.0)
        optimizer = library.sgd(parameters)
        for _ in range(passes):
            library.backward(scaler, parameters, [gradient / passes for gradient in finite])
        scaler.step(optimizer)
        scaler.update()
        finals.append(library.everything(scaler, optimizer))
        assert library.finite_steps_of(scaler) == 1
    assert finals[0] == finals[1]


def test_an_overflow_in_one_of_several_passes_skips_the_step(
    scaler, parameters, finite, overflowed
):
    optimizer = library.sgd(parameters)
    before = library.kept(optimizer)
    for gradients in (finite, overflowed, finite):
        library.backward(scaler, parameters, gradients)
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).reason == "overflow"
    assert library.kept(optimizer) == before
