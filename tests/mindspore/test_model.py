"""gradscaler.mindspore.Model beside mindspore.Model, whose steps on the CPU cannot be skipped."""

import os
import re
import signal

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, amp, nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import (
    BackupAndRestore,
    CheckpointConfig,
    EarlyStopping,
    History,
    LambdaCallback,
    LearningRateScheduler,
    LossMonitor,
    ModelCheckpoint,
    OnRequestExit,
    ReduceLROnPlateau,
    TimeMonitor,
)

import gradscaler.mindspore as ours

INF = float("inf")
SCALE = ("scale_sense", "current_iterator_step", "last_overflow_iterator_step")


@pytest.fixture
def make(layer):
    def make(cls=ours.Model, loss_scale=1.0, **kwargs):
        network = layer()
        parameters = network.trainable_params()
        optimizer = nn.Momentum(parameters, 0.1, momentum=0.9, loss_scale=loss_scale)
        return cls(network, nn.MSELoss(), optimizer, **kwargs)

    return make


def scale_of(model):
    return model.train_network.scale_sense.asnumpy().item()


def test_the_examples_of_mindspores_document_train(mode, layer, dataset, bits):
    """A scale that is a power of two changes no bit of the training."""
    ms = ours
    models = []

    def net_and_loss():
        return nn.WithLossCell(layer(), nn.MSELoss())

    net = net_and_loss()
    loss_scale_manager = ms.FixedLossScaleManager()
    optim = nn.Momentum(params=net.trainable_params(), learning_rate=0.1, momentum=0.9)
    models.append(ms.Model(net, loss_scale_manager=loss_scale_manager, optimizer=optim))

    net = net_and_loss()
    loss_scale = 1024.0
    loss_scale_manager = ms.FixedLossScaleManager(loss_scale, False)
    optim = nn.Momentum(
        params=net.trainable_params(), learning_rate=0.1, momentum=0.9, loss_scale=loss_scale
    )
    models.append(ms.Model(net, loss_scale_manager=loss_scale_manager, optimizer=optim))

    net = net_and_loss()
    loss_scale_manager = ms.DynamicLossScaleManager()
    optim = nn.Momentum(params=net.trainable_params(), learning_rate=0.1, momentum=0.9)
    models.append(ms.Model(net, loss_scale_manager=loss_scale_manager, optimizer=optim))

    net = net_and_loss()
    optim = nn.Momentum(params=net.trainable_params(), learning_rate=0.1, momentum=0.9)
    unscaled = mindspore.Model(net, optimizer=optim)
    before = bits(net)
    for model in (*models, unscaled):
        model.train(2, dataset(None, None))
    assert all(bits(model.predict_network) == bits(net) != before for model in models)
    skips = [isinstance(m.train_network, ours.TrainOneStepWithLossScaleCell) for m in models]
    assert skips == [True, False, True]


def callbacks(folder, events, history):
    """Ten of MindSpore's, and a learning rate that makes the loss rise in the end."""

    def on_step(run_context):
        params = run_context.original_args()
        events.append((params.cur_step_num, params.optimizer.learning_rate.asnumpy().item()))
        if params.cur_step_num == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    return [
        LossMonitor(),
        TimeMonitor(),
        ModelCheckpoint("model", folder, CheckpointConfig(save_checkpoint_steps=2)),
        LearningRateScheduler(lambda rate, step: rate * 1.1),
        ReduceLROnPlateau("eval_loss", patience=1, verbose=True),
        EarlyStopping("eval_loss", patience=2, verbose=True, restore_best_weights=True),
        LambdaCallback(on_train_step_end=on_step),
        OnRequestExit(save_mindir=False, directory=folder),
        BackupAndRestore(folder),
        history,
    ]


def without_scale(parameters):
    return {name: value for name, value in parameters.items() if name not in SCALE}


def without_time(printed):
    """The output of callbacks, with each loss in float32, in which MindSpore prints only some."""
    printed = re.sub(r"(epoch|per step) time.*", "", printed)
    return re.sub(r"(?<=loss is )\S+", lambda loss: str(np.float32(loss[0])), printed)


def contents(folder):
    """The names of the files in a folder, with the parameters of those that are checkpoints."""
    return {
        path.name: path.suffix == ".ckpt"
        and without_scale(
            {
                name: parameter.asnumpy().tobytes()
                for name, parameter in mindspore.load_checkpoint(str(path)).items()
            }
        )
        for path in folder.rglob("*")
    }


@pytest.fixture
def _sigterm_as_before():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("_sigterm_as_before")
def test_it_fits_evaluates_and_predicts_with_callbacks_as_mindspores(
    mode, make, dataset, bits, tmp_path, capsys
):
    manager = ours.DynamicLossScaleManager(2**10, 2, 2)
    mine = make(metrics={"mae", "loss"}, loss_scale_manager=manager)
    native = make(mindspore.Model, metrics={"mae", "loss"})
    data = dataset(None, None, None)
    results = []
    for model, name in ((mine, "mine"), (native, "native")):
        folder, events, history = str(tmp_path / name), [], History()
        model.fit(12, dataset(None, None, None), data, callbacks=callbacks(folder, events, history))
        results.append(
            {
                "printed": without_time(capsys.readouterr().out),
                "events": events,
                "history": history.history,
                "files": contents(tmp_path / name),
                "metrics": model.eval(data),
                "predicted": model.predict(Tensor([[1.0, 2.0, 3.0]])).asnumpy().tolist(),
                "trained": without_scale(bits(model.train_network)),
            }
        )
    assert results[0] == results[1]
    for sign in ("loss is", "reducing learning rate", "early stopping"):
        assert sign in results[0]["printed"]
    assert {"model-4_3.ckpt", "Net_train.ckpt"} < set(results[0]["files"])
    assert 2 < len(results[0]["history"]["mae"]) < 12
    assert manager.get_loss_scale() == scale_of(mine) > 2**10


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
def test_it_trains_at_every_level_as_mindspores_with_a_scale_that_never_skips(
    mode, make, dataset, bits, level
):
    scale = 2.0**7
    manager = ours.DynamicLossScaleManager(scale, 2, 1000)
    mine = make(amp_level=level, metrics={"mae"}, loss_scale_manager=manager)
    native = make(
        mindspore.Model,
        scale,
        amp_level=level,
        metrics={"mae"},
        loss_scale_manager=amp.FixedLossScaleManager(scale, False),
    )
    results = []
    for model in (mine, native):
        # The CPU takes the mode that sinks a dataset into the device, and does not sink it.
        model.train(2, dataset(None, None), dataset_sink_mode=True, sink_size=2)
        predicted = model.predict(Tensor([[1.0, 2.0, 3.0]]))
        end = without_scale(bits(model.train_network))
        metrics = model.eval(dataset(None), dataset_sink_mode=True)
        results.append((end, metrics, str(predicted.dtype), predicted.asnumpy().tolist()))
    assert results[0] == results[1]
    assert isinstance(mine.train_network, ours.TrainOneStepWithLossScaleCell)
    before = bits(mine.train_network.optimizer)
    mine.train(1, dataset(INF))
    assert bits(mine.train_network.optimizer) == before
    assert manager.get_loss_scale() == scale_of(mine) == scale / 2


@pytest.mark.parametrize("module", [ours, amp])
def test_the_manager_follows_the_train_step(mode, make, dataset, tmp_path, module):
    manager = module.DynamicLossScaleManager(2**10, 2, 2)
    model = make(loss_scale_manager=manager)
    step = model.train_network
    seen = []

    def see(_):
        seen.append(manager.get_loss_scale())
        assert seen[-1] == scale_of(model)

    def train(*overflows, **functions):
        seen.clear()
        with_each_step = LambdaCallback(on_train_step_end=see, **functions)
        model.train(1, dataset(*overflows), callbacks=with_each_step)
        assert manager.get_loss_scale() == scale_of(model)
        return seen

    assert train(INF, None, None, None, INF) == [2**9, 2**9, 2**10, 2**10, 2**9]
    saved = str(tmp_path / "step.ckpt")
    mindspore.save_checkpoint(step, saved)
    step.set_sense_scale(Tensor(2.0**20))
    assert train(INF) == [2**19]
    mindspore.load_checkpoint(saved, step)
    assert train(None, None) == [2**9, 2**10]
    step.set_sense_scale(Tensor(0.25))  # below the bound of the manager's rule
    assert train(None) == [0.25]
    step.set_sense_scale(Tensor(2.0**10))
    train(INF, on_train_end=lambda _: step.set_sense_scale(Tensor(8.0)))
    assert manager.get_loss_scale() == 8
    manager.bad_step_max = 2
    with pytest.raises(RuntimeError, match=r"ontinuous overflow"):
        train(INF, INF)
    assert manager.get_loss_scale() == scale_of(model) == 2


def test_level_o2_scales_the_loss_by_default(make, dataset):
    model = make(amp_level="O2")
    assert scale_of(model) == 2**24
    model.train(1, dataset(INF))
    assert scale_of(model) == 2**23
    assert type(make(amp_level="O2", loss_scale_manager=None).train_network) is nn.TrainOneStepCell


def test_what_mindspore_can_build_on_the_cpu_is_its_own(make, line):
    fixed = {"loss_scale_manager": ours.FixedLossScaleManager(8.0, False), "loss_scale": 8.0}
    for kwargs in ({}, fixed):
        assert type(make(**kwargs).train_network) is nn.TrainOneStepCell
    step = ours.build_train_network(line(), nn.SGD(line().trainable_params()))
    assert ours.Model(step).train_network is step


@pytest.mark.parametrize("by_name", [False, True])
def test_batches_may_change_their_size(mode, by_name, layer):
    """``set_inputs`` leaves their length open, by position or by name."""

    def batches():
        for size in (2, 3, 4):
            yield np.ones((size, 3), np.float32), np.zeros((size, 2), np.float32)

    network, loss = layer(), nn.MSELoss()
    data, label = (Tensor(shape=[None, size], dtype=mindspore.float32) for size in (3, 2))
    if by_name:
        network.set_inputs(x=data)
    else:
        network.set_inputs(data)
    loss.set_inputs(label, label)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    manager = ours.DynamicLossScaleManager(8, 2, 1)
    model = ours.Model(network, loss, optimizer, loss_scale_manager=manager)
    native = mindspore.Model(network, loss, optimizer)
    assert model.train_network.get_inputs() == native.train_network.get_inputs() != ()
    model.train(1, GeneratorDataset(batches, ["data", "label"], shuffle=False))
    assert manager.get_loss_scale() == 2**6


@pytest.mark.parametrize(
    "kwargs",
    [
        {"amp_level": "O4"},
        {"amp_level": 2},
        {"loss_scale": 8},
        {"loss_scale_manager": "dynamic"},
        {"loss_scale_manager": ours.DynamicLossScaler(8, 2, 2)},
        {"keep_batchnorm_fp32": 1},
        {"optimizer": None, "loss_scale_manager": ours.DynamicLossScaleManager()},
        {"optimizer": None, "amp_level": "O2"},
        {"optimizer": "SGD", "loss_scale_manager": ours.FixedLossScaleManager(8, False)},
    ],
)
def test_what_mindspore_refuses_is_refused_in_its_words(layer, kwargs):
    errors = []
    for cls in (ours.Model, mindspore.Model):
        network = layer()
        arguments = {"optimizer": nn.SGD(network.trainable_params()), **kwargs}
        with pytest.raises((TypeError, ValueError)) as raised:
            cls(network, nn.MSELoss(), **arguments)
        errors.append((type(raised.value), str(raised.value)))
    assert errors[0] == errors[1]


def test_boost_with_steps_to_skip_is_refused_on_the_cpu(make):
    with pytest.raises(ValueError, match="boost_level='O0'"):
        make(boost_level="O1", loss_scale_manager=ours.DynamicLossScaleManager())
