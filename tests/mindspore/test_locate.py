"""locate() in MindSpore names the operation, in both modes and both passes, and changes nothing."""

import os
import threading
from importlib import import_module

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from gradscaler.diagnose import locate

pytestmark = pytest.mark.usefixtures("mode")
LABELS = Tensor(np.arange(8) % 4, mindspore.int32)
MASK = Tensor(np.arange(4) > 2)


class Net(nn.Cell):
    """Two layers, without an activation that hides an Inf."""

    def __init__(self):
        super().__init__()
        generator = np.random.default_rng(0)
        weights = (Tensor(generator.normal(size=(4, 4)), mindspore.float32) for _ in range(2))
        self.body = nn.SequentialCell(nn.Dense(4, 4, next(weights)), nn.BatchNorm1d(4), nn.Tanh())
        self.head = nn.Dense(4, 4, next(weights))

    def construct(self, x):
        return self.head(self.body(x))


@pytest.fixture
def net():
    return Net().set_train()


@pytest.fixture
def x():
    return Tensor(np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32))


def located(net, loss_of, x):
    """What is located in a step."""

    def forward(x):
        return loss_of(net(x))

    def step():
        return mindspore.value_and_grad(forward, None, net.trainable_params())(x)

    return locate(net, step)


def gradients_of(net):
    """A step, which graph mode compiles."""

    def loss_of(x):
        return net(x).mean()

    return mindspore.value_and_grad(loss_of, None, net.trainable_params())


def line_of(function):
    """The first line of a function, as it is named."""
    return f"{__file__}:{function.__code__.co_firstlineno}"


FORWARD = {
    "log": lambda y: ops.log(y * 0).mean(),
    "exp": lambda y: ops.exp(y * 1e5).mean(),
    "pow": lambda y: ops.pow(-y.abs(), 0.5).mean(),
    "div": lambda y: (y / (y * 0)).mean(),
    "square": lambda y: nn.MSELoss()(y * 1e30, y),
    "cumsum": lambda y: ops.cumsum(ops.cast(ops.exp(y * 0 + 11), mindspore.float16), 0).mean(),
    "std": lambda y: ops.std(y[:1, :1], ddof=1).mean(),
    "acos": lambda y: ops.acos(y * 0 + 2)[1].mean(),
    "reciprocal": lambda y: (1 / (y * 0)).mean(),
}
BACKWARD = {
    "sqrt": lambda y: ops.sqrt(ops.abs(y * 0)).mean(),
    "norm": lambda y: ops.norm(y * 0),
    "log": lambda y: ops.where(y > 1e9, ops.log(y * 0), Tensor(0.0)).mean(),
    "pow": lambda y: ops.pow(y * 0, 0.5)[1:].mean(),
    "acos": lambda y: ops.acos(y * 0 + 1).mean(),
    "std": lambda y: ops.std(y * 0),
}
MADE_BEFORE = ops.relu(Tensor(np.float32([[-1, -1, 2, 3]])))
# MindSpore's own mode shows no operation whose inputs all come from cat, or from before it began.
UNSHOWN = {
    "exp": lambda y: ops.exp(ops.cat([y, y * 1e5])),
    "div": lambda y: mindspore.mint.div(1.0, mindspore.mint.cat([y, y * 0])),
    "rsqrt": lambda y: y * ops.rsqrt(MADE_BEFORE),
}
HEALTHY = {
    "plain": lambda y: (y**2).mean(),
    "mask": lambda y: (ops.softmax(ops.masked_fill(y, MASK, float("-inf"))) * y).mean(),
    "where": lambda y: ops.where(y > 0, y, Tensor(0.0)).mean(),
    "unused": lambda y: [ops.log(y * 0), y.mean()][1],
    "integers": lambda y: (y * (LABELS > 1).astype(mindspore.float32)[:, None]).mean(),
}


@pytest.mark.parametrize("name", FORWARD)
def test_the_operation_of_a_loss_is_named(name, net, x):
    found = located(net, FORWARD[name], x)
    assert (found.operation, found.kind, found.module) == (name, "forward", None)
    assert found.line == line_of(FORWARD[name])


@pytest.mark.parametrize("name", BACKWARD)
def test_the_operation_of_a_gradient_is_named(name, net, x):
    found = located(net, BACKWARD[name], x)
    assert (found.operation, found.kind, found.module) == (name, "backward", None)
    assert found.line == line_of(BACKWARD[name])


@pytest.mark.parametrize("name", UNSHOWN)
def test_an_operation_that_mindspore_does_not_show_is_named(name, net, x):
    found = located(net, lambda y: UNSHOWN[name](y).mean(), x)
    assert (found.operation, found.kind, found.line) == (name, "forward", line_of(UNSHOWN[name]))


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_step_gives_none(name, net, x):
    assert located(net, HEALTHY[name], x) is None


class Layer(nn.Cell):
    """Divides by 0 in the model."""

    def construct(self, x):
        return x / ops.relu(-ops.abs(x))  # the divisor is 0


def test_an_operation_in_a_module_is_named_with_it(net, x):
    net.body.append(Layer())
    found = located(net, ops.mean, x)
    number = line_of(Layer.construct).rpartition(":")[2]
    assert (found.module, found.type, found.operation) == ("body.3", "Layer", "div")
    assert (found.line, found.smallest_divisor) == (f"{__file__}:{int(number) + 1}", 0)


def test_the_rows_of_a_batch_that_is_bad_itself_are_named(net, x):
    x[3, 1] = float("nan")
    found = located(net, ops.mean, x)
    assert (found.kind, found.rows, found.module) == ("input", "row 3 of 8", "body.0")


def test_a_bad_batch_is_named_even_if_only_a_gradient_shows_it(x):
    net = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU())  # in MindSpore, ReLU of NaN is 0
    x[3, 1] = float("nan")
    found = located(net, ops.mean, x)
    assert (found.kind, found.rows) == ("input", "row 3 of 8")


def test_a_bad_parameter_is_named(net, x):
    net.head.bias.set_data(Tensor(np.float32([1, np.nan, 1, 1])))
    found = located(net, ops.mean, x)
    assert (found.module, found.type, found.bad_parameter) == ("head", "Dense", "head.bias")


class Squares(nn.Cell):
    """A backward pass of the user's own."""

    def construct(self, x):
        return x * x

    def bprop(self, x, out, dout):
        return (dout / (x * 0),)


def test_a_backward_pass_of_the_users_own_is_named(net, x):
    squares = Squares()
    found = located(net, lambda y: squares(y).mean(), x)
    number = line_of(Squares.construct).rpartition(":")[2]
    assert (found.kind, found.operation) == ("backward", "CellCustomBackward")
    assert found.line == f"{__file__}:{int(number) + 1}"


def test_an_operation_that_is_computed_again_is_named(net, x):
    class Again(nn.Cell):
        def construct(self, x):
            return ops.sqrt(ops.abs(x * 0))

    again = Again()
    again.recompute()
    found = located(net, lambda y: again(y).mean(), x)
    assert (found.kind, found.operation) == ("backward", "sqrt")


def test_functions_that_are_compiled_run_as_they_are_written(net, x):
    @mindspore.jit
    def loss_of(y):
        return ops.log(y * 0).mean()

    assert located(net, loss_of, x).operation == "log"


def test_a_step_without_gradients_is_checked(net, x):
    assert locate(net, lambda: ops.log(net(x) * 0)[2:].mean()).operation == "log"
    assert locate(net, lambda: (ops.log(net(x) * 0), net(x))[1]) is None
    assert locate(net, lambda: None) is None


def test_an_operation_in_place_is_named(net, x):
    def loss_of(y):
        y = y * 0
        y[0] = ops.log(y[0])
        return y.mean()

    assert located(net, loss_of, x).operation == "log"


def test_nothing_is_changed(net, x, bits, mode):
    executor = import_module("mindspore.graph.api")._pynative_executor
    step = gradients_of(net)
    step(x)
    before, state = bits(net), mindspore.get_rng_state().asnumpy().tobytes()
    context = mindspore.get_context("mode"), os.environ.get("MS_JIT"), dict(vars(executor))
    losses = []

    def closure():
        losses.append(step(x)[0])

    assert locate(net, closure) is None
    with pytest.raises(ZeroDivisionError):
        locate(net, lambda: (step(x), 1 / 0))
    assert bits(net) == before
    assert mindspore.get_rng_state().asnumpy().tobytes() == state
    assert context == (
        mindspore.get_context("mode"),
        os.environ.get("MS_JIT"),
        dict(vars(executor)),
    )
    loss = step(x)[0]
    if mode == "pynative":
        assert losses[0].asnumpy().tobytes() == loss.asnumpy().tobytes()


def test_a_compiled_step_is_not_compiled_again(net, x, count_compilations):
    step = gradients_of(net)
    first = step(x)[0].asnumpy()
    with count_compilations() as compiled:
        assert located(net, ops.mean, x) is None
        step(x)
    assert not compiled
    assert np.isfinite(first)


def test_operations_of_other_threads_pass_unseen(net, x):
    made = []

    def loss_of(y):
        thread = threading.Thread(target=lambda: made.append(ops.log(Tensor(np.zeros(2, "f4")))))
        thread.start()
        thread.join()
        return y.mean() + 0 * made[-1].sum().asnumpy().clip(0).item()

    assert located(net, loss_of, x) is None


def test_a_search_in_a_search_is_one_of_its_own(net, x):
    def loss_of(y):
        inner = locate(net, lambda: ops.log(Tensor(np.zeros(2, "f4"))).mean())
        assert inner.operation == "log"
        return ops.sqrt(ops.abs(y * 0)).mean()

    assert located(net, loss_of, x).operation == "sqrt"


def test_a_parameter_outside_of_the_model_is_given(net, x):
    scale = Parameter(Tensor(np.float32(np.inf)))
    found = located(net, lambda y: (y * scale).mean(), x)
    assert (found.kind, found.operation) == ("input", "mul")


def test_a_divisor_of_whole_numbers_and_one_that_is_no_tensor_are_read(net, x):
    found = located(net, lambda y: (y / (LABELS[:, None] * 0)).mean(), x)
    assert (found.operation, found.smallest_divisor) == ("div", 0)
    assert locate(net, lambda: (net(x) / 0.0).mean()).smallest_divisor == 0


@pytest.mark.parametrize("read", [np.float32, lambda x: x.item()])
def test_a_number_that_was_read_from_a_tensor_is_followed(net, x, read):
    found = located(net, lambda y: y.mean() * read((y * 0).log().mean().asnumpy()), x)
    assert (found.kind, found.operation) == ("forward", "log")


@pytest.mark.parametrize("operation", ["mul", "div"])
def test_a_number_from_outside_of_mindspore_is_an_input(net, x, operation):
    number = np.float32(np.nan)
    found = located(net, lambda y: y.mean() * number if operation == "mul" else y / number, x)
    assert (found.kind, found.operation, found.is_number) == ("input", operation, True)


@pytest.mark.parametrize(("exponent", "shift"), [(-0.5, 0.0), (20.0, 100.0)])
def test_a_power_tells_its_exponent(net, x, exponent, shift):
    found = located(net, lambda y: ((y * 0 + shift) ** exponent).mean(), x)
    assert (found.operation, found.exponent) == ("pow", exponent)
    found = located(net, lambda y: (2.0 ** (y * 0 + 200)).mean(), x)
    assert (found.operation, found.exponent) == ("pow", None)


def test_states_of_random_functions_are_left_as_they_were(net):
    def draw():
        return ops.dropout(Tensor(np.ones(32, np.float32))) + ops.standard_normal((32,))

    def drawn(is_located):
        mindspore.set_seed(1)
        if is_located:
            locate(net, draw)
        return draw().asnumpy().tobytes()

    assert drawn(is_located=True) == drawn(is_located=False)
