"""What a report says first: what to do; and what its loss is."""

from tests.support import run_files
from tests.support.reports import explained

SCALES = [(1, 0.25)]


def test_a_report_begins_with_the_action_which_stands_there_alone():
    run = run_files.run_of(run_files.sample(100, 0.25, SCALES, 100, [], 2.0))
    (finding,) = run.verdict.findings
    first, _, rest = explained(run, width=1000).partition("\n")
    assert first.strip() == finding.action
    assert finding.cause in rest
    assert finding.action not in rest


def test_a_report_says_that_a_loss_is_the_share_of_a_micro_batch():
    text = "the share of a micro-batch"
    sample = run_files.sample(100, 0.25, SCALES, 100, [], 2.0)
    assert text not in explained(run_files.run_of(sample), width=1000)
    several = run_files.run_of({**sample, "num_losses": 4})
    assert several.num_losses == 4
    assert text in explained(several, width=1000)
