"""Checkpoints by mindspore.save_checkpoint: a resumed run is the run that was not stopped.

They are loaded before the first step. After one, MindSpore 2.10's own optimizers lose their updates
on the CPU, with or without loss scaling.
"""

import mindspore
import pytest
from mindspore import Tensor, nn

from gradscaler import DynamicScale
from gradscaler.mindspore import (
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    TrainOneStepWithLossScaleCell,
)

INF = float("inf")
OVERFLOWS = [None, INF, None, None, INF, INF, None, None, None, None, INF, None]
POLICIES = {
    "mindspore": DynamicScale.mindspore(2**10, 2, 3),
    "hysteresis": DynamicScale(2.0**10, growth_interval=3, hysteresis=2),
}


def save_and_load(source, target, path):
    mindspore.save_checkpoint(source, str(path))
    loaded = mindspore.load_checkpoint(str(path))
    assert mindspore.load_param_into_net(target, loaded, strict_load=True) == ([], [])


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_resumed_run_ends_with_the_same_bits(
    mode, line, inputs, bits, make_optimizer, tmp_path, policy
):
    def make_step():
        network = line()
        optimizer = make_optimizer(network.trainable_params())
        cell = DynamicLossScaleUpdateCell(policy=policy)
        return TrainOneStepWithLossScaleCell(network, optimizer, cell).set_train()

    def run(step, first, last):
        for seed in range(first, last):
            step(inputs(seed, OVERFLOWS[seed]))
        return bits(step)

    whole, *resumed = make_step(), make_step(), make_step()
    stops, end = (2, 9), len(OVERFLOWS)
    for first, stop, each in zip((0, *stops), stops, resumed, strict=False):
        run(whole, first, stop)
        save_and_load(whole, each, tmp_path / f"{stop}.ckpt")
    run(whole, stops[-1], end)
    assert [run(each, stop, end) for each, stop in zip(resumed, stops, strict=True)] == [
        bits(whole),
        bits(whole),
    ]


def test_a_functional_scalers_parameters_can_be_saved_with_others(mode, tmp_path):
    scaler, restored = (DynamicLossScaler(2**10, 2, 3) for _ in range(2))
    for grads_finite in [True, False, True, True]:
        scaler.adjust(Tensor(grads_finite))
    owned, again = ([s.scale_value, s.counter] for s in (scaler, restored))
    path = str(tmp_path / "scaler.ckpt")
    mindspore.save_checkpoint([{"name": p.name, "data": p} for p in owned], path)
    for parameter in again:
        parameter.set_data(mindspore.load_checkpoint(path)[parameter.name])
    for grads_finite in [True, True, True, False]:
        scaler.adjust(Tensor(grads_finite))
        restored.adjust(Tensor(grads_finite))
        assert [p.asnumpy() for p in again] == [p.asnumpy() for p in owned]


def test_a_checkpoint_of_mindspores_train_step_is_taken_over(mode, line, tmp_path, bits):
    def make_step(step, cell):
        network = line()
        optimizer = nn.Adam(network.trainable_params())
        return step(network, optimizer, cell(2**10, 2, 3))

    native = make_step(nn.TrainOneStepWithLossScaleCell, nn.DynamicLossScaleUpdateCell)
    native.scale_sense.set_data(Tensor(2.0**5))
    mine = make_step(TrainOneStepWithLossScaleCell, DynamicLossScaleUpdateCell)
    save_and_load(native, mine, tmp_path / "native.ckpt")
    assert bits(mine) == bits(native)
    save_and_load(mine, native, tmp_path / "mine.ckpt")
