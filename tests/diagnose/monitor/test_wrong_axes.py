"""Operations along a wrong axis, which a monitor reads in the graph of a finite loss."""

import math
import warnings

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, nll_loss, normalize

from gradscaler.diagnose import FindingWarning, Monitor
from tests.support.marked_lines import lines_marked_in

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
line_with = lines_marked_in(__file__)
BATCH, TIME, WIDTH, CLASSES = 12, 6, 4, 5
LABELS = torch.arange(BATCH) % CLASSES
ROWS = torch.arange(BATCH)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.late = nn.LSTM(WIDTH, WIDTH)
        self.early = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.both = nn.GRU(WIDTH, WIDTH // 2, 2, bidirectional=True)
        self.table = nn.Parameter(torch.randn(BATCH, TIME))


def judged(loss_of, steps=12):
    """The verdict after training with a loss of a model, and of a batch of sequences."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Monitor(None, model) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", FindingWarning)
        for _ in range(steps):
            loss = loss_of(model, torch.randn(BATCH, TIME, WIDTH))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return monitor.verdict


def logits(model, x):
    return model.head(x[:, 0])


def scores(model, x):
    return model.query(x) @ model.key(x).transpose(1, 2) / math.sqrt(WIDTH)


def of_heads(model, x, dim):
    query, key, value = (
        layer(x).view(BATCH, TIME, 2, WIDTH // 2).transpose(1, 2)
        for layer in (model.query, model.key, model.value)
    )
    weights = (query @ key.transpose(-2, -1)).softmax(dim)  # heads
    weights = nn.functional.dropout(weights, 0.1)
    return (weights @ value).transpose(1, 2).reshape(BATCH, TIME, WIDTH).square().mean()


def classes_in_time(model, x, dim):
    logs = model.head(x).log_softmax(dim)  # in time
    return nll_loss(logs.view(-1, CLASSES), LABELS.repeat(TIME))


def classes_before_time(model, x, dim):
    logs = model.head(x).transpose(1, 2).log_softmax(dim)  # before time
    return nll_loss(logs, LABELS[:, None].expand(BATCH, TIME))


def rectangle(model, x):
    """The scores of rows and of other ones, which are as many as there are classes."""
    return model.query(x[:, 0]).mm(model.key(x[:CLASSES, 1]).T)


ACROSS = {
    "row": lambda m, x: nll_loss(logits(m, x).log_softmax(0), LABELS),  # row
    "picked": lambda m, x: -logits(m, x).softmax(0).log()[ROWS, LABELS].mean(),  # picked
    "eps": lambda m, x: -(logits(m, x).softmax(0) + 1e-9).log()[range(12), LABELS].mean(),  # eps
    "gathered": lambda m, x: 1 - logits(m, x).softmax(0).gather(1, LABELS[:, None]).mean(),
    "in time": lambda m, x: classes_in_time(m, x, 1),
    "before time": lambda m, x: classes_before_time(m, x, -1),
}
NOT_ACROSS = {
    "right": lambda m, x: -logits(m, x).softmax(1).log()[ROWS, LABELS].mean(),
    "right in time": lambda m, x: classes_in_time(m, x, -1),
    "right before time": lambda m, x: classes_before_time(m, x, 1),
    "pairs": lambda m, x: nll_loss((q := m.query(x[:, 0])).mm(q.T).log_softmax(0), ROWS),
    "texts and more of them": lambda m, x: nll_loss(rectangle(m, x).log_softmax(0), LABELS),
    "both ways": lambda m, x: nll_loss(logits(m, x).log_softmax(1).log_softmax(0), LABELS),
    "a pool over rows": lambda m, x: (logits(m, x).softmax(0) * logits(m, x)).sum(0).square().sum(),
    "of columns": lambda m, x: -logits(m, x).softmax(0).log()[LABELS, ROWS % CLASSES].mean(),
    "one column": lambda m, x: -logits(m, x).log_softmax(0)[:, 1].mean(),
}


@pytest.mark.parametrize("name", ACROSS)
def test_a_softmax_that_is_not_along_the_classes_is_told(name):
    found = judged(ACROSS[name]).findings[0]
    assert found.kind == "misuse"
    assert "is not along the classes" in found.cause
    if name != "gathered":
        assert found.line == line_with(name)


@pytest.mark.parametrize("name", NOT_ACROSS)
def test_a_softmax_along_the_classes_or_of_another_meaning_is_not_told(name):
    assert "is not along the classes" not in judged(NOT_ACROSS[name]).text


def attended(model, x, weights):
    return cross_entropy(model.head((weights @ model.value(x))[:, 0]), LABELS)


def slots(weights):
    return weights / weights.sum(-1, keepdim=True)


OVER_QUERIES = {
    "queries": lambda m, x: attended(m, x, scores(m, x).softmax(1)),  # queries
    "of a batch": lambda m, x: attended(m, x, scores(m, x).softmax(0)),  # of a batch
    "heads": lambda m, x: of_heads(m, x, -2),
    "einsum": lambda m, x: (
        torch.einsum("bqk,bkd->bqd", scores(m, x).softmax(1), m.value(x)).square().mean()  # einsum
    ),
    "mask": lambda m, x: attended(m, x, (scores(m, x) + torch.eye(TIME)).softmax(-2)),  # mask
}
NOT_OVER_QUERIES = {
    "keys": lambda m, x: attended(m, x, scores(m, x).softmax(2)),
    "heads": lambda m, x: of_heads(m, x, -1),
    "slots": lambda m, x: attended(m, x, slots(scores(m, x).softmax(1))),
    "transposed": lambda m, x: attended(m, x, scores(m, x).softmax(1).transpose(1, 2)),
    "efficient": lambda m, x: (
        (m.query(x).softmax(-1) @ (m.key(x).softmax(1).transpose(1, 2) @ m.value(x)))
        .square()
        .mean()
    ),
    "pooled": lambda m, x: (m.head(x)[..., :1].softmax(1) * m.value(x)).sum(1).square().mean(),
    "built in": lambda m, x: (
        nn.functional.scaled_dot_product_attention(m.query(x), m.key(x), m.value(x)).square().mean()
    ),
    "a table": lambda m, x: (m.table.T.softmax(0) @ m.value(x[:, 0])).square().mean(),
}


@pytest.mark.parametrize("name", OVER_QUERIES)
def test_an_attention_whose_softmax_is_not_along_its_keys_is_told(name):
    found = judged(OVER_QUERIES[name]).findings[0]
    assert (found.kind, found.line) == ("misuse", line_with(name))
    assert "is not along its keys" in found.cause


@pytest.mark.parametrize("name", NOT_OVER_QUERIES)
def test_an_attention_along_its_keys_or_of_another_kind_is_not_told(name):
    assert "is not along its keys" not in judged(NOT_OVER_QUERIES[name]).text


def of_last(model, last):
    return cross_entropy(model.head(last), LABELS)


def each_row(model, x):
    out, _ = model.late(x.transpose(0, 1))
    return torch.stack([out[:, n].mean(0) for n in range(BATCH)])


def of_sequences(model, x):
    """Sequences of rows that were encoded one by one."""
    return torch.stack([model.value(row) for row in x])[:, -1]


POOLED = {
    "last step": lambda m, x: of_last(m, m.late(x)[0][:, -1]),  # last step
    "sliced": lambda m, x: of_last(m, m.late(x)[0][:, -1, :]),  # sliced
    "layers": lambda m, x: of_last(m, m.both(x)[0][:, -1]),  # layers
    "average": lambda m, x: of_last(m, m.both(x)[0].mean(1)),  # average
    "dropped": lambda m, x: of_last(m, nn.functional.dropout(m.late(x)[0], 0.5)[:, -1]),  # dropped
    "largest": lambda m, x: of_last(m, m.late(x)[0].max(1)[0]),  # largest
    "first": lambda m, x: of_last(m, m.early(x.transpose(0, 1))[0][-1]),  # first
}
NOT_POOLED = {
    "right": lambda m, x: of_last(m, m.early(x)[0][:, -1]),
    "time first": lambda m, x: of_last(m, m.late(x.transpose(0, 1))[0][-1]),
    "turned back": lambda m, x: of_last(m, m.late(x.transpose(0, 1))[0].transpose(0, 1)[:, -1]),
    "mean of time": lambda m, x: of_last(m, m.both(x.transpose(0, 1))[0].mean(0)),
    "each row": lambda m, x: of_last(m, each_row(m, x)),
    "one row": lambda m, x: m.late(x[:1].transpose(0, 1))[0][:, -1].square().mean(),
    "sequences": lambda m, x: of_last(m, of_sequences(m, x)),
    "no batch": lambda m, x: m.late(x[0])[0][:, -1].square().mean(),
    "a row beside all": lambda m, x: (
        (out := m.late(x.transpose(0, 1))[0])[:, -1].square().mean() + out.square().mean()
    ),
}


@pytest.mark.parametrize("name", POOLED)
def test_the_last_step_along_the_batch_of_a_recurrent_layer_is_told(name):
    found = judged(POOLED[name]).findings[0]
    assert (found.kind, found.line) == ("misuse", line_with(name))
    order = "[batch, time, features]" if name == "first" else "[time, batch, features]"
    assert f"read as {order}" in found.cause
    assert "set batch_first" in found.action
    assert not found.is_certain


@pytest.mark.parametrize("name", NOT_POOLED)
def test_the_last_step_along_time_is_not_told(name):
    assert "read as [" not in judged(NOT_POOLED[name]).text


ENCODER = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1)
EARLY_ENCODER = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, norm_first=True)
STACK = nn.TransformerEncoder(ENCODER, 2, enable_nested_tensor=False)
ATTENTION = nn.MultiheadAttention(WIDTH, 2)


def encoded(layer, model, x):
    """What an encoder of its own makes of a sequence that the model has embedded."""
    return layer(model.value(x))


def attention(model, x, **options):
    rows = model.value(x)
    return ATTENTION(rows, rows, rows, **options)[0]


def own_attention(model, x):
    query, key, value = (
        layer(x).view(BATCH, TIME, 2, WIDTH // 2).transpose(1, 2)
        for layer in (model.query, model.key, model.value)
    )
    out = nn.functional.scaled_dot_product_attention(query, key, value)
    return model.query(out.transpose(1, 2).reshape(BATCH, TIME, WIDTH))


def of_patches(model, x):
    """The mean over 3 patches, of an attention over time within each."""
    return own_attention(model, x).view(4, 3, TIME, WIDTH).mean(1)


ATTENDED = {
    "encoder": lambda m, x: of_last(m, encoded(ENCODER, m, x).mean(1)),  # encoder
    "stack": lambda m, x: of_last(m, encoded(STACK, m, x)[:, 0]),  # stack
    "weights": lambda m, x: of_last(m, attention(m, x).mean(1)),  # weights
    "no weights": lambda m, x: of_last(m, attention(m, x, need_weights=False)[:, 2]),  # no weights
    "early": lambda m, x: of_last(m, encoded(EARLY_ENCODER, m, x.transpose(0, 1)).mean(0)),  # early
}
NOT_ATTENDED = {
    "right": lambda m, x: of_last(m, encoded(EARLY_ENCODER, m, x).mean(1)),
    "first place": lambda m, x: of_last(m, encoded(EARLY_ENCODER, m, x)[:, 0]),
    "time first": lambda m, x: of_last(m, encoded(STACK, m, x.transpose(0, 1)).mean(0)),
    "turned back": lambda m, x: of_last(m, attention(m, x.transpose(0, 1)).transpose(0, 1).mean(1)),
    "own": lambda m, x: of_last(m, own_attention(m, x).mean(1)),
    "patches": lambda m, x: of_patches(m, x).square().mean(),
    "each row": lambda m, x: of_last(
        m,
        torch.stack(
            [
                out[:, n].mean(0)
                for out in [encoded(ENCODER, m, x.transpose(0, 1))]
                for n in range(BATCH)
            ]
        ),
    ),
}


@pytest.mark.parametrize("name", ATTENDED)
def test_a_mean_along_the_batch_of_an_attention_is_told(name):
    found = judged(ATTENDED[name]).findings[0]
    assert (found.kind, found.line) == ("misuse", line_with(name))
    order = "[batch, time, features]" if name == "early" else "[time, batch, features]"
    assert f"read as {order}" in found.cause


@pytest.mark.parametrize("name", NOT_ATTENDED)
def test_a_mean_along_the_time_of_an_attention_is_not_told(name):
    assert "read as [" not in judged(NOT_ATTENDED[name]).text


def contrast(one, other):
    return cross_entropy(one @ other.T / 0.1, ROWS)


def rows_of(model, x):
    return model.query(x[:, 0])


def whole(z):
    return z / z.norm()  # whole


def floored(z):
    return z / (torch.norm(z) + 1e-8)  # floored


def rooted(z):
    return z / z.pow(2).sum().sqrt()  # rooted


def inverted(z):
    z = whole(z)
    gram = z @ z.T
    return (gram @ z).square().mean()


WHOLE = {"whole": whole, "floored": floored, "rooted": rooted}
NOT_WHOLE = {
    "each": lambda m, x: contrast(*[(z := rows_of(m, x)) / z.norm(dim=1, keepdim=True)] * 2),
    "normalize": lambda m, x: contrast(*[normalize(rows_of(m, x))] * 2),
    "iterated": lambda m, x: inverted(rows_of(m, x)),
    "square": lambda m, x: contrast(*[whole(rows_of(m, x) @ rows_of(m, x).T)] * 2),
    "features": lambda m, x: (whole(z := rows_of(m, x)).T @ whole(z)).square().mean(),
    "loss": lambda m, x: rows_of(m, x).norm() + mse_loss(rows_of(m, x), x[:, 1]),
    "weights": lambda m, x: (x[:, 0] @ whole(m.head.weight).T).square().mean(),
    "scaled": lambda m, x: mse_loss(whole(rows_of(m, x)), whole(x[:, 1])),
}


@pytest.mark.parametrize("name", WHOLE)
def test_rows_that_are_divided_by_one_norm_and_compared_are_told(name):
    found = judged(lambda m, x: contrast(*[WHOLE[name](rows_of(m, x))] * 2)).findings[0]
    assert (found.kind, found.line) == ("misuse", line_with(name))
    assert "by the norm of the whole batch" in found.cause


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_rows_of_their_own_norms_and_matrices_of_one_are_not_told(name):
    assert "norm of the whole batch" not in judged(NOT_WHOLE[name]).text
