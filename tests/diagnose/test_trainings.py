"""The monitor's verdicts on trainings that it was not written for, and those from their files.

Each is run with several seeds, sizes and frequencies, so that no rule fits one case alone.
"""

import re
import warnings

import pytest

pytest.importorskip("torch", reason="the trainings are torch's")

from gradscaler.diagnose import FindingWarning, read_run
from tests.support.diagnosed_trainings import (
    TRAININGS,
    VARIANTS,
    Setting,
    by_hand,
    healthy,
    intermittent,
    lost,
    misuse,
    reported,
    silent,
    stuck,
    unmoved,
)

assert all(
    (by_hand, healthy, intermittent, lost, misuse, reported, silent, stuck, unmoved)
)  # each enters its trainings

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


KINDS = {kind for _, kind, *_ in TRAININGS.values()}
OF_KIND = {kind: [name for name in TRAININGS if TRAININGS[name][1] == kind] for kind in KINDS}
MANY = [name for names in OF_KIND.values() for number, name in enumerate(names) if number % 4]
of_many = pytest.mark.rare("each kind has a quarter of its trainings, at least one")


@pytest.mark.covering(1)  # both variants of a training get the same kind
@pytest.mark.parametrize("variant", range(VARIANTS))
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[of_many] * (name in MANY)) for name in TRAININGS]
)
def test_the_verdict_gives_cause_culprit_and_advice(name, variant, path):
    run, kind, where, advice = TRAININGS[name]
    setting = Setting(variant, path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", FindingWarning)
        run(setting)
        before = setting.watching.verdict
        setting.watching.close()
    verdict = setting.watching.verdict  # it counts the skips since it was first given
    assert verdict.kind == before.kind
    said = [str(each.message) for each in warned if isinstance(each.message, FindingWarning)]
    assert bool(said) == (verdict.kind != "normal")
    # 60, and the class beside a module whose name is a number.
    assert max(len(each.text.split()) for each in verdict.findings) <= 61
    assert re.fullmatch(kind, verdict.kind), verdict
    assert where is None or (verdict.where is not None and where in verdict.where)
    assert re.search(advice, verdict.text)
    assert read_run(path).verdict == verdict
