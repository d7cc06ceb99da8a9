"""An evaluation that leaves a NaN in a variable of the script's, though each loss was finite."""

import math
import sys
import textwrap
import weakref
from collections import deque
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

import gradscaler
from gradscaler._run_script.variables import RunningNans, means_nan, nan_among
from gradscaler.diagnose import read_run
from tests.support import programs

NAN = math.nan


class Trainer:
    __module__ = "__main__"

    def __init__(self, **own):
        vars(self).update(own)


class Search:
    """As one of scikit-learn's, whose ``error_score`` is NaN."""

    def __init__(self):
        self.error_score = NAN


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ({"train_loss": 1.0, "eval_loss": NAN}, "eval_loss"),
        ({"val_ppl": np.float32(NAN)}, "val_ppl"),
        ({"test_acc": torch.tensor(NAN, dtype=torch.bfloat16)}, "test_acc"),
        ({"losses": [1.0, NAN]}, "losses"),
        ({"scores": deque([torch.tensor(1.0), torch.tensor(NAN)])}, "scores"),
        ({"history": {"train": [1.0], "val_loss": [1.0, NAN]}}, "val_loss"),
        ({"trainer": Trainer(best_metric=NAN)}, "best_metric"),
        ({"loss": 1.0, "best_loss": math.inf, "val": -math.inf}, ""),
        ({"losses": [NAN, 1.0], "val_losses": [], "scores": None}, ""),
        ({"scores": torch.tensor([1.0, NAN]), "metrics": [[NAN]]}, ""),
        ({"x": NAN, "fill_value": NAN, "interval": NAN, "NAN_LOSS": NAN}, ""),
        ({"class_scores": [0.5, NAN], "acc_per_class": NAN, "per_class_acc": [NAN]}, ""),
        ({"search": Search(), "math": math, "score_of": lambda: NAN}, ""),
        ({"epoch_loss": True, "val_loss": "nan"}, ""),
    ],
)
def test_a_number_or_the_latest_of_a_list_is_found_by_its_name(names, found):
    assert nan_among(names) == found


TRAINING = """
import torch
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, labels = torch.randn(8, 4), torch.arange(8) % 3
of = torch.nn.functional.cross_entropy
for _ in range(12):
    optimizer.zero_grad()
    loss = of(model(inputs), labels)
    loss.backward()
    optimizer.step()
best = float("inf")
with torch.no_grad():
    eval_loss = of(model(inputs), labels.{}).item()
"""
WORDS = (
    "steps had a gradient of NaN or Inf. The script's eval_loss is NaN in the end, though no loss"
)


@pytest.mark.parametrize(("change", "is_nan"), [("fill_(-100)", True), ("clone()", False)])
def test_the_verdict_says_it_and_not_that_nothing_needs_fixing(tmp_path, change, is_nan):
    (tmp_path / "script.py").write_text(TRAINING.format(change))
    command = "-m", "gradscaler", "run", "-o", "runs", "script.py"
    done = programs.run(*command, cwd=tmp_path, is_strict=True)
    said = " ".join(done.stderr.split())
    assert (done.returncode, done.stdout) == (0, "")
    assert (WORDS in said, "Nothing wrong was seen" in said) == (is_nan, not is_nan)
    (file,) = (tmp_path / "runs").iterdir()
    assert read_run(file).verdict.text in said


@pytest.fixture
def cells(monkeypatch):
    """Runs cells of a notebook, whose variables are given."""
    calls = {}
    events = SimpleNamespace(register=calls.__setitem__, unregister=lambda name, _: calls.pop(name))
    shell = SimpleNamespace(events=events, compile=SimpleNamespace(format_code_name=lambda _: None))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))

    def run(code, **names):
        calls["pre_run_cell"](None)
        exec(TRAINING.format("clone()"), {})
        vars(sys.modules["__main__"]).update(names)
        info = SimpleNamespace(raw_cell=code)
        calls["post_run_cell"](SimpleNamespace(error_in_exec=None, info=info))

    yield run
    vars(sys.modules["__main__"]).pop("eval_loss", None)


def test_a_variable_is_that_of_the_cell_that_names_it(tmp_path, cells):
    watch, said = gradscaler.watch(tmp_path), []
    for code in ("train(); eval_loss = evaluate()", "train(); my_eval_loss = 1"):
        cells(code, eval_loss=NAN)
        said.append(watch.verdict.text)
    watch.stop()
    assert [WORDS in text for text in said] == [True, False]


def in_main(evaluate, before="None"):
    """The training in a function, which evaluates after each four steps."""
    setup, _, rest = TRAINING.partition("for _ in range(12):")
    loop = f"val_loss = {before}\nfor step in range(60):{rest}".partition("best =")[0]
    body = f"{loop}    if step % 4 == 3:\n        val_loss = {evaluate}\n"
    inner = textwrap.indent(f"{body}print(val_loss)\n", "    ")
    return f"{setup}def main():\n{inner}\nmain()\n"


FEW, NEVER = "of(model(inputs), labels * 0 - 100).item()", "float('nan') if step > 99 else val_loss"


@pytest.mark.parametrize(
    ("evaluate", "before", "is_told"),
    [
        (FEW, "None", True),
        (NEVER, "float('nan')", False),  # it stands for an evaluation to come
        (f"{FEW} if step < 30 else 1.0", "None", False),
        (f"{FEW} if step > 9 else float('nan')", "None", False),  # it may be meant
    ],
)
def test_a_function_that_runs_is_looked_at_on_the_way(tmp_path, evaluate, before, is_told):
    (tmp_path / "script.py").write_text(in_main(evaluate, before))
    command = "-m", "gradscaler", "run", "-o", "runs", "script.py"
    done = programs.run(*command, cwd=tmp_path, is_strict=True)
    said = " ".join(done.stderr.split()).replace("eval_loss", "val_loss")
    assert done.returncode == 0
    assert (WORDS.replace("eval_loss", "val_loss") in said) == is_told


class Batch:
    """Something whose end is seen."""


@pytest.mark.parametrize(
    ("code", "is_meant"),
    [
        ("best = float('nan')", True),
        ("best = math.nan", True),
        ("print(np.nanmean(scores))", True),
        ("if math.isnan(loss): best = inf", False),
        ("banana(1); channan = x.nanny", False),
    ],
)
def test_code_that_makes_nan_on_purpose_is_known(tmp_path, code, is_meant):
    (tmp_path / "script.py").write_text(f"import math\n{code}\n")
    assert means_nan(str(tmp_path / "script.py")) is is_meant


def test_a_look_keeps_nothing_alive_and_changes_no_locals_of_the_script(monkeypatch):
    monkeypatch.setattr("gradscaler._run_script.variables.means_nan", lambda _: False)
    running = RunningNans()

    def holds():
        batch, val_loss = Batch(), float("nan")
        gone = weakref.ref(batch)
        running.look()
        del batch
        return gone() is None, val_loss

    def reads_its_own():
        step = 1
        known = locals()
        step += 1
        running.look()
        return known["step"], step

    assert holds()[0]
    assert running.name == ""
    holds()
    assert running.name == "val_loss"
    assert reads_its_own() == (1, 2)
