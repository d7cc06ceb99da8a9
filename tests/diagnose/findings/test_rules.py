"""What the numbers of a run must be for a finding, by evidence without a training."""

import pytest

from gradscaler import NonfiniteGradient
from gradscaler.diagnose import Located
from gradscaler.diagnose._findings import judge
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._record.events import Events
from gradscaler.diagnose._record.lines import Bins, Optimizers, Sample, Skip
from gradscaler.diagnose._record.step import Step
from tests.support import run_files


def causes(evidence):
    return " ".join(each.cause for each in judge(evidence).findings)


@pytest.mark.parametrize(("power", "is_told"), [(0, False), (1, True), (2, True), (4, False)])
def test_a_loss_that_falls_with_the_scale_in_each_skip_is_told(power, is_told):
    scales = [2.0**exponent for exponent in range(16, 8, -1)]
    past = [Step(step, scale, True, scale**power) for step, scale in enumerate(scales, 1)]
    said = causes(Evidence(100, len(past), past=tuple(past), scale=scales[-1]))
    assert ("The loss falls with the loss scale" in said) == is_told


@pytest.mark.parametrize(
    ("steps", "count", "is_told"), [(4, 4, False), (5, 5, True), (100, 24, False), (100, 25, True)]
)
def test_gradients_are_unzeroed_if_a_quarter_of_the_steps_shows_it(steps, count, is_told):
    said = causes(Evidence(steps, 0, events=Events().after({"unzeroed": count})))
    assert ("the backward pass added" in said) == is_told


@pytest.mark.parametrize(
    ("eps", "last", "is_told"),
    [(2.0**-20, 1.0, True), (2.0**-25, 1.0, False), (2.0**-20, 0.5, False), (None, 1.0, False)],
)
def test_an_eps_above_the_gradients_is_told_where_the_loss_stands(eps, last, is_told):
    past = tuple(Step(step, 1.0, False, 1.0 if step < 20 else last) for step in range(1, 41))
    seen = Sample(40, 1.0, (), 40, (), norm=1e-7, histogram=Bins(-24, (1, 9)))
    held = Optimizers(eps=eps)
    evidence = Evidence(40, 0, first=past[0], past=past, measured=(seen, seen), optimizers=held)
    assert ("below the optimizer's eps" in causes(evidence)) == is_told


@pytest.mark.parametrize(("zero", "is_told"), [(1.0, True), (0.95, True), (0.85, False)])
def test_gradients_are_dead_if_nine_tenths_are_0_and_none_is_small(zero, is_told):
    rest = 1.0 - zero
    parameters = {
        "first": run_files.parameter(1.0, 0.0, 0.0, 0.0, (0, [])),
        "second": run_files.parameter(1.0, 0.0, 0.0, 0.0, (0, [])),
        "third": run_files.parameter(zero, 0.0, 0.0, 0.0, (-2, [9])),
    }
    shares = run_files.shares(zero, 0.0, 0.0, rest, 0.0, 0.0)
    line = run_files.sample(
        *(50, 2.0**16, [], 50, [], 1.0, 1.0, shares, (-2, [9])), parameters=parameters
    )
    run = run_files.run_of(run_files.start(), line)
    said = causes(Evidence(50, 0, sample=run.samples[0], scale=2.0**16))
    assert ("exactly 0" in said) == is_told


@pytest.mark.parametrize(
    ("weights", "later", "every", "is_told"),
    [(200.0, 3.0, 1, True), (20.0, 3.0, 1, False), (200.0, 1.0, 1, False), (200.0, 3.0, 5, False)],
)
def test_weights_that_grew_and_a_loss_that_stays_above_its_start_diverge(
    weights, later, every, is_told
):
    skipped = dict.fromkeys(range(7, 7 + 9 * every, every), 60.0)
    losses = [skipped.get(step, 2.0 if step < 7 else later) for step in range(1, 61)]
    past = tuple(Step(n, 1.0, n in skipped, loss) for n, loss in enumerate(losses, 1))
    held = Optimizers(weights=(10.0, weights))
    evidence = Evidence(60, 9, weights=(10.0, weights), past=past, first=past[0], optimizers=held)
    assert ("The weights' norm grew from 10" in causes(evidence)) == is_told


@pytest.mark.parametrize(("processes", "is_told"), [(1, False), (2, True)])
def test_an_inf_that_stays_may_be_in_the_memory_of_a_hook_of_several_processes(processes, is_told):
    given = Located(None, "input", "", "float32", 1, 0, 8, 1.0, 1.0, operation="mul")
    bad = NonfiniteGradient("weight", (2,), "float32", 0, 2, 1.0)
    skips = tuple(Skip(20 + n, 2.0 ** (10 - n), float("nan"), (bad,)) for n in range(20))
    streak = {"skips_in_a_row": 20, "skips": skips, "located": given, "world_size": processes}
    (finding, *_) = judge(Evidence(40, 20, **streak)).findings
    assert "reset it, as no skip does" in finding.action
    assert ("PowerSGD" in finding.action) == is_told
