"""``Monitor.record(replay=)``: it locates the failing step of a loop of MindSpore."""

import warnings

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gradscaler.diagnose import Monitor
from gradscaler.mindspore import DynamicLossScaler, all_finite

INPUTS = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


class Log(nn.Cell):
    """A logarithm, which is -Inf where ``k`` is 0."""

    def construct(self, y, k):
        return ops.log(ops.abs(y) * k).mean()


class Root(nn.Cell):
    """A root, whose slope is Inf where ``k`` is 0."""

    def construct(self, y, k):
        return ops.sqrt(ops.abs(y) * k).mean()


def trained(loss_fn, fails, steps=24):
    """Trains as the start page does; returns the verdict, and the step of each warning."""
    network = nn.SequentialCell(nn.Dense(4, 8), nn.Sigmoid(), nn.Dense(8, 2))
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    scaler = DynamicLossScaler(scale_value=2.0**16, scale_factor=2, scale_window=2000)
    told = []

    def loss_of(inputs, k):
        return loss_fn(network(inputs), k)

    def scaled_loss(inputs, k):
        return scaler.scale(loss_of(inputs, k))

    gradients_of = mindspore.value_and_grad(scaled_loss, None, optimizer.parameters)
    plain = mindspore.value_and_grad(loss_of, None, optimizer.parameters)
    with Monitor(scaler, network) as monitor:
        for step in range(1, steps + 1):
            batch = Tensor(INPUTS), Tensor(0.0 if step in fails else 1.0)
            loss, gradients = gradients_of(*batch)
            loss, gradients = scaler.unscale(loss), scaler.unscale(gradients)
            finite = all_finite(gradients)
            if finite:
                optimizer(gradients)
            scaler.adjust(finite)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                monitor.record(
                    finite=finite,
                    gradients=gradients,
                    loss=loss,
                    replay=lambda batch=batch: (network, lambda: plain(*batch)),
                )
            told += [(step, str(each.message)) for each in caught if "skipped" in str(each.message)]
    return monitor.verdict, told


@pytest.mark.parametrize("fails", [[5], range(1, 30)], ids=["once", "always"])
@pytest.mark.parametrize("loss_fn", [Log, Root])
def test_the_first_failing_step_names_the_operation_and_the_line(loss_fn, fails, mode):
    verdict, told = trained(loss_fn(), fails)
    line = f"{__file__}:{loss_fn.construct.__code__.co_firstlineno + 1}"
    step, text = told[0]
    assert step == fails[0]
    assert f"{loss_fn.__name__.replace('Root', 'sqrt').lower()} at {line}" in text
    assert verdict.kind == {Log: "loss", Root: "nan"}[loss_fn]
    assert line in verdict.text
