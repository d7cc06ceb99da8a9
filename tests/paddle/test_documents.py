"""Every code example of Paddle's reference documents runs with the import changed."""

import warnings

import paddle
import pytest

import gradscaler.paddle

# https://www.paddlepaddle.org.cn/documentation/docs/zh/api/paddle/amp/GradScaler_cn.html has one
# example three times: for the class, for scale() and for minimize(). Its source, the .rst, has it
# without the last line.
EXAMPLE = """
import paddle

model = paddle.nn.Conv2D(3, 2, 3, bias_attr=True)
optimizer = paddle.optimizer.SGD(learning_rate=0.01, parameters=model.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
data = paddle.rand([10, 3, 32, 32])

with paddle.amp.auto_cast():
    conv = model(data)
    loss = paddle.mean(conv)

scaled = scaler.scale(loss)  # scale the loss
scaled.backward()            # do backward
scaler.minimize(optimizer, scaled)  # update parameters
"""
LAST_LINE = "optimizer.clear_grad()\n"


@pytest.fixture(params=["", LAST_LINE], ids=["as in the rst", "as on the page"])
def ran(request):
    """The variables of an example that was run, and the numbers it began with."""
    code = EXAMPLE + request.param
    code = code.replace(
        "import paddle\n", "import paddle\nfrom gradscaler.paddle import GradScaler\n"
    )
    code = code.replace("paddle.amp.GradScaler", "GradScaler")
    before_training, training = code.split("with paddle.amp.auto_cast")
    variables = {}
    exec(before_training, variables)
    variables["start"] = variables["model"].weight.numpy()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "amp_guard can only be enabled", UserWarning)
        exec("with paddle.amp.auto_cast" + training, variables)
    return variables


def test_the_example_scales(ran):
    assert isinstance(ran["scaler"], gradscaler.paddle.GradScaler)
    assert ran["scaled"].item() == ran["loss"].item() * 1024


def test_the_example_updates_the_parameters_by_unscaled_gradients(ran):
    twin = paddle.nn.Conv2D(3, 2, 3)
    twin.weight.set_value(ran["start"])
    twin(ran["data"]).mean().backward()
    expected = ran["start"] - 0.01 * twin.weight.grad.numpy()
    moved = ran["model"].weight.numpy()
    assert abs(moved - expected).max() < 1e-6
    assert abs(moved - ran["start"]).max() > 1e-4


def test_the_example_counts_a_finite_step(ran):
    assert ran["scaler"].last_step(ran["optimizer"]).applied
    assert ran["scaler"].state_dict()["incr_count"] == 1
