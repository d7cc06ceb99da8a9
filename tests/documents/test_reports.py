"""The trainings of docs/reports.md fail as it says, and its repairs mend them; ``make reports``."""

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
    (each.title, each.code, each.said, reports.said_of(each.code), bool(each.change),
     reports.said_of(each.repaired()) if each.change else "")
    for each in reports.reports()
]
json.dump(found, sys.stdout)
"""
NUMBER = re.compile(r"\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
HEALTHY = re.compile(r"^gradscaler: after .*Nothing needs fixing\.$", re.DOTALL)


@pytest.fixture(scope="module")
def found():
    """For each report: its title, training, text, today's text, and that after its repair."""
    command = [sys.executable, "-c", RUN, str(ROOT / "docs")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return json.loads(
        subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    )


def words_and_numbers(text):
    """Another processor may round another way."""
    text = " ".join(text.split())
    return NUMBER.sub("0", text), [float(each.replace(",", "")) for each in NUMBER.findall(text)]


def test_the_page_shows_what_is_said_today(found):
    for title, _, said, today, *_ in found:
        words, numbers = words_and_numbers(said)
        words_today, numbers_today = words_and_numbers(today)
        assert words_today == words, title
        assert numbers_today == pytest.approx(numbers, rel=0.05), title


def test_nothing_is_found_after_a_repair(found):
    repaired = {title: after for title, *_, has_change, after in found if has_change}
    assert len(repaired) >= 24
    assert [title for title, said in repaired.items() if not HEALTHY.match(said.strip())] == []


def test_each_section_is_a_short_training_with_its_address():
    page = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    titles = re.findall(r"^### (.+)$", page, re.MULTILINE)
    sections = re.split(r"^### .+$", page, flags=re.MULTILINE)[1:]
    assert len(set(titles)) == len(titles) >= 24
    for title, section in zip(titles, sections, strict=True):
        (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        assert 10 <= code.count("\n") <= 30, title
        assert "https://github.com/" in section.split("```python")[0], title
        assert page.count(f"[{title}](#") == 1, title
