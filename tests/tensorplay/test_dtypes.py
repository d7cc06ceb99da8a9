"""Gradients of every kind: each dtype, mixed ones, sparse ones, any layout, and none at all."""

import math

import numpy as np
import pytest
import tensorplay as tp

from gradscaler.tensorplay import GradScaler

INF = math.inf


@pytest.fixture
def scaler():
    scaler = GradScaler(init_scale=4.0)
    scaler.scale(tp.ones(()))
    return scaler


def with_gradient(gradient):
    """A parameter of ones with that gradient."""
    parameter = tp.nn.Parameter(tp.ones(tuple(gradient.shape), dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


# What loss scaling is for.


@pytest.mark.parametrize(("enabled", "expected"), [(False, 0.0), (True, 1e-8)])
def test_a_gradient_too_small_for_fp16_comes_through_if_it_is_scaled(enabled, expected):
    weight = tp.nn.Parameter(tp.ones((4, 4)))
    optimizer = tp.optim.SGD([weight])
    scaler = GradScaler(enabled=enabled)
    with tp.autocast("cpu", dtype=tp.float16):
        output = tp.ones((1, 4)) @ weight
    assert output.dtype == tp.float16
    scaler.scale((output.float() * 1e-8).sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad.dtype == tp.float32
    assert np.array(weight.grad.tolist()) == pytest.approx(expected, rel=1e-3, abs=0)


def test_a_float16_loss_does_not_overflow_in_being_scaled():
    scaled = GradScaler().scale(tp.full((), 3.0, dtype=tp.float16))
    assert scaled.item() == 3.0 * 2.0**16


# float16.


def test_float16_gradients_are_refused_as_tensorplay_does(scaler):
    optimizer = tp.optim.SGD([with_gradient(tp.ones(2, dtype=tp.float16))])
    native = tp.amp.GradScaler("cpu")
    native.scale(tp.ones(()))
    with pytest.raises(ValueError, match="FP16") as theirs:
        native.unscale_(optimizer)
    with pytest.raises(type(theirs.value), match=str(theirs.value)):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_the_refusal_names_the_parameter_by_its_name(scaler, call):
    parameters = [
        ("embedding", with_gradient(tp.ones(2))),
        ("head", with_gradient(tp.ones((2, 3), dtype=tp.float16))),
    ]
    optimizer = tp.optim.SGD(parameters)
    with pytest.raises(ValueError, match=r"'head', shape \(2, 3\)"):
        getattr(scaler, call)(optimizer)


def test_the_refusal_names_a_parameter_without_a_name_by_its_place(scaler):
    fine, bad = with_gradient(tp.ones(2)), with_gradient(tp.ones(3, dtype=tp.float16))
    groups = [{"params": [fine]}, {"params": [with_gradient(tp.ones(1)), bad]}]
    with pytest.raises(ValueError, match=r"parameter 1 of parameter group 1, shape \(3,\)"):
        scaler.step(tp.optim.SGD(groups))


@pytest.mark.parametrize("call", ["unscale_", "step", "minimize"])
def test_the_refusal_changes_nothing(scaler, call, everything):
    gradients = [tp.ones(2), tp.ones(2, dtype=tp.float16)]
    optimizer = tp.optim.SGD([with_gradient(gradient) for gradient in gradients])
    before = everything(scaler, optimizer)
    with pytest.raises(ValueError, match="float16"):
        getattr(scaler, call)(optimizer)
    assert everything(scaler, optimizer) == before


def test_float16_gradients_are_unscaled_where_they_are_allowed(exact):
    scaler = GradScaler(init_scale=4.0, allow_fp16_gradients=True)
    scaler.scale(tp.ones(()))
    parameter = with_gradient(tp.tensor([8.0, -2.0], dtype=tp.float16))
    scaler.unscale_(tp.optim.SGD([parameter]))
    assert exact(parameter.grad) == exact(tp.tensor([2.0, -0.5], dtype=tp.float16))


def test_an_overflow_in_allowed_float16_gradients_skips_the_step():
    scaler = GradScaler(init_scale=4.0, allow_fp16_gradients=True)
    scaler.scale(tp.ones(()))
    parameter = with_gradient(tp.tensor([8.0, 1e6], dtype=tp.float16))
    optimizer = tp.optim.SGD([parameter], lr=1.0)
    scaler.step(optimizer)
    assert parameter.tolist() == [1.0, 1.0]
    assert scaler.last_step(optimizer).reason == "overflow"


# Other dtypes.


@pytest.mark.parametrize("dtype", [tp.bfloat16, tp.float32, tp.float64])
@pytest.mark.parametrize("scale", [4.0, 3.0, 2.0**16])
def test_gradients_are_divided_by_the_scale(dtype, scale, randn):
    scaler = GradScaler(init_scale=scale)
    scaler.scale(tp.ones(()))
    scaled = (randn(0, (50,))[0] * scale).to(dtype)
    expected = np.array(scaled.tolist()) / scale  # in float64
    parameter = with_gradient(scaled)
    scaler.unscale_(tp.optim.SGD([parameter]))
    rounding = 2.0**-7 if dtype == tp.bfloat16 else 2.0**-23  # 1/scale is a float32
    assert np.array(parameter.grad.tolist()) == pytest.approx(expected, rel=rounding)
    assert parameter.grad.dtype == dtype


@pytest.mark.parametrize("bad", [INF, -INF, math.nan])
@pytest.mark.parametrize("dtype", [tp.bfloat16, tp.float32, tp.float64])
@pytest.mark.parametrize("size", [1, 7, 64, 1025])
def test_a_non_finite_value_is_found_wherever_it_is(dtype, bad, size):
    scaler = GradScaler()
    for place in {0, size // 2, size - 1}:
        gradient = tp.ones(size, dtype=dtype)
        gradient[place] = bad
        optimizer = tp.optim.SGD([with_gradient(tp.ones(3)), with_gradient(gradient)])
        scaler.scale(tp.ones(()))
        scaler.step(optimizer)
        assert scaler.last_step(optimizer).found_inf
        scaler.update()


def test_dtypes_may_be_mixed(scaler):
    dtypes = [tp.float32, tp.bfloat16, tp.float64, tp.float32]
    parameters = [with_gradient(tp.full((2,), 2.0, dtype=dtype)) for dtype in dtypes]
    scaler.step(tp.optim.SGD(parameters, lr=1.0))
    assert [parameter.tolist() for parameter in parameters] == [[0.5, 0.5]] * 4
    assert [parameter.grad.dtype for parameter in parameters] == dtypes


@pytest.mark.parametrize("overflowed", [0, 1, 2])
def test_an_overflow_in_one_dtype_skips_them_all(scaler, overflowed):
    dtypes = [tp.float32, tp.bfloat16, tp.float64]
    parameters = [with_gradient(tp.ones(2, dtype=dtype)) for dtype in dtypes]
    parameters[overflowed].grad[1] = INF
    scaler.step(tp.optim.SGD(parameters, lr=1.0))
    assert [parameter.tolist() for parameter in parameters] == [[1.0, 1.0]] * 3


def test_what_is_finite_is_unscaled_although_another_gradient_overflowed(scaler):
    """TensorPlay's own kernel leaves all gradients of that dtype, and those after, scaled."""
    overflowed = tp.tensor([INF, 8.0])
    gradients = [tp.full((2,), 8.0), overflowed, tp.full((2,), 8.0, dtype=tp.float64)]
    parameters = [with_gradient(gradient) for gradient in gradients]
    scaler.unscale_(tp.optim.SGD(parameters))
    assert [p.grad.tolist() for p in parameters] == [[2.0, 2.0], [INF, 2.0], [2.0, 2.0]]


def test_a_dtype_that_cannot_be_unscaled_is_refused_before_any_gradient_is(scaler, everything):
    gradients = [tp.ones(2), tp.ones(2, dtype=tp.complex64)]
    optimizer = tp.optim.SGD([with_gradient(gradient) for gradient in gradients])
    before = everything(scaler, optimizer)
    with pytest.raises(NotImplementedError):
        scaler.unscale_(optimizer)
    assert everything(scaler, optimizer) == before


# Sparse gradients.


def sparse():
    return tp.sparse_coo_tensor(tp.tensor([[0, 2]]), tp.tensor([1.0, 2.0]), (3,))


def optimizer_with_a_sparse_gradient():
    parameter = tp.nn.Parameter(tp.ones(3))
    parameter.grad = sparse()
    return tp.optim.SGD([with_gradient(tp.ones(2)), parameter])


@pytest.mark.parametrize("call", ["unscale_", "step", "minimize"])
def test_a_sparse_gradient_is_refused_and_nothing_changes(scaler, call, everything):
    optimizer = optimizer_with_a_sparse_gradient()
    before = everything(scaler, optimizer)
    with pytest.raises(NotImplementedError, match="sparse"):
        getattr(scaler, call)(optimizer)
    assert everything(scaler, optimizer) == before


def test_a_sparse_gradient_is_refused_as_tensorplay_does():
    native = tp.amp.GradScaler("cpu")
    native.scale(tp.ones(()))
    with pytest.raises(NotImplementedError, match="sparse"):
        native.unscale_(optimizer_with_a_sparse_gradient())


def test_a_sparse_gradient_does_not_stand_in_the_way_of_another_optimizer(scaler):
    with pytest.raises(NotImplementedError):
        scaler.step(optimizer_with_a_sparse_gradient())
    other = with_gradient(tp.full((2,), 2.0))
    scaler.step(tp.optim.SGD([other], lr=1.0))
    scaler.update()
    assert other.tolist() == [0.5, 0.5]


# Layouts.


def test_a_transposed_gradient_is_unscaled(scaler):
    parameter = with_gradient(tp.tensor([[4.0, 8.0], [12.0, 16.0]]).t())
    scaler.unscale_(tp.optim.SGD([parameter]))
    assert parameter.grad.tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_a_strided_gradient_is_unscaled_whole(scaler):
    parameter = with_gradient(tp.tensor([4.0, 0.0, 8.0, 0.0, 12.0, 0.0])[::2])
    scaler.unscale_(tp.optim.SGD([parameter]))
    assert parameter.grad.tolist() == [1.0, 2.0, 3.0]


def test_what_lies_between_the_strides_is_left_alone(scaler):
    everything = tp.full((6,), 4.0)
    scaler.unscale_(tp.optim.SGD([with_gradient(everything[::2])]))
    assert everything[1::2].tolist() == [4.0, 4.0, 4.0]


def test_an_overflow_at_the_end_of_a_strided_gradient_skips_the_step(scaler):
    parameter = with_gradient(tp.tensor([4.0, 0.0, 8.0, 0.0, INF, 0.0])[::2])
    scaler.step(tp.optim.SGD([parameter], lr=1.0))
    assert parameter.tolist() == [1.0, 1.0, 1.0]


def test_an_empty_gradient_is_no_trouble(scaler):
    parameter = with_gradient(tp.full((2,), 2.0))
    scaler.step(tp.optim.SGD([with_gradient(tp.ones((0, 3))), parameter], lr=1.0))
    assert parameter.tolist() == [0.5, 0.5]


def parameters_whose_gradients_share_memory(scaler):
    """TensorPlay hands the gradient of a sum to both summands, as one piece of memory."""
    parameters = [tp.nn.Parameter(tp.ones(3)) for _ in range(2)]
    scaler.scale((parameters[0] + parameters[1]).pow(2).sum()).backward()
    return parameters


def test_gradients_that_share_memory_are_unscaled_once(scaler):
    parameters = parameters_whose_gradients_share_memory(scaler)
    scaler.unscale_(tp.optim.SGD(parameters))
    assert [parameter.grad.tolist() for parameter in parameters] == [[4.0] * 3] * 2


def test_gradients_that_share_memory_are_clipped_once(scaler):
    parameters = parameters_whose_gradients_share_memory(scaler)
    optimizer = tp.optim.SGD(parameters)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    assert norm.item() == pytest.approx(math.sqrt(6 * 4.0**2))
    clipped = np.array([parameter.grad.tolist() for parameter in parameters])
    assert np.linalg.norm(clipped) == pytest.approx(1.0)


# None at all.


def test_without_gradients_the_optimizer_is_stepped_over(kind, randn, stepped):
    optimizer = kind([tp.nn.Parameter(value) for value in randn(0, *kind.shapes)])
    before = stepped(optimizer)
    scaler = GradScaler()
    scaler.scale(tp.ones(()))
    assert scaler.step(optimizer) is None
    assert stepped(optimizer) == before
    assert scaler.last_step(optimizer).reason == "no_gradients"


def test_without_gradients_it_is_neither_an_overflow_nor_a_finite_step(scaler, parameters):
    scaler.step(tp.optim.SGD(parameters))
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4.0, 0)


def test_an_optimizer_without_gradients_does_not_hold_another_back(scaler, parameters):
    stepping = tp.optim.SGD([with_gradient(tp.ones(2))])
    for optimizer in (tp.optim.SGD(parameters), stepping):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step(stepping).applied
    assert scaler._get_growth_tracker() == 1


def test_a_parameter_without_a_gradient_is_left_alone(scaler):
    parameter, other = with_gradient(tp.full((2,), 2.0)), tp.nn.Parameter(tp.ones(2))
    scaler.step(tp.optim.SGD([parameter, other], lr=1.0))
    assert (parameter.tolist(), other.tolist(), other.grad) == ([0.5, 0.5], [1.0, 1.0], None)
