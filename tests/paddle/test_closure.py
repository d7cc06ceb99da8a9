"""step(optimizer, closure) where Fleet has replaced ``_unscale``, and Paddle's names of a state."""

import numpy as np
import paddle
import pytest

from gradscaler.paddle import GradScaler
from tests.support.eager import library


class TwoEvaluations:
    """Adam at two evaluations a step, whose gradients overflow at some of all evaluations."""

    def __init__(self, scaler, finite):
        self.parameters = library.parameters()
        self.optimizer = library.closure_optimizers["Adam at two evaluations"](self.parameters)
        self.scaler, self.finite = scaler, finite

    def step(self, overflows):
        scales = []

        def closure():
            self.optimizer.clear_grad()
            loss = paddle.ones([])
            scales.append(self.scaler.scale(loss).item())
            factor = np.inf if len(scales) in overflows else 1.0
            library.backward(self.scaler, self.parameters, [factor * g for g in self.finite])

        self.scaler.step(self.optimizer, closure)
        return scales


def test_a_repetition_is_unscaled_by_its_own_scale_where_unscaling_is_replaced(
    replace_unscale, finite
):
    """Fleet's _unscale divides by ``scaler._scale``."""
    ours, plain = (TwoEvaluations(GradScaler(init_loss_scaling=1024.0), finite) for _ in range(2))
    replace_unscale(ours.scaler)
    plain.step(overflows=())
    assert ours.step(overflows={1}) == [1024.0, 512.0, 512.0]
    assert ours.scaler.last_step(ours.optimizer).scale == 512.0
    assert library.stepped(ours.optimizer) == library.stepped(plain.optimizer)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_rolled_back_optimizer_s_state_dict_has_the_keys_it_had(steps_before, finite):
    """By them a checkpoint is loaded."""
    training = TwoEvaluations(GradScaler(), finite)
    for _ in range(steps_before):
        training.step(overflows=())
        training.scaler.update()
    before = list(training.optimizer.state_dict())
    training.step(overflows=range(2, 1000))
    assert training.scaler.last_step(training.optimizer).skipped
    assert list(training.optimizer.state_dict()) == before
