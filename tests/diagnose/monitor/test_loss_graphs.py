"""Mistakes that a monitor reads in the graph of a finite loss."""

import warnings

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    kl_div,
    l1_loss,
    mse_loss,
    nll_loss,
    smooth_l1_loss,
    triplet_margin_loss,
)

from gradscaler.diagnose import FindingWarning, Monitor
from gradscaler.torch import GradScaler
from tests.support.marked_lines import lines_marked_in
from tests.support.steps import take_step

pytestmark = [
    pytest.mark.usefixtures("own_random_numbers_and_one_thread"),
    pytest.mark.filterwarnings("ignore:Using a target size"),
]
line_with = lines_marked_in(__file__)
SIZE = 8  # of a batch


class Net(nn.Module):
    """Its first output is a prediction, the others are logits."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, SIZE)
        self.prototype = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x):
        return self.layer(x)


def judged(loss_of, scaler=None, dtype=None, steps=12):
    """The verdict after training with a loss of outputs of shape [n, 1] and [n, n]."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Monitor(scaler, model) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", FindingWarning)
        for _ in range(steps):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                table = model(torch.randn(SIZE, 4))
                loss = loss_of(table[:, :1], table, model)
            optimizer.zero_grad()
            take_step(loss, optimizer, scaler)
    return monitor.verdict


def value_loss(out):
    return 0.5 * (TARGET - out).pow(2).mean()  # critic


TARGET = torch.arange(float(SIZE))
CLASSES = torch.arange(SIZE) % 3


def distance(ones, others):
    return (ones - others).abs().mean()


BROADCASTS = {
    "sub": lambda out, *_: ((out - TARGET) ** 2).mean(),  # sub
    "weighted": lambda out, *_: (0.5 * (TARGET - out).pow(2)).sum() / SIZE,  # weighted
    "absolute": lambda out, *_: (TARGET - out).abs().mean(),  # absolute
    "root": lambda out, *_: mse_loss(out, TARGET).sqrt(),  # root
    "l1": lambda out, *_: l1_loss(out, TARGET),  # l1
    "huber": lambda out, *_: huber_loss(out, TARGET),  # huber
    "smooth": lambda out, *_: smooth_l1_loss(out, TARGET),  # smooth
    "targets": lambda out, *_: mse_loss(out.squeeze(1), TARGET[:, None]),  # targets
    "critic": lambda out, table, *_: value_loss(out) - table.log_softmax(1)[:, 1].mean(),
    "tall": lambda out, *_: (out[:, 0] - TARGET[:, None]).square().mean(),  # tall
    "spread": lambda out, *_: (out - TARGET).abs().mean() + distance(out, out.T),  # spread
    "others": lambda out, t, *_: (
        (out - TARGET).abs().mean()  # others
        - distance((2 * t)[:, 1:2], (2 * t)[:, 1])
    ),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize("name", BROADCASTS)
def test_a_loss_that_compares_each_output_with_each_target_is_told(name, has_scaler, dtype):
    scaler = GradScaler("cpu", init_scale=8.0) if has_scaler else None
    verdict = judged(BROADCASTS[name], scaler, dtype)
    found = verdict.findings[0]
    assert found.kind == "misuse", verdict
    assert f"at {line_with(name)} makes [8, 8] of [8" in found.cause
    assert "squeeze(-1)" in found.action
    assert found.line == line_with(name)


def of_ratio(out, advantage):
    ratio = out.squeeze(1).exp()
    return torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)  # surrogate


COLUMN = torch.arange(float(SIZE)).reshape(SIZE, 1) + 1
PAIRED = {
    "surrogate": lambda out, *_: -of_ratio(out, COLUMN).mean(),
    "beside others": lambda out, t, *_: t.square().mean() - 0.5 * of_ratio(out, COLUMN).mean(),
    "weights": lambda _, t, *__: (cross_entropy(t, CLASSES, reduction="none") * COLUMN).sum() / 8,
    "critic's": lambda out, t, *_: -(t.log_softmax(1)[:, 1] * (COLUMN - out)).mean(),
    "quotient": lambda out, t, *_: (out.exp() / (TARGET + 1)).mean() + t.mean(),
}


@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize("name", PAIRED)
def test_a_product_of_each_row_with_all_rows_is_told(name, has_scaler):
    verdict = judged(PAIRED[name], GradScaler("cpu", init_scale=8.0) if has_scaler else None)
    found = verdict.findings[0]
    assert found.kind == "misuse", verdict
    assert "those of all rows, not by its own: " in found.cause
    assert " makes [8, 8] of [8" in found.cause
    if name == "surrogate":
        assert found.line == line_with("surrogate")
    assert "squeeze(-1)" in found.action


def reshaped_softmax(table):
    return table.softmax(1).view(SIZE, SIZE).contiguous()  # reshaped


def under_autocast(table):
    return table.softmax(1).to(torch.bfloat16)  # autocast


TWICE = {
    "plain": lambda _, table, *__: cross_entropy(table.softmax(1), CLASSES),  # plain
    "reshaped": lambda _, table, *__: cross_entropy(reshaped_softmax(table), CLASSES),
    "autocast": lambda _, table, *__: cross_entropy(under_autocast(table), CLASSES),
    "several": lambda out, t, *_: cross_entropy(t.softmax(1), CLASSES) + out.mean(),  # several
    "sigmoid": lambda out, *_: binary_cross_entropy_with_logits(  # the call
        out.sigmoid(),  # sigmoid
        (TARGET > 3).float()[:, None],
    ),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", TWICE)
def test_a_loss_that_takes_probabilities_for_logits_is_told(name, dtype):
    found = judged(TWICE[name], dtype=dtype).findings[0]
    by = "sigmoid" if name == "sigmoid" else "softmax"
    assert found.kind == "misuse"
    assert f"the output of {by} at {line_with(name)}: it normalises them once more" in found.cause
    assert f"Leave out this {by}" in found.action


def cut_off(table):
    return table.relu().view(SIZE, SIZE)  # relu


SOFT = torch.eye(SIZE) * 0.5 + 0.5 / SIZE
KL = {
    "plain": lambda t: kl_div(t.softmax(1), SOFT, reduction="batchmean"),  # kl plain
    "masked": lambda t: (kl_div(t.softmax(1), SOFT, reduction="none") * SOFT).sum(),  # kl masked
    "log": lambda t: kl_div(t.softmax(1), SOFT.log(), reduction="sum", log_target=True),  # kl log
    "added": lambda t: t.mean() + 3 * KL_SUM(t.log_softmax(1).exp(), SOFT),  # kl added
    "quotient": lambda t: KL_SUM(t.exp() / t.exp().sum(1, keepdim=True), SOFT),  # kl quotient
}
KL_SUM = nn.KLDivLoss(reduction="sum")
NOT_KL = {
    "right": lambda t: kl_div(t.log_softmax(1), SOFT, reduction="batchmean"),
    "right log": lambda t: KL_LOG(t.log_softmax(1), SOFT.log()),
    "logarithm": lambda t: KL_SUM((t.softmax(1) + 1e-8).log(), SOFT),
    "mixture": lambda t: KL_SUM((0.5 * (t.softmax(1) + SOFT)).log(), SOFT),
    "reward": lambda t: (SOFT.mean() - SOFT * t.softmax(1)).sum(),  # not kl_div's
    "scores": lambda t: kl_div(t / (1 + t.detach().abs()), SOFT, reduction="sum"),
}
KL_LOG = nn.KLDivLoss(reduction="sum", log_target=True)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", KL)
def test_a_kl_div_that_is_given_probabilities_is_told(name, dtype):
    found = judged(lambda _, table, *__: KL[name](table), dtype=dtype).findings[0]
    assert found.kind == "misuse"
    assert f"kl_div at {line_with(f'kl {name}')} takes log-probabilities" in found.cause
    assert "log_softmax" in found.action
    assert found.line == line_with(f"kl {name}")


@pytest.mark.parametrize("name", NOT_KL)
def test_a_kl_div_of_logarithms_or_a_formula_like_it_is_none(name):
    verdict = judged(lambda _, table, *__: NOT_KL[name](table))
    assert verdict.kind == "normal", verdict


CUT = {
    "classes": lambda _, table, *__: cross_entropy(cut_off(table), CLASSES),
    "two classes": lambda _, t, *__: binary_cross_entropy_with_logits(cut_off(t), MASK),
}
NOT_CUT = {
    "softplus": lambda _, t, *__: cross_entropy(nn.functional.softplus(t), CLASSES),
    "hidden": lambda _, t, model: cross_entropy(t.relu() @ model.layer.weight, CLASSES % 4),
    "probabilities": lambda _, t, *__: nll_loss(t.relu() - t.logsumexp(1), CLASSES),
    "targets": lambda _, t, *__: binary_cross_entropy_with_logits(t, t.detach().relu().clamp(0, 1)),
}


@pytest.mark.parametrize("name", CUT)
def test_a_relu_that_makes_the_logits_is_told(name):
    found = judged(CUT[name]).findings[0]
    assert (found.kind, found.line) == ("misuse", line_with("relu"))
    assert "is given the output of relu at" in found.cause


@pytest.mark.parametrize("name", NOT_CUT)
def test_logits_that_may_be_negative_are_not_told(name):
    assert "The loss takes logits" not in judged(NOT_CUT[name]).text


def over_the_batch(table):
    return table[:, :3].log_softmax(0)  # dim


def test_probabilities_over_the_batch_are_told():
    verdict = judged(lambda _, table, *__: nll_loss(over_the_batch(table), CLASSES))
    assert (
        f"log_softmax at {line_with('dim')} is not along the classes" in verdict.findings[0].cause
    )
    assert "dim=1" in verdict.findings[0].action


MASK = torch.zeros(SIZE, SIZE)
ENDED = {
    "factor": lambda _, table, *__: -(table.exp() * MASK).sum() / SIZE,  # factor
    "both": lambda _, t, *__: -torch.min(t * MASK, t.clamp(max=0) * MASK).mean(),  # both
    "ignored": lambda _, t, *__: cross_entropy(t, CLASSES * 0 - 100, reduction="sum"),  # ignored
    "margin": lambda out, *_: (out - 9).relu().mean(),  # margin
    "triplet": lambda _, t, *__: triplet_margin_loss(t, t, t + 9),  # triplet
    "equal": lambda _, table, *__: mse_loss(table, table.detach()),  # equal
    "alone": lambda _, table, *__: cross_entropy(table[:, :1], CLASSES * 0),  # alone
    "empty": lambda _, table, *__: table[table > 99].sum(),  # empty
}
WHY = {
    "factor": "it is multiplied by numbers that are all 0, in mul",
    "both": "it is multiplied by numbers that are all 0, in mul",
    "ignored": "each target is its ignore_index, in nll_loss",
    "margin": "each term is beyond its margin, where the slope is 0, in relu",
    "triplet": "each term is beyond its margin, where the slope is 0, in clamp_min",
    "equal": "each output equals its target, in mse_loss",
    "alone": "a softmax over one class alone gives it the probability 1, in log_softmax",
    "empty": "it is computed from no elements, in index",
}


@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize("name", ENDED)
@pytest.mark.covering(1)  # a sample reads the graph before the loss is scaled, or without that
def test_a_loss_that_is_0_from_the_start_is_told_with_what_makes_it_so(name, has_scaler):
    verdict = judged(ENDED[name], GradScaler("cpu") if has_scaler else None, steps=20)
    found = verdict.findings[0]
    assert found.kind == "dead", verdict
    assert f"{WHY[name]} at {line_with(name)}" in found.cause
    assert found.line == line_with(name)
    assert len(verdict.findings) == 1


def test_a_loss_that_is_0_for_an_unknown_reason_is_told():
    found = judged(lambda out, *_: (out - out).mean(), steps=20).findings[0]
    assert found.kind == "dead"
    assert "and so is the loss, as in all samples. Look at what the loss multiplies" in found.text


OFF = {
    "relu": lambda out: (out - 9).relu(),  # density
    "clamp_min": lambda out: (out - 9).clamp_min(0),  # clamped
    "module": lambda out: nn.Sequential(nn.ReLU())(out - 9),  # module
    "weights": lambda out: (1 - torch.exp(-(out - 9).relu())) * out.sigmoid(),  # weights
}
OFF_AT = {
    "relu": ("density", "relu", "0"),
    "clamp_min": ("clamped", "clamp_min", "its limit"),
    "module": ("module", "relu", "0"),
    "weights": ("weights", "relu", "0"),
}


@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize("name", OFF)
def test_a_relu_that_is_off_and_makes_all_gradients_0_is_told(name, has_scaler):
    scaler = GradScaler("cpu") if has_scaler else None
    found = judged(lambda out, *_: (OFF[name](out) - 1).square().mean(), scaler).findings[0]
    marker, operation, limit = OFF_AT[name]
    told = f"as {operation} at {line_with(marker)} gives {limit} for all {SIZE} inputs"
    assert (found.kind, found.line) == ("dead", line_with(marker))
    assert f"All gradients are exactly 0 in step 10, {told}" in found.cause


KEEP_NUMBERS = {
    "label smoothing": lambda table: cross_entropy(table, CLASSES, label_smoothing=0.1),
    "trapezoid": lambda table: torch.trapezoid(table.square(), dx=0.5).mean(),
    "vmap": lambda table: torch.vmap(lambda row: (2 * row).square().mean())(table).mean(),
}


@pytest.mark.parametrize("name", KEEP_NUMBERS)
def test_a_factor_that_a_node_keeps_as_a_number_is_read(name, capsys):
    said = judged(lambda _, table, __: KEEP_NUMBERS[name](table), steps=60).text
    assert "own" not in capsys.readouterr().err
    assert "None of 60 steps" in said


NOT_OFF = {
    "a residual connection": lambda out, table: (out - 9).relu() + table,
    "one of many": lambda out, table: (table + torch.linspace(-9, 9, SIZE)).relu(),
    "a bias behind it": lambda out, table: (out - 9).relu() @ table[:1] * 0 + table.mean(),
    "saturated": lambda out, table: (out - 999).sigmoid(),
}


@pytest.mark.parametrize("name", NOT_OFF)
def test_a_relu_that_may_be_off_for_some_is_not_told(name):
    said = judged(lambda out, table, _: (NOT_OFF[name](out, table) - 1).square().mean()).text
    assert " gives 0 for all" not in said


def floored(by, low):
    """Training with losses from 3e-3 on, of which a step takes 1e-3, down to a floor."""
    start = []

    def loss_of(out, _, model):
        bias = model.layer.bias[0]
        start[:] = start or [bias.item()]
        return by(bias - start[0] + 3e-3, torch.tensor(low))

    return judged(loss_of)


FLOORS = {
    "maximum": torch.maximum,
    "maximum of a constant": lambda loss, low: torch.maximum(low, loss),
    "clamp": lambda loss, low: loss.clamp(min=low.item()),
    "tensor": lambda loss, low: torch.clamp(loss, min=low).mean(),
}


@pytest.mark.parametrize("by", FLOORS)
def test_a_loss_that_comes_to_its_floor_is_healthy(by):
    assert floored(FLOORS[by], 5e-4).kind == "normal"


@pytest.mark.parametrize("by", FLOORS)
def test_a_loss_below_its_floor_from_the_start_is_told(by):
    assert "gradients are exactly 0" in floored(FLOORS[by], 1.0).text


def test_a_loss_that_ends_elsewhere_than_at_its_floor_is_told():
    assert "gradients are exactly 0" in floored(lambda loss, low: loss.relu() + low, 5e-4).text


def test_a_loss_that_comes_to_0_is_healthy():
    start = []

    def hinge(out, _, model):
        bias = model.layer.bias[0]
        start[:] = start or [bias.item()]
        return (bias - start[0] + 3e-3).relu()  # a step takes 1e-3 of it

    assert judged(hinge).kind == "normal"


SOUND = {
    "one shape": lambda out, *_: mse_loss(out, TARGET[:, None]),
    "a table": lambda _, table, *__: mse_loss(table, torch.eye(SIZE)),
    "distances": lambda out, *_: (out - out.squeeze(1)).square().mean(),
    "energy": lambda out, *_: 2 * distance(out, TARGET) - distance(out, out.squeeze(1)),
    "energy of rows": lambda out, *_: -torch.cdist(out, out).mean() + 2 * distance(out, TARGET),
    "energy of many rows": lambda out, *_: (
        distance(out, TARGET)
        - 0.5 * torch.cdist(out, out, compute_mode="use_mm_for_euclid_dist").mean()
    ),
    "kernel": lambda out, *_: (-((out - TARGET) ** 2)).exp().mean(),
    "quantiles": lambda out, *_: (smooth_l1_loss(out, TARGET, reduction="none") * WEIGHTS).mean(),
    "prototype": lambda out, table, model: mse_loss(model.prototype, table.detach()) + out.mean(),
    "column for all": lambda out, *_: (out - torch.zeros(SIZE, 3)).square().mean(),
    "pairs that are meant": lambda out, *_: (out[:, :, None] - TARGET[None, None]).abs().mean(),
    "pairs of rows": lambda out, *_: (out.squeeze(1)[:, None] - TARGET).abs().mean(),
    "a table of targets": lambda out, *_: mse_loss(out, WEIGHTS),
    "a table of differences": lambda out, *_: (out - WEIGHTS).square().mean(),
    "both dimensions": lambda _, table, *__: (
        nll_loss(table.log_softmax(0), CLASSES) + nll_loss(table.log_softmax(1), CLASSES)
    ),
    "a target with a gradient": lambda out, *_: binary_cross_entropy_with_logits(
        TARGET[:, None], out.sigmoid()
    ),
    "logarithm": lambda _, table, *__: nll_loss(table.log_softmax(1), CLASSES),
    "logarithm twice": lambda _, table, *__: cross_entropy(table.log_softmax(1), CLASSES),
    "attention": lambda _, table, *__: cross_entropy(table.softmax(1) @ table, CLASSES),
    "gate": lambda out, table, *_: cross_entropy(table * out.sigmoid(), CLASSES),
}
WEIGHTS = torch.rand(SIZE, SIZE)
LEVELS = torch.tensor([0.1, 0.5, 0.9])


def pinball(out, levels):
    error = TARGET[:, None] - out
    return torch.max(levels * error, (levels - 1) * error).mean()


PAIRS_MEANT = {
    "outer": lambda out, t, *_: -(t.mean(1)[:, None] * out.squeeze(1)).mean(),
    "outer of data": lambda out, *_: -(out.squeeze(1) * (TARGET + 1)[:, None]).mean(),
    "torch.outer": lambda out, t, *_: -torch.outer(t.mean(1), out.squeeze(1)).mean(),
    "kernel": lambda out, *_: (torch.exp(-((out - out.T) ** 2)) * COLUMN * TARGET).mean(),
    "three levels": lambda out, *_: pinball(out, LEVELS),
    "one shape": lambda out, *_: -of_ratio(out, COLUMN.squeeze(1)).mean(),
    "columns": lambda out, *_: -(out * COLUMN).mean(),
    "weights of columns": lambda _, table, *__: (table * COLUMN).mean(),
    "scales": lambda _, __, model: (model.prototype * COLUMN).mean() + model.layer.weight.mean(),
    "cosines": lambda _, t, *__: ((t @ t.T) / (t.norm(dim=1, keepdim=True) * t.norm(dim=1))).mean(),
    "logits": lambda out, *_: cross_entropy(out.squeeze(1) * COLUMN, CLASSES),
}


@pytest.mark.parametrize("name", PAIRS_MEANT)
def test_a_product_of_pairs_that_are_meant_is_not_told(name):
    assert "those of all rows" not in judged(PAIRS_MEANT[name]).text


def test_a_product_of_few_rows_is_not_told():
    def of_rows(number):
        def loss_of(out, *_):
            return -(out[:number, 0] * COLUMN[:number]).mean()

        return "those of all rows" in judged(loss_of).text

    assert [of_rows(number) for number in (7, 8)] == [False, True]


@pytest.mark.parametrize("name", SOUND)
def test_a_loss_that_looks_alike_and_is_meant_so_is_not_told(name):
    assert judged(SOUND[name]).kind == "normal"
