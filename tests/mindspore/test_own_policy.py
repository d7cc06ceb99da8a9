"""A policy that is nobody's moves the scale, in both modes, by every way there."""

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import gradscaler.mindspore as ours
from tests.support.own_policy import PROVEN, SCALES, TRACE, Proven, ProvenState

pytestmark = pytest.mark.usefixtures("mode")


@pytest.mark.parametrize("compiled", [False, True], ids=["called", "compiled"])
def test_a_scaler_moves_the_scale(compiled):
    scaler, scales = ours.DynamicLossScaler(policy=Proven()), []

    @mindspore.jit
    def jitted(finite):
        return scaler.adjust(finite)

    for letter in TRACE:
        (jitted if compiled else scaler.adjust)(Tensor(letter == "o"))
        scales.append(float(scaler.scale_value.asnumpy()))
    assert scales == SCALES
    assert scaler.proven.asnumpy() == PROVEN[-1]
    assert scaler.nonfinite_steps.asnumpy() == TRACE.count("x")


@pytest.mark.parametrize("shape", [(), (1,)])
def test_an_update_cell_moves_the_scale(shape):
    cell, scales = ours.DynamicLossScaleUpdateCell(policy=Proven()), []
    scale = Parameter(Tensor(np.full(shape, cell.get_loss_scale(), np.float32)), name="scale")
    for letter in TRACE:
        cell(scale, Tensor(letter == "x"))
        scales.append(scale.asnumpy().item())
    assert scales == SCALES
    assert cell.proven.asnumpy() == PROVEN[-1]


def test_a_manager_moves_the_scale():
    manager, scales = ours.DynamicLossScaleManager(policy=Proven()), []
    for letter in TRACE:
        manager.update_loss_scale(letter == "x")
        scales.append(manager.get_loss_scale())
    assert scales == SCALES
    assert manager.get_update_cell().get_loss_scale() == SCALES[-1]


def test_a_checkpoint_brings_back_its_state(tmp_path):
    saved, loaded = (ours.DynamicLossScaleUpdateCell(policy=Proven()) for _ in range(2))
    scale = Parameter(Tensor(8.0, mindspore.float32), name="scale")
    for letter in TRACE:
        saved(scale, Tensor(letter == "x"))
    mindspore.save_checkpoint(saved, str(tmp_path / "cell.ckpt"))
    mindspore.load_checkpoint(str(tmp_path / "cell.ckpt"), loaded)
    assert loaded.proven.asnumpy() == PROVEN[-1]
    assert loaded.nonfinite_steps.asnumpy() == TRACE.count("x")


def test_a_train_step_moves_the_scale(line, inputs):
    network = line()
    optimizer = nn.SGD(network.trainable_params(), learning_rate=2.0**-20)
    cell, scales = ours.DynamicLossScaleUpdateCell(policy=Proven()), []
    step = ours.TrainOneStepWithLossScaleCell(network, optimizer, cell).set_train()
    for seed, letter in enumerate(TRACE):
        step(inputs(seed, np.inf if letter == "x" else None))
        scales.append(step.scale_sense.asnumpy().item())
    assert scales == SCALES


class Sized(Proven):
    """Keeps the largest gradient of the last finite step in place of the largest scale."""

    amax_interval = 1

    def update(self, state, found_inf, where=None, *, amax=None):
        moved = super().update(state, found_inf, where)
        return ProvenState(moved[0], moved[1], moved[2], where(found_inf, state.proven, amax))


def test_one_that_needs_the_largest_gradient_is_handed_it():
    scaler = ours.DynamicLossScaler(policy=Sized())
    cell = ours.DynamicLossScaleUpdateCell(policy=Sized())
    scale = Parameter(Tensor(8.0, mindspore.float32), name="scale")
    for size, letter in enumerate(TRACE):
        amax = Tensor(size, mindspore.float32)
        scaler.adjust(Tensor(letter == "o"), amax)
        cell(scale, Tensor(letter == "x"), amax)
    assert scaler.scale_value.asnumpy() == scale.asnumpy() == SCALES[-1]
    assert scaler.proven.asnumpy() == cell.proven.asnumpy() == TRACE.rindex("o")
