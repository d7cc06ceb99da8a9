"""Each package trains with our scaler as it does with torch's, to the bit, over an overflow."""

import pytest
import torch
from torch.nn.functional import mse_loss

from gradscaler.torch import GradScaler, install

SETTINGS = {"init_scale": 2.0**10, "growth_interval": 2}

# The packages warn of each other, of their own code, and of the CPU.
pytestmark = pytest.mark.filterwarnings("ignore")


# Packages that are handed a scaler: each trains a task with it.


def on_lightning(task, scaler, accelerator):
    import lightning
    from lightning.pytorch.plugins import MixedPrecision

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = task.model

        def training_step(self, batch):
            inputs, targets = batch
            return mse_loss(self.model(inputs).float(), targets)

        def configure_optimizers(self):
            return task.optimizer

    lightning.Trainer(
        accelerator="cpu",
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        gradient_clip_val=0.5,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), torch.utils.data.DataLoader(task.samples, batch_size=4))


def on_fabric(task, scaler, accelerator):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    fabric = Fabric(accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    model, optimizer = fabric.setup(task.model, task.optimizer)
    for inputs, targets in task.batches:
        optimizer.zero_grad()
        fabric.backward(mse_loss(model(inputs), targets))
        fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()


def on_accelerate(task, scaler, accelerator):
    accelerator = accelerator(scaler)
    model, optimizer = accelerator.prepare(task.model, task.optimizer)
    for inputs, targets in task.batches:
        optimizer.zero_grad()
        accelerator.backward(mse_loss(model(inputs), targets))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def on_transformers(task, scaler, accelerator):
    import transformers

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return mse_loss(model(inputs["inputs"]).float(), inputs["targets"])

    trainer = Trainer(
        task.model,
        transformers.TrainingArguments(
            per_device_train_batch_size=4,
            num_train_epochs=1,
            max_grad_norm=0.5,
            use_cpu=True,
            fp16=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=[{"inputs": x, "targets": y} for x, y in task.samples],
        optimizers=(task.optimizer, torch.optim.lr_scheduler.ConstantLR(task.optimizer, 1.0)),
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(task.samples)
    trainer.accelerator.scaler = scaler
    trainer.accelerator.native_amp = True  # Accelerate turns autocast off on the CPU
    trainer.train()


def on_ignite(task, scaler, accelerator):
    from ignite.engine import create_supervised_trainer

    create_supervised_trainer(
        task.model, task.optimizer, mse_loss, "cpu", amp_mode="amp", scaler=scaler
    ).run(task.batches)


def on_skorch(task, scaler, accelerator):
    import skorch
    from skorch.hf import AccelerateMixin

    class Net(AccelerateMixin, skorch.NeuralNetRegressor):
        pass

    Net(
        task.model,
        accelerator=accelerator(scaler),
        criterion=torch.nn.MSELoss,
        optimizer=lambda parameters, **_: task.optimizer,
        iterator_train__shuffle=False,
        train_split=None,
        batch_size=4,
        max_epochs=1,
        verbose=0,
    ).fit(*(part.flatten(0, 1) for part in (task.inputs, task.targets)))


HANDED = [on_lightning, on_fabric, on_accelerate, on_transformers, on_ignite, on_skorch]


@pytest.mark.parametrize("train", HANDED)
def test_a_package_that_is_handed_ours_trains_as_with_torch_s(
    train, task, accelerator, made, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    trained, expected = task(), task()
    first = [parameter.clone() for parameter in expected.model.parameters()]
    theirs = torch.amp.GradScaler("cpu", **SETTINGS)
    train(expected, theirs, accelerator)
    assert made == []
    ours = GradScaler(**SETTINGS)
    train(trained, ours, accelerator)
    assert made == [ours]
    assert [step.applied for step in ours.history] == [True] * 2 + [False] + [True] * 5
    assert ours.state_dict() == theirs.state_dict()
    assert_equal(trained.model.parameters(), expected.model.parameters())
    assert not torch.equal(next(trained.model.parameters()), first[0])


def assert_equal(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


# Packages that make their scaler: each trains a task, and returns the scaler.


def with_accelerate(task, monkeypatch):
    from accelerate.utils import DistributedType
    from accelerate.utils.modeling import get_grad_scaler  # what Accelerator calls, but on the CPU

    scaler = get_grad_scaler(DistributedType.NO, **SETTINGS)
    for inputs, targets in task.batches:
        task.optimizer.zero_grad()
        scaler.scale(mse_loss(task.model(inputs), targets)).backward()
        scaler.step(task.optimizer)
        scaler.update()
    return scaler


def with_ignite(task, monkeypatch):
    from ignite.engine import create_supervised_trainer

    trainer = create_supervised_trainer(
        task.model, task.optimizer, mse_loss, "cpu", amp_mode="amp", scaler=True
    )
    trainer.run(task.batches)
    return trainer.state.scaler


def with_monai(task, monkeypatch):
    from monai.engines import SupervisedTrainer

    trainer = SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=1,
        train_data_loader=[{"image": x, "label": y} for x, y in task.batches],
        network=task.model,
        optimizer=task.optimizer,
        loss_function=mse_loss,
        amp=True,
    )
    trainer.run()
    return trainer.scaler


def with_fastai(task, monkeypatch):
    from fastai.basics import SGD, Callback, DataLoaders, Learner
    from fastai.callback.fp16 import MixedPrecision

    class Keep(Callback):
        def after_fit(self):  # before MixedPrecision drops it
            self.kept = self.learn.scaler

    keep = Keep()
    loader = torch.utils.data.DataLoader(task.samples, batch_size=4)
    learner = Learner(
        DataLoaders(loader, loader),
        task.model,
        loss_func=mse_loss,
        opt_func=SGD,
        lr=0.1,
        cbs=[MixedPrecision(**SETTINGS), keep],
    )
    with learner.no_bar(), learner.no_logging():
        learner.fit(1)
    return keep.kept


def with_mmengine(task, monkeypatch):
    from mmengine.optim import AmpOptimWrapper
    from mmengine.optim.optimizer import amp_optimizer_wrapper

    monkeypatch.setattr(amp_optimizer_wrapper, "is_cuda_available", lambda: True)
    wrapper = AmpOptimWrapper(
        loss_scale=SETTINGS, optimizer=task.optimizer, clip_grad={"max_norm": 0.5}
    )
    for inputs, targets in task.batches:
        wrapper.update_params(mse_loss(task.model(inputs), targets))
    return wrapper.loss_scaler


MADE = [with_accelerate, with_ignite, with_monai, with_fastai, with_mmengine]


@pytest.mark.usefixtures("cuda_scalers_on_the_cpu")
@pytest.mark.parametrize("train", MADE)
def test_a_package_that_makes_its_scaler_makes_ours_while_it_is_installed(
    train, task, made, monkeypatch
):
    trained, expected = task(), task()
    theirs = train(expected, monkeypatch)
    assert made == []
    with install():
        ours = train(trained, monkeypatch)
    assert made == [ours]
    assert [step.applied for step in ours.history] == [True] * 2 + [False] + [True] * 5
    assert ours.state_dict() == theirs.state_dict()
    assert_equal(trained.model.parameters(), expected.model.parameters())


# fmt: off
OPTIMIZERS = [
    "AdaBelief", "Adan", "AdEMAMix", "AdamP", "CAME", "DiffGrad", "FTRL", "Fromage", "Lamb", "LARS",
    "Lion", "MADGRAD", "NovoGrad", "PNM", "QHAdam", "RAdam", "SGDP", "Shampoo", "SophiaH",
    "StableAdamW", "Tiger", "Yogi",
]
# fmt: on


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_pytorch_optimizer_take_the_same_steps(name, task):
    import pytorch_optimizer

    weights = []
    for make in (torch.amp.GradScaler, GradScaler):
        it = task(getattr(pytorch_optimizer, name), lr=1e-2)
        scaler = make("cpu", **SETTINGS)
        for inputs, targets in it.batches:
            it.optimizer.zero_grad()
            scaler.scale(mse_loss(it.model(inputs), targets)).backward(
                create_graph=name == "SophiaH"
            )
            scaler.step(it.optimizer)
            scaler.update()
        weights.append([parameter.detach().clone() for parameter in it.model.parameters()])
    assert sum(not step.applied for step in scaler.history) == 1
    assert_equal(*weights)
