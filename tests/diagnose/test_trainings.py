"""What a monitor says of trainings that it was not written for, and what it finds in their files.

Each is run with several seeds, sizes and frequencies, so that no rule fits one case alone.
"""

import re

import pytest

pytest.importorskip("torch", reason="the trainings are torch's")

from trainings import (
    TRAININGS,
    VARIANTS,
    Setting,
    healthy,
    intermittent,
    misuse,
    silent,
    stuck,
)

from gradscaler.diagnose import read_run

assert all((healthy, intermittent, misuse, silent, stuck))  # each enters its trainings

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


@pytest.mark.parametrize("variant", range(VARIANTS))
@pytest.mark.parametrize("name", TRAININGS)
def test_the_verdict_gives_cause_culprit_and_advice(name, variant, path):
    run, kind, where, advice = TRAININGS[name]
    setting = Setting(variant, path)
    run(setting)
    verdict = setting.watching.verdict
    setting.watching.close()
    assert re.fullmatch(kind, verdict.kind), verdict
    assert where is None or (verdict.where is not None and where in verdict.where)
    assert re.search(advice, verdict.text)
    assert read_run(path).verdict == verdict
