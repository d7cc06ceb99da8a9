"""A training in bfloat16 whose loss becomes NaN. It knows nothing of gradscaler.

    python examples/torch_nan.py
    python -m gradscaler run examples/torch_nan.py

It learns to place points of one class close together. docs/run.md shows what both commands print.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.functional import relu

POINTS, CLASSES, BATCH = 1500, 4, 64


def main() -> None:
    """Train until a point meets itself, and on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps

    torch.manual_seed(1)
    classes = torch.randint(CLASSES, (POINTS,))
    points = torch.randn(CLASSES, 8)[classes] + torch.randn(POINTS, 8)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for step in range(1, steps + 1):
        one, other = torch.randint(POINTS, (2, BATCH))
        with torch.autocast("cpu", torch.bfloat16):
            difference = model(points[one]) - model(points[other])
        distance = difference.float().square().sum(1).sqrt()  # 0 if both are the same point
        is_alike = classes[one] == classes[other]
        loss = torch.where(is_alike, distance, relu(2 - distance)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
