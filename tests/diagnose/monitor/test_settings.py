"""Settings of an optimizer: NaN or Inf, or a rate that jumps as its schedule begins again."""

import math
from inspect import currentframe

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from gradscaler.diagnose import Monitor
from gradscaler.diagnose._monitor import new_optimizers
from gradscaler.torch import GradScaler
from tests.support.marked_lines import lines_marked_in
from tests.support.steps import take_step

line_with = lines_marked_in(__file__)
pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
SETTINGS = {
    "lr": (torch.optim.SGD, {"lr": math.nan}),
    "lr, a NumPy number": (torch.optim.SGD, {"lr": np.float32(math.inf)}),
    "weight_decay": (torch.optim.AdamW, {"weight_decay": math.inf}),
    "betas": (torch.optim.Adam, {"betas": (0.9, math.nan)}),
    "eps": (torch.optim.RMSprop, {"eps": math.nan}),
    "momentum": (torch.optim.SGD, {"momentum": math.nan}),
}


@pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_named_in_the_step_that_uses_it(name, is_scaled):
    kind, changed = SETTINGS[name]
    net = nn.Linear(4, 2)
    groups = [{"params": [net.weight]}, {"params": [net.bias]}]
    optimizer, told = kind(groups, lr=1e-3), []
    scaler = GradScaler("cpu", init_scale=8.0) if is_scaled else None
    monitor = Monitor(scaler, net, tell=lambda finding: told.append((step, finding)))
    for step in range(1, 30):
        if step == 17:
            optimizer.param_groups[1] |= changed
        loss = net(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        (scaler.scale(loss) if scaler else loss).backward()
        scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
    monitor.close()
    at, finding = told[0]
    setting = next(iter(changed))
    assert (at, finding.kind) == (17, "divergence")
    assert f"The optimizer's {setting} of group 1 was NaN or Inf" in finding.cause
    assert len({each.text for _, each in told}) == len(told)
    assert monitor.verdict.findings[0].cause.startswith(f"The optimizer's {setting} of group 1")


def test_settings_that_are_finite_are_not_spoken_of():
    net = nn.Linear(4, 2)
    optimizer, told = torch.optim.SGD(net.parameters(), lr=0.0), []
    monitor = Monitor(model=net, tell=told.append)
    for step in range(20):
        optimizer.param_groups[0]["lr"] = 1e-3 * step / 20
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    assert told == []


def train(net, optimizer, schedule, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("is_loaded", [False, True], ids=["anew", "loaded"])
def test_a_schedule_that_begins_again_after_a_resume_is_told(is_loaded):
    """A schedule that was loaded may jump as well, as here where the next cycle begins."""
    net = nn.Linear(4, 2)

    def resumed():
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10)
        return optimizer, schedule

    first, told = resumed(), []
    train(net, *first, 9)
    optimizer, schedule = resumed()
    optimizer.load_state_dict(first[0].state_dict())
    if is_loaded:
        schedule.load_state_dict(first[1].state_dict())
    with Monitor(model=net, tell=told.append) as monitor:
        train(net, optimizer, schedule, 20)
    assert monitor.verdict.kind == ("normal" if is_loaded else "restart")
    assert [each.kind for each in told] == ([] if is_loaded else ["restart"])
    assert is_loaded or "from 0.00244717 to 0.0975528. Load the optimizer's" in told[0].text


@pytest.mark.parametrize(("peak", "is_told"), [(0.04, True), (0.02, False)])
def test_a_warm_up_that_begins_again_after_a_resume_is_told(peak, is_told):
    """Each change of the rate is small."""
    net = nn.Linear(4, 2)

    def resumed(rate):
        optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
        factors = [0.3, 0.4, 0.5, 0.7, 1.0]
        return optimizer, torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: factors[min(step, 4)]
        )

    (first, schedule), (optimizer, anew), told = resumed(0.01), resumed(peak), []
    train(net, first, schedule, 9)
    optimizer.load_state_dict(first.state_dict())
    with Monitor(model=net, tell=told.append):
        optimizer.param_groups[0]["initial_lr"] = peak  # as a schedule that is made now would
        train(net, optimizer, anew, 20)
    assert [each.kind for each in told] == ["restart"] * is_told
    assert not is_told or "from 0.01 to 0.04" in told[0].text


@pytest.mark.parametrize(
    ("rate", "is_shared", "later", "is_told"),
    [
        (0.5, True, None, True),
        (1e-9, True, None, False),
        (0.5, False, None, False),  # a rate for each group, which is meant
        (0.5, True, 1e-8, False),  # the code sets another
    ],
)
def test_a_rate_that_the_dicts_of_another_optimizer_replace_is_told(
    rate, is_shared, later, is_told
):
    net = nn.Linear(4, 2)
    groups = [{"params": [net.weight]}, {"params": [net.bias]}]
    first = torch.optim.SGD(groups, lr=1e-9)
    new_optimizers.note_made(first, currentframe())
    second = torch.optim.SGD(groups if is_shared else [dict(each) for each in groups], lr=rate)
    new_optimizers.note_made(second, currentframe())
    for group in second.param_groups:
        group["lr"] = later or group["lr"]
    with Monitor(model=net, tell=[].append) as monitor:
        for step in range(120):
            optimizer = first if step < 5 else second
            optimizer.zero_grad()
            (net(torch.ones(8, 4)) - 9).square().mean().backward()
            optimizer.step()
    said = str(monitor.verdict)
    assert "the loss went from" in said
    assert ("lr=0.5 of SGD at" in said) is is_told
    assert not is_told or "wrote its own rate of 1e-09 into them" in said


@pytest.mark.parametrize("factor", [1.0, 0.01], ids=["higher", "as low"])
def test_a_schedule_that_is_made_after_the_state_is_loaded_is_told(monkeypatch, factor):
    """Its first rate is that of the first step, and that of the state is seen in no step."""
    load = new_optimizers.noting_rates(torch.optim.Optimizer.load_state_dict)
    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", load)
    net = nn.Linear(4, 2)
    state = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.randn(8, 4)).square().mean().backward()
    state.step()
    state.param_groups[0]["lr"] = 1e-3
    optimizer, told = torch.optim.Adam(net.parameters(), lr=0.1), []
    optimizer.load_state_dict(state.state_dict())
    optimizer.param_groups[0]["initial_lr"] = 0.1
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: factor)
    with Monitor(model=net, tell=told.append):
        for _ in range(20):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            schedule.step()  # too high
    assert [each.kind for each in told] == (["restart"] if factor == 1 else [])
    assert factor != 1 or "from 0.001 to 0.1" in told[0].cause
    assert factor != 1 or told[0].line == line_with("too high")


@pytest.mark.parametrize(
    ("peak", "first_peak", "is_loaded", "is_told"),
    [
        (0.1, 0.1, False, True),
        (0.1, 0.1, True, False),  # it goes on from where it was
        (0.05, 0.1, False, False),  # another schedule, which may be meant
        (0.1, None, False, False),  # the earlier run had none
    ],
)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_schedule_that_begins_again_far_below_the_loaded_rate_is_told(
    monkeypatch, peak, first_peak, is_loaded, is_told, is_scaled
):
    load = new_optimizers.noting_rates(torch.optim.Optimizer.load_state_dict)
    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", load)
    net = nn.Linear(4, 2)
    cycle = torch.optim.lr_scheduler.OneCycleLR
    before, told = torch.optim.Adam(net.parameters(), lr=0.1), []
    schedule = first_peak and cycle(before, first_peak, total_steps=40)
    for _ in range(15):
        net(torch.randn(8, 4)).square().mean().backward()
        before.step()
        if schedule:
            schedule.step()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    optimizer.load_state_dict(before.state_dict())
    again = cycle(optimizer, peak, total_steps=40)
    if is_loaded:
        again.load_state_dict(schedule.state_dict())
    scaler = GradScaler("cpu", init_scale=2.0**4) if is_scaled else None
    with Monitor(scaler, net, tell=told.append):
        for _ in range(20):
            optimizer.zero_grad()
            loss = net(torch.randn(8, 4)).square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            again.step()
    assert [each.kind for each in told if each.kind == "restart"] == ["restart"] * is_told
    if is_told:
        assert "to 0.004. Load" in str(told[0])
        assert (", and of the scaler, too" in told[0].action) == is_scaled


@pytest.mark.parametrize("rate", [None, 0.01, 0.05], ids=["as made", "as loaded", "by hand"])
def test_a_schedule_that_is_made_in_between_sets_its_first_rate_though_it_is_loaded(
    monkeypatch, rate
):
    """It takes that back where it steps, such as after an epoch."""
    load = new_optimizers.noting_rates(torch.optim.Optimizer.load_state_dict)
    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", load)
    net = nn.Linear(4, 2)

    def made(states=None):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        if states:
            optimizer.load_state_dict(states[0])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / 10)
        if states:
            schedule.load_state_dict(states[1])
        return optimizer, schedule

    first, told = made(), []
    train(net, *first, 9)
    optimizer, _schedule = made([each.state_dict() for each in first])
    optimizer.param_groups[0]["lr"] = rate or optimizer.param_groups[0]["lr"]
    with Monitor(model=net, tell=told.append):
        for _ in range(20):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    assert [each.kind for each in told] == (["restart"] if rate is None else [])
    assert rate is not None or "from 0.01 to 0.1. Load" in told[0].text


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize(
    ("kind", "are_loaded", "is_told"),
    [
        (torch.optim.AdamW, ("schedule",), True),
        (torch.optim.AdamW, ("schedule", "optimizer"), False),
        (torch.optim.AdamW, (), False),  # it begins anew
        (torch.optim.SGD, ("schedule",), False),  # it has nothing to lose
    ],
)
def test_a_schedule_that_goes_on_with_an_optimizer_that_begins_anew_is_told(
    monkeypatch, kind, are_loaded, is_told, is_scaled
):
    load = new_optimizers.noting_rates(torch.optim.Optimizer.load_state_dict)
    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", load)
    schedules = torch.optim.lr_scheduler.LambdaLR
    load = new_optimizers.noting_progress(schedules.load_state_dict)
    monkeypatch.setattr(schedules, "load_state_dict", load)
    scaler = GradScaler("cpu", init_scale=2.0**4) if is_scaled else None
    net, told, states = nn.Linear(4, 2), [], {}
    for part in (1, 2):
        optimizer = kind(net.parameters(), lr=1e-3)
        held = {"optimizer": optimizer, "schedule": schedules(optimizer, lambda _: 1.0)}
        for name in are_loaded if states else ():
            held[name].load_state_dict(states[name])  # it goes on
        with Monitor(scaler, net, tell=told.append):
            for _ in range(20):
                optimizer.zero_grad()
                take_step(net(torch.randn(8, 4)).square().mean(), optimizer, scaler)
                held["schedule"].step()
        states = {name: each.state_dict() for name, each in held.items()}
        assert part == 2 or told == []
    found = [each for each in told if each.kind == "restart" and "has loaded" in each.cause]
    assert [each.line for each in found] == [line_with("it goes on")] * is_told
