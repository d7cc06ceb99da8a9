"""The kinds of findings, docs/stuck.md, and the recipe of docs/contributing.md for a new kind."""

import ast
import re
from pathlib import Path

import pytest

from gradscaler.diagnose import Verdict, read_run
from gradscaler.diagnose._findings import DETECTORS

# A verdict and a file give a kind by its name alone.
from gradscaler.diagnose._record.kinds import KINDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "stuck.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
RECIPE = GUIDE.partition("## Add a finding\n")[2].partition("\n## ")[0]
PLACES = re.findall(r"^\d\. `(.+?)`: [^`]+(?:`\w+`)?(?:: (`.+`))?$", RECIPE, re.MULTILINE)
ENTRIES = [(place, entry.strip("`")) for place, entry in PLACES if entry]
FINDINGS = sorted((ROOT / "src/gradscaler/diagnose/_findings").glob("*.py"))
# The files that name kinds, without results and files that tests write.
SOURCES = [
    *(path for folder in ("src", "tests", "examples") for path in (ROOT / folder).rglob("*.py")),
    *(ROOT / "docs").rglob("*.md"),
]

OF_RANKS = {"ranks", "elsewhere"}  # several processes are needed to show them
EXCEPTIONS = {
    "tests/support/diagnosed_trainings/*.py": OF_RANKS,
    "examples/torch_stuck.py": OF_RANKS | {"restart"},  # which needs two runs
}


def rows(first_heading, second_heading):
    """The first cells of the table of docs/stuck.md with these headings."""
    _, found, rest = PAGE.partition(f"| {first_heading} | {second_heading} |")
    assert found
    _, _, *lines = rest.partition("\n\n")[0].splitlines()
    return [line.split("|")[1] for line in lines]


def kinds_in(cells):
    """The kinds that cells name, in order."""
    return [kind for cell in cells for kind in re.findall(r"`(\w+)`", cell)]


def test_the_recipe_has_at_most_eight_places_each_a_file():
    assert 0 < len(PLACES) == len(re.findall(r"^\d\. ", RECIPE, re.MULTILINE)) <= 8
    assert all(any(ROOT.glob(place)) for place, _ in PLACES)
    assert len(RECIPE.strip().splitlines()) <= 14


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("place", "entry"), ENTRIES)
def test_each_kind_has_each_entry_of_the_recipe(kind, place, entry):
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob(place)]
    wanted = entry.replace("KIND", kind)
    has_entry = any(wanted in text for text in texts)
    needs_entry = kind not in EXCEPTIONS.get(place, ())
    assert has_entry == needs_entry, f"{place}: {wanted}"


def test_the_recipe_names_every_file_that_lists_the_kinds():
    places = {path for place, _ in PLACES for path in ROOT.glob(place)}
    lists = {
        path
        for path in SOURCES
        if all(re.search(rf"[\"`]{kind}[\"`]", path.read_text("utf-8")) for kind in KINDS)
    }
    assert lists <= places
    assert ROOT / "src/gradscaler/diagnose/_record/kinds.py" in lists


def test_the_page_has_a_row_for_each_verdict_on_one_process():
    kinds = kinds_in(rows("Verdict", "What happens"))
    assert set(kinds) == KINDS.keys() - OF_RANKS
    assert len(kinds) == len(set(kinds))
    links = [f" [`{kind}`](#{kind}) " for kind in kinds]
    assert rows("Verdict", "What happens") == links


def test_a_kind_says_what_it_means_in_a_few_words():
    for kind in KINDS.values():
        assert 15 <= len(kind.meaning.split()) <= 40
        assert kind.meaning.isascii()


def test_the_page_says_for_each_verdict_which_frameworks_give_it():
    assert set(kinds_in(rows("Verdict", "PyTorch"))) == set(KINDS)


def test_the_page_and_the_docstring_order_the_causes_of_skips_as_the_ranks_are():
    causes = [kind for kind, row in KINDS.items() if row.explains_skips and kind != "ranks"]
    listed = PAGE.partition("Its verdict is the most severe, in the order ")[2].partition(".\n")[0]
    assert re.findall(r"`(\w+)`", listed) == causes
    assert f"verdict: {', '.join(causes)};" in " ".join(read_run.__doc__.split())


def test_the_docstring_of_a_verdict_explains_each_kind_once():
    explained = re.findall(r'``"(\w+)"``', Verdict.__doc__)
    assert set(explained) == KINDS.keys()
    assert len(explained) == len(set(explained))


def finders():
    """The names of the functions of the evidence alone that may give a finding."""
    for path in FINDINGS:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                arguments = [ast.unparse(each.annotation) for each in node.args.args]
                if arguments == ["Evidence"] and ast.unparse(node.returns) == "Finding | None":
                    yield node.name


def test_every_function_that_finds_something_is_asked():
    asked = {each.find.__name__ for each in DETECTORS}
    called = set(re.findall(r"\w+", (FINDINGS[0].parent / "__init__.py").read_text("utf-8")))
    assert len([*finders()]) > 10
    assert {*finders()} <= asked | called
    assert len({each.find for each in DETECTORS}) == len(DETECTORS)


def test_every_finding_that_is_made_is_of_a_kind():
    made = {
        node.args[0].value
        for path in FINDINGS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "Finding"
        and isinstance(node.args[0], ast.Constant)
    }
    assert len(made) > 10
    assert made <= KINDS.keys()
