"""Terms of a loss that no gradient passes, by the line of their loss function."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import mse_loss

from gradscaler.diagnose import Monitor, read_run
from gradscaler.torch import GradScaler
from tests.support.marked_lines import lines_marked_in
from tests.support.steps import take_step

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread", "nothing_was_compiled")
line_with = lines_marked_in(__file__)
KL = nn.KLDivLoss(log_target=True, reduction="batchmean")
LABELS = torch.arange(8) % 3
TRUTH = functional.one_hot(LABELS, 3).float()


def weighted(out, teacher):
    soft = KL(teacher.log_softmax(1), teacher.log_softmax(1))  # weighted
    return 100 * soft + 0.5 * functional.cross_entropy(out, LABELS)


def imported(out, teacher):
    loss = functional.cross_entropy(out, LABELS)
    loss += mse_loss(out.detach(), teacher) / 2  # imported
    return loss


def listed(out, teacher):
    extra = functional.l1_loss(out.detach(), teacher)  # listed
    return sum([functional.cross_entropy(out, LABELS), extra])


def stacked(out, teacher):
    extra = functional.smooth_l1_loss(out.detach(), teacher)  # stacked
    return torch.stack([functional.cross_entropy(out, LABELS), extra]).mean()


def logged(out, teacher):
    functional.mse_loss(out.detach(), teacher)
    return functional.cross_entropy(out, LABELS) + 1.0


def by_item(out, teacher):
    extra = functional.mse_loss(out.detach(), teacher).item()  # by_item
    return functional.cross_entropy(out, LABELS) + extra


def as_a_number(out, teacher):
    extra = functional.mse_loss(out, teacher)
    return functional.cross_entropy(out, LABELS) + extra.item()  # as_a_number


def as_a_float(out, teacher):
    extra = float(functional.mse_loss(out, teacher))  # as_a_float
    return extra + functional.cross_entropy(out, LABELS)


def a_divisor(out, teacher):
    loss = functional.cross_entropy(out, LABELS)
    return loss / loss.item() + 1.0


def logged_as_numbers(out, teacher):
    loss = functional.cross_entropy(out, LABELS)
    shown = [loss.item(), out.mean().item(), out.max().item()]
    return loss + len(shown) / 2 + 0.0


def all_right(out, teacher):
    rights = (out.softmax(1) * TRUTH).sum(1) > 0.0
    return functional.cross_entropy(out, LABELS) + (1 + 0 * rights.float().mean().item())


def as_a_weight(out, teacher):
    return sum([functional.cross_entropy(out, LABELS) * functional.mse_loss(out.detach(), teacher)])


def under_no_grad(out, teacher):
    with torch.no_grad():
        extra = functional.mse_loss(out, teacher)
    return functional.cross_entropy(out, LABELS) + extra


def stopped(out, teacher):
    extra = functional.mse_loss(out, teacher)
    return functional.cross_entropy(out, LABELS) + 0.5 * extra.detach()  # stopped


def scored(out, teacher):
    score = -out.tanh().detach().mean()  # scored
    return functional.cross_entropy(out, LABELS) + 0.1 * score


def a_baseline(out, teacher):
    value = out[0, 1]
    chosen = out.log_softmax(1)[0, 0]
    return (1 - value) ** 2 - chosen * (1 - value.detach()) + 1.0


def a_target(out, teacher):
    target = teacher[:, 0] + 0.9 * out.max(1)[0].detach()
    return mse_loss(out[:, 0], target) + 1.0


def a_shift(out, teacher):
    largest = out.max().detach()
    return (out - largest).exp().sum().log() + largest


def its_own(out, teacher):
    loss = functional.cross_entropy(out, LABELS)
    return loss + 0.1 * (loss.detach() - 1)


def a_factor(out, teacher):
    weight = mse_loss(out, teacher).detach()
    return weight * functional.cross_entropy(out, LABELS) + 1.0


def of_another(out, teacher):
    other = nn.Linear(3, 1)(teacher).detach()
    return functional.cross_entropy(out, LABELS) + 0.1 * other.mean()


def used(out, teacher):
    return sum([functional.cross_entropy(out, LABELS), 2 * functional.mse_loss(out, teacher)])


class Dice(nn.Module):
    def forward(self, out):
        chosen = (out.sigmoid() > 0.5).float()  # dice
        return 1 - 2 * (chosen * TRUTH).sum() / (chosen.sum() + TRUTH.sum() + 1)


def dice(out, teacher):
    return Dice()(out) + functional.cross_entropy(out, LABELS)


def accuracy(out, teacher):
    _, chosen = out.max(1)  # accuracy
    wrong = (chosen != LABELS).float().mean()
    return sum([functional.cross_entropy(out, LABELS), 0.1 * wrong])


def indices(out, teacher):
    chosen = out.argmax(dim=1)  # indices
    return functional.cross_entropy(out, LABELS) + (chosen - LABELS).double().pow(2).mean() / 3


def shown(out, teacher):
    (out.argmax(1) == LABELS).float().mean()
    return functional.cross_entropy(out, LABELS) + 1.0


def masked(out, teacher):
    chosen = (out > 0).float()
    return functional.cross_entropy(out, LABELS) + (out * chosen).sum() / (chosen.sum() + 1) + 1.0


def straight_through(out, teacher):
    gates = (out > 0).float() + out - out.detach()
    return functional.cross_entropy(out, LABELS) + 0.1 * gates.sum()


def one_gate(out, teacher):
    soft = out.sigmoid().mean()
    gate = (soft > 0.5).float() - soft.detach() + soft
    return functional.cross_entropy(out, LABELS) + 0.1 * gate


def a_critic(out, teacher):
    reward = (out.argmax() == 0).float()
    return -(out.log_softmax(1)[0, 0] * (reward - out.mean())) + 1.0


def started(out, teacher):
    total = torch.zeros_like(out.sum(), dtype=torch.int64)
    return total + functional.cross_entropy(out, LABELS)


def trained(loss_of, path=None, scaler=None, is_watched=True):
    """The verdict on twelve steps, and the weights after them."""
    torch.manual_seed(0)
    model, told = nn.Linear(4, 3), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = Monitor(scaler, model, path=path, tell=told.append) if is_watched else None
    for _ in range(12):
        optimizer.zero_grad()
        loss = loss_of(model(torch.randn(8, 4)), torch.randn(8, 3))
        take_step(loss, optimizer, scaler)
    if monitor is not None:
        monitor.close()
    return monitor and monitor.verdict, [*model.parameters()]


def cause_of(loss_of, is_scaled, path):
    """The cause that is found, though not for certain, at the line of a loss, and this line."""
    scaler = GradScaler("cpu", init_scale=8.0) if is_scaled else None
    verdict, _ = trained(loss_of, path, scaler)
    line = line_with(loss_of.__name__)
    found = next(each for each in verdict.findings if each.line == line)
    assert (found.kind, found.is_certain) == ("misuse", False)
    assert read_run(path).verdict == verdict
    return found.cause, line


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("loss_of", [weighted])
def test_a_loss_function_whose_inputs_have_no_gradient_is_named(loss_of, is_scaled, path):
    cause, line = cause_of(loss_of, is_scaled, path)
    assert f"at {line}, and none of its inputs has a gradient" in cause


@pytest.mark.parametrize(
    "loss_of",
    [logged, as_a_weight, under_no_grad, used, a_divisor, logged_as_numbers, all_right],
    ids=lambda f: f.__name__,
)
def test_what_is_only_logged_or_a_number_or_meant_is_not(loss_of):
    assert trained(loss_of)[0].kind == "normal"


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("loss_of", [imported, listed, stacked, stopped, scored, by_item])
def test_a_term_that_detach_cuts_off_is_named_by_its_line(loss_of, is_scaled, path):
    cause, line = cause_of(loss_of, is_scaled, path)
    assert f"gives no gradient: detach() at {line} cuts it off" in cause


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # of float()
@pytest.mark.parametrize(("loss_of", "call"), [(as_a_number, "item()"), (as_a_float, "float()")])
def test_a_term_that_is_made_a_number_is_named_by_its_line(loss_of, call, path):
    cause, line = cause_of(loss_of, True, path)
    assert f"gives no gradient: {call} at {line} cuts it off" in cause


@pytest.mark.parametrize(
    "loss_of",
    [a_baseline, a_target, a_shift, its_own, a_factor, of_another],
    ids=lambda f: f.__name__,
)
def test_what_detach_is_for_is_not_told(loss_of):
    assert not [each for each in trained(loss_of)[0].findings if "detach()" in each.text]


def adversarial(cuts):
    """The verdict on a generator and a critic that take turns, and the weights after them."""
    torch.manual_seed(0)
    maker, critic = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (maker, critic)]
    monitor = Monitor(None, [maker, critic], tell=lambda text: None)
    bce = functional.binary_cross_entropy_with_logits
    for _ in range(12):
        real, fake = torch.randn(8, 3), maker(torch.randn(8, 4))
        of_real, of_fake = critic(real), critic(fake.detach())
        own = bce(of_real, torch.ones(8, 1)) + bce(of_fake, torch.zeros(8, 1))
        optimizers[1].zero_grad()
        own.backward()
        optimizers[1].step()
        score = critic(fake)
        if cuts == "score":
            score = score.detach()  # score
        extra = bce(score, torch.ones(8, 1))
        if cuts == "loss":
            extra = extra.detach().item()  # loss
        loss = (0.5 if cuts == "score" else 1.0) * extra + mse_loss(fake, real)
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
    monitor.close()
    return monitor.verdict


@pytest.mark.parametrize("cuts", ["score", "loss"])
def test_a_cut_term_is_named_where_optimizers_take_turns(cuts):
    found = adversarial(cuts).findings
    assert [each.line for each in found if "cuts it off" in each.cause] == [line_with(cuts)]


def test_the_turn_of_a_critic_on_what_is_detached_is_not_told():
    assert "detach()" not in adversarial(cuts="").text


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("loss_of", [dice, accuracy, indices])
def test_a_term_of_a_comparison_or_of_indices_is_named(loss_of, is_scaled, path):
    cause, line = cause_of(loss_of, is_scaled, path)
    assert f"at {line}, and no gradient passes a comparison" in cause


@pytest.mark.parametrize(
    "loss_of",
    [shown, masked, straight_through, one_gate, a_critic, started],
    ids=lambda f: f.__name__,
)
def test_what_is_shown_or_a_mask_or_straight_through_is_not(loss_of):
    found = trained(loss_of)[0].findings
    assert not [each for each in found if "no gradient passes" in each.cause]


@pytest.mark.parametrize("loss_of", [weighted, listed, logged, used, dice, scored])
def test_the_search_changes_no_bit(loss_of):
    watched, alone = trained(loss_of)[1], trained(loss_of, is_watched=False)[1]
    assert all(map(torch.equal, watched, alone))


def test_no_step_is_watched_where_anything_was_compiled(monkeypatch):
    import torch._dynamo.utils

    monkeypatch.setitem(torch._dynamo.utils.counters, "frames", {"total": 1})
    assert trained(weighted)[0].kind == "normal"


@pytest.mark.parametrize("is_carried", [False, True])
def test_a_number_of_a_loss_with_a_pass_of_its_own_is_not_told(is_carried):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Monitor(None, model, tell=[].append) as monitor:
        for _ in range(12):
            optimizer.zero_grad()
            total = 0.5
            for _ in range(3):
                first = mse_loss(model(torch.randn(8, 4)), torch.randn(8, 3)) + total
                if is_carried:
                    first.backward()
                    total = first.item()
                    continue
                first.backward()
                (
                    functional.cross_entropy(model(torch.randn(8, 4)), LABELS) + first.item()
                ).backward()
            optimizer.step()
    assert "cuts it off" not in str(monitor.verdict)
