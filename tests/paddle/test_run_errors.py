"""An error of ours wherever a watch of Paddle calls us changes no bit of a training."""

import math

import paddle
import pytest
from paddle import nn

from gradscaler.paddle import GradScaler
from tests.support.injected import wrong_after_errors
from tests.support.steps import take_step

STEPS = 5


def trained(scaler):
    """The numbers of a training whose fourth batch is bad."""
    paddle.seed(0)
    model = nn.Linear(4, 1)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    losses = []
    for step in range(STEPS):
        x = paddle.to_tensor([[1.0, 2.0, 3.0, math.inf if step == 3 else 4.0]])
        loss = paddle.sqrt(paddle.sum(paddle.square(model(x))))
        losses.append(loss.numpy())
        take_step(loss, optimizer, scaler)
        optimizer.clear_grad()
    values = [*losses, *(each.numpy() for each in model.parameters())]
    return [each.tobytes() for each in values]


@pytest.mark.rare("the guard is the same one, which TensorPlay's test of a plain loop tries")
@pytest.mark.parametrize("make", [GradScaler, lambda: None])
def test_an_error_wherever_we_are_called_changes_no_bit(make, tmp_path):
    assert wrong_after_errors(lambda: trained(make()), tmp_path) == {}
