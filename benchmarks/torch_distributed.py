"""The time of a decision of two processes: gradscaler against FSDP's ShardedGradScaler.

    python benchmarks/torch_distributed.py

Two processes, joined by gloo over the loopback, make the calls of a training loop together: scale,
``unscale_``, step and update. The optimizer's step does nothing, so all the time is the scaler's.
The processes wait for each other before each call, and the times of the first one are reported.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import eager
import paired
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.multiprocessing.spawn import spawn
from torch_scaler import IdleOptimizer

from gradscaler.torch import GradScaler

PROCESSES = 2
CALLS = 20  # in a measurement


def flattened(layers: int) -> list[torch.nn.Parameter]:
    """Shards of layers, each of which FSDP1 makes one flat parameter."""
    cpu = torch.device("cpu")
    modules = [
        FullyShardedDataParallel(torch.nn.Linear(256, 256), device_id=cpu) for _ in range(layers)
    ]
    return [parameter for module in modules for parameter in module.parameters()]


def plain(count: int) -> list[torch.nn.Parameter]:
    """Parameters of one process alone."""
    return [torch.nn.Parameter(torch.zeros(64, 64)) for _ in range(count)]


WORKLOADS: dict[str, Callable[[], list[torch.nn.Parameter]]] = {
    "4 flat parameters of FSDP1": partial(flattened, 4),
    "20 of 64x64": partial(plain, 20),
    "100 of 64x64": partial(plain, 100),
}


def compare(
    workload: str, make: Callable[[], list[torch.nn.Parameter]], repetitions: int
) -> paired.Comparison:
    """Time both scalers by turns on the same gradients, in step with the other process."""
    torch.manual_seed(0)
    parameters = make()
    gradients = [torch.randn_like(parameter).mul_(1e-3) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = IdleOptimizer(parameters)
    loss = torch.ones(())

    def iteration(scaler: torch.amp.GradScaler) -> None:
        scaler.scale(loss)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    def prepare() -> None:
        torch._foreach_mul_(gradients, eager.SCALE)
        dist.barrier()

    ours = GradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER, group=dist.group.WORLD)
    native = ShardedGradScaler("cpu", eager.SCALE, growth_interval=eager.NEVER)
    norms = torch._foreach_norm(gradients)
    seconds = paired.interleave(
        {"ours": partial(iteration, ours), "native": partial(iteration, native)},
        prepare,
        repetitions,
        CALLS,
    )
    if not all(map(torch.equal, norms, torch._foreach_norm(gradients))):
        raise RuntimeError(f"{workload}: the gradients were not unscaled to what they were")
    return paired.Comparison(f"{PROCESSES} processes, {workload}", **seconds)


def measure(rank: int, store: str, arguments: argparse.Namespace) -> None:
    """Be one of the processes; the first reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    comparisons = [
        compare(workload, make, arguments.repetitions) for workload, make in WORKLOADS.items()
    ]
    if rank == 0:
        setting = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        paired.report(arguments, setting, comparisons)
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    arguments = paired.parse(
        argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    )
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        spawn(measure, (store, arguments), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
