"""Fully sharded models step, skip and clip on each rank as in one process."""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    sharded_grad_scaler,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.debug import CommDebugMode

from gradscaler import ParameterError
from gradscaler.torch import GradScaler, ShardedGradScaler

INF = float("inf")
INTERVAL = 2
SCALE = 1024.0
MAX_NORM = 40.0
NORM_TYPES = (2.0, 1.0, 3.0, INF)  # one a step, in turn


class Model(torch.nn.Module):
    """Linear in its parameters: batches of small integers give gradients without rounding.

    ``tiny`` has one element and ``first`` five rows, so some ranks hold less of it, or nothing.
    """

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 5)
        self.tiny = torch.nn.Linear(1, 1, bias=False)
        self.last = torch.nn.Linear(4, 4)

    def forward(self, x):
        first = self.first(x) * torch.arange(1.0, 6.0).to(x.dtype)
        return first.sum(1) + self.tiny(x[:, :1]).sum(1) + (self.last(x) * x).sum(1)


def batch(step, world):
    """Two rows for each rank."""
    numbers = torch.Generator().manual_seed(step)
    return torch.randint(-3, 4, (2 * world, 4), generator=numbers).float()


def own_rows(step):
    return batch(step, dist.get_world_size()).chunk(dist.get_world_size())[dist.get_rank()]


def overflows(world):
    """The rank, and the first (0) or last (-1) parameter, that overflow, after finite steps."""
    return [(None, 0)] * 3 * INTERVAL + [(rank, -(rank % 2)) for rank in range(world)]


def overflow(optimizer, which):
    """Put an Inf into the first (0) or the last (-1) gradient that this rank has a part of."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parts = [local(p.grad).view(-1) for p in parameters if p.grad is not None]
    [part for part in parts if part.numel()][which][which] = INF


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# Engines: each shards a model and names the group that its shards lie in.


@cache  # its process groups are for all cases
def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def fsdp1(model, strategy="FULL_SHARD", **options):
    shards, groups = dist.group.WORLD, None
    if strategy == "HYBRID_SHARD":
        shards, replicas = (mesh_of(2, 2).get_group(name) for name in ("shards", "replicas"))
        groups = shards, replicas
    policy = ModuleWrapPolicy({torch.nn.Linear})
    options["device_id"] = torch.device("cpu")
    strategy = ShardingStrategy[strategy]
    return FullyShardedDataParallel(model, groups, strategy, None, policy, **options), shards


def fsdp2(model, hybrid=False, **options):
    mesh = mesh_of(2, 2) if hybrid else mesh_of(dist.get_world_size())
    for layer in model.children():
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options), mesh.get_group("shards")


FSDP1 = {
    "FULL_SHARD": fsdp1,
    "use_orig_params": partial(fsdp1, use_orig_params=True),
    "SHARD_GRAD_OP": partial(fsdp1, strategy="SHARD_GRAD_OP"),
    "HYBRID_SHARD": partial(fsdp1, strategy="HYBRID_SHARD"),
    "HYBRID_SHARD, use_orig_params": partial(fsdp1, strategy="HYBRID_SHARD", use_orig_params=True),
}
FSDP2 = {
    "fully_shard": fsdp2,
    "fully_shard, HYBRID": partial(fsdp2, hybrid=True),
    "fully_shard, offload": partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fully_shard, reduce in float64": partial(
        fsdp2, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64)
    ),
}
ENGINES = FSDP1 | FSDP2
ENGINES_AND_WORLDS = [(name, 4) for name in ENGINES if "," not in name or "HYBRID" in name]
ENGINES_AND_WORLDS += [(name, 2) for name in ENGINES if "HYBRID" not in name]


def prepared(engine, fused=False, reverse=False, **options):
    """A model sharded over all ranks, its optimizer, its parameters, and the group of shards."""
    torch.manual_seed(0)
    model, shards = ENGINES[engine](Model(), **options)
    parameters = list(model.parameters())
    order = parameters[::-1] if reverse else parameters
    return model, torch.optim.AdamW(order, lr=0.125, fused=fused), parameters, shards


def scaler_for(engine):
    """Who decides follows from FSDP2's parameters, but not from FSDP1's."""
    settings = {"init_scale": SCALE, "growth_interval": INTERVAL}
    if engine in FSDP2:
        return GradScaler(**settings)
    if dist.get_world_size() == 2:
        return ShardedGradScaler("cpu", **settings)
    return GradScaler(**settings, group=dist.group.WORLD)


def parts(parameters, tensors):
    """This rank's elements of each tensor, without padding."""
    found = []
    for parameter, tensor in zip(parameters, tensors, strict=True):
        values = [] if tensor is None else local(tensor.detach()).flatten().tolist()
        found.append(values[: len(values) - getattr(parameter, "_shard_numel_padded", 0)])
    return found


def sharded(engine, fused, clip, reverse):
    """The result of each step on this rank."""
    model, optimizer, parameters, shards = prepared(engine, fused, reverse)
    scaler = scaler_for(engine)
    steps = []
    for step, (bad, which) in enumerate(overflows(dist.get_world_size())):
        optimizer.zero_grad()
        scaler.scale(model(own_rows(step)).mean()).backward()
        if bad == dist.get_rank():
            overflow(optimizer, which)
        norm = 0.0
        if clip:
            named = shards if engine in FSDP1 else None
            norm_type = NORM_TYPES[step % 4]
            norm = scaler.clip_grad_norm_(optimizer, MAX_NORM, norm_type, shards=named).item()
        elif step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        reason, state = scaler.last_step(optimizer).reason, scaler.state_dict()
        grads = parts(parameters, [p.grad for p in parameters])
        steps.append((reason, state, norm, grads, parts(parameters, parameters)))
    return steps, dist.get_process_group_ranks(shards)


@cache
def one_process(world, clip):
    """The results of torch's own scaler on the whole batch; a gradient may be left scaled."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=INTERVAL)
    steps = []
    for step, (bad, which) in enumerate(overflows(world)):
        optimizer.zero_grad()
        scaler.scale(model(batch(step, world)).mean()).backward()
        if bad is not None:
            overflow(optimizer, which)
        scaler.unscale_(optimizer)
        norm = 0.0
        if clip:
            norm_type = NORM_TYPES[step % 4]
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type).item()
        scaler.step(optimizer)
        scaler.update()
        reason = "finite" if bad is None else "overflow"
        grads, values = (
            torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist()
            for tensors in ([p.grad for p in model.parameters()], model.parameters())
        )
        steps.append((reason, scaler.state_dict(), norm, grads, values))
    return steps


@pytest.mark.parametrize(
    ("fused", "clip", "reverse"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
)
@pytest.mark.parametrize(("engine", "world"), ENGINES_AND_WORLDS)
def test_each_rank_does_what_one_process_does(ranks, engine, world, fused, clip, reverse):
    answers = ranks(world).run(sharded, engine, fused, clip, reverse)
    # Shards add up a norm in another order, and the fused kernel rounds otherwise than a loop.
    rounds = clip or fused
    near = partial(pytest.approx, rel=1e-5, abs=1e-6) if rounds else lambda values: values
    for i, (reason, state, norm, grads, values) in enumerate(one_process(world, clip)):
        bad = overflows(world)[i][0]
        for steps, members in answers:
            assert steps[i][:2] == (reason, state)
            if bad is None or bad in members:  # or another replica's gradients overflowed
                assert steps[i][2] == near(norm)
            of_shards = [answers[rank][0][i] for rank in members]
            assert joined(step[4] for step in of_shards) == near(values)
            if reason == "finite" and (clip or not fused):  # or they are left scaled
                assert joined(step[3] for step in of_shards) == near(grads)


def joined(parts_of_shards):
    """All elements, in the order of the parameters."""
    return [x for parts in zip(*parts_of_shards, strict=True) for part in parts for x in part]


def by_fsdps_own_class(engine, clip, dtype):
    """The result of each step with our class, and with FSDP's own."""
    results = []
    for theirs in (True, False):
        options = MixedPrecision(dtype, dtype, keep_low_precision_grads=True)
        model, _, parameters, shards = prepared(engine, mixed_precision=options)
        optimizer = torch.optim.SGD(parameters, lr=0.125)  # others take no float16 gradients
        make = sharded_grad_scaler.ShardedGradScaler if theirs else ShardedGradScaler
        scaler = make("cpu", init_scale=SCALE, growth_interval=INTERVAL)
        assert isinstance(scaler, sharded_grad_scaler.ShardedGradScaler)
        steps = []
        for step, (bad, which) in enumerate(overflows(dist.get_world_size())):
            optimizer.zero_grad()
            scaler.scale(model(own_rows(step)).mean()).backward()
            if bad == dist.get_rank():
                overflow(optimizer, which)
            norm = 0.0
            if clip:
                scaler.unscale_(optimizer)
                norm = (
                    model.clip_grad_norm_(MAX_NORM)
                    if theirs
                    else scaler.clip_grad_norm_(optimizer, MAX_NORM, shards=shards)
                ).item()
            scaler.step(optimizer)
            scaler.update()
            steps.append((scaler.state_dict(), norm, parts(parameters, parameters)))
        results.append(steps)
    return results


@pytest.mark.parametrize(("clip", "dtype"), [(False, torch.float16), (True, torch.float32)])
@pytest.mark.parametrize("engine", FSDP1)
def test_it_does_what_fsdps_own_class_does(ranks, engine, clip, dtype):
    for theirs, ours in ranks(4).run(by_fsdps_own_class, engine, clip, dtype):
        assert [step[0] for step in ours] == [step[0] for step in theirs]
        for (_, norm, values), (_, expected, expected_values) in zip(ours, theirs, strict=True):
            near = partial(pytest.approx, rel=1e-5, abs=1e-6) if clip else lambda values: values
            assert norm == near(expected)
            assert joined([values]) == near(joined([expected_values]))


def in_float16(engine):
    """The gradient of one rank's rows is 512, others have 0; float16 ends below 512 * 128."""
    dtypes = {"param_dtype": torch.float16, "reduce_dtype": torch.float16}
    options = (
        {"mp_policy": MixedPrecisionPolicy(**dtypes)}
        if engine in FSDP2
        else {"mixed_precision": MixedPrecision(**dtypes)}
    )
    model, _ = ENGINES[engine](Model(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scaler = scaler_for(engine)
    reasons = []
    for _ in range(3 * INTERVAL):
        optimizer.zero_grad()
        rows = torch.full((2, 4), 16.0 if dist.get_rank() == 1 else 0.0)
        scaler.scale(model(rows).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        reasons.append(scaler.last_step(optimizer).reason)
    return reasons, scaler.state_dict()


@pytest.mark.parametrize("engine", ["FULL_SHARD", "fully_shard"])
def test_all_skip_what_overflows_in_float16_on_one(ranks, engine):
    for reasons, state in ranks(4).run(in_float16, engine):
        assert reasons == ["overflow"] * 4 + ["finite"] * 2  # at 1024, 512, 256, 128; at 64
        assert state["scale"] == 128.0


def of_two_optimizers(engine, fused):
    """All that one optimizer has, some ranks hold nothing of."""
    torch.manual_seed(0)
    model, _ = ENGINES[engine](Model())
    tiny = list(model.tiny.parameters())
    others = [*model.first.parameters(), *model.last.parameters()]
    optimizers = [torch.optim.AdamW(some, lr=0.125, fused=fused) for some in (tiny, others)]
    scaler = scaler_for(engine)
    results = []
    for step in range(3 * INTERVAL):
        model.zero_grad()
        scaler.scale(model(own_rows(step)).mean()).backward()
        with CommDebugMode() as communication:
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        reasons = [scaler.last_step(optimizer).reason for optimizer in optimizers]
        counts = {str(call): n for call, n in communication.get_comm_counts().items()}
        results.append((reasons, counts))
    held = sum(parameter.numel() for parameter in map(local, tiny))
    return results, scaler.state_dict(), held


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "engine", ["use_orig_params", "HYBRID_SHARD, use_orig_params", "fully_shard"]
)
def test_ranks_that_hold_nothing_of_an_optimizer_step_with_the_others(ranks, engine, fused):
    answers = ranks(4).run(of_two_optimizers, engine, fused)
    assert 0 in [held for *_, held in answers]
    for results, state, _ in answers:
        assert results == [(["finite", "finite"], {"c10d.allreduce_": 2})] * 3 * INTERVAL
        assert state["scale"] == SCALE * 8


def with_large_shards(engine, bad):
    """Shards of 2**14 elements, which a fused optimizer's are read in another way."""
    model, _ = ENGINES[engine](torch.nn.Sequential(torch.nn.Linear(128, 256, bias=False)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = scaler_for(engine)
    scaler.scale(model(torch.ones(1, 128)).sum()).backward()
    if dist.get_rank() == bad:
        overflow(optimizer, -1)
    scaler.step(optimizer)
    return scaler.last_step(optimizer).reason


@pytest.mark.parametrize("bad", [None, 0, 1])
@pytest.mark.parametrize("engine", ["FULL_SHARD", "fully_shard"])
def test_large_shards_are_read_for_all(ranks, engine, bad):
    reason = "finite" if bad is None else "overflow"
    assert ranks(2).run(with_large_shards, engine, bad) == [reason] * 2


def counted(engine, clip, unscale):
    model, optimizer, _, shards = prepared(engine)
    scaler = scaler_for(engine)
    scaler.scale(model(own_rows(0)).mean()).backward()
    with CommDebugMode() as communication:
        if unscale:
            scaler.unscale_(optimizer)
        if clip:
            scaler.clip_grad_norm_(
                optimizer, MAX_NORM, clip, shards=shards if engine in FSDP1 else None
            )
        scaler.step(optimizer)
        scaler.update()
    return {str(call): n for call, n in communication.get_comm_counts().items()}


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("clip", [None, 2.0, 3.0])
@pytest.mark.parametrize("engine", ["HYBRID_SHARD", "fully_shard, HYBRID"])
def test_a_step_costs_one_all_reduce_and_a_norm_one_more(ranks, engine, clip, unscale):
    counts = {"c10d.allreduce_": 1 if clip is None else 2}
    assert ranks(4).run(counted, engine, clip, unscale) == [counts] * 4


def refused(engine, call, fused):
    """Nothing tells who decides, or who holds the other shards."""
    model, optimizer, parameters, shards = prepared(engine, fused)
    scaler = GradScaler(init_scale=SCALE)
    if "shards" in call:
        scaler = ShardedGradScaler("cpu", init_scale=SCALE)
    scaler.scale(model(own_rows(0)).mean()).backward()
    before = parts(parameters, parameters), parts(parameters, [p.grad for p in parameters])
    calls = {
        "step": lambda: scaler.step(optimizer),
        "unscale_": lambda: scaler.unscale_(optimizer),
        "clip": lambda: scaler.clip_grad_norm_(optimizer, MAX_NORM, shards=shards),
        "shards": lambda: scaler.clip_grad_norm_(optimizer, MAX_NORM),
        "shards, 1": lambda: scaler.clip_grad_norm_(optimizer, MAX_NORM, 1.0),
    }
    with pytest.raises(ParameterError) as raised:
        calls[call]()
    after = parts(parameters, parameters), parts(parameters, [p.grad for p in parameters])
    assert before == after
    assert not optimizer.state
    return str(raised.value)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("call", ["step", "unscale_", "clip", "shards", "shards, 1"])
@pytest.mark.parametrize("engine", ["FULL_SHARD", "use_orig_params"])
def test_what_nothing_tells_is_asked_for_before_anything_changes(ranks, engine, call, fused):
    messages = set(ranks(2).run(refused, engine, call, fused))
    (message,) = messages
    assert ("shards=" if "shards" in call else "GradScaler(group=") in message
