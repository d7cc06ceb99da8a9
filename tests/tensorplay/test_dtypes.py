"""Gradients that TensorPlay cannot unscale, and those that share memory; and none at all."""

import math

import numpy as np
import pytest
import tensorplay as tp

from gradscaler.tensorplay import GradScaler
from tests.support.eager import library


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


def optimizer_with_a_sparse_gradient():
    parameter = tp.nn.Parameter(tp.ones(3))
    parameter.grad = tp.sparse_coo_tensor(tp.tensor([[0, 2]]), tp.tensor([1.0, 2.0]), (3,))
    return tp.optim.SGD([with_gradient(tp.ones(2)), parameter])


def optimizer_with_a_complex_gradient():
    return tp.optim.SGD(map(with_gradient, [tp.ones(2), tp.ones(2, dtype=tp.complex64)]))


@pytest.mark.parametrize("call", ["unscale_", "step", "minimize"])
@pytest.mark.parametrize(
    ("make_optimizer", "match"),
    [(optimizer_with_a_sparse_gradient, "sparse"), (optimizer_with_a_complex_gradient, "complex")],
)
def test_a_gradient_that_cannot_be_unscaled_is_refused_and_nothing_changes(
    make_optimizer, match, scaler, call
):
    optimizer = make_optimizer()
    before = library.everything(scaler, optimizer)
    with pytest.raises(NotImplementedError, match=match):
        getattr(scaler, call)(optimizer)
    assert library.everything(scaler, optimizer) == before


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


# Gradients that share memory, and none at all.


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


def test_without_gradients_the_optimizer_is_stepped_over(kind, randn):
    optimizer = kind([tp.nn.Parameter(value) for value in randn(0, *kind.shapes)])
    before = library.kept(optimizer)
    scaler = GradScaler()
    scaler.scale(tp.ones(()))
    assert scaler.step(optimizer) is None
    assert library.kept(optimizer) == before
    assert scaler.last_step(optimizer).reason == "no_gradients"
