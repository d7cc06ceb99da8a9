"""What a monitor sees of the targets and labels that a loss compares outputs with."""

import warnings

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import cross_entropy, huber_loss, mse_loss, nll_loss

from gradscaler.diagnose import FindingWarning, Monitor, read_run
from gradscaler.torch import GradScaler

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
ROWS, STEPS = 64, 120
OF_MEAN = "the variance of its targets, as of a model that gives their mean"


def trained(loss_of, rate=0.05, width=1, rows=ROWS, path=None):
    """The verdict after training a linear model with a loss of its outputs for inputs."""
    model = nn.Linear(4, width)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with Monitor(None, model, path=path) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", FindingWarning)
        for _ in range(STEPS):
            inputs = torch.randn(rows, 4)
            optimizer.zero_grad()
            loss_of(model(inputs), inputs).backward()
            optimizer.step()
    return monitor.verdict.text


def elsewhere(size=1.0, middle=0.0):
    """Targets that the inputs do not show, in two columns around a middle."""
    return size * torch.randn(ROWS, 2) + middle * torch.tensor([1.0, -1.0])


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out, _: mse_loss(out, elsewhere()),
        lambda out, _: mse_loss(elsewhere(), out),
        lambda out, _: 0.5 * mse_loss(out, elsewhere(), reduction="none").sum(1).mean(),
        lambda out, _: mse_loss(out, elsewhere(middle=0.5)),  # the mean of each column
        lambda out, _: mse_loss(out[:, 0], elsewhere()[:, 0]),
    ],
)
def test_a_regression_that_learns_the_mean_of_its_targets_alone_is_told(loss_of):
    text = trained(loss_of, width=2)
    assert OF_MEAN in text
    assert "look for exchanged axes" in text
    assert "Nothing wrong was seen" not in text


@pytest.mark.parametrize("rate", [0.002, 0.01, 0.05])
def test_a_regression_that_is_slow_is_not_told_to_give_a_mean(rate):
    assert OF_MEAN not in trained(
        lambda out, x: mse_loss(out, x.sum(1, keepdim=True) + torch.randn(ROWS, 1)), rate
    )


def test_noise_that_is_found_in_the_inputs_is_not_told():
    """Of a diffusion, whose outputs and loss begin as those of a mean."""

    def loss_of(out, inputs):
        return mse_loss(out * 0.2, inputs)

    assert OF_MEAN not in trained(loss_of, width=4)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out, _: huber_loss(out, elsewhere()),  # whose value for a mean is another
        lambda out, _: mse_loss(out, elsewhere()) + 0.1 * out.square().mean(),
        lambda out, _: mse_loss(out, torch.ones(ROWS, 2)),
        lambda out, _: mse_loss(out, out.flip(0)),  # both are outputs
        lambda out, _: mse_loss(out.sum(), torch.tensor(1.0)),
        lambda out, _: mse_loss(out[:0], elsewhere()[:0], reduction="sum"),
        lambda out, _: ((out - elsewhere()) ** 2).mean(),  # the graph keeps no targets
    ],
)
def test_of_other_losses_nothing_is_said(loss_of):
    assert OF_MEAN not in trained(loss_of, width=2)


@pytest.mark.parametrize("rows", [7, 8])
def test_targets_are_read_in_batches_of_eight_rows_or_more(rows, tmp_path):
    path = tmp_path / "run.jsonl"
    trained(lambda out, x: mse_loss(out, x[:, :1] + 3.0), rows=rows, path=path)
    seen = [each.targets for each in read_run(path).samples if each.norm is not None]
    assert len(seen) >= 6
    assert all((each is None) == (rows == 7) for each in seen)


def test_targets_are_read_in_closed_form(tmp_path):
    targets = torch.arange(float(ROWS))[:, None] * torch.tensor([1.0, 10.0])
    path = tmp_path / "run.jsonl"
    trained(lambda out, _: mse_loss(out * 0, targets), width=2, path=path)
    seen = next(each.targets for each in read_run(path).samples if each.targets)
    square = float(targets.square().mean())
    spread = (ROWS + 1) * ROWS / 12 * (1 + 100) / 2  # of 0 to n - 1 it is n (n + 1) / 12
    assert seen.error == pytest.approx(square)
    assert seen.variance == pytest.approx(spread)
    assert (seen.targets, seen.outputs) == (pytest.approx(square**0.5), 0.0)


def test_large_targets_are_read_in_a_part(tmp_path):
    path = tmp_path / "run.jsonl"
    targets = torch.randn(ROWS, 2000)
    trained(lambda out, _: mse_loss(out, targets), width=2000, path=path)
    seen = [each.targets for each in read_run(path).samples if each.targets]
    assert seen[0].variance == pytest.approx(float(targets[:, ::7].var(0).mean()))


FAR = "its targets are some"


def priced(inputs, size, middle):
    """Targets that the inputs show, of a size and around a middle."""
    return size * inputs.sum(1, keepdim=True) + middle


@pytest.mark.parametrize(
    ("loss", "size", "middle"),
    [(mse_loss, 1e5, 4e5), (huber_loss, 1e5, 4e5), (mse_loss, 1e4, 0.0), (mse_loss, 1.0, 1e4)],
)
def test_targets_that_are_far_above_the_outputs_are_told(loss, size, middle):
    text = trained(lambda out, x: loss(out, priced(x, size, middle)), rate=0.001)
    assert FAR in text
    assert "divided by their deviation" in text


@pytest.mark.parametrize(
    ("size", "middle", "rate"),
    [
        (1.0, 0.0, 0.001),
        (1.0, 30.0, 0.001),
        (1e5, 4e5, 1e3),  # a learning rate for them
        (0.0, 0.0, 0.001),
    ],
)
def test_targets_that_outputs_reach_are_not_told(size, middle, rate):
    assert FAR not in trained(lambda out, x: mse_loss(out, priced(x, size, middle)), rate)


def test_outputs_that_are_small_for_a_mean_of_0_are_not_told_as_small():
    text = trained(lambda out, _: mse_loss(0.01 * out, elsewhere()), rate=0.001, width=2)
    assert OF_MEAN in text
    assert FAR not in text


CLASSES = 5
SORTED = torch.arange(20 * CLASSES) // 20  # the labels of a data set, by class
SORTED_TOLD = "the data is sorted by class"


def classified(labels_of, steps=20, loss_of=cross_entropy, passes=1):
    """The verdict after training a linear model with labels for the number of each batch."""
    model = nn.Linear(4, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(None, model) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", FindingWarning)
        for step in range(steps):
            optimizer.zero_grad()
            for each in range(passes):
                labels = labels_of(step * passes + each)
                loss_of(model(torch.randn(len(labels), 4)), labels).backward()
            optimizer.step()
    return monitor.verdict.text


def batch_of(data, size):
    """A function that takes the batches of a data set one after another, again and again."""
    return lambda number: data.repeat(2)[number * size % len(data) :][:size]


@pytest.mark.parametrize(
    ("labels_of", "more"),
    [
        (batch_of(SORTED, 8), {}),
        (batch_of(SORTED.flip(0), 12), {}),
        (batch_of(SORTED.where(torch.arange(len(SORTED)) % 7 > 0, -100), 12), {}),
        (batch_of(SORTED, 8), {"loss_of": lambda out, y: nll_loss(out.log_softmax(1), y)}),
        (batch_of(SORTED, 8), {"loss_of": lambda out, y: cross_entropy(out, y) + out.mean()}),
        (batch_of(SORTED.repeat_interleave(2), 8), {"passes": 2}),
    ],
)
def test_data_that_is_sorted_by_class_is_told(labels_of, more):
    text = classified(labels_of, **more)
    assert SORTED_TOLD in text
    assert "shuffle=True" in text


def pairs(number):
    """Eight of one class and eight of another, as for embeddings."""
    first = number % (CLASSES - 2)
    return torch.tensor([first] * 8 + [first + 2] * 8)


@pytest.mark.parametrize(
    ("labels_of", "more"),
    [
        (batch_of(SORTED, 6), {}),  # such a batch may be of one class by chance
        (batch_of(SORTED[torch.randperm(100, generator=torch.manual_seed(0))], 10), {}),
        (batch_of(SORTED.reshape(CLASSES, 20).T.reshape(-1).clone(), 10), {}),
        (lambda number: torch.arange(16) // 4, {}),  # each step has the same classes
        (pairs, {}),
        (lambda number: torch.full((16,), int(number == 4)), {}),  # most labels are one class
        (lambda number: torch.full((16,), number % 2), {}),  # true and false in turns
        (lambda number: torch.full((16,), number // 15), {}),  # one task after another
        (batch_of(SORTED, 8), {"passes": CLASSES}),  # of which each adds another class
        (batch_of(SORTED, 8), {"steps": 9}),
    ],
)
def test_labels_that_look_sorted_by_class_are_not_told(labels_of, more):
    assert SORTED_TOLD not in classified(labels_of, **more)


def test_masks_of_one_class_are_not_told():
    """Of pictures, whose labels have the shape of a batch of rows."""

    def loss_of(out, labels):
        return cross_entropy(out.T[None], labels[None])

    assert SORTED_TOLD not in classified(batch_of(SORTED, 8), loss_of=loss_of)


def passes_of(loss_of, passes=4, before=lambda optimizer: None, path=None, scaler=None):
    """What samples count of steps that add up the gradients of some backward passes."""
    model = nn.Linear(4, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = torch.arange(20) % CLASSES
    with Monitor(scaler, model, path=path):
        for _ in range(6):
            optimizer.zero_grad()
            for each in range(passes):
                before(optimizer)
                loss = loss_of(model(torch.randn(20, 4)), labels, each)
                (loss if scaler is None else scaler.scale(loss)).backward()
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
    counts = [each.calls for each in read_run(path).samples if each.norm is not None]
    return [{name for name in calls if name.startswith("added_up ")} for calls in counts]


@pytest.mark.parametrize("passes", [4, 16])
@pytest.mark.parametrize("has_scaler", [False, True])
def test_losses_of_micro_batches_that_are_not_divided_are_counted(passes, has_scaler, tmp_path):
    scaler = GradScaler("cpu", init_scale=8.0) if has_scaler else None
    path = tmp_path / "run.jsonl"
    found = passes_of(lambda out, y, _: cross_entropy(out, y), passes, path=path, scaler=scaler)
    assert found == [{f"added_up {passes}"}] * 2


def by_turns(out, labels, number):
    return cross_entropy(out, labels) if number % 2 else out.square().mean()


@pytest.mark.parametrize(
    ("loss_of", "more"),
    [
        (lambda out, y, _: cross_entropy(out, y) / 4, {}),
        (lambda out, y, _: 0.25 * cross_entropy(out, y), {}),
        (lambda out, y, _: cross_entropy(out, y), {"passes": 3}),
        (lambda out, y, _: cross_entropy(out, y), {"before": lambda own: own.zero_grad()}),
        (
            lambda out, y, _: cross_entropy(out, y),
            {"before": lambda own: own.zero_grad(set_to_none=False)},
        ),
        (by_turns, {}),
    ],
)
def test_other_backward_passes_of_a_step_are_not_counted(loss_of, more, tmp_path):
    assert passes_of(loss_of, path=tmp_path / "run.jsonl", **more) == [set()] * 2


HIGH = "that of a guess among"
WORDS = 50


class Tied(nn.Module):
    """Predicts the next word by the table that embeds the present one."""

    def __init__(self, deviation):
        super().__init__()
        self.table = nn.Embedding(WORDS, 32)
        nn.init.normal_(self.table.weight, std=deviation)

    def forward(self, words):
        return self.table(words) @ self.table.weight.T


def of_words(deviation, rate, loss_of=cross_entropy):
    """The verdict on 40 steps that learn which word follows each."""
    model = Tied(deviation)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with Monitor(None, model) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", FindingWarning)
        for _ in range(40):
            words = torch.randint(WORDS, (64,))
            optimizer.zero_grad()
            loss_of(model(words), (words * 7 + 3) % WORDS).backward()
            optimizer.step()
    return monitor.verdict.text


def test_a_cross_entropy_that_begins_far_above_a_guess_is_told():
    text = of_words(1.0, 0.01)
    assert f"its first was far above 3.91, {HIGH} {WORDS} classes: the first outputs" in text
    assert "a deviation of 0.02" in text
    assert "steps to reach" in of_words(1.0, 0.06)


@pytest.mark.parametrize(
    ("deviation", "rate", "loss_of"),
    [
        (0.02, 0.01, cross_entropy),
        (0.7, 0.15, cross_entropy),  # it falls soon
        (0.02, 0.01, lambda out, y: cross_entropy(out, y, reduction="sum")),
        (0.02, 0.01, lambda out, y: cross_entropy(out, y, reduction="none").sum()),
        (1.0, 0.01, lambda out, y: mse_loss(out, 9.0 * nn.functional.one_hot(y, WORDS))),
        (1.0, 0.01, lambda out, y: cross_entropy(out[:, :2], y % 2)),
    ],
)
def test_a_cross_entropy_that_begins_near_a_guess_or_is_soon_there_is_not_told(
    deviation, rate, loss_of
):
    assert HIGH not in of_words(deviation, rate, loss_of)


class Slow:
    """A training on one batch, whose rate, targets and model are given."""

    def __init__(self, optimizer=torch.optim.SGD, rate=1e-4, classes=0, depth=1, tanh=nn.ReLU):
        layers = [layer for _ in range(depth) for layer in (nn.Linear(10, 10), tanh())]
        self.model = nn.Sequential(*layers, nn.Linear(10, classes or 1))
        self.optimizer = optimizer(self.model.parameters(), lr=rate)
        self.inputs, self.classes = torch.randn(100, 10), classes
        self.targets = self.inputs[:, :3].sum(1, keepdim=True)

    def verdict(self, schedule=None):
        with Monitor(None, self.model, tell=[].append) as monitor:
            for step in range(110):
                for group in self.optimizer.param_groups if schedule else ():
                    group["lr"] = schedule(step)
                self.optimizer.zero_grad()
                self.loss(self.model(self.inputs)).backward()
                self.optimizer.step()
        return monitor.verdict.text

    def loss(self, outputs):
        if self.classes:
            labels = (self.targets[:, 0] * 2).long() % self.classes
            return cross_entropy(outputs, labels)
        return mse_loss(outputs, self.targets)


RAISE = "If it should fall faster, raise that rate"


@pytest.mark.parametrize(
    "how", [{}, {"classes": 5}, {"optimizer": torch.optim.Adam, "rate": 1e-6, "classes": 5}]
)
def test_a_rate_that_is_too_small_is_told_alone(how):
    text = Slow(**how).verdict()
    assert RAISE in text
    assert "exchanged axes" not in text
    assert "labels of other rows" not in text


def shuffled(rate):
    slow = Slow(rate=rate)
    slow.targets = torch.randn(100, 1)
    return slow.verdict()


@pytest.mark.parametrize(
    "train",
    [
        lambda: shuffled(0.1),
        lambda: shuffled(0.02),
        lambda: Slow(rate=0.01).verdict(),
        lambda: Slow(classes=5, rate=0.1).verdict(),
        lambda: Slow(rate=0.001, depth=9, tanh=nn.Sigmoid).verdict(),
        lambda: Slow().verdict(lambda step: 1e-6 * step),
    ],
    ids=["no relation", "slowly", "learns", "learns classes", "vanishing", "warm-up"],
)
def test_a_rate_that_is_not_the_cause_is_not_told(train):
    assert RAISE not in train()
