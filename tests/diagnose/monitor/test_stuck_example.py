"""The trainings that docs/stuck.md walks through: each gets its verdict, and the page quotes it."""

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the trainings are torch's")

from gradscaler.diagnose import read_run
from tests.support import programs
from tests.support.run_files import HEADLINES

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "torch_stuck.py"
PAGE = (ROOT / "docs" / "stuck.md").read_text(encoding="utf-8")
OF_ONE_RUN = [kind for kind in HEADLINES if kind not in ("elsewhere", "ranks", "restart")]
CULPRITS = {
    "parameter": "hidden.weight",
    "activations": "output",
    "nan": "hidden.weight",
    "floor": "output.weight",
}

spec = importlib.util.spec_from_file_location("torch_stuck", SCRIPT)
torch_stuck = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch_stuck)

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


def without_numbers(text):
    """Another processor may round another way."""
    return re.sub(r"[\d.]+", "0", " ".join(text.split()))


def test_there_is_a_training_and_a_section_for_each_verdict():
    assert set(torch_stuck.TRAININGS) == set(OF_ONE_RUN)
    sections = set(HEADLINES)
    assert set(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) == sections


@pytest.mark.parametrize("kind", OF_ONE_RUN)
@pytest.mark.some(5, "test_trainings.py has each kind")
def test_each_training_gets_its_verdict_which_the_page_quotes(tmp_path, capsys, kind):
    torch_stuck.main([kind, "--runs", str(tmp_path)])
    run = read_run(tmp_path / f"{kind}.jsonl")
    assert run.verdict.kind == kind
    assert kind not in CULPRITS or run.verdict.where == CULPRITS[kind]
    is_stuck = kind in ("parameter", "activations", "loss", "nan", "floor", "divergence")
    steps = torch_stuck.TRAININGS[kind]().steps
    assert run.num_steps < steps if is_stuck else run.num_steps == steps
    printed = without_numbers(capsys.readouterr().out)
    assert without_numbers(run.verdict.text) in printed
    assert printed in without_numbers(PAGE)


def test_it_runs_as_a_script(tmp_path):
    result = programs.run(SCRIPT, "loss", cwd=tmp_path, is_strict=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("loss, after 20 steps: loss\n")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_training_is_refused_by_name(capsys):
    with pytest.raises(SystemExit) as stopped:
        torch_stuck.main(["nun"])
    assert stopped.value.code == 2
    assert "'nun'" in capsys.readouterr().err
