"""float16 gradients, refused unless they are allowed; gradients of any layout."""

import math

import numpy as np
import pytest

from tests.support.eager import library


def with_gradients(*gradients):
    """An optimizer with a learning rate of 1 of parameters that are ones, with these gradients."""
    ones = (
        library.tensor(np.ones(tuple(gradient.shape)), gradient.dtype) for gradient in gradients
    )
    parameters = library.make_parameters(*ones)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return library.sgd(parameters, lr=1.0), parameters


@pytest.fixture
def scaler():
    return library.placed(init_scale=4.0)


# What loss scaling is for.


@pytest.mark.parametrize(("enabled", "expected"), [(False, 0.0), (True, 1e-8)])
def test_a_gradient_too_small_for_fp16_comes_through_if_it_is_scaled(enabled, expected):
    (weight,) = library.make_parameters(np.ones((4, 4), np.float32))
    scaler = library.scaler(enabled=enabled)
    with library.framework.autocast("cpu", dtype=library.framework.float16):
        output = library.tensor(np.ones((1, 4))) @ weight
    assert output.dtype == library.framework.float16
    scaler.scale((output.float() * 1e-8).sum()).backward()
    scaler.unscale_(library.sgd([weight]))
    assert weight.grad.dtype == library.framework.float32
    assert library.numpy(weight.grad) == pytest.approx(expected, rel=1e-3, abs=0)


# float16 gradients.


@pytest.fixture
def halves():
    """An optimizer, the second of whose parameters has a float16 gradient."""
    gradients = np.full(2, 4.0), np.full((3, 4), 4.0), np.full(2, 4.0)
    kinds = "float32", "float16", "float32"
    return with_gradients(*map(library.tensor, gradients, kinds))


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_float16_gradients_are_the_framework_s_error(call, scaler, halves, native):
    theirs = native()
    theirs.scale(library.tensor(1.0))
    with pytest.raises(ValueError, match="FP16") as error:
        getattr(theirs, call)(halves[0])
    with pytest.raises(type(error.value), match=str(error.value)):
        getattr(scaler, call)(halves[0])


@pytest.mark.parametrize("call", ["unscale_", "step", "minimize", "clip_grad_norm_"])
def test_the_refusal_names_the_way_out_and_changes_nothing(call, scaler, halves):
    before = library.everything(scaler, halves[0])
    with pytest.raises(ValueError, match=r"FP16.*autocast.*allow_fp16_gradients=True"):
        getattr(scaler, call)(halves[0], *([1.0] if "clip" in call else []))
    assert library.everything(scaler, halves[0]) == before


@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("named", [False, True])
def test_the_refusal_names_the_parameter_by_its_name_or_else_its_place(named, call, scaler, halves):
    _, parameters = halves
    names = ["bias", "layer.weight", "other"]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = library.sgd(list(zip(names, parameters, strict=True)) if named else groups)
    place = r"'layer\.weight'" if named else "parameter 0 of parameter group 1"
    with pytest.raises(ValueError, match=rf"{place}, shape \(3, 4\)"):
        getattr(scaler, call)(optimizer)


@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
def test_allowed_float16_gradients_are_unscaled_checked_and_stepped(bad, halves):
    optimizer, parameters = halves
    if bad is not None:
        parameters[1].grad[2, 3] = bad
    scaler = library.placed(init_scale=4.0, allow_fp16_gradients=True)
    scaler.step(optimizer)
    scaler.update()
    expected = 0.0 if bad is None else 1.0
    assert all((library.numpy(parameter) == expected).all() for parameter in parameters)
    assert scaler.last_step(optimizer).skipped == (bad is not None)
    assert scaler.get_scale() == (4.0 if bad is None else 2.0)


# Layouts.

ROW = library.tensor([4.0, 0.0, 8.0, 0.0, 12.0, 0.0])
MATRIX = library.tensor([[4.0, 8.0], [12.0, 16.0]])


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda: MATRIX.clone().t(), [[1.0, 3.0], [2.0, 4.0]]),
        (lambda: ROW.clone()[::2], [1.0, 2.0, 3.0]),
        (lambda: library.tensor(np.ones((0, 3))), []),
    ],
    ids=["transposed", "strided", "empty"],
)
@pytest.mark.parametrize("overflow", [False, True])
def test_a_gradient_of_any_layout_is_unscaled_whole_and_checked(view, expected, overflow, scaler):
    gradient = view()
    overflows = overflow and expected != []
    if overflows:
        gradient[(-1,) * gradient.dim()] = math.inf
    optimizer, (other, parameter) = with_gradients(library.tensor([8.0]), gradient)
    scaler.unscale_(optimizer)
    unscaled = np.array(expected)
    if overflows:
        unscaled.flat[-1] = math.inf
    assert library.numpy(parameter.grad).tolist() == unscaled.tolist()
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).skipped == overflows
    assert library.numpy(other) == (1.0 if overflows else -1.0)


def test_what_is_between_the_strides_is_left_alone(scaler):
    whole = library.tensor(np.full(6, 4.0))
    scaler.unscale_(with_gradients(whole[::2])[0])
    assert library.numpy(whole)[1::2].tolist() == [4.0, 4.0, 4.0]


def test_empty_gradients_alone_are_a_finite_step(scaler):
    optimizer, _ = with_gradients(library.tensor(np.ones(0)), library.tensor(np.ones((2, 0))))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step(optimizer).applied
    assert library.finite_steps_of(scaler) == 1
