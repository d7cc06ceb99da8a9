"""MindSpore's own master weights: float32 parameters, which ``amp_level`` casts when they are read.

Its optimizers have no switch: float16 parameters get a float16 state, and no masters.
"""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, amp, nn

import gradscaler.mindspore as ours

STEPS, STEP = 16, 2.0**-14  # float16 is spaced by 2**-11 below 1
ONES = [np.ones((1, 4), np.float32)] * STEPS
OVERFLOW = np.full((1, 4), np.inf, np.float32)
OPTIMIZERS = {
    "SGD": lambda parameters: nn.SGD(parameters, STEP),
    "Adam": lambda parameters: nn.Adam(parameters, STEP),
}


class Ones(nn.Cell):
    """The gradient of the weight is the input."""

    def __init__(self, dtype=mindspore.float32):
        super().__init__()
        self.layer = nn.Dense(4, 1, "ones", has_bias=False, dtype=dtype)

    def construct(self, x):
        return self.layer(x)


def trained(network, batches, optimizer="SGD"):
    optimizer = OPTIMIZERS[optimizer](network.trainable_params())
    scale = ours.DynamicLossScaleUpdateCell(2**4, 2, 1000)
    step = ours.TrainOneStepWithLossScaleCell(network, optimizer, scale).set_train()
    return step, [bool(step(Tensor(batch))[1]) for batch in batches]


def weight_of(step):
    (weight,) = step.network.trainable_params()
    return weight


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_with_an_amp_level_steps_below_the_spacing_of_float16_add_up(mode, level):
    step, skipped = trained(amp.auto_mixed_precision(Ones(), level), ONES)
    assert not any(skipped)
    assert weight_of(step).dtype == mindspore.float32
    assert (weight_of(step).asnumpy() == 1 - STEPS * STEP).all()


def test_with_to_float_they_do_too(mode):
    network = Ones()
    network.layer.to_float(mindspore.float16)
    assert network(Tensor(ONES[0])).dtype == mindspore.float16
    step, _ = trained(network, ONES)
    assert (weight_of(step).asnumpy() == 1 - STEPS * STEP).all()


def test_float16_parameters_have_no_masters_and_stand_still(mode):
    network = Ones(mindspore.float16)
    batches = [batch.astype(np.float16) for batch in ONES]
    step, skipped = trained(network, batches, "Adam")
    assert not any(skipped)
    state = {parameter.name: parameter.dtype for parameter in step.optimizer.get_parameters()}
    assert {state["moment1.layer.weight"], state["moment2.layer.weight"]} == {mindspore.float16}
    assert (weight_of(step).asnumpy() == 1).all()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_leaves_float32_parameters_and_state_bit_for_bit(mode, optimizer, bits):
    ends = []
    for batches in (ONES, [*ONES, OVERFLOW]):
        network = amp.auto_mixed_precision(Ones(), "O2")
        step, skipped = trained(network, batches, optimizer)
        ends.append({**bits(step.network), **bits(step.optimizer)})
    assert skipped[-1]
    assert ends[0] == ends[1]
