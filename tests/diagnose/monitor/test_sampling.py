"""Which steps are sampled, and that the loss of every step is recorded all the same."""

import math

import pytest

from gradscaler.diagnose import read_run
from gradscaler.diagnose._findings import judge
from gradscaler.diagnose._monitor.gradient_sample import is_sampled
from gradscaler.diagnose._monitor.step_log import Step, StepLog
from gradscaler.diagnose._run.lines import Sample, Skip, Start
from gradscaler.diagnose._run.run import Run
from gradscaler.diagnose._run.writer import RunFile

START = Start("torch", "float16", 100, 0, {}, "")


def sampled(every, windows):
    return [step for step in range(1, every * windows + 1) if is_sampled(step, every)]


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


def test_a_step_far_into_a_run_has_a_sample_in_its_window():
    first = 2**50 * 100 + 1
    assert sum(is_sampled(step, 100) for step in range(first, first + 100)) == 1


# Losses.


def log_into(path):
    return StepLog([RunFile(path, START)], 0, "continue", 20, judge=lambda log: judge(log.evidence))


def test_the_loss_of_every_step_is_in_the_file_however_far_apart_samples_are(path):
    log = log_into(path)
    for step in range(1, 2_501):
        log.add(Step(step, 8.0, skipped=step % 100 == 0, loss=1 / step))
    log.close()
    run = read_run(path)
    assert run.losses == {step: 1 / step for step in range(1, 2_501)}
    assert run.skipped == tuple(range(100, 2_501, 100))
    assert [sample.step for sample in run.samples] == [1_000, 2_000, 2_500]


def test_a_sample_that_is_due_when_the_history_is_full_keeps_its_gradients(path):
    log = log_into(path)
    for step in range(1, 1_001):
        log.add(Step(step, 8.0, skipped=False, loss=1.0))
    log.add_sample(1.0, norm=3.0)
    log.close()
    (sample,) = read_run(path).samples
    assert (sample.step, sample.norm, len(sample.losses)) == (1_000, 3.0, 1_000)


def test_a_step_without_a_loss_keeps_the_others_in_their_places(path):
    log = log_into(path)
    for step, loss in enumerate([None, 2.0, math.nan, None], 1):
        log.add(Step(step, 8.0, skipped=False, loss=loss))
    log.add_sample()
    log.add(Step(5, 8.0, skipped=False))
    log.close()
    run = read_run(path)
    assert repr(run.losses) == repr({2: 2.0, 3: math.nan})
    assert run.samples[1].losses == ()


def test_a_loss_that_no_list_of_losses_holds_comes_from_its_sample_or_skip():
    samples = Sample(10, 8.0, (), 10, (7,), 0.5), Sample(20, 8.0, (), 10, ())
    run = Run((START,), samples, (Skip(7, 8.0, 0.7), Skip(8, 8.0)), ())
    assert list(run.losses.items()) == [(7, 0.7), (10, 0.5)]
