"""The trainings of docs/reports.md fail as it says, and its repairs work; ``make reports``."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if os.environ.get("GRADSCALER_FRAMEWORK", "torch") != "torch":
    pytest.skip("the reports are PyTorch's", allow_module_level=True)

ROOT = Path(__file__).parents[2]
# One process, which imports PyTorch once and forks for each training: pytest must not be forked.
RUN = """
import json, sys
sys.path.insert(0, sys.argv[1])
import reports
found = [
    (each.title, each.said, reports.said_of(each.code),
     reports.said_of(each.repaired()) if each.change else None)
    for each in reports.reports()
]
json.dump(found, sys.stdout)
"""
NUMBER = re.compile(r"\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
PAGE = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
_, *parts = re.split(r"^### (.+)$", PAGE, flags=re.MULTILINE)
SECTIONS = dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.fixture(scope="module")
def found():
    """For each report: its title, its text, today's text, and that after its repair, if any."""
    command = [sys.executable, "-c", RUN, str(ROOT / "docs")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(result.stdout)


def is_healthy(said):
    """Whether a verdict finds nothing, or only parameters that no loss reaches."""
    judged = "Nothing needs fixing", "Nothing else was judged"
    return said.startswith("gradscaler: after ") and any(words in said for words in judged)


def words_and_numbers(text):
    """Another processor may round another way."""
    text = " ".join(text.split())
    return NUMBER.sub("0", text), [float(each.replace(",", "")) for each in NUMBER.findall(text)]


def test_the_page_shows_what_is_said_today(found):
    for title, said, today, _ in found:
        words, numbers = words_and_numbers(said)
        words_today, numbers_today = words_and_numbers(today)
        assert words_today == words, title
        assert numbers_today == pytest.approx(numbers, rel=0.05), title


def test_nothing_is_found_after_a_repair(found):
    repaired = {title: after for title, _, _, after in found if after is not None}
    assert len(repaired) >= 24
    bad = [title for title, said in repaired.items() if not is_healthy(said)]
    assert bad == []


def test_a_failure_that_is_not_found_is_said_to_be_missed(found):
    missed = [title for title, _, said, after in found if after is not None and is_healthy(said)]
    for title in missed:
        assert "**What it misses**" in SECTIONS[title], title


def test_each_section_is_a_short_training_with_its_address(found):
    assert list(SECTIONS) == [title for title, *_ in found]
    for title, section in SECTIONS.items():
        (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        assert 10 <= code.count("\n") <= 30, title
        assert "](https://github.com/" in section.split("```python")[0], title
        assert PAGE.count(f"[{title}](#") == 1, title  # in the table
