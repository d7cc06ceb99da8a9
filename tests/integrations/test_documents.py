"""docs/integrations.md says with which versions the packages were tried: those of these tests."""

import re
from importlib.metadata import version
from pathlib import Path

DOCUMENT = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
TESTED = DOCUMENT.partition("were tried by hand, on the CPU")[0]
ROWS = re.findall(r"^\| `([\w-]+)`.*? \| ([\d.]+) \|", TESTED, re.MULTILINE)


def test_the_document_names_the_versions_that_the_tests_ran_with():
    assert len(ROWS) == TESTED.count("\n| `") == 22
    for package, tried in ROWS:
        assert version(package) == tried, package


def test_the_document_names_the_number_of_optimizers_that_were_tried():
    names = re.findall(
        r'"(\w+)"', (Path(__file__).parent / "test_packages.py").read_text().split("# fmt: o")[1]
    )
    assert f"; {len(names)} of them were tried" in DOCUMENT
