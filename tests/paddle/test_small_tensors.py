"""Which tensors are taken together."""

import numpy as np
import paddle
import pytest

from gradscaler.paddle import GradScaler
from gradscaler.paddle._small_tensors import batches_of_small, small_by_shape

MIXES = {
    "none": [],
    "few": [(4,)] * 7,
    "alike": [(64, 64)] * 2000,
    "alike, and too few to copy 8 of them within 1/128": [(64, 64)] * 700,
    "two shapes of one size by turns": [(8, 4), (4, 8)] * 900,
    "scalars beside a large one": [(), (1000, 1000)] * 50,
    "without elements": [(0, 3)] * 1000,
    "large": [(2**14,)] * 1000,
}


@pytest.mark.parametrize("shapes", MIXES.values(), ids=MIXES)
def test_each_tensor_is_in_one_list_and_batches_are_small(shapes):
    tensors = [np.empty(shape, np.float32) for shape in shapes]
    batches, others = batches_of_small(tensors)
    found = [tensor for batch in batches for tensor in batch] + others
    assert sorted(map(id, found)) == sorted(map(id, tensors))
    for batch in batches:
        assert len({tensor.shape for tensor in batch}) == 1
        assert len(batch) >= 8
        assert sum(tensor.size for tensor in batch) <= min(
            2**17, sum(tensor.size for tensor in tensors) / 128
        )


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("alike", {15}),
        ("two shapes of one size by turns", {14}),
        ("scalars beside a large one", {50}),
        ("alike, and too few to copy 8 of them within 1/128", set()),
        ("large", set()),
    ],
)
def test_batches_hold_as_many_tensors_as_they_may(name, lengths):
    batches, _ = batches_of_small([np.empty(shape, np.float32) for shape in MIXES[name]])
    assert {len(batch) for batch in batches} == lengths


@pytest.mark.parametrize("shapes", MIXES.values(), ids=MIXES)
def test_each_tensor_is_small_or_not(shapes):
    tensors = [np.empty(shape, np.float32) for shape in shapes]
    by_shape, others = small_by_shape(tensors)
    small = [tensor for alike in by_shape.values() for tensor in alike]
    assert sorted(map(id, small + others)) == sorted(map(id, tensors))
    assert all(tensor.shape == shape for shape, alike in by_shape.items() for tensor in alike)
    assert all(0 < tensor.size <= 2**13 for tensor in small)
    assert len(small) == 0 or len(small) >= 8


@pytest.mark.parametrize("scale", [65536.0, 3.0, 2.0**-100, 3e38])
def test_small_gradients_are_divided_as_a_product_with_the_reciprocal(scale):
    random = np.random.default_rng(0)
    specials = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 1.0]
    given = []
    for shape in [(64, 64), (7,), (1,), (3, 5, 2)] * 7:
        values = random.standard_normal(shape) * 10.0 ** random.integers(-40, 38, shape)
        given.append(values.astype(np.float32))
        given[-1].flat[0] = specials[len(given) % 7]
    parameters = [paddle.create_parameter(values.shape, "float32") for values in given]
    for parameter, values in zip(parameters, given, strict=True):
        parameter.grad = paddle.to_tensor(values)
    optimizer = paddle.optimizer.SGD(0.1, parameters)
    scaler = GradScaler(init_loss_scaling=scale)
    scaler.scale(paddle.ones([]))
    scaler.unscale_(optimizer)
    with np.errstate(all="ignore"):
        expected = [values * np.float32(1.0 / scale) for values in given]
    for parameter, values in zip(parameters, expected, strict=True):
        found = parameter.grad.numpy()
        assert np.array_equal(found, values, equal_nan=True)
        assert np.array_equal(np.signbit(found)[values == 0], np.signbit(values)[values == 0])


def test_many_small_gradients_take_one_call(monkeypatch):
    calls = []
    native = paddle._C_ops.scale_
    monkeypatch.setattr(paddle._C_ops, "scale_", lambda *args: calls.append(1) or native(*args))
    parameters = [paddle.create_parameter([4, 4], "float32") for _ in range(100)]
    large = paddle.create_parameter([100, 100], "float32")
    for parameter in (*parameters, large):
        parameter.grad = paddle.ones(parameter.shape)
    optimizer = paddle.optimizer.SGD(0.1, [*parameters, large])
    scaler = GradScaler(init_loss_scaling=4.0)
    scaler.scale(paddle.ones([]))
    scaler.unscale_(optimizer)
    assert len(calls) == 1
    assert all((parameter.grad.numpy() == 0.25).all() for parameter in (*parameters, large))
