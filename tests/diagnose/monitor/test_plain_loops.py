"""A monitor of loops of PyTorch that have no scaler."""

import math
import threading

import pytest

pytest.importorskip("torch")

import torch

from gradscaler.diagnose import Monitor, read_run
from tests.support import plain_loops
from tests.support.marked_lines import lines_marked_in
from tests.support.plain_loops import LOOPS, Training

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
line_with = lines_marked_in(plain_loops.__file__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STEPS = 12
# What is a step of the monitor: a run of backward passes, and the steps that follow them.
STEPS_IN_ONE = {"adversarial": 2}
# No graph shows the operation, or the loss holds its gradient, which divides by the root.
HIDDEN = "gradients_by_hand", "checkpointed", "compiled", "penalised"


def run(name, dtype="float32", fails=(), steps=STEPS, **options):
    """A training that a monitor has watched, the monitor, and what it has told."""
    training, told = Training(name, DTYPES[dtype], fails), []
    monitor = Monitor(model=training.models, tell=told.append, **options)
    training.run(steps)
    return training, monitor, told


def same(first, second):
    """Whether two structures hold the same bits."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(
            first.contiguous().view(-1).view(torch.uint8),
            second.contiguous().view(-1).view(torch.uint8),
        )
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    are_nan = isinstance(first, float) and math.isnan(first) and math.isnan(second)
    return first == second or are_nan


@pytest.mark.parametrize("fails", [(), (7,)], ids=["", "fails"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOOPS)
def test_a_monitor_changes_no_bit_of_a_training(name, dtype, fails, path):
    alone = Training(name, DTYPES[dtype], fails)
    alone.run(STEPS)
    training, monitor, _ = run(name, dtype, fails, path=path, every=3)
    monitor.close()
    assert same(alone.states(), training.states())
    before = Training(name, DTYPES[dtype])
    assert not same(
        before.models["G" if name == "adversarial" else "net"].state_dict(),
        next(iter(training.models.values())).state_dict(),
    )


@pytest.mark.parametrize("name", LOOPS)
def test_every_step_of_a_loop_is_seen_once(name):
    _, monitor, told = run(name)
    history = monitor.history
    monitor.close()
    assert [step.step for step in history] == [*range(1, STEPS * STEPS_IN_ONE.get(name, 1) + 1)]
    assert not any(step.skipped or step.nonfinite for step in history)
    assert name == "gradients_by_hand" or all(step.loss is not None for step in history)
    assert told == []
    assert monitor.bad_step is None
    assert monitor.verdict.kind == "normal"


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("fails", [(), (7,)], ids=["", "fails"])
def test_only_optimizers_that_take_turns_are_said_to_count_one_by_one(name, fails, path):
    _, monitor, _ = run(name, fails=fails, path=path)
    monitor.close()
    number = 1 + 6 * STEPS_IN_ONE.get(name, 1)  # the critic's step of the seventh iteration
    words = f"step {number} was applied" if fails else "steps had a gradient"
    is_by_turns = f"optimizer {words}" in monitor.verdict.text
    assert words in monitor.verdict.text
    assert is_by_turns == (name == "adversarial")
    assert read_run(path).verdict == monitor.verdict


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LOOPS)
def test_the_first_bad_step_is_told_when_it_happens_with_its_operation_and_line(name, dtype, path):
    training = Training(name, DTYPES[dtype], (7,))
    told = []
    monitor = Monitor(
        model=training.models, tell=lambda f: told.append((training.step, f)), path=path
    )
    training.run(STEPS)
    monitor.close()
    step, finding = told[0]
    assert step == 7
    assert finding.steps == (monitor.bad_step,)
    assert monitor.bad_step == (13 if name == "adversarial" else 7)
    assert finding.kind == ("activations" if name == "penalised" else "nan")
    if name not in HIDDEN:
        assert f"by the gradient of sqrt at {line_with('the root')}" in finding.text
    assert len(told) == 1  # what follows are its consequences
    assert read_run(path).verdict == monitor.verdict
    assert monitor.verdict.findings == (finding,)


def test_a_loop_that_goes_back_after_each_bad_step_is_told_once_and_goes_on():
    model, told = torch.nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    with Monitor(model=model, tell=told.append) as monitor:
        for step in range(1, 61):
            divisor = 0.0 if step in (10, 40) else 1.0
            loss = (model(torch.ones(8, 4)) / torch.full((1,), divisor)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.load_state_dict(first)
    assert len(told) == 1
    assert "step 10 was applied" in told[0].cause
    assert len(monitor.history) == 60


def test_monitors_of_two_threads_say_that_the_watch_ended():
    verdicts, is_first_done, may_end = [], threading.Event(), threading.Event()

    def train(done, wait):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Monitor(model=model) as monitor:
            for _ in range(2):
                model(torch.ones(4)).sum().backward()
            done()
            wait()
        optimizer.step()
        verdicts.append(monitor.verdict)

    first = threading.Thread(target=train, args=(is_first_done.set, may_end.wait))
    first.start()
    is_first_done.wait()
    train(may_end.set, first.join)
    for verdict in verdicts:
        assert verdict.text == (
            "No step was seen. So nothing was judged. The watch ended before step 1: a second "
            "thread trains, and gradscaler watches one."
        )
    assert len(verdicts) == 2
