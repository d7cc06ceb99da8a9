"""torch.distributed.checkpoint saves the scaler by some ranks, and loads it by more or fewer."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradscaler import DynamicScale, ScaleMismatchError
from gradscaler.torch import GradScaler

INF = float("inf")
POLICY = DynamicScale(init_scale=1024.0, growth_interval=2, hysteresis=2)
SAVED, END = 4, 9  # steps
OVERFLOWS = (2, 3, 5, 7)
REASONS = ["overflow" if step in OVERFLOWS else "finite" for step in range(END)]


def build():
    """A model, sharded over all ranks, its optimizer, and a scaler."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    return model, optimizer, GradScaler(policy=POLICY)


def train(model, optimizer, scaler, steps):
    """The scaler's outcome of each step, and the last parameters; an Inf comes on one rank."""
    results = []
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in steps:
        rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        scaler.scale(model(rows.chunk(world)[rank]).mean()).backward()
        if step in OVERFLOWS and rank == step % 2:
            model[0].weight.grad.to_local()[0] = INF
        scaler.step(optimizer)
        scaler.update()
        results.append((scaler.last_step(optimizer).reason, scaler.state_dict()))
    values = torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()])
    return results, values.tolist()


def state_of(model, optimizer, scaler, stateful):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "scaler": scaler if stateful else scaler.state_dict(),
    }


def uninterrupted():
    return train(*build(), range(END))


def saved(path, stateful):
    parts = build()
    train(*parts, range(SAVED))
    dcp.save(state_of(*parts, stateful), checkpoint_id=path)
    return parts[2].state_dict()


def resumed(path, stateful):
    parts = model, optimizer, scaler = build()
    state = state_of(*parts, stateful)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    if not stateful:
        scaler.load_state_dict(state["scaler"])
    return scaler.state_dict(), *train(*parts, range(SAVED, END))


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize(("savers", "loaders"), [(2, 3), (4, 2)])
def test_other_numbers_of_ranks_go_on_as_if_uninterrupted(
    ranks, savers, loaders, stateful, tmp_path
):
    (expected, values), *_ = ranks(savers).run(uninterrupted)
    assert [reason for reason, _ in expected] == REASONS
    path = str(tmp_path)
    assert ranks(savers).run(saved, path, stateful) == [expected[SAVED - 1][1]] * savers
    answers = ranks(loaders).run(resumed, path, stateful)
    for state, results, resumed_values in answers:
        assert state == expected[SAVED - 1][1]
        assert results == expected[SAVED:]
        assert resumed_values == answers[0][2]
        assert resumed_values == pytest.approx(values, rel=1e-4, abs=1e-5)  # means of other parts


def saved_at(steps, path):
    parts = build()
    train(*parts, range(steps))
    dcp.save({"scaler": parts[2]}, checkpoint_id=path)
    return parts[2].get_scale()


def resumed_from_different(paths):
    """Each rank loads a checkpoint of its own, as a stale copy on one machine makes it."""
    model, optimizer, scaler = build()
    dcp.load({"scaler": scaler}, checkpoint_id=paths[dist.get_rank()], no_dist=True)
    before = [parameter.to_local().tolist() for parameter in model.parameters()]
    with pytest.raises(ScaleMismatchError) as raised:
        train(model, optimizer, scaler, [0])
    assert [parameter.to_local().tolist() for parameter in model.parameters()] == before
    assert not optimizer.state
    return str(raised.value)


@pytest.mark.parametrize("stale", range(3))
def test_ranks_that_loaded_different_scales_are_told_so(ranks, stale, tmp_path):
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    assert ranks(3).run(saved_at, 2, old) == [2048.0] * 3
    assert ranks(3).run(saved_at, 4, new) == [1024.0] * 3
    paths = [old if rank == stale else new for rank in range(3)]
    (message,) = set(ranks(3).run(resumed_from_different, paths))
    assert "scale is 1024 on one and 2048 on another" in message


def loaded_from_torch_s(path):
    native = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7)
    dcp.save({"scaler": native}, checkpoint_id=path)
    scaler, planner = GradScaler(policy=POLICY), DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"scaler": scaler}, checkpoint_id=path, planner=planner)
    assert scaler.state_dict() == {**native.state_dict(), "_nonfinite_steps": 0}


def test_a_checkpoint_of_torch_s_scaler_lacks_the_count_of_a_hysteresis(ranks, tmp_path):
    ranks(2).run(loaded_from_torch_s, str(tmp_path))
