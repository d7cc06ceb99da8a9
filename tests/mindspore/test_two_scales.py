"""A train step whose optimizer divides by another scale than the step leaves in the gradients."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, amp, nn

import gradscaler.mindspore as ours

DATA = Tensor([[1.0, 2.0], [3.0, 5.0]]), Tensor([[1.0], [-1.0]])
SKIPPING = [
    ours.FixedLossScaleManager(1024.0),
    amp.FixedLossScaleManager(1024),
    ours.DynamicLossScaleManager(1024.0),
]
MANAGERS = [  # each with the scale that it leaves in the gradients
    (ours.FixedLossScaleManager(1024.0, False), 1024.0),
    (amp.FixedLossScaleManager(1024, False), 1024.0),
    *((manager, 1.0) for manager in SKIPPING),
]
BUILDERS = {
    "Model": lambda network, optimizer, **kwargs: (
        ours.Model(network, nn.MSELoss(), optimizer, **kwargs).train_network
    ),
    "build_train_network": lambda network, optimizer, **kwargs: ours.build_train_network(
        network, optimizer, nn.MSELoss(), **kwargs
    ),
}


def trained(build, loss_scale=1.0, **kwargs):
    """How far a step moves the weights, and the warnings."""
    network = nn.Dense(2, 1, Tensor([[1.0, 1.0]]), "zeros")
    optimizer = nn.SGD(network.trainable_params(), 2.0**-10, loss_scale=loss_scale)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = build(network, optimizer, **kwargs)
    step(*DATA)
    return network.weight.asnumpy() - 1.0, caught


@pytest.mark.parametrize("loss_scale", [1.0, 8.0, 1024.0])
@pytest.mark.parametrize(("manager", "left"), MANAGERS)
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_it_says_how_many_times_too_far_the_weights_move(build, manager, left, loss_scale):
    right, _ = trained(BUILDERS["build_train_network"])  # without loss scaling
    moved, caught = trained(build, loss_scale, loss_scale_manager=manager)
    factor = left / loss_scale
    np.testing.assert_allclose(moved, right * factor, rtol=1e-2)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (factor != 1.0)
    for text in texts:
        assert f"SGD divides the gradients by its loss_scale, {loss_scale}" in text
        assert f"{factor:g} times" in text
        assert ("without loss_scale" if left == 1.0 else f"loss_scale={left}") in text
    assert {Path(warning.filename).name for warning in caught} <= {Path(__file__).name}


def test_level_o2_scales_without_being_told_and_warns_too():
    for name, build in BUILDERS.items():
        _, caught = trained(build, 1024.0, **{"amp_level" if name == "Model" else "level": "O2"})
        assert len(caught) == 1


def test_an_optimizer_that_takes_no_loss_scale_is_told_to_skip():
    network = nn.Dense(2, 1)
    optimizer = nn.AdamWeightDecay(network.trainable_params())
    manager = ours.FixedLossScaleManager(1024.0, False)
    with pytest.warns(UserWarning, match=r"1024 times .* or use drop_overflow_update=True"):
        ours.build_train_network(network, optimizer, nn.MSELoss(), loss_scale_manager=manager)


def test_a_train_step_of_ones_own_warns_if_the_optimizer_would_divide_again():
    network = nn.Dense(2, 1)
    optimizer = nn.SGD(network.trainable_params(), loss_scale=1024.0)
    loss = nn.WithLossCell(network, nn.MSELoss())
    with pytest.warns(UserWarning, match="without loss_scale"):
        ours.TrainOneStepWithLossScaleCell(loss, optimizer, Tensor(1024.0))


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_a_loss_that_the_user_scales_is_no_mistake(build):
    for loss_scale in (1.0, 1024.0):
        assert not trained(build, loss_scale, loss_scale_manager=None)[1]
