"""An Inf that the memory of a communication hook adds to each gradient."""

import math

import pytest

pytest.importorskip("torch")

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
SAID = "The memory of a communication hook, PowerSGDState.error_dict, holds an Inf or NaN"


@pytest.fixture
def one_process(tmp_path):
    where = {"store": distributed.FileStore(str(tmp_path / "store"), 1), "rank": 0}
    distributed.init_process_group("gloo", world_size=1, **where)
    yield
    distributed.destroy_process_group()


def verdict_on(clears, is_scaled):
    """The verdict on steps, the 20th of which has an Inf."""
    model = DistributedDataParallel(nn.Linear(64, 64))
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=8.0) if is_scaled else None
    with Monitor(scaler, model, tell=[].append) as monitor:
        for step in range(1, 61):
            x = torch.randn(16, 64)
            x[0, 0] = 1e30 if step == 20 else x[0, 0]
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
            is_finite = all(math.isfinite(float(p.grad.sum())) for p in model.parameters())
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            elif is_finite:
                optimizer.step()
            if clears and not is_finite:
                for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                    memory.clear()
    return str(monitor.verdict)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_memory_of_powersgd_that_keeps_an_inf_is_named(is_scaled):
    assert SAID in verdict_on(clears=False, is_scaled=is_scaled)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("is_scaled", [False, True])
def test_its_advice_helps(is_scaled):
    verdict = verdict_on(clears=True, is_scaled=is_scaled)
    assert SAID not in verdict
    assert "no step was taken" not in verdict
    assert "the last" not in verdict
