"""build_train_network, and mindspore.Model training what it returns, on the CPU."""

import inspect
import math
import re

import mindspore
import numpy as np
import pytest
from mindspore import amp, nn
from mindspore.train import Callback, LossMonitor, TimeMonitor

import gradscaler.mindspore as ours

INF = float("inf")
LEVELS = ["O0", "O1", "O2", "O3"]
# What is built does not depend on the mode, in which a compilation takes seconds.
in_pynative = pytest.mark.parametrize(
    "mode",
    [
        "pynative",
        pytest.param("graph", marks=pytest.mark.rare("test_train_step.py compiles such steps")),
    ],
    indirect=True,
)


@pytest.fixture
def build(layer):
    def build(build_train_network=ours.build_train_network, *args, divisor=1.0, **kwargs):
        network = layer()
        parameters = network.trainable_params()
        optimizer = nn.Momentum(parameters, 0.1, momentum=0.9, loss_scale=divisor)
        return build_train_network(network, optimizer, nn.MSELoss(), *args, **kwargs)

    return build


class Outputs(Callback):
    """The results of each step of ``Model.train``."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_step_end(self, run_context):
        outputs = run_context.original_args().net_outputs
        self.seen.append([output.asnumpy().tolist() for output in outputs])


def test_its_signature_is_mindspores():
    mine, native = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (ours.build_train_network, amp.build_train_network)
    )
    assert mine == native


@pytest.mark.parametrize("manager", [None, ours.DynamicLossScaleManager(2**10, 2, 2)])
def test_it_can_take_the_place_of_mindspores(monkeypatch, build, manager):
    for module in (amp, mindspore.train.amp):  # mindspore.Model calls the latter
        monkeypatch.setattr(module, "build_train_network", ours.build_train_network)

    def by_model(network, optimizer, loss_fn, **kwargs):
        return mindspore.Model(network, loss_fn, optimizer, **kwargs).train_network

    kind = nn.TrainOneStepCell if manager is None else ours.TrainOneStepWithLossScaleCell
    for function in (amp.build_train_network, by_model):
        assert type(build(function, loss_scale_manager=manager)) is kind


@pytest.mark.parametrize(
    "manager",
    [
        ours.DynamicLossScaleManager(2**10, 2, 2),
        amp.DynamicLossScaleManager(2**10, 2, 2),
        ours.FixedLossScaleManager(2**10),
    ],
)
@in_pynative
@pytest.mark.parametrize("level", LEVELS)
def test_managers_that_skip_steps_are_taken_at_every_level(
    mode, build, bits, batch, level, manager
):
    with pytest.raises(ValueError, match="CPU"):
        build(amp.build_train_network, level, loss_scale_manager=manager)
    step = build(ours.build_train_network, level, loss_scale_manager=manager)
    assert isinstance(step, ours.TrainOneStepWithLossScaleCell)
    assert step.training
    scales = [step(*batch(0))[2].asnumpy().item()]
    before = bits(step.optimizer)
    loss, overflow, _ = step(*batch(1, INF))
    assert bool(overflow)
    assert not np.isfinite(loss.asnumpy())
    assert bits(step.optimizer) == before
    scales.append(step.scale_sense.asnumpy().item())
    assert scales == ([2**10, 2**10] if "Fixed" in type(manager).__name__ else [2**10, 2**9])


def test_level_o2_scales_the_loss_by_default(mode, build):
    step = build(ours.build_train_network, "O2")
    assert isinstance(step, ours.TrainOneStepWithLossScaleCell)
    assert isinstance(step.loss_scaling_manager, ours.DynamicLossScaleUpdateCell)
    assert step.scale_sense.asnumpy() == 2**24
    step = build(ours.build_train_network, "O2", loss_scale_manager=None)
    assert type(step) is nn.TrainOneStepCell


@in_pynative
@pytest.mark.parametrize("level", LEVELS)
def test_the_network_is_made_as_mindspore_makes_it(mode, build, batch, level):
    """The loss of the first step, and so the casts to float16, are the same."""
    native = build(amp.build_train_network, level, loss_scale_manager=None)
    mine = build(ours.build_train_network, level, loss_scale_manager=ours.FixedLossScaleManager())
    assert mine(*batch(0))[0].asnumpy() == native(*batch(0)).asnumpy()


@in_pynative
@pytest.mark.parametrize(
    "manager", [None, ours.FixedLossScaleManager(8.0, drop_overflow_update=False)]
)
def test_mindspore_builds_what_it_can_on_the_cpu(mode, build, bits, batch, manager):
    mine, native = (
        build(function, loss_scale_manager=manager, divisor=8.0 if manager else 1.0)
        for function in (ours.build_train_network, amp.build_train_network)
    )
    assert type(mine) is type(native) is nn.TrainOneStepCell
    for seed in range(3):
        assert mine(*batch(seed)).asnumpy() == native(*batch(seed)).asnumpy()
    assert bits(mine) == bits(native)


def test_model_trains_with_callbacks_and_a_dataset(mode, build, dataset, capsys):
    manager = ours.DynamicLossScaleManager(2**10, 2, 2)
    model = mindspore.Model(build(loss_scale_manager=manager))
    outputs = Outputs()
    model.train(3, dataset(None, None, None), callbacks=[LossMonitor(), TimeMonitor(), outputs])
    printed = [float(loss) for loss in re.findall(r"loss is ([\d.e-]+)", capsys.readouterr().out)]
    losses, overflows, scales = zip(*outputs.seen, strict=True)
    assert printed == pytest.approx(losses)
    assert losses[-1] < losses[0]
    assert set(overflows) == {False}
    assert scales[-1] == 2**14


@in_pynative
def test_model_takes_the_fixed_manager_that_skips_nothing(mode, layer, dataset):
    """As MindSpore's documentation has it: the optimizer divides by the scale."""
    ends = []
    for manager in (ours.FixedLossScaleManager, amp.FixedLossScaleManager):
        network = layer()
        parameters = network.trainable_params()
        optimizer = nn.Momentum(parameters, learning_rate=0.1, momentum=0.9, loss_scale=1024.0)
        model = mindspore.Model(
            network, nn.MSELoss(), optimizer, loss_scale_manager=manager(1024.0, False)
        )
        model.train(2, dataset(None, None))
        ends.append([p.asnumpy().tobytes() for p in network.get_parameters()])
    assert ends[0] == ends[1]


def test_model_skips_the_steps_that_overflow(mode, build, dataset):
    step = build(loss_scale_manager=ours.DynamicLossScaleManager(2**10, 2, 2))
    outputs = Outputs()
    mindspore.Model(step).train(1, dataset(None, INF, None, math.nan), callbacks=outputs)
    assert [overflow for _, overflow, _ in outputs.seen] == [False, True, False, True]
    assert step.scale_sense.asnumpy() == 2**8
    assert step.optimizer.global_step.asnumpy() == 2
    assert all(np.isfinite(p.asnumpy()).all() for p in step.trainable_params())


def test_a_network_with_its_loss_inside_needs_no_loss_function(mode, line, inputs):
    network = line()
    optimizer = nn.SGD(network.trainable_params())
    manager = ours.DynamicLossScaleManager(8)
    step = ours.build_train_network(network, optimizer, loss_scale_manager=manager)
    assert len(step(inputs(0))) == 3


@pytest.mark.parametrize("boost_level", ["O1", "O2"])
def test_boost_with_steps_to_skip_is_refused_on_the_cpu(build, boost_level):
    with pytest.raises(ValueError, match="boost_level='O0'"):
        build(boost_level=boost_level, loss_scale_manager=ours.DynamicLossScaleManager())


def refused(build, args, kwargs):
    """The errors of ours and of MindSpore's own."""
    errors = []
    for function in (ours.build_train_network, amp.build_train_network):
        with pytest.raises((TypeError, ValueError)) as raised:
            build(function, *args, **kwargs)
        errors.append((type(raised.value), str(raised.value)))
    return errors


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("O4",), {}),
        ((2,), {}),
        ((), {"loss_scale_manager": "dynamic"}),
        ((), {"loss_scale_manager": ours.DynamicLossScaler(8, 2, 2)}),
        ((), {"loss_scale": 8}),
        ((), {"keep_batchnorm_fp32": 1}),
        ((), {"cast_model_type": mindspore.int32}),
    ],
)
def test_what_mindspore_refuses_is_refused_in_its_words(build, args, kwargs):
    mine, expected = refused(build, args, kwargs)
    assert mine == expected
    if "loss_scale_manager" not in kwargs:
        kwargs = {**kwargs, "loss_scale_manager": ours.DynamicLossScaleManager()}
        assert refused(build, args, kwargs)[0] == expected


def test_none_as_the_optimizer_is_refused(layer):
    with pytest.raises(TypeError, match="optimizer"):
        ours.build_train_network(layer(), None, loss_scale_manager=ours.DynamicLossScaleManager())
