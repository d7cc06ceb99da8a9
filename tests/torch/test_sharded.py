"""Sharded gradients, as FSDP's are: each process steps, or skips, as all the others do."""

import subprocess
import sys

import pytest

PROCESS = """
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from gradscaler.torch import GradScaler

rank, store, fused, clip, value = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
mesh = init_device_mesh("cpu", (2,))
sharded = lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])
parameter = torch.nn.Parameter(sharded(torch.zeros(256, 128)))
optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused == "True")
scaler = GradScaler(init_scale=1024.0)
scaler.scale(torch.ones(()))
gradient = torch.full((256, 128), 1024.0)
gradient[-1, 0] = float(value) * 1024.0  # in the shard of the last process alone
parameter.grad = sharded(gradient)
if clip == "True":
    scaler.clip_grad_norm_(optimizer, 1e6)
scaler.step(optimizer)
scaler.update()
print(scaler.get_scale(), bool(parameter.to_local().any()))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("value", [2.0, float("inf")])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_all_processes_step_or_skip(fused, clip, value, tmp_path):
    how = fused, clip, value
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, *map(str, (rank, tmp_path / "store", *how))],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=60)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
    expected = ["512.0", "False"] if value == float("inf") else ["1024.0", "True"]
    assert printed == [expected, expected]
