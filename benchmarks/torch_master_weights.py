"""Time and memory of a step of 16-bit parameters, beside a step of float32 parameters.

    python benchmarks/torch_master_weights.py

"Ours" is gradscaler's scaler and MasterWeights around AdamW, on float16 parameters and gradients.
"Native" is PyTorch's scaler and the same AdamW on float32 ones, as autocast leaves them: it does
not count the casts of the forward pass, which float16 parameters do without. Both scale, check,
unscale, step and update. Gradients are made outside the measured time.

Memory is that of a process of its own for each kind: the resident set after the steps, and its
highest point, less what it had before there were parameters. It holds parameters, gradients and
all state.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import eager
import paired
import torch

from gradscaler.torch import GradScaler, MasterWeights

STORES = "float32", "remainder16", "stochastic"
NATIVE = "native"
IN_MEMORY = eager.Workload("16 million parameters, 64 tensors", [(512, 512)] * 64, calls=1)
STEPS = 3


class Training:
    """Parameters with gradients, their optimizer and its scaler.

    Args:
        store: of MasterWeights; or "native" for float32 parameters.
        workload: what parameters there are.
        fused: whether AdamW is fused, rather than foreach.
    """

    def __init__(self, store: str, workload: eager.Workload, fused: bool) -> None:
        self.loss = torch.ones(())
        options: dict[str, Any] = {"lr": 1e-4, "fused": fused, "foreach": not fused}
        parameters = [torch.nn.Parameter(torch.rand(shape)) for shape in workload.shapes]
        self.optimizer: torch.optim.Optimizer
        self.scaler: torch.amp.GradScaler
        if store == NATIVE:
            self.optimizer = torch.optim.AdamW(parameters, **options)
            self.scaler = torch.amp.GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER)
        else:
            self.optimizer = MasterWeights(torch.optim.AdamW, parameters, store=store, **options)
            self.scaler = GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER)
        self.parameters = parameters
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        self.make_gradients()

    def make_gradients(self) -> None:
        """Scaled gradients, all of one value: their values decide nothing about time."""
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_zero_(grads)
        torch._foreach_add_(grads, 2.0**-10 * eager.SCALE)

    def step(self) -> None:
        """Do as a training loop does after the backward pass."""
        scaler, optimizer = self.scaler, self.optimizer
        scaler.scale(self.loss)
        scaler.step(optimizer)
        scaler.update()


def compare(
    store: str, fused: bool, workload: eager.Workload, repetitions: int
) -> paired.Comparison:
    """Time a step with a store by turns with one of float32 parameters."""
    torch.manual_seed(0)
    trainings = {
        "ours": Training(store, workload, fused),
        "native": Training(NATIVE, workload, fused),
    }
    seconds = paired.interleave(
        {name: training.step for name, training in trainings.items()},
        prepare={name: training.make_gradients for name, training in trainings.items()},
        repetitions=repetitions,
        calls=workload.calls,
    )
    kind = "fused" if fused else "foreach"
    name = f"{workload.name}, 16 bits by {store}, {kind} AdamW"
    return paired.Comparison(name, **seconds)


def resident(field: str) -> int:
    """Bytes of the process in memory, of /proc: ``VmRSS`` now, ``VmHWM`` at the highest point."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def trim() -> None:
    """Give memory that is free back to the system, so that it is not counted as resident."""
    ctypes.CDLL(None).malloc_trim(0)


def highest_resident(step: Callable[[], object]) -> tuple[int, int]:
    """Bytes of the process after some steps, and at the highest point of one more."""
    for _ in range(STEPS):
        step()
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # the highest point is now
    after = resident("VmRSS")
    step()
    return after, resident("VmHWM")


def measure_memory(store: str, fused: bool) -> tuple[float, float]:
    """Bytes per parameter after some steps, and at the highest point of the last one."""
    small = eager.Workload("small", [(512, 512)] * 2, calls=1)
    Training(store, small, fused).step()  # threads and code are there
    trim()
    before = resident("VmRSS")
    training = Training(store, IN_MEMORY, fused)

    def step() -> None:
        training.make_gradients()
        training.step()

    after, highest = highest_resident(step)
    count = sum(parameter.numel() for parameter in training.parameters)
    return (after - before) / count, (highest - before) / count


def memory_table() -> str:
    """The costs of each kind, each measured in its own process."""
    rows: list[tuple[str, ...]] = [("bytes per parameter", "after a step", "at the highest point")]
    for store in (NATIVE, *STORES):
        for fused in (False, True):
            command = [sys.executable, __file__, "--memory", store, *["--fused"] * fused]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            after, highest = map(float, printed.split())
            kind = "fused" if fused else "foreach"
            what = "float32 parameters" if store == NATIVE else f"16 bits by {store}"
            rows.append((f"{what}, {kind} AdamW", f"{after:.1f}", f"{highest:.1f}"))
    return paired.aligned(rows)


def main() -> None:
    """Time every store with foreach and fused AdamW, and measure the memory of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--memory", metavar="STORE", help="only measure the memory of one store")
    parser.add_argument("--fused", action="store_true", help="with --memory: by fused AdamW")
    arguments = paired.parse(parser)
    if arguments.memory:
        print(*measure_memory(arguments.memory, arguments.fused))
        return
    setting = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    comparisons: list[Callable[[eager.Workload, int], paired.Comparison]] = [
        partial(compare, store, fused) for fused in (False, True) for store in STORES
    ]
    eager.run(arguments, setting, comparisons)
    if Path("/proc/self/clear_refs").exists():  # on Linux alone
        print(memory_table())


if __name__ == "__main__":
    main()
