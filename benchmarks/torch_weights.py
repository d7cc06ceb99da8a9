"""Time and memory of training steps with weights in 16 bits, beside float32 ones under autocast.

    python benchmarks/torch_weights.py

Each way trains the same network in bfloat16 by AdamW: forward, backward and step. "Native" is
float32 weights under autocast. "Ours" is weights in bfloat16, stepped by AdamW itself or by
MasterWeights. bfloat16 needs no loss scale, so no scaler takes part.

Memory is that of a process of its own for each way, as in ``torch_master_weights.py``: the
resident set after a step, and its highest point in one. It holds weights, gradients, all state, and
what the forward pass keeps for the backward pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import paired
import torch
from torch import nn
from torch_master_weights import STORES, highest_resident, resident, trim

from gradscaler.torch import MasterWeights

AUTOCAST, PLAIN = "float32, autocast", "bfloat16, PyTorch's AdamW"
WAYS = (AUTOCAST, PLAIN, *(f'MasterWeights, "{store}"' for store in STORES))
WIDTH, DEPTH, BATCH = 1024, 16, 32
OPTIONS: dict[str, Any] = {"lr": 1e-4, "foreach": True}


class Training:
    """A network that trains in one of the ``WAYS``."""

    def __init__(self, way: str, depth: int = DEPTH) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.model, self.way = nn.Sequential(*layers), way
        self.optimizer: torch.optim.Optimizer
        if way.startswith("MasterWeights"):
            store, dtype = way.split('"')[1], torch.bfloat16
            self.optimizer = MasterWeights(
                torch.optim.AdamW, self.model, dtype=dtype, store=store, **OPTIONS
            )
        else:
            self.model.to(torch.bfloat16 if way == PLAIN else torch.float32)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **OPTIONS)
        self.inputs = torch.randn(BATCH, WIDTH, dtype=next(self.model.parameters()).dtype)

    def step(self) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.way == AUTOCAST):
            loss = self.model(self.inputs).float().square().mean()
        loss.backward()
        self.optimizer.step()


def compare(way: str, repetitions: int) -> paired.Comparison:
    """Time a training step of one way by turns with one under autocast."""
    steps = {"ours": Training(way).step, "native": Training(AUTOCAST).step}
    return paired.Comparison(way, **paired.interleave(steps, lambda: None, repetitions))


def measure_memory(way: str) -> tuple[float, float]:
    """Bytes per weight after some steps, and at the highest point of the last one."""
    Training(way, depth=1).step()  # threads and code are there
    trim()
    before = resident("VmRSS")
    training = Training(way)
    after, highest = highest_resident(training.step)
    count = sum(weight.numel() for weight in training.model.parameters())
    return (after - before) / count, (highest - before) / count


def memory_of(way: str) -> list[float]:
    """``measure_memory`` in a process of its own."""
    command = [sys.executable, __file__, "--memory", way]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [round(float(each), 1) for each in printed.split()]


def main() -> None:
    """Time every way, and measure the memory of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--memory", metavar="WAY", help="only measure the memory of one way")
    arguments = paired.parse(parser)
    if arguments.memory:
        print(*measure_memory(arguments.memory))
        return
    setting = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    comparisons = [compare(way, arguments.repetitions) for way in WAYS if way != AUTOCAST]
    paired.report(arguments, setting, comparisons)
    memory = {way: memory_of(way) for way in WAYS}
    print(*(f"{way}: {after}, {highest}" for way, (after, highest) in memory.items()), sep="\n")
    if arguments.json:
        keep_memory(arguments.json, memory)


def keep_memory(path: Path, memory: dict[str, list[float]]) -> None:
    """Add the bytes per weight of each way to the results of the times."""
    results = json.loads(path.read_text())
    path.write_text(json.dumps({**results, "bytes": memory}, indent=2) + "\n")


if __name__ == "__main__":
    main()
