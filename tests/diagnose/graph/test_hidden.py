"""Graphs that hide a part of themselves, and tensors that are not dense and real."""

import math

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradscaler import FixedScale
from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler
from tests.support.marked_lines import lines_marked_in

line_with = lines_marked_in(__file__)
pytestmark = pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")


def places(loss_of, flags, model=None, called=None):
    """The place known after each step; the numbers are bad in those marked "!"."""
    torch.manual_seed(0)
    model = model or nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler(policy=FixedScale(1.0))
    monitor = Monitor(scaler, model, stuck_after=50)
    found = []
    for flag in flags:
        optimizer.zero_grad()
        loss = loss_of(model if called is None else called, torch.randn(8, 4), flag == "!")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(monitor._log.counts.evidence.watched)
    monitor.close()
    return found


def exponential(h, is_bad):
    return (h * (1 + 1e4 * is_bad)).exp()  # exponential


def test_the_loss_of_a_checkpoint_is_read_without_running_its_block_again():
    runs = []

    def block(h, is_bad):
        runs.append(is_bad)
        return exponential(h, is_bad)

    def loss_of(model, x, is_bad):
        return checkpoint(block, model(x), is_bad, use_reentrant=False).mean()

    _, found = places(loss_of, ".!")
    assert (found.operation, found.line) == ("exp", line_with("exponential"))
    assert runs == [False, False, True, True]  # forward and backward


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_what_a_checkpoint_hides_is_not_certain_until_its_operations_are_watched(is_reentrant):
    def loss_of(model, x, is_bad):
        x = torch.where(torch.tensor(is_bad), math.nan, x)  # the batch
        x.requires_grad_(is_reentrant)
        return checkpoint(model, x, use_reentrant=is_reentrant).mean()

    *_, first, then = places(loss_of, ".!!")
    if not is_reentrant:
        assert first.is_likely
    assert then.line == line_with("the batch")
    assert not then.is_likely


def advantage(model, x, is_bad):
    with torch.no_grad():
        rewards = x[: 1 if is_bad else 8].sum(1)
        spread = rewards.std()  # spread
    return (model(x)[:, 0] * ((rewards - rewards.mean()) / spread).mean()).mean()  # reads


def prepared_batch(model, x, is_bad):
    x = (x - x.mean()) / (x.std() * (not is_bad))  # prepared
    return model(x).square().mean()


def kept_mean(model, x, is_bad):
    mean = torch.zeros(4)
    mean.add_(x.sum(0)).div_(0.0 if is_bad else 8.0)  # kept
    return (model(x) - mean).square().mean()


def teacher_in_half(model, x, is_bad):
    with torch.inference_mode():
        target = (model.weight.half() * (1e7 if is_bad else 1.0)).sum(1)  # teacher
    return (model(x) - target.float().clone()).square().mean()


@pytest.mark.filterwarnings("ignore:std:UserWarning")
@pytest.mark.parametrize(
    ("loss_of", "operation", "mark"),
    [
        (advantage, "std", "spread"),
        (prepared_batch, "div", "prepared"),
        (kept_mean, "div", "kept"),
        (teacher_in_half, "mul", "teacher"),
    ],
)
def test_an_operation_without_a_graph_is_named_when_the_failure_comes_again(
    loss_of, operation, mark
):
    """However irregular: here after 2, 5 and 4 steps."""
    *before, found = places(loss_of, "..!....!....!")
    assert before[2].kind == "input"
    assert (before[-1].operation, before[-1].line) == (operation, line_with(mark))
    assert (found.kind, found.module, found.operation) == ("forward", None, operation)


def test_a_tensor_from_outside_of_the_graph_is_said_to_be_that():
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 4), GradScaler(policy=FixedScale(1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    targets = torch.ones(8, 4), torch.full((8, 4), math.nan)
    with Monitor(scaler, model) as monitor:
        for step in range(40):
            optimizer.zero_grad()
            target = targets[step % 9 == 7]
            loss = (model(torch.ones(8, 4)) - target).square().mean()  # target
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        text = monitor.verdict.text
    read = f"from a tensor without a gradient, first read by sub at {line_with('target')}"
    assert read in text


@pytest.mark.parametrize("parts", [None, 2, 2.0], ids=["", "int", "float"])  # that are summed up
def test_compiled_code_is_one_operation_until_it_is_watched_uncompiled(parts):
    class Net(nn.Linear):
        def forward(self, inputs, factor):
            return (super().forward(inputs) * factor).exp()  # compiled

    def loss_of(model, x, is_bad):
        loss = model(x, torch.tensor(1 + 1e4 * is_bad)).mean()
        return loss / parts if parts else loss

    model = Net(4, 4)
    compiled = torch.compile(model, backend="aot_eager")
    *_, first, then = places(loss_of, "..!!", model, compiled)
    assert first.operation == "CompiledFunction"
    assert (then.operation, then.line) == ("exp", line_with("compiled"))


def test_rows_of_a_sparse_gradient_are_read():
    def loss_of(model, x, is_bad):
        rows = model(torch.tensor([0, 1, 2, 2]))
        return (rows - rows.detach() * is_bad).square().sum(1).sqrt().mean()  # rows

    *_, found = places(loss_of, ".!.!", nn.Embedding(5, 4, sparse=True))
    assert (found.kind, found.operation, found.line) == ("backward", "sqrt", line_with("rows"))


def test_complex_numbers_are_read():
    def loss_of(model, x, is_bad):
        spectrum = torch.fft.fft(model(x)) * (1 + is_bad * torch.tensor(1e30)) ** 2
        return spectrum.abs().mean()

    _, found = places(loss_of, ".!")
    assert (found.kind, found.operation) in (("forward", "mul"), ("input", "mul"))


def test_the_place_in_an_accumulated_step_is_that_of_its_bad_micro_batch():
    def loss_of(model, x, is_bad):
        return exponential(model(x), is_bad).mean() / 2

    model, scaler = nn.Linear(4, 4), GradScaler(policy=FixedScale(1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Monitor(scaler, model) as monitor:
        for is_bad in (False, False, False, True, False, False):
            scaler.scale(loss_of(model, torch.randn(8, 4), is_bad)).backward()
        scaler.step(optimizer)
        scaler.update()
        found = monitor._log.counts.evidence.watched
    assert (found.operation, found.line) == ("exp", line_with("exponential"))


def test_the_nodes_of_a_graph_that_is_not_kept_hold_no_tensors_afterwards():
    """Reading a graph keeps nothing of it alive."""
    import gc
    import weakref

    alive = []

    def loss_of(model, x, is_bad):
        hidden = model(x)
        alive.append(weakref.ref(hidden))
        return exponential(hidden, is_bad).mean()

    places(loss_of, ".!.")
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3
