"""The recipe for a policy in docs/contributing.md, and the rule that it rests on."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from gradscaler.policies import OwnPolicy

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "contributing.md").read_text()
RECIPE = GUIDE.partition("\n## Add a policy\n")[2].partition("\n## ")[0]
PLACES = re.findall(r"^\d\. `(.+?)`: .+: `(.+?)`$", RECIPE, re.MULTILINE)
CLASSES = [
    node
    for path in sorted((ROOT / "src/gradscaler/policies").glob("*.py"))
    for node in ast.parse(path.read_text("utf-8")).body
    if isinstance(node, ast.ClassDef) and node.name != "Policy"
]
NAMES = [
    each.name
    for each in CLASSES
    if {"init", "update"} <= {getattr(part, "name", "") for part in each.body}
]
# Files that may ask for a policy's class: two describe the rules that frameworks' files hold, one
# names a rule in a config, and two use PyTorch's kernel and a shortcut for one rule.
MAY_ASK = {
    "_formats/layouts.py",
    "_keras_like/wrapper.py",
    "_on_torch/operations.py",
    "_on_torch/shortcuts.py",
    "checkpoint/__init__.py",
}


def asks(code):
    """Whether code asks an object for a policy's class: by isinstance, type() or check_policy."""
    classes = {*NAMES, "Rule", "OwnPolicy"}
    for node in ast.walk(ast.parse(code)):
        parts = []
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("isinstance", "issubclass", "check_policy")
        ):
            parts = node.args[1:]
        elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node.left):
            parts = node.comparators
        names = (name for part in parts for name in ast.walk(part) if isinstance(name, ast.Name))
        if any(name.id in classes for name in names):
            return True
    return False


def test_the_policies_of_the_package_are_those_that_files_may_hold():
    assert {kind.__name__ for kind in get_args(OwnPolicy)} == set(NAMES)


def test_the_recipe_has_all_its_places():
    assert len(PLACES) == len(re.findall(r"^\d\.", RECIPE, re.MULTILINE)) > 4


@pytest.mark.parametrize(("place", "entry"), PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_each_policy_has_each_entry_of_the_recipe(name, place, entry):
    wanted = entry.replace("NAME", name)
    found = any(wanted in path.read_text() for path in ROOT.glob(place))
    assert found, f"{place} lacks {wanted}"


@pytest.mark.parametrize("name", NAMES)
def test_each_docstring_that_lists_policies_has_each(name):
    texts = {path: path.read_text() for path in (ROOT / "src" / "gradscaler").glob("*/*.py")}
    lists = {
        path: text.partition(" policy: ")[2].partition(":class:`gradscaler.Policy`")[0]
        for path, text in texts.items()
        if " policy: the rule" in text and ":class:`gradscaler.Policy`" in text
    }
    assert len({path.parent for path in lists}) > 5
    if name == "FixedScale":  # MindSpore has scalers of its own for one, and refuses it
        lists = {path: text for path, text in lists.items() if path.parent.name != "mindspore"}
    assert [path for path, text in lists.items() if f":class:`gradscaler.{name}`" not in text] == []


def test_few_files_ask_for_a_policy_s_class():
    package = ROOT / "src" / "gradscaler"
    asking = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if asks(path.read_text("utf-8"))
    }
    assert asking == MAY_ASK


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(policy, (DynamicScale, AmaxScale))",
        "check_policy(policy, OwnPolicy)",
        "type(policy) is not DynamicScale",
    ],
)
def test_a_question_for_a_class_is_noticed(code):
    assert asks(code)
    assert not asks("is_fixed(policy) and isinstance(policy, Policy)")
