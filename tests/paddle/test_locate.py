"""What ``locate`` does with tensors that only Paddle has."""

import math

import paddle
import pytest
from paddle import nn

from gradscaler.diagnose import locate
from tests.support.marked_lines import lines_marked_in

line_of = lines_marked_in(__file__)


def test_a_tensor_that_is_spread_over_processes_is_not_read(monkeypatch):
    distributed = paddle.distributed
    mesh = distributed.ProcessMesh([0], dim_names=["x"])
    spread = distributed.shard_tensor(paddle.zeros([4]), mesh, [distributed.Replicate()])
    read = []
    monkeypatch.setattr(paddle.Tensor, "numpy", lambda tensor: read.append(tensor))
    assert locate(nn.Linear(1, 1), lambda: (spread.log() + 1).sum()) is None
    assert not any(each.is_dist() for each in read)


def roots_of_0(x):
    return (x * 0).sqrt()  # roots of 0


LISTS = {
    "concat": lambda x: paddle.concat([roots_of_0(x), x]).sum(),
    "stack": lambda x: paddle.stack([x, roots_of_0(x)]).mean(),
    "add_n": lambda x: paddle.add_n([roots_of_0(x), x]).sum(),
    "split before": lambda x: roots_of_0(paddle.split(x, 2, axis=1)[1]).sum() + x.sum(),
    "split after": lambda x: paddle.add_n(paddle.split(roots_of_0(x), 2, axis=1)).sum(),
    "concat before": lambda x: roots_of_0(paddle.concat([x, x])).sum(),
    "unstack": lambda x: roots_of_0(paddle.add_n(paddle.unstack(x))).sum(),
    "lstm": lambda x: nn.LSTM(4, 4)(roots_of_0(x).unsqueeze(0))[0].sum(),
}


def found_in(function):
    model = nn.Linear(4, 4)
    return locate(model, lambda: function(model(paddle.ones([2, 4]))).backward())


@pytest.mark.parametrize("name", LISTS)
def test_a_gradient_behind_a_function_of_lists_is_named(name):
    found = found_in(LISTS[name])
    assert (found.kind, found.operation, found.line) == ("backward", "sqrt", line_of("roots of 0"))


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_gradient_that_a_function_of_lists_makes_is_named(is_leaf):
    weight = paddle.full([4, 4], 1e-30)
    weight.stop_gradient = False

    def product(x):
        used = weight if is_leaf else weight * 1
        made = paddle.einsum("bi,io->bo", x * 0 + 1e20, used)  # a product
        return (made * 1e25).sum()

    found = found_in(product)
    assert (found.kind, found.operation) == ("backward", "einsum")
    assert (found.line, found.largest_input) == (line_of("a product"), pytest.approx(1e25))


OTHERS = {
    "alone": lambda x: 0.0,
    "sum": lambda x: x.sum(),
    "concat": lambda x: paddle.concat([x, x]).sum(),
    "stack": lambda x: paddle.stack([x, x]).sum(),
    "add_n": lambda x: paddle.add_n([x, x]).sum(),
    "matmul": lambda x: x.matmul(paddle.full([4, 4], 100.0)).sum(),
}


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_an_inf_that_a_function_of_lists_adds_to_other_gradients_is_named(name, is_leaf):
    leaf = paddle.zeros([2, 4])
    leaf.stop_gradient = False

    def function(x):
        used = leaf if is_leaf else x - x.detach()
        made = paddle.einsum("bi,io->bo", used, paddle.full([4, 4], 1e20))  # made of several
        return (made * 1e20).sum() + OTHERS[name](used)

    found = found_in(function)
    assert (found.kind, found.operation) == ("backward", "einsum")
    assert (found.line, found.num_inf) == (line_of("made of several"), 8)


def test_an_inf_behind_a_list_of_a_list_is_named():
    def function(x):
        used = x - x.detach()
        rows = paddle.concat([used, used])
        made = paddle.einsum("bi,io->bo", rows, paddle.full([4, 4], 1e20))  # made behind a list
        return (made * 1e20).sum() + used.sum()

    found = found_in(function)
    assert (found.operation, found.line) == ("einsum", line_of("made behind a list"))


@pytest.mark.parametrize("function", [paddle.concat, paddle.add_n, paddle.stack])
def test_a_sum_of_large_gradients_is_made_by_no_operation(function):
    """Each is finite, and none of the operations that they come from is at fault."""
    assert found_in(lambda x: (function([x - x.detach()] * 2) * 3e38).sum()) is None

    def twice(x):
        used = x - x.detach()
        made = paddle.einsum("bi,io->bo", used, paddle.eye(4))
        return ((made + function([used] * 2).reshape([-1, 2, 4])[0]) * 3e38).sum()

    assert found_in(twice) is None


def test_a_gradient_that_a_function_of_lists_leaves_out_is_none():
    leaf = paddle.ones([4])
    leaf.stop_gradient = False
    zeros = paddle.zeros([4])
    assert found_in(lambda _: paddle.concat([zeros, leaf]).square().sqrt().sum()) is None
    assert math.isfinite(leaf.grad.sum())


def test_a_layer_with_a_buffer_that_holds_nothing_is_searched():
    model = nn.LSTM(4, 4)
    found = locate(model, lambda: (model(paddle.ones([1, 2, 4]))[0] * 0).log().sum())  # of an LSTM
    assert (found.operation, found.line) == ("log", line_of("of an LSTM"))
