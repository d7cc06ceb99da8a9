"""The list of frameworks, and docs/contributing.md, which says what belongs to each."""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from gradscaler._formats.layouts import FORMATS, LAYOUTS
from gradscaler._frameworks import FRAMEWORKS

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "contributing.md").read_text()
TABLE = re.findall(r"^\| `(.+?)` \| (?:.+: `(.+?)`|.+?) \|$", GUIDE, re.MULTILINE)
# Environments without a framework.
TOOLS = {"test", "nox", "lint", "integrations", "engines", "package", "docs", "release"}
# The files to compare with the guide, without results and files that tests write.
SOURCES = [
    path
    for folder in ("src", "tests", "examples", "benchmarks", "requirements")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".txt") and path.is_file()
] + [ROOT / "noxfile.py", ROOT / "pyproject.toml"]


def environments():
    """Each framework's environment, as the tasks have it."""
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ENVIRONMENTS":
            frameworks_in = ast.literal_eval(node.value)
            return {name: where for where, names in frameworks_in.items() for name in names}
    raise AssertionError("noxfile.py has no ENVIRONMENTS")


ENVIRONMENT_OF = environments()


def spelled(template, package):
    """A path or a text of the guide for one framework; one for each of its formats."""
    text = template.replace("NAME", package)
    if "ENVIRONMENT" in text:
        assert package in ENVIRONMENT_OF, f"noxfile.py has no environment for {package}"
        text = text.replace("ENVIRONMENT", ENVIRONMENT_OF[package])
    text = text.replace("EXTRA", package.replace("_", "-"))
    return {text.replace("FORMAT", name) for name in FRAMEWORKS[package]}


@pytest.mark.parametrize("package", FRAMEWORKS)
@pytest.mark.parametrize(("place", "entry"), TABLE)
def test_each_framework_has_each_entry_of_the_guide(package, place, entry):
    (pattern,) = spelled(place, package)
    texts = [path.read_text() for path in ROOT.glob(pattern)]
    assert texts, f"{pattern} is missing"
    for wanted in spelled(entry, package):
        assert any(wanted in text for text in texts), f"{pattern} lacks {wanted}"


@pytest.mark.parametrize(("place", "entry"), TABLE)
def test_a_framework_without_an_environment_misses_no_other_place(place, entry, monkeypatch):
    monkeypatch.delitem(ENVIRONMENT_OF, "torch")
    if "ENVIRONMENT" in place + entry:
        with pytest.raises(AssertionError, match=r"noxfile\.py has no environment for torch"):
            test_each_framework_has_each_entry_of_the_guide("torch", place, entry)
    else:
        test_each_framework_has_each_entry_of_the_guide("torch", place, entry)


def test_the_guide_names_the_place_of_every_file_that_is_named_after_a_framework():
    names = "|".join(sorted(FRAMEWORKS, key=len, reverse=True))
    places = re.findall(r"`([\w/.*]*NAME[\w/.*]*)`", GUIDE)
    for path in SOURCES:
        file = path.relative_to(ROOT).as_posix()
        place = re.sub(rf"(?<![a-z])(?<!/_on_)({names})(?![a-z]|_like)", "NAME", file, count=1)
        named = place != file and path.parent.name != "requirements"
        assert not named or any(fnmatch(place, f"{known}*") for known in places), file


def test_the_guide_names_every_file_that_lists_the_frameworks():
    places = {path for place, _ in TABLE for path in ROOT.glob(place)}
    lists = {
        path
        for path in SOURCES
        if all(re.search(rf"\b{name.replace('_', '.')}\b", path.read_text()) for name in FRAMEWORKS)
    }
    assert lists <= places
    assert ROOT / "src" / "gradscaler" / "_frameworks.py" in lists


def test_every_extra_is_a_framework_or_a_tool():
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
    names = re.findall(r"^([\w-]+) = ", extras.partition("\n\n")[0], re.MULTILINE)
    assert set(names) == {name.replace("_", "-") for name in FRAMEWORKS} | {"diagnose", "demo"}


def test_every_environment_is_of_a_framework_or_of_the_tests():
    assert set(ENVIRONMENT_OF) == set(FRAMEWORKS)
    files = {path.stem for path in (ROOT / "requirements").iterdir()}
    assert files - {"lowest-jax", "lowest-tensorflow"} == {*ENVIRONMENT_OF.values()} | TOOLS


def test_every_format_has_a_layout_and_every_layout_is_of_a_format():
    assert tuple(dict.fromkeys(layout.format for layout in LAYOUTS)) == FORMATS


def test_every_adapter_and_every_folder_of_tests_is_of_a_framework():
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/conftest.py")}
    several = {"conformance", "device", "distributed", "eager", "keras_like"}
    shared = several | {"diagnose", "engines", "integrations"}
    assert folders - shared == set(FRAMEWORKS)
    packages = {path.parent.name for path in (ROOT / "src/gradscaler").glob("[!_]*/__init__.py")}
    assert packages - {"policies", "checkpoint", "diagnose", "demo", "simulate"} == set(FRAMEWORKS)


def test_every_path_that_the_tasks_name_exists():
    """Those that `make test` does not run stop at one that does not, or run nothing for it."""
    files = "noxfile.py", "tests/support/mutants.py"
    text = "".join((ROOT / file).read_text() for file in files)
    paths = re.findall(r'"((?:src|tests)/[^"{]+)"', text)
    assert len(paths) > 40
    assert [path for path in paths if not any(ROOT.glob(path))] == []
