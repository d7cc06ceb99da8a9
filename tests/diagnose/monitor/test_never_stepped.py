"""Backward passes, and no step of an optimizer: told at the end, unless something else steps."""

import pytest

pytest.importorskip("torch")

from inspect import currentframe

import torch
from torch import nn

from gradscaler.diagnose import Monitor, read_run
from gradscaler.diagnose._monitor import new_optimizers
from tests.support.marked_lines import lines_marked_in

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
line_with = lines_marked_in(__file__)


def end_with(optimizer):
    optimizer.step()


def by_hand(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.add_(p.grad, alpha=-0.1)


def without_gradients(optimizer):
    optimizer.zero_grad()
    optimizer.step()


def verdict_of(passes, after, path, is_scheduled=False):
    """The verdict on backward passes, after each of which a function is called."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    new_optimizers.note_made(optimizer, currentframe())  # made here
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50)
    new_optimizers.note_made(schedule, currentframe())
    told = []
    with Monitor(model=model, tell=told.append, path=path) as monitor:
        for _ in range(passes):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            after(optimizer)
            if is_scheduled:
                schedule.step()
    assert not [each for each in told[:-1] if "never called" in each.cause]
    return monitor.verdict


@pytest.mark.parametrize("is_scheduled", [False, True])
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_step_that_never_comes_is_told_at_the_end(path, is_scheduled):
    verdict = verdict_of(40, lambda _: None, path, is_scheduled)
    assert verdict.kind == "misuse"
    assert "step() was never called, in 40 backward passes" in verdict.text
    assert ("scheduler.step()" in verdict.text) is is_scheduled
    assert verdict.findings[0].line == line_with("made here")
    assert read_run(path).verdict == verdict


@pytest.mark.parametrize(
    ("passes", "after"), [(40, end_with), (40, by_hand), (40, without_gradients), (9, print)]
)
def test_steps_and_weights_that_the_script_moves_and_a_few_passes_are_not(passes, after, path):
    assert "never called" not in str(verdict_of(passes, after, path))
