"""An error of ours wherever a watch of TensorPlay calls us changes no bit of a training."""

import math

import tensorplay
from tensorplay import nn

from tests.support.injected import wrong_after_errors

STEPS = 5


def trained():
    """The numbers of a training whose fourth batch is bad."""
    tensorplay.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = tensorplay.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x = tensorplay.tensor([[1.0, 2.0, 3.0, math.inf if step == 3 else 4.0]])
        loss = (model(x) ** 2).sum().sqrt()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach().numpy())
        optimizer.step()
    values = [*losses, *(each.detach().numpy() for each in model.parameters())]
    return [each.tobytes() for each in values]


def test_an_error_wherever_we_are_called_changes_no_bit(tmp_path):
    assert wrong_after_errors(trained, tmp_path) == {}
