"""When a detector is asked, and which of the findings are reported."""

import pytest

from gradscaler.diagnose import _findings
from gradscaler.diagnose._findings import DETECTORS, judge
from gradscaler.diagnose._findings.detector import Phase, Role, detector
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.kinds import KINDS
from gradscaler.diagnose._record.lines import BadStep, Skip

STREAK = Evidence(20, 20, skips=(Skip(20, 1.0),), skips_in_a_row=20)
BAD_STEP = Evidence(1, 0, bad_step=BadStep(1, float("nan")), has_scaler=False)


def of(kind, phase=Phase.MISUSE, **asked):
    """A detector that finds a kind in any evidence."""
    return detector(phase, **asked)(lambda evidence: Finding(kind, kind, ""))


def kinds_of(evidence, *detectors):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_findings, "DETECTORS", detectors)
        return [each.kind for each in judge(evidence).findings]


def test_the_detectors_are_asked_in_the_order_of_their_phases():
    phases = [each.phase for each in DETECTORS]
    assert phases == sorted(phases)
    assert {*phases} == {*Phase}


def test_of_a_phase_the_first_finding_is_reported():
    one_phase = of("dead"), of("misuse"), of("stalled", Phase.STALLED)
    assert kinds_of(Evidence(1, 0), *one_phase) == ["dead", "stalled"]


@pytest.mark.parametrize("cause", [kind for kind, row in KINDS.items() if row.explains])
def test_what_a_finding_explains_is_not_reported_beside_it(cause):
    for effect in KINDS[cause].explains:
        pair = of(cause, Phase.MISUSE), of(effect, Phase.SCALE)
        assert kinds_of(Evidence(1, 0), *pair) == [cause]
        assert kinds_of(Evidence(1, 0), pair[1]) == [effect]


def test_what_speaks_of_a_scaler_is_asked_only_where_there_is_one():
    pair = of("misuse", needs_scaler=True), of("stalled", Phase.STALLED)
    assert kinds_of(Evidence(1, 0), *pair) == ["misuse", "stalled"]
    assert kinds_of(Evidence(1, 0, has_scaler=False), *pair) == ["stalled"]


@pytest.mark.parametrize(
    ("evidence", "asked", "kind"),
    [(STREAK, "in_streak", "floor"), (BAD_STEP, "at_bad_step", "loss")],
    ids=["streak", "bad step"],
)
def test_of_steps_that_fail_the_cause_is_told_first_and_the_rest_beside_them(evidence, asked, kind):
    beside, cause, not_asked = (
        of("stalled", Phase.STATE, **{asked: Role.BESIDE}),
        of("misuse", **{asked: Role.CAUSE}),
        of("dead", Phase.DEAD),
    )
    assert kinds_of(evidence, beside, cause, not_asked) == ["misuse", kind, "stalled"]
