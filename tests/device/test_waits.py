"""How often a training loop makes the host wait for the device: only where PyTorch's own does."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gradscaler import AmaxScale, DynamicScale, ScaleMismatchError
from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler, ShardedGradScaler, flat_gradients
from tests.support import device

FUSED = {
    "AdamW": partial(torch.optim.AdamW, fused=True),
    "Adam": partial(torch.optim.Adam, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, fused=True),
}
SCALERS = {
    "the rule of torch": GradScaler,
    "hysteresis": partial(GradScaler, policy=DynamicScale(hysteresis=2)),
    "the largest gradient": partial(GradScaler, policy=AmaxScale()),
    "sharded": partial(ShardedGradScaler, device.NAME),
    "an outside flag": partial(GradScaler, overflow=lambda: torch.zeros((), device=device.NAME)),
}


def small_model():
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    return torch.nn.Sequential(*layers).to(device.NAME)


def iterate(model, optimizer, scaler, *, clip=False, bad=False):
    """One iteration of a training loop; its gradients overflow if it is bad."""
    optimizer.zero_grad()
    inputs = torch.ones(16, 4).to(device.NAME)
    loss = model(inputs).square().mean()
    scaler.scale(loss * float("inf") if bad else loss).backward()
    if clip and isinstance(scaler, GradScaler):
        scaler.clip_grad_norm_(optimizer, 1.0)
    elif clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def values(model):
    return [parameter.detach().cpu() for parameter in model.parameters()]


def unchanged(model, before):
    return all(map(torch.equal, values(model), before))


def test_a_read_that_is_forbidden_is_noticed():
    value = torch.ones((), device=device.NAME)
    with device.forbidden_reads(), pytest.raises(RuntimeError, match="waited for it"):
        value.item()
    with device.forbidden_reads(), pytest.raises(RuntimeError, match="waited for it"):
        value.cpu()
    assert value.item() == 1


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("optimizer", FUSED)
def test_nothing_waits_with_an_optimizer_that_skips_by_itself(optimizer, scaler, clip):
    model, scaler = small_model(), SCALERS[scaler]()
    optimizer = FUSED[optimizer](model.parameters())
    iterate(model, optimizer, scaler)  # which sets up state
    with device.forbidden_reads():
        iterate(model, optimizer, scaler, clip=clip)
    before = values(model)
    with device.forbidden_reads():
        iterate(model, optimizer, scaler, clip=clip, bad=True)
        outcomes = scaler.last_step(optimizer), scaler.history
    assert unchanged(model, before)
    assert outcomes[0].reason == "overflow"  # read now
    assert [outcome.applied for outcome in outcomes[1]] == [True, True, False]


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
def test_another_optimizer_waits_as_often_as_with_torchs_scaler(clip):
    counts = []
    for make in (GradScaler, partial(torch.amp.GradScaler, device.NAME)):
        model, scaler = small_model(), make()
        optimizer = torch.optim.AdamW(model.parameters())
        iterate(model, optimizer, scaler)
        before = device.reads()
        iterate(model, optimizer, scaler, clip=clip)
        iterate(model, optimizer, scaler, clip=clip, bad=True)
        counts.append(device.reads() - before)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("optimizer", [*FUSED, "unfused"])
def test_clipped_training_is_torchs_but_for_the_last_bits_of_the_norm(optimizer):
    trained = []
    for make in (GradScaler, partial(torch.amp.GradScaler, device.NAME)):
        torch.manual_seed(0)
        model, scaler = small_model(), make()
        kind = FUSED.get(optimizer, torch.optim.AdamW)
        steps = kind(model.parameters())
        for bad in (False, True, False, False):
            iterate(model, steps, scaler, clip=True, bad=bad)
        trained.append(values(model))
        assert scaler.get_scale() == 2.0**15
    for ours, native in zip(*trained, strict=True):
        torch.testing.assert_close(ours, native, rtol=1e-6, atol=0)


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
def test_nothing_waits_for_flat_gradients(clip):
    model, scaler = small_model(), GradScaler()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    flat_gradients(optimizer)
    iterate(model, optimizer, scaler)
    with device.forbidden_reads():
        iterate(model, optimizer, scaler, clip=clip)
        iterate(model, optimizer, scaler, clip=clip, bad=True)
    assert scaler.last_step(optimizer).reason == "overflow"


@pytest.fixture
def two_processes():
    """This process as the first of two; a collective leaves its tensors as they are."""
    backends = f"cpu:fake,{device.NAME}:fake"
    dist.init_process_group(backends, rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
def test_a_decision_of_many_processes_waits_for_nothing(two_processes, clip):
    model, scaler = small_model(), GradScaler(group=dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    iterate(model, optimizer, scaler)
    with device.forbidden_reads():
        for bad in (False, True, False):
            iterate(model, optimizer, scaler, clip=clip, bad=bad)
    assert [outcome.applied for outcome in scaler.history] == [True, True, False, True]


def test_another_process_flag_skips_the_step_without_waiting(two_processes, monkeypatch):
    def all_reduce(vote, *_):
        vote[0] = 1.0  # the flag comes first

    model, scaler = small_model(), GradScaler(group=dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    iterate(model, optimizer, scaler)
    before = values(model)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with device.forbidden_reads():
        iterate(model, optimizer, scaler)
    assert unchanged(model, before)
    assert scaler.last_step(optimizer).reason == "overflow"


def test_scales_that_differ_are_noticed_one_step_later(two_processes, monkeypatch):
    def all_reduce(vote, *_):
        vote[2] = 2.0 * vote[2]  # the largest scale of all

    model, scaler = small_model(), GradScaler(group=dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with device.forbidden_reads():
        iterate(model, optimizer, scaler)
    with pytest.raises(ScaleMismatchError, match="scale"):
        iterate(model, optimizer, scaler)


def test_a_loop_over_attempts_waits_between_its_bodies():
    model, scaler = small_model(), GradScaler(init_scale=8.0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    factors = [float("inf"), float("inf"), 1.0]
    for _ in scaler.attempts(optimizer):
        with device.forbidden_reads():
            loss = model(torch.ones(16, 4).to(device.NAME)).square().mean()
            scaler.scale(loss * factors.pop(0)).backward()
    with device.forbidden_reads():
        scaler.step(optimizer)
        scaler.update()
    assert scaler.last_step(optimizer).applied
    assert scaler.get_scale() == 2.0


def test_a_loop_over_attempts_waits_once_where_the_first_is_finite():
    model, scaler = small_model(), GradScaler()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = device.reads()
    for _ in scaler.attempts(optimizer):
        loss = model(torch.ones(16, 4).to(device.NAME)).square().mean()
        scaler.scale(loss).backward()
    assert device.reads() - before == 1


def test_a_closure_is_repeated_until_it_is_finite():
    model, scaler = small_model(), GradScaler(init_scale=8.0)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    factors = [float("inf"), 1.0, 1.0, 1.0, 1.0]

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(16, 4).to(device.NAME)).square().mean()
        scaler.scale(loss * factors.pop(0)).backward()
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    assert scaler.last_step(optimizer).applied
    assert scaler.get_scale() == 4.0


def test_a_state_moves_between_devices():
    model, scaler = small_model(), GradScaler(growth_interval=1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    iterate(model, optimizer, scaler)
    saved = scaler.state_dict()
    assert saved["scale"] == 2.0**17
    resumed = GradScaler(growth_interval=1)
    resumed.load_state_dict(saved)
    iterate(model, optimizer, resumed)
    assert resumed._scale.device.type == device.NAME
    on_cpu = torch.nn.Linear(1, 1)
    of_cpu = torch.optim.SGD(on_cpu.parameters(), lr=0.1)
    host = GradScaler(growth_interval=1)
    host.load_state_dict(resumed.state_dict())
    host.scale(on_cpu(torch.ones(1)).sum()).backward()
    host.step(of_cpu)
    host.update()
    assert host.get_scale() == 2.0**19


# There is no autocast for this device, of which the monitor warns.
@pytest.mark.filterwarnings("ignore:The backward pass computes in float32")
def test_a_monitor_that_inspects_no_skips_waits_in_its_samples_alone():
    counts = {}
    for interval in (5, 10):
        model, scaler = small_model(), GradScaler()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with Monitor(scaler, model, every=interval, forensics=0) as monitor:
            per_step = []
            for _ in range(30):
                before = device.reads()
                iterate(model, optimizer, scaler)
                per_step.append(device.reads() - before)
            assert monitor.verdict.findings
        counts[interval] = sum(count > 0 for count in per_step[10:])
    assert counts[5] <= 4
    assert counts[10] <= 2
