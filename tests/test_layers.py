"""Who may import whom: the layers of docs/contributing.md, read from the source.

An import counts wherever it is: in a function, or for type checkers alone. One by a text, as
``import_module`` does it, does not: ``gradscaler`` and its doctor find the adapters that way.
"""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import gradscaler

PACKAGE = Path(gradscaler.__file__).parent
TESTS = Path(__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# The modules that each part may import. Adapters do not import each other, and no code that trains
# imports the diagnosis.
RULES = {"errors", "outcome", "policies"}
EAGER = RULES | {"_formats", "_eager"}
TORCH_LIKE = EAGER | {"_torch_like"}
ROOMS = {"diagnose._record", "diagnose._gradients", "diagnose._findings"}
TABLE = {
    "errors": set(),
    "outcome": set(),
    "_frameworks": set(),
    "_atomic": set(),
    "_notebook": set(),
    "_in_memory": set(),
    "policies": {"errors"},
    "_formats": RULES | {"_frameworks"},
    "_eager": RULES,
    "_torch_like": EAGER,
    "_on_torch": TORCH_LIKE,
    "_keras_like": RULES,
    "torch": TORCH_LIKE | {"_frameworks", "_in_memory", "_on_torch"},
    "tensorplay": TORCH_LIKE | {"_frameworks"},
    "paddle": EAGER | {"_frameworks"},
    "jax": RULES | {"_frameworks"},
    "keras": RULES | {"_frameworks", "_keras_like", "_on_torch"},
    "tf_keras": RULES | {"_frameworks", "_keras_like"},
    "mindspore": RULES | {"_frameworks"},
    "gradscaler": RULES | {"_frameworks", "_run_script"},
    "checkpoint": RULES | {"_atomic", "_formats", "_frameworks"},
    # The rooms of the diagnosis, from the ground up.
    "diagnose._record": RULES | {"_notebook"},
    "diagnose._operations": {"diagnose._record"},
    "diagnose._gradients": RULES | {"diagnose._record"},
    "diagnose._graph": {
        "_in_memory",
        "_notebook",
        "diagnose._record",
        "diagnose._gradients",
        "diagnose._operations",
    },
    "diagnose._seams": {"diagnose._record", "diagnose._gradients", "diagnose._graph"}
    | {"diagnose._operations"},
    "diagnose._locate": {"diagnose._record", "diagnose._gradients", "diagnose._graph"}
    | {"diagnose._operations", "diagnose._seams"},
    "diagnose._findings": RULES
    | {"diagnose._record", "diagnose._gradients", "diagnose._operations"},
    "diagnose._monitor": RULES
    | ROOMS
    | {"_in_memory", "_notebook"}
    | {"diagnose._locate", "diagnose._graph", "diagnose._operations", "diagnose._seams"},
    "diagnose.report": {"_atomic"} | ROOMS,
    "diagnose.simulate": RULES | ROOMS | {"diagnose.report"},
    "diagnose._logs": {"diagnose._record", "diagnose.report"},
    "diagnose": ROOMS | {"diagnose._locate", "diagnose._monitor"},
    "demo": {"_frameworks", "torch", "diagnose", "diagnose.report"},
    "_doctor": {"_frameworks", "gradscaler"},
    "_run_script": {
        "_frameworks",
        "_in_memory",
        "_notebook",
        "torch",
        "diagnose",
        "diagnose._record",
        "diagnose.report",
    }
    | {"diagnose._locate", "diagnose._graph", "diagnose._findings", "diagnose._monitor"}
    | {"diagnose._seams", "diagnose._gradients"},
    "__main__": {"_atomic", "_doctor", "_frameworks", "_run_script", "gradscaler", "checkpoint"}
    | {"demo"}
    | {"diagnose", "diagnose.report", "diagnose.simulate", "diagnose._logs"},
}

# Private modules that others may import: by whom.
EVERYONE = set(TABLE)
PRIVATE = {
    "policies._checks": EVERYONE,
    "policies._presets": EVERYONE,
    "policies._spelling": EVERYONE,
    "checkpoint._files": {"__main__"},
    "torch._install": {"_run_script"},
    "diagnose._logs": {"__main__"},
    "diagnose.report._content": {"__main__", "diagnose._logs", "diagnose.simulate"},
    "diagnose.report._picture": {"demo"},
    "diagnose.report._plain": {"__main__"},
    "diagnose.report._terminal": {"__main__"},
    "diagnose.report._watch": {"__main__"},
    "diagnose.report._words": {"diagnose._logs", "diagnose.simulate"},
    "diagnose.simulate": {"__main__"},
}


def imports(code):
    """The names of this package that code imports, dotted, without ``gradscaler.``."""
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno} says from . import: write the whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            root, _, rest = name.partition(".")
            if root == "gradscaler":
                yield rest


def is_in(name, module):
    return f"{name}.".startswith(f"{module}.")


def part(name):
    """The row of the table that a dotted name belongs to: a package, or a room of the diagnosis."""
    first, *inner = name.split(".")
    room = ".".join([first, *inner[:1]])
    if first == "diagnose" and f"gradscaler.{room}" in MODULES:
        return room
    return first if f"gradscaler.{first}" in MODULES else "gradscaler"


def forbidden(importer, code):
    """The imports of code in the part ``importer`` that the table forbids."""
    found = set()
    for name in imports(code):
        imported = part(name)
        inner = name.removeprefix(imported).split(".")[1:]
        if imported == importer:
            continue
        private = any(each.startswith("_") for each in inner)
        shared = any(is_in(name, each) and importer in by for each, by in PRIVATE.items())
        if imported not in TABLE[importer] or (private and not shared):
            found.add(name)
    return found


def module_of(name):
    """The module that a dotted name is, or is in."""
    name = f"gradscaler.{name}".removesuffix(".")
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def circle(codes):
    """Modules that import each other in a circle, or None; ``codes`` are by the modules' names."""
    graph = {
        module: {module_of(name) for name in imports(code)} - {module}
        for module, code in codes.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]


def test_every_part_is_in_the_table():
    assert {part(name.partition(".")[2]) for name in MODULES} == set(TABLE)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_the_table_allows(module):
    importer = part(module.partition(".")[2])
    assert forbidden(importer, MODULES[module].read_text(encoding="utf-8")) == set()


def test_no_modules_import_each_other_in_a_circle():
    assert circle({name: path.read_text("utf-8") for name, path in MODULES.items()}) is None


def test_the_table_itself_has_no_circle():
    TopologicalSorter(TABLE).prepare()


def rooms():
    """The rooms of the diagnosis, in the order of docs/contributing.md."""
    guide = (TESTS.parent / "docs" / "contributing.md").read_text("utf-8")
    listed = guide.partition("The rooms of `diagnose/`")[2].partition("\n\n`tests/")[0]
    return [f"diagnose.{name}" for name in re.findall(r"^    (\w+) ", listed, re.MULTILINE)]


def test_a_room_imports_only_the_rooms_above_it_in_the_guide():
    assert set(rooms()) == {name for name in TABLE if name.startswith("diagnose.")}
    for index, room in enumerate(rooms()):
        assert TABLE[room] & set(rooms()) <= set(rooms()[:index])


def test_each_room_has_a_folder_of_tests():
    folders = {path.parent.name for path in TESTS.glob("diagnose/*/test_*.py")}
    assert folders == {name.removeprefix("diagnose.").lstrip("_") for name in rooms()}


def test_every_exception_is_needed():
    used = {
        (known, importer)
        for module, path in MODULES.items()
        for importer in [part(module.partition(".")[2])]
        for name in imports(path.read_text("utf-8"))
        for known in PRIVATE
        if is_in(name, known) and not is_in(known, importer)
    }
    listed = {(known, each) for known, by in PRIVATE.items() if by is not EVERYONE for each in by}
    assert listed <= used
    assert {known for known, _ in used} == set(PRIVATE)


@pytest.mark.parametrize(
    ("importer", "code", "found"),
    [
        (
            "policies",
            "from gradscaler._eager.scaler import EagerScaler",
            "_eager.scaler.EagerScaler",
        ),
        ("_eager", "from gradscaler import torch", "torch"),
        ("paddle", "import gradscaler.torch.scaler", "torch.scaler"),
        ("keras", "def f():\n    from gradscaler.torch import GradScaler", "torch.GradScaler"),
        ("torch", "if TYPE_CHECKING:\n    from gradscaler import diagnose", "diagnose"),
        ("torch", "from gradscaler import checkpoint", "checkpoint"),
        ("torch", "import gradscaler", ""),
        ("_torch_like", "from gradscaler.policies.amax import _DOUBTS", "policies.amax._DOUBTS"),
        ("demo", "from gradscaler.diagnose._record import lines", "diagnose._record.lines"),
        ("demo", "from gradscaler.torch import _install", "torch._install"),
        (
            "diagnose._record",
            "from gradscaler.diagnose._findings import judge",
            "diagnose._findings.judge",
        ),
        (
            "diagnose._findings",
            "from gradscaler.diagnose._locate.locate import locate",
            "diagnose._locate.locate.locate",
        ),
        ("diagnose._monitor", "from gradscaler import diagnose", "diagnose"),
        (
            "diagnose.report",
            "from gradscaler.diagnose.simulate import replay",
            "diagnose.simulate.replay",
        ),
    ],
)
def test_an_import_against_the_table_is_noticed(importer, code, found):
    assert forbidden(importer, code) == {found}


@pytest.mark.parametrize(
    ("importer", "code"),
    [
        ("torch", "from gradscaler.torch._install import install"),
        ("torch", "import torch, numpy"),
        ("demo", "from gradscaler.diagnose.report._picture import png_of"),
        ("jax", "from gradscaler.policies import _checks"),
        ("diagnose._findings", "from gradscaler.diagnose._record.lines import Sample"),
    ],
)
def test_other_imports_are_not(importer, code):
    assert forbidden(importer, code) == set()


def test_a_relative_import_is_noticed():
    with pytest.raises(AssertionError, match="line 1"):
        forbidden("torch", "from . import scaler")


def test_a_circle_is_noticed():
    there = "def f():\n    from gradscaler.policies.amax import AmaxScale"
    back = "from gradscaler.policies.state import ScaleState"
    codes = {"gradscaler.policies.state": there, "gradscaler.policies.amax": back}
    assert set(circle(codes)) == set(codes)
    assert circle({**codes, "gradscaler.policies.state": ""}) is None


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_named_tuple_has_another_base(module):
    """Python 3.10 cannot make such a class."""
    classes = (
        n for n in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(n, ast.ClassDef)
    )
    bases = [list(map(ast.unparse, each.bases)) for each in classes]
    assert all(names == ["NamedTuple"] for names in bases if "NamedTuple" in names)
