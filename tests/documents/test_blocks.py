"""Every Python block of the README and of docs/ runs, in the framework that it is about.

Blocks of one page share their names, in their order. Pages in docs/start/ must bring all they use.
Other pages may use the names in ``tests/support/document_names.py``, such as a model or a batch. A
block that is not about PyTorch is marked by a comment in the line before it::

    <!-- framework: jax -->

Each block in docs/start/ that trains also runs as the body of a loop, under a monitor. Those of
docs/reports.md run in ``test_reports.py``.
"""

import ast
import importlib
import os
import re
from pathlib import Path

import pytest

import gradscaler
from gradscaler.diagnose import Monitor
from tests.support import document_names, ranks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "torch").replace("-", "_")
BLOCK = re.compile(
    r"^(?:<!-- framework: (?P<named>\w+)(?: on (?P<backend>\w+))? -->\n+)?"
    r"```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(page):
    """The framework, the backend, the first line and the code of each block of a page."""
    text = page.read_text()
    default = page.stem if page.parent.name == "start" else "torch"
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        yield match["named"] or default, match["backend"], line, match["code"]


MINE = {
    page: [
        (line, code)
        for name, backend, line, code in blocks(page)
        if name == FRAMEWORK and backend in (None, os.environ.get("KERAS_BACKEND"))
    ]
    for page in PAGES
}


def test_every_block_is_found():
    for page in PAGES:
        fences = len(re.findall(r"^\s*```python", page.read_text(), re.MULTILINE))
        assert fences == len(list(blocks(page))), page


def test_a_page_has_one_title():
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        titles = re.findall(r"^# .+$", text, re.MULTILINE)
        assert len(titles) == (0 if text.startswith("```{include}") or not text.strip() else 1), (
            page
        )


def test_every_page_installs_as_the_readme_does():
    pages = [page for page in PAGES if page.name != "releasing.md"]
    pages += (ROOT / "docs" / "notebooks").glob("*.ipynb")
    commands = [re.findall(r"pip install '([^'\[]*)\[", page.read_text()) for page in pages]
    assert len(set(commands[0])) == 1
    assert set(commands[0]) == {each for found in commands for each in found}


def test_every_framework_has_a_page_to_start_with():
    assert MINE[ROOT / "docs" / "start" / f"{FRAMEWORK}.md"]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if MINE[page] and page.name not in ("cookbook.md", "reports.md")],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "document"}
    if page.parent.name != "start":
        names |= getattr(document_names, f"on_{FRAMEWORK}")()
    with document_names.kept_settings(FRAMEWORK):
        for line, code in MINE[page]:
            # A traceback shows the line of the page.
            exec(compile("\n" * line + code, page, "exec"), names)
    for monitor in [value for value in names.values() if isinstance(value, Monitor)]:
        monitor.close()


CALL = re.compile(r"`(gradscaler\.(\w+)\.\w+\((?!\.\.\.)[^`]+\))`")


def test_the_calls_that_the_migration_says_to_write_make_scalers():
    calls = CALL.findall((ROOT / "docs" / "migration.md").read_text())
    assert {"torch", "jax", "keras", "paddle"} == {framework for _, framework in calls}
    for call in [call for call, framework in calls if framework == FRAMEWORK]:
        module = importlib.import_module(f"gradscaler.{FRAMEWORK}")
        names = {"gradscaler": gradscaler}
        if "inner" in call:
            names["inner"] = importlib.import_module(FRAMEWORK).optimizers.SGD()
        assert type(eval(call, names)).__module__.startswith(module.__name__)


# Readers copy each recipe of the cookbook as a script of its own.

COOKBOOK = ROOT / "docs" / "cookbook.md"
RECIPES = [(line, code) for line, code in MINE[COOKBOOK] if "__main__" not in code]
PROCESSES = [code for _, code in MINE[COOKBOOK] if "__main__" in code]


@pytest.mark.parametrize(("line", "code"), RECIPES, ids=[f"line {line}" for line, _ in RECIPES])
def test_a_recipe_is_a_short_script_that_trains(line, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "document"}
    exec(compile("\n" * line + code, COOKBOOK, "exec"), names)
    assert code.count("\n") < 40
    reasons = [outcome.reason for outcome in names["scaler"].history]
    assert len(reasons) >= 5
    assert reasons[-1] == "finite"
    assert set(reasons) <= {"finite", "overflow"}


@pytest.mark.rare("tests/torch/distributed trains in such processes")
@pytest.mark.parametrize("code", PROCESSES)
def test_a_recipe_of_many_processes_runs_as_a_script(code, tmp_path):
    assert code.count("\n") < 40
    (tmp_path / "recipe.py").write_text(code)
    ranks.output_of("recipe.py", cwd=tmp_path)


# Readers copy the blocks of the start pages into loops of their own.

START = ROOT / "docs" / "start" / f"{FRAMEWORK}.md"
EAGER = ("torch", "paddle", "tensorplay")
REPETITIONS = 40
STEPS = {"step", "minimize", "adjust", "value_and_grad"}  # the body of a loop calls one of these
LOOPS = {"fit", "train"}  # each is a loop itself
ONCE = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def called(statement):
    """The names of the functions that a statement calls; a definition calls none yet."""
    calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    names = {getattr(function, "attr", getattr(function, "id", None)) for function in calls}
    return set() if isinstance(statement, ONCE) else names


def body_of(code):
    """The statements that a loop over a block's training repeats; none if it does not train."""
    statements = ast.parse(code).body
    training = [statement for statement in statements if called(statement) & (STEPS | LOOPS)]
    if not training:
        return []
    bodies = [statement.body for statement in training if isinstance(statement, ast.For)]
    if bodies:
        return bodies[-1]
    loops = [statement for statement in training if called(statement) & LOOPS]
    return loops or [statement for statement in statements if not isinstance(statement, ONCE)]


def scaler_of(code, names):
    """The scaler that a block uses, by the first of these names."""
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    scalers = "scaler", "scale", "manager", "state", "optimizer"
    return names[next(name for name in scalers if name in used)]


def check_zeroed(scaler, model, monkeypatch):
    """Let ``scaler.scale`` fail if gradients are left over from the step before.

    A verdict may miss them: they are unscaled, so they hardly count beside scaled ones.
    """
    scale = scaler.scale

    def checked(loss):
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        left = [n for n, grad in gradients.items() if grad is not None and bool((grad != 0).any())]
        assert not left, "gradients are left over from the step before"
        return scale(loss)

    monkeypatch.setattr(scaler, "scale", checked)


@pytest.mark.one_backend  # a block that is about one of them runs there, above
def test_the_training_of_each_block_may_be_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "document"}
    num_trained = 0
    with document_names.kept_settings(FRAMEWORK):
        for line, code in MINE[START]:
            exec(compile("\n" * line + code, START, "exec"), names)
            body = ast.increment_lineno(ast.Module(body_of(code), []), line)
            if not body.body:
                continue
            scaler, compiled = scaler_of(code, names), compile(body, START, "exec")
            is_eager = hasattr(scaler, "add_observer")
            model = names.get("network", names.get("model"))
            with Monitor(scaler, model, every=1) as monitor, monkeypatch.context() as patched:
                if is_eager:
                    check_zeroed(scaler, model, patched)
                for _ in range(REPETITIONS):
                    exec(compiled, names)
                    if not is_eager:
                        monitor.record(scaler=scaler_of(code, names), loss=names.get("loss"))
            steps = monitor.history
            assert len(steps) == REPETITIONS
            assert monitor.verdict.kind == "normal", monitor.verdict
            assert sum(step.skipped for step in steps) < REPETITIONS / 4
            assert steps[-1].scale >= 2**10
            num_trained += 1
    assert num_trained


@pytest.mark.skipif(FRAMEWORK not in EAGER, reason="its page saves by functions of the framework")
def test_what_a_start_page_loads_is_all_that_it_has_trained(tmp_path, monkeypatch):
    from tests.support.eager import library

    def states():
        parts = ("model", "optimizer", "scheduler", "scaler")
        found = {name: names[name].state_dict() for name in parts if name in names}
        return library.exact(found)

    monkeypatch.chdir(tmp_path)
    names = {"__name__": "document"}
    for line, code in MINE[START]:
        exec(compile("\n" * line + code, START, "exec"), names)
    first, last = MINE[START][0][1], ast.parse(MINE[START][-1][1])
    saved = states()
    exec(compile(ast.Module(body_of(first), []), START, "exec"), names)
    trained = states()
    assert all(trained[name] != state for name, state in saved.items())
    last.body = [statement for statement in last.body if "save" not in called(statement)]
    exec(compile(last, START, "exec"), names)
    assert states() == saved
