"""DeepSpeed's engine under ``gradscaler run``: equal bits, its skips counted, the line named."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.engines.watched import CASES
from tests.support.both import run_both
from tests.support.marked_lines import lines_marked_in

SCRIPT = Path(__file__).with_name("watched.py")
LINE = Path(lines_marked_in(str(SCRIPT))("fails")).name
NAMES = [f"ZeRO {stage}, {dtype}" + ", fails" * is_bad for stage, dtype, _, is_bad in CASES]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the script prints with and without, and what is said of each training at its end."""
    folder = tmp_path_factory.mktemp("engines")
    ours, theirs, said = run_both(SCRIPT, folder=folder, OMP_NUM_THREADS="1")
    verdicts = " ".join(said.split()).split("gradscaler (rank 0): after")[1:]
    return ours, theirs, verdicts


def skipped_of(out):
    return [int(each) for each in re.findall(r"^skipped (\d+)$", out, re.MULTILINE)]


def test_weights_random_numbers_and_skips_are_equal(printed):
    ours, theirs = (re.findall(r"^digest \w+$", out, re.MULTILINE) for out in printed[:2])
    assert ours == theirs
    assert len(theirs) == len(CASES) == len(printed[2])
    assert skipped_of(printed[0]) == skipped_of(printed[1])


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: NAMES[number])
def test_the_verdict_counts_what_the_engine_skips_and_names_the_line(printed, number):
    verdict, skipped = printed[2][number], skipped_of(printed[1])[number]
    stage, dtype, _, is_bad = CASES[number]
    if is_bad:
        assert f"sqrt at {SCRIPT.parent}/{LINE}" in verdict
    if stage == 3 or dtype == "float16":
        assert verdict.startswith(f" 12 steps: {skipped or 'None'} of 12 steps")
    assert ("while the loss scale settled" in verdict) is (skipped > 0 and not is_bad)


def test_the_document_names_the_version_that_the_tests_ran_with():
    document = Path(__file__).parents[2] / "docs" / "integrations.md"
    assert f"DeepSpeed {version('deepspeed')} is in `make test-engines`" in document.read_text()
