"""The monitor in two processes that train one model with FSDP2, whose gradients are DTensors."""

import math
import os
import warnings
from types import MethodType
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from gradscaler import FixedScale
from gradscaler.diagnose import FindingWarning, Monitor, StuckError, inspect, read_run
from gradscaler.torch import GradScaler

RANKS = 2

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forked")


def as_in_a_test(case, arguments):
    """Run a case in a rank, for which pytest and the fixtures of this folder set nothing."""
    with (
        warnings.catch_warnings(),
        mock.patch("gradscaler.diagnose._graph.budget.clock", return_value=0.0),
        mock.patch("gradscaler.diagnose._monitor.step_log._LONGEST_UNWRITTEN", math.inf),
    ):
        warnings.simplefilter("error")
        return globals()[case](dist.get_rank(), *arguments)


@pytest.fixture
def on_both_ranks(ranks):
    """Run a case on each rank, and return the list of results."""
    return lambda case, *arguments: ranks(RANKS).run(as_in_a_test, case.__name__, arguments)


def fsdp2():
    """A small model. Its last layer's parameters have length 1: rank 1 has no part of them."""
    mesh = init_device_mesh("cpu", (RANKS,))
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*layers)
    for layer in (layers[0], layers[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def tensor_parallel():
    """A small model whose activations and outputs are DTensors, and so is its loss."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    plan = {
        "0": ColwiseParallel(use_local_output=False),
        "2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }
    return parallelize_module(model, mesh, plan)


MODELS = {"fsdp2": fsdp2, "tensor parallel": tensor_parallel}


class ShardedTraining:
    """Steps of a small model, with one batch for all ranks."""

    def __init__(self, scale=2.0**10, model="fsdp2"):
        torch.manual_seed(0)
        self.model = MODELS[model]()
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
    training = ShardedTraining()
    if rank not in monitored:
        for _ in range(4):
            training.step()
        return None
    with Monitor(training.scaler, training.model, every=4, path=path.format(rank=rank)):
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


def stopped(rank, monitored, path, model):
    """Take steps of which the last ones overflow on rank 1 alone; return each monitor's report."""
    training = ShardedTraining(32.0, model)
    flags = "..!..!!!!!!"
    options = {"every": 2, "stuck_after": 4, "path": path}
    monitor = Monitor(training.scaler, training.model, **options) if rank in monitored else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for flag in flags:
            training.step(flag == "!" and rank == 1)
    if monitor is None:
        return None
    monitor.close()
    verdict = monitor.verdict
    skips = [step.nonfinite for step in monitor.history if step.skipped]
    return verdict.kind, verdict.where, len(caught), skips, training.scaler.get_scale()


@pytest.mark.parametrize("model", MODELS)
def test_the_rank_that_overflows_is_named_from_the_files_of_both(on_both_ranks, tmp_path, model):
    path = str(tmp_path / "run.{rank}.jsonl")
    along, at_fault = on_both_ranks(stopped, (0, 1), path, model)
    assert along == ("elsewhere", None, 1, [()] * 7, 2.0**-2)
    kind, where, num_warnings, skips, scale = at_fault
    assert (kind, where, num_warnings, scale) == ("floor", "0.weight", 1, 2.0**-2)
    assert [[found.num_inf for found in skip] for skip in skips] == [[1]] * 7
    assert {found.shape for skip in skips for found in skip} == {(4, 4)}  # of its own shard
    run = read_run(*(path.format(rank=rank) for rank in range(RANKS)))
    assert run.verdict.text.startswith("rank 1: The gradients overflow in 0.weight")
    assert (run.verdict.kind, run.starts[0].rank, run.starts[0].world_size) == ("floor", 1, 2)
    for own in run.ranks.values():  # at the same steps
        assert [line.step for line in own.verdicts] == [9, 10, 11]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("monitored", [0, 1])
def test_one_rank_alone_can_watch_a_run_to_its_verdict(on_both_ranks, tmp_path, monitored, model):
    results = on_both_ranks(stopped, (monitored,), str(tmp_path / "run.jsonl"), model)
    assert results[1 - monitored] is None
    assert results[monitored][0] == ("elsewhere", "floor")[monitored]


def poisoned(rank):
    training = ShardedTraining(4.0)
    with torch.no_grad():  # in each rank's shard
        training.model[0].weight.to_local()[0] = math.nan
    monitor = Monitor(training.scaler, training.model, stuck_after=4, on_stuck="raise")
    if rank != 0:
        monitor.close()
    warnings.simplefilter("ignore", FindingWarning)  # it is found before the run is stuck
    for _ in range(3):
        training.step()
    try:
        training.step()
    except StuckError:
        return monitor.verdict.kind, monitor.verdict.where
    return None


def test_a_parameter_that_is_nan_is_found_in_a_shard(on_both_ranks):
    assert on_both_ranks(poisoned) == [("parameter", "0.weight"), None]


def overflowing_activations(rank):
    training = ShardedTraining(4.0, "tensor parallel")
    with torch.no_grad():  # the output of tanh is 1
        training.model[0].weight.zero_()
        training.model[0].bias.fill_(100.0)
        training.model[2].weight.fill_(3e38)
    monitor = Monitor(training.scaler, training.model, stuck_after=4, on_stuck="continue")
    if rank != 0:
        monitor.close()
    for _ in range(5):
        training.step()
    return monitor.verdict.kind, monitor.verdict.where


def test_activations_that_are_dtensors_are_read_by_one_rank_alone(on_both_ranks):
    assert on_both_ranks(overflowing_activations)[0] == ("activations", "2")


class Touched(TorchFunctionMode):
    """Records the functions that are called with a DTensor."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if any(isinstance(arg, DTensor) for arg in args):
            self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def touched(rank, model):
    """The calls with DTensors that the monitor makes, not the training, in samples and skips."""
    training = ShardedTraining(4.0, model)
    monitor = Monitor(training.scaler, training.model, 1, stuck_after=2, on_stuck="continue")
    mode, source = Touched(), monitor._source

    def noted(call):
        def call_and_note(_, *args):
            with mode:
                return call(*args)

        return MethodType(call_and_note, call.__self__)

    for owner, names in (
        (source, ("scaled", "unscaling", "stepping", "stepped", "updating", "updated")),
        (source._watch._hooks, ("enter_module", "leave_module")),
    ):
        for name in names:
            setattr(owner, name, noted(getattr(owner, name)))
    for _ in range(4):
        training.step(overflows=True)
    monitor.close()
    return sorted(mode.names)


@pytest.mark.parametrize("model", MODELS)
def test_a_monitor_touches_dtensors_only_to_get_what_is_local(on_both_ranks, model):
    for names in on_both_ranks(touched, model):
        assert set(names) <= {"__get__", "to_local", "is_floating_point", "is_complex"}


def without_a_loss_of_its_own(rank):
    """A loss that is a DTensor without a part on rank 1."""
    training = ShardedTraining()
    monitor = Monitor(training.scaler, training.model)
    part = torch.ones(1 - rank)
    mesh = init_device_mesh("cpu", (RANKS,))
    training.scaler.scale(
        DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=(1,), stride=(1,))
    )
    training.step(overflows=True)
    monitor.close()
    return monitor.history[0].loss


def test_a_loss_of_which_a_rank_holds_nothing_is_not_nan(on_both_ranks):
    assert all(map(math.isfinite, on_both_ranks(without_a_loss_of_its_own)))


def refused_and_taken(rank, path):
    training = ShardedTraining()
    dist.barrier()
    if rank == 0:
        monitor = Monitor(training.scaler, path=path)
    dist.barrier()
    message = ""
    if rank == 1:
        try:
            Monitor(training.scaler, path=path)
        except ValueError as error:
            message = str(error)
    dist.barrier()
    if rank == 0:
        monitor.close()
    return message


def test_a_path_without_a_rank_is_refused_to_the_second_rank(on_both_ranks, tmp_path):
    pytest.importorskip("fcntl", reason="files are not locked here")
    first, second = on_both_ranks(refused_and_taken, str(tmp_path / "run.jsonl"))
    assert first == ""
    assert 'path="run.{rank}.jsonl"' in second


def inspected(rank):
    mesh = init_device_mesh("cpu", (RANKS,))
    local = torch.full((2, 3), math.inf if rank == 1 else 1.0)
    gradient = DTensor.from_local(local, mesh, [Shard(0)])
    return inspect({"w": gradient}) if rank == 0 else inspect({"w": gradient})[0].shape


def test_inspect_reads_a_rank_s_own_shard(on_both_ranks):
    assert on_both_ranks(inspected) == [(), (2, 3)]


def bad_on_one_rank(rank, model):
    """The places that a rank's monitor names, where only rank 1 makes bad numbers."""
    torch.manual_seed(rank)
    trained = fsdp2() if model == "fsdp2" else torch.nn.Linear(4, 4)
    called = trained if model == "fsdp2" else DistributedDataParallel(trained)
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
    scaler = GradScaler(policy=FixedScale(1.0))
    monitor = Monitor(scaler, trained, stuck_after=50, on_stuck="continue")
    found = []
    for kind in ("", "", "sqrt", "", "sqrt", "", "exp"):
        optimizer.zero_grad()
        out = called(torch.randn(8, 4)) + 1
        bad, far = (float(kind == each and rank == 1) for each in ("sqrt", "exp"))
        distances = (out - out.detach() * bad).square().sum(1).sqrt()
        loss = distances.mean() + (out * 999 * far).exp().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        located = monitor._log.counts.evidence.watched
        found.append(located and (located.kind, located.operation, located.is_likely))
    monitor.close()
    return found


@pytest.mark.parametrize("model", ["ddp", "fsdp2"])
def test_a_rank_reads_its_own_graphs_and_waits_for_no_other(on_both_ranks, model):
    _, found = on_both_ranks(bad_on_one_rank, model)
    assert found[4] == found[5] == ("backward", "sqrt", False)
    assert found[6] == ("forward", "exp", False)
