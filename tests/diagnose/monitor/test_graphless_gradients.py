"""Results of autograd.grad() without a graph in a loss, by the line of the call."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.autograd import grad
from torch.nn import functional

from gradscaler.diagnose import Monitor, read_run
from gradscaler.torch import GradScaler
from tests.support.marked_lines import lines_marked_in
from tests.support.steps import take_step

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread", "nothing_was_compiled")
line_with = lines_marked_in(__file__)


def inputs():
    return torch.randn(8, 2).requires_grad_()


def residual(net):
    x = inputs()
    u = net(x)
    slope = grad(u, x, torch.ones_like(u), retain_graph=True)[0]  # residual
    return ((slope[:, :1] - u) ** 2).mean() + (net(torch.ones(1, 2)) - 1).square().mean()


def constant_residual(net):
    x = inputs()
    slope = grad(net(x).sum(), x)[0]  # constant_residual
    return 0.5 * (slope + 2 * x.detach()).norm(dim=1).mean() + net(torch.ones(1, 2)).square().mean()


def forces(net):
    x = inputs()
    energy = net(x)
    force = -grad(energy.sum(), x, retain_graph=True)[0]  # forces
    energies = functional.l1_loss(energy, torch.ones(8, 1))
    return energies + 10 * functional.mse_loss(force, torch.zeros(8, 2))


def compared(net):
    x = inputs()
    u = net(x)
    slope = grad(u.sum(), x, retain_graph=True)[0]  # compared
    return functional.mse_loss(slope.sum(1, keepdim=True), u)


def of_second_order(net):
    x = inputs()
    u = net(x).square()
    u_x = grad(u.sum(), x, create_graph=True)[0]
    u_xx = grad(u_x.sum(), x, retain_graph=True)[0]  # of_second_order
    return (u * u_x - 0.1 * u_xx).square().mean()


def penalty(net, create_graph=False):
    real, fake = torch.randn(8, 2) + 1, torch.randn(8, 2)
    mixed = (0.5 * real + 0.5 * fake).requires_grad_()
    (slope,) = grad(net(mixed).sum(), mixed, create_graph=create_graph)  # penalty
    return net(fake).mean() - net(real).mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()


def penalty_with_a_graph(net):
    return penalty(net, create_graph=True)


def residual_with_a_graph(net):
    x = inputs()
    u = net(x)
    slope = grad(u.sum(), x, create_graph=True)[0]
    return ((slope[:, :1] - u) ** 2).mean()


def of_a_linear_function(net):
    x = inputs()
    slope = grad((2 * x).sum(), x, create_graph=True)[0]
    return ((slope[:, :1] - net(x)) ** 2).mean()


def adversarial(net):
    x = inputs()
    slope = grad(net(x).square().mean(), x)[0]
    return net(x).square().mean() + net(x + 0.1 * slope.sign()).square().mean()


def adversarial_in_steps(net):
    x = torch.randn(8, 2)
    moved = x.clone()
    for _ in range(3):
        moved.requires_grad_()
        slope = grad(net(moved).square().mean(), moved)[0]
        moved = moved.detach() + 0.1 * slope.sign()
        moved = torch.min(torch.max(moved, x - 0.2), x + 0.2)
    return net(moved).square().mean()


def adversarial_to_features(net):
    features = net[0](torch.randn(8, 2))
    slope = grad(net[1:](features).square().mean(), features, retain_graph=True)[0]
    return net[1:](features + 0.1 * slope / slope.norm()).square().mean()


def contrastive(net):
    x = inputs()
    for _ in range(3):
        slope = grad(net(x).sum(), x)[0]
        x = (x.detach() - 0.1 * slope + 0.01 * torch.randn(8, 2)).requires_grad_()
    return net(torch.randn(8, 2)).square().mean() - net(x).mean()


def first_order_maml(net):
    weights = dict(net.named_parameters())
    for _ in range(2):
        loss = torch.func.functional_call(net, weights, torch.randn(8, 2)).square().mean()
        slopes = grad(loss, list(weights.values()))
        pairs = zip(weights.items(), slopes, strict=True)
        weights = {name: weight - 0.1 * slope for (name, weight), slope in pairs}
    return torch.func.functional_call(net, weights, torch.ones(8, 2)).square().mean()


def first_order_maml_of_one_factor(net):
    factor = net[0].weight[0, 0]
    slope = grad((factor * 2 - 1).square(), factor, retain_graph=True)[0]
    faster = factor - 0.1 * slope
    return (faster * 3 - 1).square()


def saliency_that_is_logged(net):
    x = inputs()
    loss = net(x).square().mean()
    slope = grad(net(x).sum(), x)[0]
    (slope.abs() + 1).mean().item()
    return loss + 1.0


def a_step_by_hand(net):
    loss = net(inputs()).square().mean()
    slopes = grad(loss, list(net.parameters()))
    with torch.no_grad():
        for weight, slope in zip(net.parameters(), slopes, strict=True):
            weight -= 0.01 * slope
    return net(torch.randn(8, 2)).square().mean() + 1.0


def weights_of_losses(net):
    x = inputs()
    first, second = net(x).square().mean(), (net(torch.ones(1, 2)) - 1).square().mean()
    slopes = [grad(each, net[2].weight, retain_graph=True)[0].norm() for each in (first, second)]
    return first + slopes[0] / (slopes[1] + 1e-3) * second


def weights_by_inputs(net):
    x = inputs()
    u = net(x)
    weight = 1 / (1 + grad(u.sum(), x, retain_graph=True)[0].norm(dim=1, keepdim=True))
    return (weight * (u - 1).square()).mean()


def importance_without_a_gradient(net):
    x = inputs()
    with torch.no_grad():
        weight = net(x).exp() - 1
    return (weight * net(x)).mean() + 1.0


def slopes_of_a_teacher(net):
    torch.manual_seed(1)
    teacher, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), inputs()
    theirs = grad(teacher(x).sum(), x)[0]
    ours = grad(net(x).sum(), x, create_graph=True)[0]
    return functional.mse_loss(ours, theirs) + net(x).square().mean()


def of_a_density(net, x, given):
    """A density and the score of another model, each of a part of the net."""
    density = net[0](x).square().sum(1)
    score = grad(density.sum(), x, retain_graph=True)[0]  # target_of_what_it_is_given
    other = net[2](torch.cat([given, given], 1))
    return density.mean() + functional.mse_loss(other, score[:, :1])


def target_of_another(net):
    x = inputs()
    return of_a_density(net, x, x.detach())


def target_of_what_it_is_given(net):
    x = inputs()
    return of_a_density(net, x, x)


def meant(net):
    x = inputs()
    u = net(x)
    slope = grad(u.sum(), x, retain_graph=True)[0].detach()
    return ((slope[:, :1] - u) ** 2).mean()


def trained(loss_of, path=None, scaler=None, is_watched=True):
    """The verdict on thirteen steps, and the weights after them."""
    torch.manual_seed(0)
    net, told = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), []
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    monitor = Monitor(scaler, net, path=path, tell=told.append) if is_watched else None
    for _ in range(13):
        optimizer.zero_grad()
        loss = loss_of(net)
        take_step(loss, optimizer, scaler)
    if monitor is not None:
        monitor.close()
    return monitor and monitor.verdict, [*net.parameters()]


WRONG = (
    *(residual, constant_residual, forces, compared, of_second_order, penalty),
    target_of_what_it_is_given,
)


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("loss_of", WRONG, ids=lambda f: f.__name__)
def test_a_loss_that_reads_a_gradient_without_a_graph_is_told_with_the_call(
    loss_of, is_scaled, path
):
    scaler = GradScaler("cpu", init_scale=8.0) if is_scaled else None
    verdict, _ = trained(loss_of, path, scaler)
    line = line_with(loss_of.__name__)
    (found,) = (each for each in verdict.findings if each.line == line)
    assert (found.kind, found.is_certain) == ("misuse", False)
    assert f"The result of autograd.grad at {line} has no graph" in found.cause
    assert "create_graph=True" in found.action
    assert read_run(path).verdict == verdict


@pytest.mark.parametrize(
    "loss_of",
    [
        penalty_with_a_graph,
        residual_with_a_graph,
        of_a_linear_function,
        adversarial,
        adversarial_in_steps,
        adversarial_to_features,
        contrastive,
        first_order_maml,
        first_order_maml_of_one_factor,
        saliency_that_is_logged,
        a_step_by_hand,
        weights_of_losses,
        weights_by_inputs,
        importance_without_a_gradient,
        slopes_of_a_teacher,
        target_of_another,
        meant,
    ],
    ids=lambda f: f.__name__,
)
def test_a_gradient_that_is_an_input_a_step_a_weight_or_a_target_is_not(loss_of):
    assert "create_graph" not in trained(loss_of)[0].text


@pytest.mark.parametrize("loss_of", [*WRONG, adversarial, a_step_by_hand], ids=lambda f: f.__name__)
def test_the_search_changes_no_bit(loss_of):
    watched, alone = trained(loss_of)[1], trained(loss_of, is_watched=False)[1]
    assert all(map(torch.equal, watched, alone))


def test_a_critic_that_steps_five_times_as_often_is_told():
    critic, generator = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), nn.Linear(2, 2)
    optimizers = [torch.optim.Adam(each.parameters(), 1e-3) for each in (critic, generator)]
    monitor = Monitor(None, {"critic": critic, "generator": generator}, tell=lambda _: None)
    for _ in range(2):
        for turn in range(6):
            optimizer = optimizers[turn == 5]
            optimizer.zero_grad()
            loss = penalty(critic) if turn < 5 else -critic(generator(torch.randn(8, 2))).mean()
            loss.backward()
            optimizer.step()
    monitor.close()
    assert f"autograd.grad at {line_with('penalty')}" in monitor.verdict.text
