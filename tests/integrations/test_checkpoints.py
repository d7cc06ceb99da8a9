"""Packages save the scaler with the training, and go on from where it was."""

import pytest
import torch
from torch.nn.functional import mse_loss

from gradscaler.torch import GradScaler

# The packages warn of each other, of their own code, and of the CPU.
pytestmark = pytest.mark.filterwarnings("ignore")


def scaler_of(scale):
    return GradScaler(init_scale=scale, growth_interval=7)


def test_lightning_s_checkpoint_holds_it(task, tmp_path):
    import lightning
    from lightning.pytorch.plugins import MixedPrecision

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = task().model

        def training_step(self, batch):
            return mse_loss(self.model(batch[0]).float(), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trained(scaler, epochs, **given):
        trainer = lightning.Trainer(
            accelerator="cpu",
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(task().samples, 4), **given)
        return trainer

    whole, half, resumed = scaler_of(1024.0), scaler_of(1024.0), scaler_of(8.0)
    trained(whole, 2)
    trained(half, 1).save_checkpoint(tmp_path / "half.ckpt")
    trained(resumed, 2, ckpt_path=tmp_path / "half.ckpt")
    assert len(resumed.history) == 8
    assert resumed.state_dict() == whole.state_dict()


def test_accelerate_s_saved_state_holds_it(task, accelerator, tmp_path):
    def trained(scaler, start=None, end=None):
        it = task()
        trainer = accelerator(scaler)
        model, optimizer = trainer.prepare(it.model, it.optimizer)
        if start is not None:
            trainer.load_state(tmp_path)
        for inputs, targets in it.batches[start:end]:
            optimizer.zero_grad()
            trainer.backward(mse_loss(model(inputs), targets))
            optimizer.step()
        return trainer, list(model.parameters())

    whole, half, resumed = scaler_of(1024.0), scaler_of(1024.0), scaler_of(8.0)
    _, expected = trained(whole)
    trained(half, end=5)[0].save_state(tmp_path)
    _, weights = trained(resumed, start=5)
    assert resumed.state_dict() == whole.state_dict() != half.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_the_trainer_of_transformers_saves_and_loads_it(tmp_path, accelerator):
    import transformers

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, inputs):
            return {"loss": (self.weight * inputs).sum()}

    def trained(scaler, epochs, folder, resume=None):
        model = Model()
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                output_dir=folder,
                num_train_epochs=epochs,
                save_strategy="epoch",
                per_device_train_batch_size=4,
                use_cpu=True,
                fp16=True,
                report_to="none",
                disable_tqdm=True,
                remove_unused_columns=False,
            ),
            train_dataset=[{"inputs": torch.ones(3)}] * 20,
        )
        trainer.accelerator.scaler = scaler
        trainer.train(resume_from_checkpoint=resume)
        return model.weight

    whole, resumed = scaler_of(1024.0), scaler_of(8.0)
    expected = trained(whole, 2, tmp_path / "whole")
    weight = trained(resumed, 2, tmp_path / "again", tmp_path / "whole" / "checkpoint-5")
    assert len(resumed.history) == 5
    assert resumed.state_dict() == whole.state_dict()
    assert resumed.get_scale() == 2048.0  # after seven steps, two of them the resumed run's
    assert torch.equal(weight, expected)
