"""Loops without a scaler whose optimizers take turns, do nothing, or diverge in one step."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import mse_loss

from gradscaler.diagnose import Monitor, read_run
from gradscaler.diagnose._monitor import new_optimizers
from tests.support.marked_lines import lines_marked_in

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
line_with = lines_marked_in(__file__)


@pytest.mark.parametrize("turns", [1, 5])
def test_a_loss_of_an_optimizer_that_steps_later_has_its_lines(turns):
    critic, maker, told = nn.Linear(4, 1), nn.Linear(2, 4), []
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (critic, maker)]
    with Monitor(model={"critic": critic, "maker": maker}, tell=told.append):
        for step in range(1, 41):
            made = maker(torch.randn(8, 2))
            optimizers[0].zero_grad()
            critic(made.detach()).square().mean().backward()
            optimizers[0].step()
            if step % turns == 0:
                optimizers[1].zero_grad()
                share = critic(made).sigmoid() * (step < 40)
                loss = -share.log().mean()  # the maker
                loss.backward()
                optimizers[1].step()
    assert f"by log at {line_with('the maker')}, from finite inputs" in told[0].cause


def test_gradients_that_are_zeroed_before_the_step_are_told():
    model, told = nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model=model, tell=told.append):
        for _ in range(20):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
    assert "all of them were 0 when the optimizer stepped" in told[0].cause
    assert "call zero_grad() before the backward pass" in told[0].action
    assert len(told) == 1


def replace_layers(model):
    for place in range(2):
        model[place] = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replace_layers, "the model holds none of its parameters any more. Make the optimizer"),
        (lambda model: model.requires_grad_(False), "all of its parameters have requires_grad="),
        (lambda model: None, "nothing is trained any more. Look for what changed"),
    ],
)
def test_steps_that_find_no_gradient_any_more_are_told_while_it_lasts(change, said, tmp_path):
    told, inputs = [], torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(None, model, path=tmp_path / "run.jsonl", tell=told.append) as monitor:
        for step in range(1, 61):
            if step == 31:
                assert [each.kind for each in told] == []
                change(model)
            optimizer.zero_grad()
            if step <= 30 or change is replace_layers:
                model(inputs).square().mean().backward()
            optimizer.step()
    assert [each.kind for each in told] == ["misuse"]
    assert said in told[0].text
    assert "no gradient in 30 calls of step() after step 30" in monitor.verdict.text
    assert read_run(tmp_path / "run.jsonl").verdict == monitor.verdict


def test_what_is_frozen_on_the_way_is_named_and_the_first_layers_if_they_are_replaced():
    told, inputs = [], torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(model=model, tell=told.append) as monitor:
        for step in range(1, 161):
            if step == 31:
                model[2].requires_grad_(False)
            if step == 61:
                assert "If 2.bias and 1 more should be trained, look" in monitor.verdict.text
                model[0] = nn.Linear(4, 4)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    (finding,) = told
    assert finding.cause.startswith(
        "In no optimizer that is stepped: 2 parameters (0.weight first)"
    )


def test_networks_that_freeze_each_other_in_turn_are_not_said_to_be_frozen():
    nets = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in nets]
    with Monitor(model=nn.ModuleList(nets), every=10, tell=list) as monitor:
        for step in range(240):
            for place, net in enumerate(nets):
                net.requires_grad_(step % 2 == place)
            optimizers[step % 2].zero_grad()
            nets[1](nets[0](torch.randn(8, 4))).square().mean().backward()
            optimizers[step % 2].step()
    assert monitor.verdict.kind == "normal"
    assert "frozen" not in monitor.verdict.text


def test_optimizers_of_phases_and_a_pause_may_step_without_gradients():
    told, phases = [], [nn.Linear(4, 4) for _ in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in phases]
    with Monitor(model=nn.ModuleList(phases), tell=told.append) as monitor:
        for step in range(1, 121):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for place, phase in enumerate(phases):
                if step == 1 or (step // 20 % 2 == place and not 50 < step < 55):
                    phase(torch.randn(8, 4)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert monitor.verdict.kind == "normal"
    assert told == []


@pytest.mark.parametrize(
    ("rate", "factor", "said"),
    [
        (0.1, 1.0, "Nothing wrong was seen in numbers and calls: the loss went from "),
        (1e-9, 1.0, " hardly move at a learning rate of 1e-09: their norm has changed by "),
        (0.001, 0.9, ", at a learning rate of 0.0009 to "),
    ],
)
def test_a_verdict_does_not_praise_a_loss_that_stands_still(rate, factor, said):
    model, inputs = nn.Linear(4, 4), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, factor)
    with Monitor(model=model, tell=lambda _: None) as monitor:
        for _ in range(120):
            optimizer.zero_grad()
            mse_loss(model(inputs), inputs).backward()
            optimizer.step()
            schedule.step()
    assert monitor.verdict.kind == "normal"
    assert said in monitor.verdict.text


LOWER = "If it should have fallen, lower the learning rate."


@pytest.mark.parametrize(
    ("steps", "rise", "said"),
    [(20, 1, LOWER), (6, 1, ", and 6 steps are too few to say more."), (6, 100, LOWER)],
)
def test_a_verdict_does_not_praise_a_loss_that_rises(steps, rise, said):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with Monitor(model=model, tell=lambda _: None) as monitor:
        for step in range(steps):
            optimizer.zero_grad()
            (model(torch.ones(8, 4)).square().mean() + rise * step).backward()
            optimizer.step()
    assert monitor.verdict.kind == "normal"
    assert monitor.verdict.text.endswith(said)


def test_one_batch_with_a_small_loss_is_no_fall():
    model, told = nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with Monitor(model=model, tell=told.append) as monitor:
        for step in range(1, 121):
            optimizer.zero_grad()
            (model(torch.randn(64, 4)).square().mean() * (0.5 if step == 120 else 1)).backward()
            optimizer.step()
    assert "Nothing else was judged: the loss went from " in monitor.verdict.text


@pytest.mark.parametrize("first", [1, 3])
def test_a_step_that_diverges_among_its_evaluations_is_told_so(first):
    model, told = nn.Linear(4, 4), []
    inputs = torch.randn(64, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-9)

    def closure():
        optimizer.zero_grad()
        loss = (model(inputs) - 1).pow(4).mean()
        loss.backward()
        return loss

    with Monitor(model=model, tell=told.append):
        for step in range(1, 5):
            optimizer.param_groups[0]["lr"] = 50.0 if step == first else 1e-9
            optimizer.step(closure)
    assert told[0].kind == "divergence"
    assert f"within step {first}, which evaluated it several times" in told[0].cause
    assert 'line_search_fn="strong_wolfe"' in told[0].action


def trained_by(losses, steps, rate=0.01):
    """The verdict on a model whose loss in a step is chosen by the step's number."""
    torch.manual_seed(0)
    model, told = nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with Monitor(model=model, tell=told.append) as monitor:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            losses(step, model(torch.randn(8, 4))).backward()
            optimizer.step()
    assert told == []
    return monitor.verdict.text


def test_the_ends_of_a_loss_are_those_of_its_phase():
    def of_phases(step, out):
        return 0.01 * out.square().mean() if step <= 40 else mse_loss(out, torch.ones(8, 4))

    assert ": since step 41, where it became another one, the loss went" in trained_by(
        of_phases, 80
    )


def test_tasks_that_take_turns_have_no_ends():
    def of_tasks(step, out):
        return out.square().mean() * 100 if step % 2 else mse_loss(out, torch.ones(8, 4))

    assert "as losses of several kinds, or several optimizers" in trained_by(of_tasks, 60)


def test_one_loss_has_its_ends():
    def of_batches(step, out):
        return mse_loss(out[: 8 - step % 5], torch.ones(8 - step % 5, 4)) / 2

    assert "calls: the loss went from" in trained_by(of_batches, 60, rate=0.1)


@pytest.mark.parametrize(("held", "is_told"), [(20, False), (200, True)])
def test_a_rate_of_0_is_told_once_no_warm_up_ends_it(held, is_told):
    model, told = nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step >= held))
    with Monitor(model=model, tell=told.append) as monitor:
        for _ in range(150):
            optimizer.zero_grad()
            mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 4)).backward()
            optimizer.step()
            schedule.step()
    assert [each.cause.startswith("The learning rate was 0 in") for each in told] == [
        True
    ] * is_told
    assert ("Unless a schedule raises it later" in monitor.verdict.text) == is_told


@pytest.mark.parametrize(("begin", "is_told"), [(60, False), (200, True)])
def test_rewards_of_0_are_told_once_they_last(begin, is_told):
    model, told = nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model=model, tell=told.append) as monitor:
        for step in range(150):
            optimizer.zero_grad()
            rewards = torch.ones(8) * (step >= begin)
            (model(torch.randn(8, 4)).log_softmax(-1)[:, 0] * -rewards).mean().backward()
            optimizer.step()
    assert ["multiplied by numbers that are all 0" in each.cause for each in told] == [
        True
    ] * is_told
    assert ("Rewards may be 0 for a while" in monitor.verdict.text) == is_told


@pytest.mark.parametrize(("made", "is_told"), [("before", False), ("after", False), ("", True)])
def test_what_an_optimizer_holds_before_its_first_step_is_not_said_to_be_held_by_none(
    made, is_told
):
    body, head = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    of_head = torch.optim.SGD(head.parameters(), lr=0.1)
    if made == "before":
        new_optimizers.lines[of_head] = "train.py:7"
    with Monitor(model=body, tell=list) as monitor:
        for _ in range(60):
            optimizer.zero_grad()
            mse_loss(head(body(torch.randn(8, 4))), torch.ones(8, 1)).backward()
            optimizer.step()
        if made == "after":
            new_optimizers.lines[of_head] = "train.py:7"
    assert ("neither the model nor an optimizer holds" in monitor.verdict.text) == is_told


@pytest.mark.parametrize(("every", "is_told"), [(10, False), (1000, True)])
@pytest.mark.parametrize("is_known", [False, True])
def test_an_optimizer_that_steps_now_and_then_holds_its_parameters(every, is_told, is_known):
    nets, told = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)]), []
    often, rarely = (torch.optim.SGD(net.parameters(), lr=0.1) for net in nets)
    if is_known:
        new_optimizers.lines[rarely] = "train.py:7"
    with Monitor(model=nets, tell=told.append) as monitor:
        for step in range(1, 121):
            nets.zero_grad()
            mse_loss(nets[1](nets[0](torch.randn(8, 4))), torch.ones(8, 1)).backward()
            often.step()
            if step % every == 0:
                rarely.step()
    if is_known:
        assert ["In no optimizer" in each.cause for each in told] == [True] * is_told
    assert ("In no optimizer that is stepped" in monitor.verdict.text) == is_told


def pass_of_critic(critic, real, fake):
    """Two backward passes of a critic, as those of a GAN on real pictures and on made ones."""
    for pictures, sign in ((real, 1), (fake.detach(), -1)):
        (sign * critic(pictures)).exp().mean().backward()


def turns_of_gan(zero_critic, has_own_term=False):
    """The verdict on a GAN; a term of its maker's own has a backward pass that meets no critic."""
    maker, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    of_maker, of_critic = (torch.optim.SGD(each.parameters(), 1e-4) for each in (maker, critic))
    model = nn.ModuleDict({"maker": maker, "critic": critic})
    with Monitor(None, model, tell=[].append) as monitor:
        for _ in range(40):
            fake = maker(torch.randn(8, 4))
            zero_critic(of_critic, "before")
            pass_of_critic(critic, torch.randn(8, 4), fake)
            of_critic.step()
            zero_critic(of_critic, "after")
            of_maker.zero_grad()
            critic(fake).exp().mean().backward(retain_graph=True)
            if has_own_term:
                fake.square().mean().backward()
            of_maker.step()
    return str(monitor.verdict)


ADDED = "the backward pass added to the gradients (those of critic)"


def test_gradients_of_a_critic_that_are_never_zeroed_are_told():
    assert ADDED in turns_of_gan(lambda critic, when: None)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_of_a_critic_that_are_zeroed_before_its_turn_are_not(to_none):
    def zero(critic, when):
        if when == "before":
            critic.zero_grad(set_to_none=to_none)

    assert "added to the gradients" not in turns_of_gan(zero)
    assert "added to the gradients" not in turns_of_gan(zero, has_own_term=True)


def test_those_that_are_zeroed_one_by_one_are_not():
    def zero(critic, when):
        for parameter in critic.param_groups[0]["params"] if when == "before" else ():
            if parameter.grad is not None:
                parameter.grad.zero_()

    assert "added to the gradients" not in turns_of_gan(zero, has_own_term=True)


def test_those_that_are_zeroed_after_its_turn_alone_hold_those_of_the_maker():
    said = turns_of_gan(lambda critic, when: when == "after" and critic.zero_grad())
    assert ADDED not in said
