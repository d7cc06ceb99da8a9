"""One small training in each trainer's own way; its loss is NaN in a step by the line marked below.

Before that step it prints a digest of weights and random numbers.

python trainers.py 3
"""

import sys
import warnings

import torch
from torch import nn
from torch.nn.functional import mse_loss


class Network(nn.Module):
    failing = 3  # a step, from 1

    def __init__(self):
        super().__init__()
        self.hidden, self.output, self.calls = nn.Linear(3, 8), nn.Linear(8, 1), 0

    def forward(self, inputs):
        self.calls += 1
        if fails := self.calls == self.failing:
            states = [*self.state_dict().values(), torch.get_rng_state()]
            print("digest", hash(tuple(n for state in states for n in state.flatten().tolist())))
        hidden = self.hidden(inputs).square() + (-99 if fails else 1)
        return self.output(hidden.sqrt())  # fails


def samples():
    random = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(24, size, generator=random) for size in (3, 1))
    return torch.utils.data.TensorDataset(inputs, targets)


def with_lightning(model, optimizer, batches):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch):
            return mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return optimizer

    lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), batches)


def with_accelerate(model, optimizer, batches):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # transformers has set it
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for inputs, targets in batches:
        optimizer.zero_grad()
        accelerator.backward(mse_loss(model(inputs), targets))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def with_transformers(model, optimizer, batches):
    import transformers

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return mse_loss(model(inputs["inputs"]), inputs["targets"])

    Trainer(
        model,
        transformers.TrainingArguments(
            per_device_train_batch_size=4,
            num_train_epochs=1,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=[{"inputs": x, "targets": y} for x, y in batches.dataset],
    ).train()


def with_fastai(model, optimizer, batches):
    from fastai.callback.core import Callback  # noqa: F401 # the package must be whole
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner

    data = DataLoaders(DataLoader(list(batches.dataset), bs=4), DataLoader([], bs=4))
    Learner(data, model, loss_func=mse_loss).fit(1, lr=0.01)


def with_ignite(model, optimizer, batches):
    from ignite.engine import create_supervised_trainer

    create_supervised_trainer(model, optimizer, mse_loss).run(batches)


TRAINERS = [with_transformers, with_lightning, with_accelerate, with_fastai, with_ignite]

if __name__ == "__main__":
    Network.failing = int(sys.argv[1])
    warnings.simplefilter("ignore")  # the packages warn of each other
    for train in TRAINERS:
        torch.manual_seed(0)
        network = Network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        train(network, optimizer, torch.utils.data.DataLoader(samples(), batch_size=4))
