"""Lightning in fp16: the precision plugin takes the scaler.

python examples/lightning_digits.py

The network is that of torch_digits.py: with scaling=False it learns nothing, because most gradients
are too small for fp16.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from gradscaler.torch import GradScaler


class Digits(lightning.LightningModule):
    """Sigmoid layers under a mean of squares, whose gradients are small."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(64, 64), nn.Sigmoid()]
        self.network = nn.Sequential(*layers, nn.Linear(64, 10))

    def training_step(self, batch: Any) -> torch.Tensor:
        """The loss of one batch, in float32."""
        images, labels = batch
        probabilities = self.network(images).float().softmax(1)
        return nn.functional.mse_loss(probabilities, nn.functional.one_hot(labels, 10).float())

    def validation_step(self, batch: Any) -> None:
        """Log the share of images that the network gets right."""
        images, labels = batch
        right = (self.network(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Lightning steps it through the scaler."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(epochs: int = 60, scaling: bool = True) -> float:
    """Train, and return the accuracy on images that the network was not trained on."""
    lightning.seed_everything(0, verbose=False)
    pixels, digits = load_digits(return_X_y=True)
    images = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits))
    training, others = random_split(images, [1500, 297])

    device = "cuda" if torch.cuda.is_available() else "cpu"
    scaler = GradScaler(growth_interval=20, enabled=scaling)
    trainer = lightning.Trainer(
        accelerator=device,
        devices=1,
        plugins=[MixedPrecision("16-mixed", device, scaler)],
        gradient_clip_val=1.0,
        max_epochs=epochs,
        check_val_every_n_epoch=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Digits(),
        DataLoader(training, batch_size=500, shuffle=True),
        DataLoader(others, batch_size=len(others)),
    )
    accuracy = float(trainer.callback_metrics["accuracy"])
    skipped = sum(not step.applied for step in scaler.history)
    print(f"accuracy {accuracy:.1%}, {skipped} steps skipped, scale {scaler.get_scale():.0f}")
    return accuracy


if __name__ == "__main__":
    main()
