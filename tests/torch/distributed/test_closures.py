"""step(optimizer, closure) in many processes: all repeat an evaluation, or none does."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradscaler import ScaleMismatchError
from gradscaler.torch import GradScaler, ShardedGradScaler
from tests.support.all_reduces import CountedAllReduces

INF = float("inf")
BATCH = 8
MAX_NORM = 0.4  # below the norms of all batches

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.5),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=4),
    "LBFGS with line search": lambda parameters: torch.optim.LBFGS(
        parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
    ),
}
# LBFGS takes products of whole gradients, and FSDP1 hands it parts of them.
WAYS = dict.fromkeys(("DDP", "group", "FSDP2"), OPTIMIZERS) | {"FSDP1": ["SGD", "fused AdamW"]}
CASES = [(way, make) for way, makes in WAYS.items() for make in makes]
# Where an overflow arises: in the backward pass, before gradients are reduced, or in its result,
# which DDP alone lets differ from process to process.
FAULTY = [
    (way, make, where)
    for way, make in CASES
    for where in ("before", "after")
    if (way, where) not in (("DDP", "after"), ("group", "before"))
]


def network():
    torch.manual_seed(0)
    # LBFGS on DTensors needs dimensions that the processes divide.
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))


def loss_of(model, step, share, shares):
    """The loss on one process' share of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn(BATCH, width, generator=generator) for width in (4, 8))
    part = slice(share * BATCH // shares, (share + 1) * BATCH // shares)
    return (model(inputs[part]) - targets[part]).square().mean()


def in_one_list(tensors):
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([tensor.flatten() for tensor in whole]).tolist()


@cache
def by_one_process(make, steps, shares=2, clip=False):
    """Calls of the closure, its last gradients and the parameters, of each step on whole batches.

    PyTorch's optimizer alone. A loss is summed from shares, so two of them give the bits that two
    processes give.
    """
    model = network()
    optimizer = OPTIMIZERS[make](model.parameters())
    results = {}
    for step in steps:
        calls = 0

        def closure(step=step):
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = sum(loss_of(model, step, share, shares) for share in range(shares)) / shares
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            return loss

        optimizer.step(closure)
        parameters = list(model.parameters())
        gradients = in_one_list([parameter.grad for parameter in parameters])
        results[step] = calls, gradients, in_one_list(parameters)
    return results


class Trainer:
    """One process' part of a training."""

    def __init__(self, way, make, clip=False, backwards=False, **options):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model, self.clip, self.is_fsdp1 = network(), clip, way == "FSDP1"
        make_scaler, options = GradScaler, {"init_scale": 1024.0, **options}
        if way == "FSDP2":
            fully_shard(self.model)
        elif self.is_fsdp1:
            cpu = torch.device("cpu")
            self.model = FullyShardedDataParallel(self.model, device_id=cpu, use_orig_params=True)
            make_scaler, options = ShardedGradScaler, {"device": "cpu", **options}
        else:
            self.model = DistributedDataParallel(self.model)
            if way == "group":
                options["group"] = dist.group.WORLD
        parameters = list(self.model.parameters())
        self.optimizer = OPTIMIZERS[make](parameters[::-1] if backwards else parameters)
        self.scaler = make_scaler(**options)
        self.calls = 0

    def step(self, step, faults=(), bad=None, where="after", raises=(), **options):
        """The result of a step; the calls of the closure in ``faults`` overflow on rank ``bad``."""
        self.calls = 0

        def closure():
            self.calls += 1
            overflows = self.calls in faults and self.rank == bad
            self.optimizer.zero_grad()
            loss = loss_of(self.model, step, self.rank, self.world)
            scaled = self.scaler.scale(loss)
            (scaled * INF if overflows and where == "before" else scaled).backward()
            if overflows and where == "after":
                self.local_gradients()[-(step % 2)].view(-1)[-1] = INF  # of the first, or the last
            if self.calls in raises:
                raise KeyError("the closure's own")
            if self.clip:
                shards = dist.group.WORLD if self.is_fsdp1 else None
                self.scaler.clip_grad_norm_(
                    self.optimizer,
                    MAX_NORM,
                    error_if_nonfinite=self.clip == "strictly",
                    shards=shards,
                )
            return self.mean(loss)

        with CountedAllReduces() as counted:
            self.scaler.step(self.optimizer, closure, **options)
            outcome = self.scaler.last_step(self.optimizer)
            self.scaler.update()
        return {
            "calls": self.calls,
            "reason": outcome.reason,
            "scale": outcome.scale,
            "state": self.scaler.state_dict(),
            "counts": dict(counted.counts),
            "gradients": self.whole(gradients=True) if outcome.applied else None,
            "parameters": self.whole(),
        }

    def mean(self, loss):
        """The loss of the whole batch: a line search decides by it, so all must return the same."""
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss / self.world

    def local_gradients(self):
        """Those with elements; FSDP1 may leave a process no part of a parameter."""
        grads = [parameter.grad for parameter in self.model.parameters()]
        parts = [g.to_local() if isinstance(g, DTensor) else g for g in grads if g is not None]
        return [part for part in parts if part.numel()]

    def whole(self, gradients=False):
        """All parameters, or all gradients, as one process would have them."""
        if not self.is_fsdp1:
            parameters = list(self.model.parameters())
            return in_one_list([p.grad for p in parameters] if gradients else parameters)
        with FullyShardedDataParallel.summon_full_params(
            self.model, writeback=False, with_grads=gradients
        ):
            return self.in_summoned(gradients)

    def in_summoned(self, gradients):
        parameters = list(self.model.module.parameters())
        return in_one_list([p.grad for p in parameters] if gradients else parameters)


def train(way, make, steps, faults, given, options):
    """The result of each step; ``faults`` are the calls that overflow in each step."""
    trainer = Trainer(way, make, **options)
    return {step: trainer.step(step, faults.get(step, ()), **given) for step in steps}


def together(ranks, world, way, make, steps, faults=None, given=None, **options):
    """The result of each step, which all processes agree on."""
    first, *others = ranks(world).run(train, way, make, steps, faults or {}, given or {}, options)
    assert all(other == first for other in others)
    return first


def check_against_one_process(results, way, make, exact=True, **options):
    """Compare gradients and parameters; the steps that one process takes are those applied."""
    steps = tuple(step for step, result in results.items() if result["reason"] == "finite")
    for step, (_, *expected) in by_one_process(make, steps, **options).items():
        actual = [results[step]["gradients"], results[step]["parameters"]]
        # The fused kernel rounds the last elements of a shard in another way than in a whole. A
        # norm of shards may differ in the last bit, which a line search enlarges.
        if exact and (way, make) not in (("FSDP1", "fused AdamW"), ("FSDP2", "fused AdamW")):
            assert actual == expected, step
        else:
            for values, of_one in zip(actual, expected, strict=True):
                assert values == pytest.approx(of_one, rel=1e-4, abs=1e-4), step


def calls_by_one(make, steps, **options):
    return [calls for calls, *_ in by_one_process(make, tuple(steps), **options).values()]


def expected_counts(way, calls, norms=0):
    """Each call reduces its loss; all but DDP alone decide, and sharded gradients have a norm.

    A maximum settles whether the optimizer has moved anything before its first call.
    """
    sums = calls + norms * calls * way.startswith("FSDP")
    return {"SUM": sums} if way == "DDP" else {"SUM": sums + calls, "MAX": 1}


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(("way", "make", "where"), FAULTY)
def test_all_repeat_an_evaluation_that_overflows_in_one(ranks, way, make, where, bad):
    faults = {1: [1], 2: [3 if "LBFGS" in make else 1]}
    results = together(ranks, 2, way, make, range(4), faults, {"bad": bad, "where": where})
    calls = [result["calls"] for result in results.values()]
    assert calls == [n + (i in faults) for i, n in enumerate(calls_by_one(make, range(4)))]
    assert [result["scale"] for result in results.values()] == [1024.0, 512.0, 256.0, 256.0]
    assert [result["reason"] for result in results.values()] == ["finite"] * 4
    check_against_one_process(results, way, make)


@pytest.mark.parametrize(
    ("way", "make", "backwards"),
    [(*case, False) for case in CASES] + [(way, "SGD", True) for way in WAYS],
)
def test_an_evaluation_takes_one_all_reduce_or_none(ranks, way, make, backwards):
    options = {"backwards": backwards, "growth_interval": 2}
    results = together(ranks, 2, way, make, range(6), **options)
    for calls, result in zip(calls_by_one(make, range(6)), results.values(), strict=True):
        assert result["calls"] == calls
        assert result["counts"] == expected_counts(way, calls)
    assert results[5]["state"]["scale"] == 8192.0
    check_against_one_process(results, way, make)


# Clipped without a line search, LBFGS runs away: it makes a last bit a digit of 1e8.
@pytest.mark.parametrize(("way", "make", "where"), [c for c in FAULTY if c[1] != "LBFGS"])
def test_a_closure_clips_by_the_norm_that_one_process_finds(ranks, way, make, where):
    given = {"bad": 0, "where": where}
    results = together(ranks, 2, way, make, range(3), {1: [1]}, given, clip=True)
    calls = calls_by_one(make, range(3), clip=True)
    assert [result["calls"] for result in results.values()] == [calls[0], calls[1] + 1, calls[2]]
    for result in results.values():
        assert result["counts"] == expected_counts(way, result["calls"], norms=1)
    check_against_one_process(results, way, make, exact=False, clip=True)


@pytest.mark.parametrize(
    ("way", "make", "where", "call"),
    [(*case, call) for case in FAULTY for call in (1, 3) if call == 1 or "LBFGS" in case[1]],
)
def test_retries_are_exhausted_in_all(ranks, way, make, where, call):
    given = {"bad": 1, "where": where, "max_retries": 1}
    results = together(ranks, 2, way, make, range(4), {2: [call, call + 1]}, given)
    reasons = [result["reason"] for result in results.values()]
    assert reasons == ["finite", "finite", "retries_exhausted", "finite"]
    assert results[2]["calls"] == call + 1
    assert results[2]["parameters"] == results[1]["parameters"]
    assert [results[step]["scale"] for step in range(3)] == [1024.0, 1024.0, 512.0]
    assert results[3]["scale"] == results[2]["state"]["scale"] < 1024.0
    check_against_one_process(results, way, make)


@pytest.mark.parametrize("make", ["SGD", "LBFGS with line search"])
@pytest.mark.parametrize("way", ["DDP", "group", "FSDP2"])
def test_four_processes_repeat_together(ranks, way, make):
    faults, given = {0: [2], 1: [1]}, {"bad": 3, "where": "before" if way == "DDP" else "after"}
    results = together(ranks, 4, way, make, range(3), faults, given)
    calls = calls_by_one(make, range(3), shares=4)
    repeated = ["LBFGS" in make, True, False]
    assert [result["calls"] for result in results.values()] == [
        n + again for n, again in zip(calls, repeated, strict=True)
    ]
    # Four shares are summed in an order of the collective's own.
    check_against_one_process(results, way, make, exact=False, shares=4)


def interrupted(way, make, how, call):
    """A step that raises in all processes, between steps that do not."""
    trainer = Trainer(way, make, clip="strictly" if how == "norm" else False)
    results = {0: trainer.step(0)}
    before = trainer.scaler.state_dict(), trainer.scaler.last_step(trainer.optimizer)
    if how == "norm":
        with pytest.raises(RuntimeError, match="norm"):
            trainer.step(1, [call], bad=1)
    else:
        with pytest.raises(KeyError, match="the closure's own"):
            trainer.step(1, [call - 1], bad=1, raises=[call])
    assert (trainer.scaler.state_dict(), trainer.scaler.last_step(trainer.optimizer)) == before
    assert trainer.calls == call
    assert trainer.whole() == results[0]["parameters"]
    return {**results, 2: trainer.step(2), 3: trainer.step(3)}


@pytest.mark.parametrize("how", ["by itself", "norm"])
@pytest.mark.parametrize(
    ("way", "make", "call"),
    [
        *[(way, "SGD", 1) for way in ("group", "FSDP1", "FSDP2")],
        *[(way, "LBFGS with line search", 3) for way in ("group", "FSDP2")],
    ],
)
def test_a_closure_that_raises_leaves_all_as_it_was(ranks, way, make, call, how):
    first, second = ranks(2).run(interrupted, way, make, how, call)
    assert first == second
    assert [result["scale"] for result in first.values()] == [1024.0] * 3
    check_against_one_process(first, way, make, exact=how == "by itself", clip=how == "norm")


def own_parameters(bad, fault, max_retries):
    """A parameter of each process alone, which needs no collective but the decision."""
    rank = dist.get_rank()
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler(init_scale=1024.0, group=dist.group.WORLD, max_retries=max_retries)
    results, gradients = [], []
    for step in range(4):
        calls = []

        def closure(step=step, calls=calls):
            calls.append(step)
            optimizer.zero_grad()
            scaler.scale((parameter * 10**rank * (step + 1)).sum()).backward()
            if step == 1 and rank == bad and len(calls) in fault:
                parameter.grad[-1] = INF

        with CountedAllReduces() as counted:
            scaler.step(optimizer, closure)
        outcome = scaler.last_step(optimizer)
        scaler.update()
        results.append((len(calls), outcome.reason, outcome.scale, scaler.state_dict()))
        is_skip = outcome.reason == "retries_exhausted"
        assert counted.counts == {"SUM": len(calls)} | ({} if is_skip else {"MAX": 1})
        gradients.append(parameter.grad.tolist())
    return results, gradients, parameter.tolist()


@pytest.mark.parametrize("bad", range(3))
def test_each_step_has_the_gradient_of_its_own_batch(ranks, bad):
    results, gradients, parameters = zip(
        *ranks(3).run(own_parameters, bad, [1, 2], 16), strict=True
    )
    assert all(result == results[0] for result in results)
    assert [calls for calls, *_ in results[0]] == [1, 3, 1, 1]
    for rank in range(3):
        assert gradients[rank] == [[10.0**rank * step] * 4 for step in (1, 2, 3, 4)]
        assert parameters[rank] == [-(10.0**rank) * 10] * 4


@pytest.mark.parametrize("bad", range(3))
def test_all_leave_out_the_step_that_one_could_not_take(ranks, bad):
    results, _, parameters = zip(*ranks(3).run(own_parameters, bad, [1, 2], 1), strict=True)
    assert all(result == results[0] for result in results)
    assert [calls for calls, *_ in results[0]] == [1, 2, 1, 1]
    assert [reason for _, reason, *_ in results[0]][1] == "retries_exhausted"
    assert [values[0] for values in parameters] == [-(10.0**rank) * 8 for rank in range(3)]


class SharpnessAware(torch.optim.SGD):
    """Moves the parameters that have gradients, and then evaluates again."""

    def step(self, closure):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad)
        closure()
        super().step()


def sharpness_aware():
    """Only the last rank has gradients."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = SharpnessAware([parameter], lr=1.0)
    scaler = GradScaler(init_scale=1024.0, group=dist.group.WORLD)
    calls = []

    def closure():
        calls.append(None)
        optimizer.zero_grad()
        loss = scaler.scale(parameter.square().sum())
        if dist.get_rank() == dist.get_world_size() - 1:
            loss.backward()

    scaler.step(optimizer, closure)
    scaler.update()
    return len(calls), scaler.state_dict(), parameter.tolist()


def test_all_evaluate_again_where_one_has_moved(ranks):
    (calls, state, kept), (*last, moved) = ranks(2).run(sharpness_aware)
    assert [calls, state] == last
    assert calls == 2
    assert kept == [1.0] * 4
    assert moved == [-3.0] * 4  # 1 + 2, and then the gradient there, 6, is taken off


class Unequal(torch.optim.SGD):
    """Evaluates once more on each next rank."""

    def step(self, closure):
        for _ in range(dist.get_rank() + 1):
            closure()
        super().step()


def unequal():
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = Unequal([parameter], lr=1.0)
    scaler = GradScaler(group=dist.group.WORLD)

    def closure():
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()

    def twice():
        for _ in range(2):
            scaler.step(optimizer, closure)
            scaler.update()

    with pytest.raises(ScaleMismatchError, match="finite_steps is 0 on one and 1 on another"):
        twice()
    return True


def test_processes_that_evaluate_unequally_often_are_told_so(ranks):
    assert ranks(2).run(unequal) == [True, True]
