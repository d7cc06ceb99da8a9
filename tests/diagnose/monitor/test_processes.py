"""The monitor in two processes that train one model with FSDP2, whose gradients are DTensors."""

import math
import multiprocessing
import os
import traceback
import warnings

import pytest

pytest.importorskip("torch")

import torch

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradscaler.diagnose import Monitor, read_run
from gradscaler.torch import GradScaler

RANKS = 2
LONGEST = 60.0  # seconds until a case counts as a deadlock

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forked")


def _rank(case, rank, store, sender, arguments):
    """One rank, in a process of its own: what the case returns, or the traceback."""
    try:
        warnings.simplefilter("error")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
        result = case(rank, *arguments)
        dist.barrier()
        sender.send((result, None))
        dist.destroy_process_group()
    except BaseException:
        sender.send((None, traceback.format_exc()))


@pytest.fixture
def on_both_ranks(tmp_path):
    """Run a case on each rank; the list of what it returns on each."""

    def run(case, *arguments):
        fork = multiprocessing.get_context("fork")
        store = f"file://{tmp_path / 'store'}"
        pipes = [fork.Pipe(duplex=False) for _ in range(RANKS)]
        processes = [
            fork.Process(target=_rank, args=(case, rank, store, sender, arguments), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        try:
            results = []
            for receiver, _ in pipes:
                assert receiver.poll(LONGEST), f"no result after {LONGEST} s: a deadlock"
                result, error = receiver.recv()
                assert error is None, error
                results.append(result)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return results

    return run


class Training:
    """Steps of a small model under FSDP2, with one batch for all ranks."""

    def __init__(self, scale=2.0**10):
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (RANKS,))
        layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        self.model = torch.nn.Sequential(*layers)
        for layer in (layers[0], layers[2], self.model):
            fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = GradScaler(init_scale=scale)
        self.inputs = torch.randn(16, 4)

    def step(self, overflows=False):
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(self.inputs).square().mean()).backward()
        if overflows:  # in this rank's shard alone
            self.model[0].weight.grad.to_local()[0, 0] = math.inf
        self.scaler.step(self.optimizer)
        self.scaler.update()


def local_gradients(training):
    """This rank's shards of the unscaled gradients, by name."""
    named = training.model.named_parameters()
    return {name: p.grad.to_local().double() for name, p in named}


def sampled(rank, monitored, path):
    training = Training()
    if rank not in monitored:
        for _ in range(4):
            training.step()
        return None
    with Monitor(training.scaler, training.model, every=2, path=path.format(rank=rank)):
        for _ in range(4):
            training.step()
    grads = local_gradients(training)
    norm = float(torch.cat([grad.flatten() for grad in grads.values()]).norm())
    return norm, {name: grad.numel() for name, grad in grads.items()}


@pytest.mark.parametrize("monitored", [(0,), (1,), (0, 1)])
def test_a_monitor_samples_its_own_shards_whoever_else_has_one(on_both_ranks, tmp_path, monitored):
    path = str(tmp_path / "run.{rank}.jsonl")
    expected = on_both_ranks(sampled, monitored, path)
    for rank in monitored:
        norm, sizes = expected[rank]
        sample = read_run(path.format(rank=rank)).samples[-1]
        assert sample.norm == pytest.approx(norm, rel=1e-5)
        assert sum(sample.histogram.counts) == sum(sizes.values())
        assert set(sample.parameters) == set(sizes)
