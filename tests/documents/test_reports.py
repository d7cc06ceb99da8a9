"""The trainings of docs/reports.md fail as it says, and its repairs work; ``make reports``."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.support import programs

FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "torch")
ROOT = Path(__file__).parents[2]
# One process, which forks for each training: pytest must not be forked.
RUN = """
import json, sys
sys.path.insert(0, sys.argv[1])
import reports
(each,) = (each for each in reports.reports() if each.title == sys.argv[2])
codes = [each.code, *[each.repaired()] * bool(each.change)]
today = [reports.said_of(code, each.framework) for code in codes]
print("\\n" + json.dumps([each.title, each.said, *today, *[None] * (2 - len(today))]))
"""
NUMBER = re.compile(r"\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
PAGE = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
_, *parts = re.split(r"^### (.+)$", PAGE, flags=re.MULTILINE)
SECTIONS = dict(zip(parts[::2], parts[1::2], strict=True))


def framework_of(section):
    (found,) = re.findall(r"^(?:<!-- framework: (\w+) -->\n)?```python$", section, re.MULTILINE)
    return found or "torch"


OWN = [title for title, section in SECTIONS.items() if framework_of(section) == FRAMEWORK]
if not OWN or os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow":
    pytest.skip("the page has no report of this framework", allow_module_level=True)

some = pytest.mark.some(8, "diagnose/test_trainings.py has trainings of each kind")


@pytest.fixture(scope="module", params=OWN)
def report(request, tmp_path_factory):
    """A report's title, its text, today's text, and that after its repair, if any."""
    folder = tmp_path_factory.mktemp("report")
    done = programs.run("-c", RUN, ROOT / "docs", request.param, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # a framework may print at its import


def is_healthy(said):
    """Whether a verdict finds nothing, or only parameters that no loss reaches."""
    judged = "Nothing wrong was seen", "Nothing else was judged", "the losses are finite"
    judged += ("show nothing wrong",)
    words = " ".join(said.split())
    return words.startswith("gradscaler: after ") and any(each in words for each in judged)


def words_and_numbers(text):
    """Another processor may round another way."""
    text = " ".join(text.split())
    return NUMBER.sub("0", text), [float(each.replace(",", "")) for each in NUMBER.findall(text)]


@some
def test_the_page_shows_what_is_said_today(report):
    _, said, today, _ = report
    words, numbers = words_and_numbers(said)
    words_today, numbers_today = words_and_numbers(today)
    assert words_today == words
    assert numbers_today == pytest.approx(numbers, rel=0.05)


@some
def test_nothing_is_found_after_a_repair(report):
    *_, after = report
    assert after is None or is_healthy(after)


@some
def test_a_failure_that_is_not_found_is_said_to_be_missed(report):
    title, _, said, after = report
    if after is not None and is_healthy(said):
        assert "**What it misses**" in SECTIONS[title]


def test_each_section_is_a_short_training_with_its_address():
    assert sum("```diff" in section for section in SECTIONS.values()) >= 24
    for title, section in SECTIONS.items():
        (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        assert 10 <= code.count("\n") <= 30, title
        assert "](https://" in section.split("```python")[0], title
        assert PAGE.count(f"[{title}](#") == 1, title  # in the table
