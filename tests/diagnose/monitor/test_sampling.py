"""Which steps are sampled, and that the loss of every step is recorded all the same."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from gradscaler import DynamicScale
from gradscaler.diagnose import Monitor, read_run

# These tests of the rule take millions of steps, too many for a monitor.
from gradscaler.diagnose._monitor.gradient_sample import is_in_window, is_sampled
from tests.support import run_files


def sampled(every, windows):
    return [step for step in range(1, every * windows + 1) if is_in_window(step, every)]


@pytest.mark.parametrize("every", [1, 2, 3, 7, 10, 100, 128])
def test_each_window_of_steps_has_one_sample_and_the_first_is_its_last(every):
    steps = sampled(every, 40)
    assert [(step - 1) // every for step in steps] == list(range(40))
    assert steps[0] == every


def test_the_place_in_the_window_moves_by_the_golden_ratio():
    golden = (math.sqrt(5) - 1) / 2
    back = [math.floor(100 * (window * golden % 1)) for window in range(500)]
    assert sampled(100, 500) == [100 * (k + 1) - b for k, b in enumerate(back)]


@pytest.mark.parametrize("every", [10, 64, 100])
@pytest.mark.parametrize("period", [2, 3, 5, 10, 16, 50, 64, 100, 128, 500])
def test_each_batch_of_a_periodic_order_is_sampled_about_equally_often(every, period):
    windows = 30 * period
    seen = [step % period for step in sampled(every, windows)]
    shares = [seen.count(batch) for batch in range(period)]
    # Where the period is longer than the window, a batch is in few of the windows.
    assert min(shares) >= 15
    assert max(shares) <= 45


@pytest.mark.parametrize(
    ("every", "early"),
    [(every, []) for every in (1, 3, 10, 50)]
    + [(every, [2, 5, 10, 20, 50]) for every in (51, 100, 10_000)],
)
@pytest.mark.parametrize("before", [0, 120])
def test_early_steps_of_a_run_are_sampled_too_unless_the_first_comes_soon(every, early, before):
    steps = [step for step in range(before + 1, before + 301) if is_sampled(step, every, before)]
    windows = [step for step in range(before + 1, before + 301) if is_in_window(step, every)]
    assert sorted({*windows, *(before + step for step in early)}) == steps


def test_a_step_far_into_a_run_has_a_sample_in_its_window():
    first = 2**50 * 100 + 1
    assert sum(is_in_window(step, 100) for step in range(first, first + 100)) == 1


def test_a_monitor_samples_these_steps(path):
    steps = sampled(7, 10)
    run = recorded(path, 7, [(False, 1.0)] * steps[-1])
    assert [sample.step for sample in run.samples] == steps


# Losses.


def recorded(path, every, steps, last=None):
    """Record whether each step was skipped and its loss, and the gradients of the last one."""
    policy = DynamicScale()
    scaler = SimpleNamespace(policy=policy, state=policy.init())
    with Monitor(scaler, path=path, every=every, on_stuck="continue") as monitor:
        for number, (skipped, loss) in enumerate(steps, 1):
            gradients = last if number == len(steps) else None
            monitor.record(finite=not skipped, loss=loss, gradients=gradients)
    return read_run(path)


def test_the_loss_of_every_step_is_in_the_file_however_far_apart_samples_are(path):
    run = recorded(path, 10_000, [(step % 100 == 0, 1 / step) for step in range(1, 2_501)])
    assert run.losses == {step: 1 / step for step in range(1, 2_501)}
    assert run.skipped == tuple(range(100, 2_501, 100))
    assert max(sample.steps for sample in run.samples) == 1_000  # as many as are remembered


def test_a_sample_that_is_due_when_the_history_is_full_keeps_its_gradients(path):
    gradients = {"w": np.float32([3.0])}
    *_, early, sample = recorded(path, 1_050, [(False, 1.0)] * 1_050, gradients).samples
    assert (sample.step, sample.norm, len(sample.losses)) == (1_050, 3.0, 1_000)
    assert early.step == 50


def test_a_step_without_a_loss_keeps_the_others_in_their_places(path):
    run = recorded(path, 4, [(False, loss) for loss in (None, 2.0, math.nan, None, None)])
    assert repr(run.losses) == repr({2: 2.0, 3: math.nan})
    assert [sample.step for sample in run.samples] == [4, 5]
    assert run.samples[1].losses == ()


def test_a_loss_that_no_list_of_losses_holds_comes_from_its_sample_or_skip():
    seen = [(4, 4, [], 0.9), (10, 6, [7], 0.5), (20, 10, [], None)]
    samples = [run_files.sample(step, 8.0, [], n, skips, loss) for step, n, skips, loss in seen]
    run = run_files.run_of(*samples, run_files.skip(7, 8.0, 0.7), run_files.skip(8, 8.0))
    assert list(run.losses.items()) == [(4, 0.9), (7, 0.7), (10, 0.5)]
