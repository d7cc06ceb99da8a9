"""Models that each rank holds as a whole: DDP, ZeRO, and optimizers in the backward pass."""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from gradscaler.torch import GradScaler

INF = float("inf")
INTERVAL = 2
SETTINGS = {"init_scale": 1024.0, "growth_interval": INTERVAL}
MAX_NORM = 20.0


class Model(torch.nn.Module):
    """Linear in its parameters, so that integers give gradients without rounding."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 3)
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.first(x).sum(1) + (self.last(x) * x[:, :2]).sum(1)


def batch(step, world):
    """Two rows for each rank."""
    numbers = torch.Generator().manual_seed(step)
    return torch.randint(-3, 4, (2 * world, 4), generator=numbers).float()


def own_rows(step):
    return batch(step, dist.get_world_size()).chunk(dist.get_world_size())[dist.get_rank()]


def overflows(world):
    """The rank and the parameter (first or last) that overflow in each step, after finite steps."""
    return [(None, 0)] * 3 * INTERVAL + [
        (rank, which) for rank in range(world) for which in (0, -1)
    ]


def trained(engine, when, fused, clip, reverse):
    """The result of each step on this rank; an Inf comes before or after gradients are reduced."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    parameters = list(model.parameters())
    order = parameters[::-1] if reverse else parameters
    kind = torch.optim.AdamW
    if engine == "ZeRO":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

        kind = partial(ZeroRedundancyOptimizer, optimizer_class=kind)
    optimizer = kind(order, lr=0.125, fused=fused)
    group = dist.group.WORLD if when == "after" else None
    scaler = GradScaler(**SETTINGS, group=group)
    steps = []
    for step, (bad, which) in enumerate(overflows(dist.get_world_size())):
        optimizer.zero_grad()
        hooks = []
        if (bad, when) == (dist.get_rank(), "before"):
            hooks = [order[which].register_hook(lambda grad: torch.full_like(grad, INF))]
        scaler.scale(model(own_rows(step)).mean()).backward()
        if (bad, when) == (dist.get_rank(), "after"):
            order[which].grad.view(-1)[which] = INF
        for hook in hooks:
            hook.remove()
        norm = 0.0
        with CommDebugMode() as communication:
            if clip:
                norm = scaler.clip_grad_norm_(optimizer, MAX_NORM).item()
            elif step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        counts = {str(call): n for call, n in communication.get_comm_counts().items()}
        reason, state = scaler.last_step(optimizer).reason, scaler.state_dict()
        steps.append((reason, state, counts.get("c10d.allreduce_", 0), norm, flat(parameters)))
    return steps


def flat(parameters):
    return torch.cat([parameter.detach().flatten() for parameter in parameters]).tolist()


@cache
def one_process(world, clip):
    """The results of torch's own scaler on the whole batch, without counts."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    steps = []
    for step, (bad, _) in enumerate(overflows(world)):
        optimizer.zero_grad()
        scaler.scale(model(batch(step, world)).mean()).backward()
        if bad is not None:
            model.first.weight.grad[0] = INF
        scaler.unscale_(optimizer)
        norm = 0.0
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
        scaler.step(optimizer)
        scaler.update()
        reason = "finite" if bad is None else "overflow"
        steps.append((reason, scaler.state_dict(), norm, flat(model.parameters())))
    return steps


@pytest.mark.parametrize(
    ("fused", "clip", "reverse"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("engine", ["DDP", "ZeRO"])
@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_does_what_one_process_does(ranks, world, engine, when, fused, clip, reverse):
    answers = ranks(world).run(trained, engine, when, fused, clip, reverse)
    # A norm is rounded in the order of the parameters, and the fused kernel's values differently.
    rounds = clip or fused
    near = partial(pytest.approx, rel=1e-5, abs=1e-6) if rounds else lambda values: values
    for i, (reason, state, norm, values) in enumerate(one_process(world, clip)):
        bad = overflows(world)[i][0]
        for rank, steps in enumerate(answers):
            # DDP spreads overflows from before its reduction; a group is for later ones.
            assert steps[i][:3] == (reason, state, 0 if when == "before" else 1)
            if when == "before" or bad in (None, rank):
                assert steps[i][3] == near(norm)
            assert steps[i][4] == near(values)
            assert steps[i][4] == answers[0][i][4]


def with_a_parameter_of_its_own(bad):
    """DDP does not reduce ``own``, and on one rank it overflows."""
    torch.manual_seed(0)
    model = Model()
    model.own = torch.nn.Parameter(torch.tensor(1.0 + dist.get_rank()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own"])
    replicated = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replicated.parameters(), lr=0.125)
    scaler = GradScaler(**SETTINGS, group=dist.group.WORLD)
    results = []
    for step in range(3 * INTERVAL):
        optimizer.zero_grad()
        scaler.scale(replicated(own_rows(step)).mean() + model.own).backward()
        if step == 1 and dist.get_rank() == bad:
            model.own.grad.fill_(INF)
        scaler.step(optimizer)
        scaler.update()
        shared = flat([*model.first.parameters(), *model.last.parameters()])
        results.append((scaler.last_step(optimizer).reason, scaler.state_dict(), shared))
    return results, model.own.item()


@pytest.mark.parametrize("bad", [0, 1])
def test_a_parameter_of_one_rank_alone_skips_on_all(ranks, bad):
    (first, own), (second, other) = ranks(2).run(with_a_parameter_of_its_own, bad)
    assert first == second
    assert [reason for reason, *_ in first] == ["finite", "overflow"] + ["finite"] * 4
    assert (own, other) == (1.0 - 5 * 0.125, 2.0 - 5 * 0.125)


CALLS = {
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "clip": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0),
    "clip, p=1": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0, 1.0),
}


def in_backward(call, fused):
    """The error, where another optimizer has used some gradients in the backward pass."""
    from torch.distributed.optim import _apply_optimizer_in_backward  # its import warns

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    _apply_optimizer_in_backward(torch.optim.SGD, model.first.parameters(), {"lr": 0.125})
    scaler = GradScaler(**SETTINGS)
    scaler.scale(model(batch(0, 1)).mean()).backward()
    before = flat([*model.parameters(), model.last.weight.grad])
    with pytest.raises(RuntimeError) as raised:
        CALLS[call](scaler, optimizer)
    assert flat([*model.parameters(), model.last.weight.grad]) == before
    return str(raised.value)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_optimizers_that_step_in_the_backward_pass_are_refused(ranks, call, fused):
    (message,) = set(ranks(2).run(in_backward, call, fused))
    assert "leave out _apply_optimizer_in_backward()" in message


@pytest.mark.parametrize("group", [5, "world", -100])
def test_what_is_not_a_process_group_is_refused(group):
    with pytest.raises(TypeError, match="group must be a process group"):
        GradScaler(group=group)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = GradScaler(**SETTINGS)
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(TypeError, match="shards must be a process group"):
        scaler.clip_grad_norm_(optimizer, 1.0, 1.0, shards=group)
    assert parameter.grad.tolist() == [1024.0, 1024.0]
