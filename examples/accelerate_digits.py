"""Accelerate in fp16: set its attribute `scaler` to gradscaler's, before `prepare`.

python examples/accelerate_digits.py

The network is that of torch_digits.py: with scaling=False it learns nothing, because most gradients
are too small for fp16.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from gradscaler.torch import GradScaler


def main(epochs: int = 60, scaling: bool = True) -> float:
    """Train, and return the accuracy on images that the network was not trained on."""
    set_seed(0)
    accelerator = Accelerator(mixed_precision="fp16")
    accelerator.native_amp = True  # on the CPU, Accelerate leaves autocast off
    accelerator.scaler = scaler = GradScaler(growth_interval=20, enabled=scaling)

    pixels, digits = load_digits(return_X_y=True)
    images = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits))
    training, others = random_split(images, [1500, 297])
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(64, 64), nn.Sigmoid()]
    network = nn.Sequential(*layers, nn.Linear(64, 10))
    model, optimizer, batches = accelerator.prepare(
        network,
        torch.optim.AdamW(network.parameters(), lr=0.01),
        DataLoader(training, batch_size=500, shuffle=True),
    )

    skipped = 0
    for _ in range(epochs):
        for inputs, labels in batches:
            optimizer.zero_grad()
            targets = nn.functional.one_hot(labels, 10).float()
            accelerator.backward(nn.functional.mse_loss(model(inputs).softmax(1), targets))
            scaler.clip_grad_norm_(optimizer, 1.0)  # accelerator.clip_grad_norm_ does as well
            optimizer.step()
            skipped += not scaler.last_step(optimizer).applied

    inputs, labels = (part.to(accelerator.device) for part in others[:])
    with torch.no_grad():
        accuracy = float((model(inputs).argmax(1) == labels).float().mean())
    print(f"accuracy {accuracy:.1%}, {skipped} steps skipped, scale {scaler.get_scale():.0f}")
    return accuracy


if __name__ == "__main__":
    main()
