"""The notebooks of docs/ run, and hold the outputs of today; ``make notebooks`` updates them."""

import os
import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import pytest

if os.environ.get("GRADSCALER_FRAMEWORK", "torch") not in ("torch", "keras"):
    pytest.skip("PyTorch's and Keras' tests run the notebooks", allow_module_level=True)
pytest.importorskip("nbclient", reason="it runs the notebooks")

import nbclient
import nbformat

FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "torch")
DOCS = Path(__file__).parents[2] / "docs"
ALL = sorted((DOCS / "notebooks").glob("*.ipynb"))
MARKS = {
    "watch_keras": [pytest.mark.rare("one notebook of PyTorch's shows that they run")],
    "policy": [pytest.mark.rare("tests/diagnose/simulate compares policies, too")],
}
NOTEBOOKS = [
    pytest.param(path, marks=MARKS.get(path.stem, []))
    for path in ALL
    if (path.stem == "watch_keras") == (FRAMEWORK == "keras")
]
RUN_FILE = re.compile(r"notebook-[\d-]+")  # the time, and the process
NUMBER = re.compile(r"\d[\d,]*\.?\d*(?:e[+-]?\d+)?")

# TensorFlow tells of oneDNN and of the processor's instructions.
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "KERAS_BACKEND": "tensorflow",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
only_torch = pytest.mark.skipif(FRAMEWORK != "torch", reason="it runs PyTorch")


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(output):
    if output.output_type == "stream":
        return output.text
    if "image/png" in output.data:  # drawn by PyTorch's notebooks, where Pillow is
        from tests.support.pictures import words_of

        return words_of(BytesIO(b64decode(output.data["image/png"])))
    return output.data["text/plain"]


def texts_and_numbers(cell):
    """The words of a cell's outputs, and their numbers, which may depend on the processor."""
    text = "".join(text_of(output) for output in cell.outputs)  # a print may be in many outputs
    text = RUN_FILE.sub("notebook", text)
    numbers = [float(found.replace(",", "")) for found in NUMBER.findall(text)]
    return NUMBER.sub("0", text), numbers


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.one_backend
@pytest.mark.some(1, "what they call has tests; one shows that notebooks run")
@pytest.mark.usefixtures("own_random_numbers_and_one_thread")
def test_a_notebook_holds_the_outputs_of_today(path, tmp_path, monkeypatch):
    for name, value in VARIABLES.items():  # its outputs were made so, too
        monkeypatch.setenv(name, value)
    kept, fresh = read(path), read(path)
    nbclient.NotebookClient(
        fresh, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    for before, after in zip(code_cells(kept), code_cells(fresh), strict=True):
        words, numbers = texts_and_numbers(before)
        words_today, numbers_today = texts_and_numbers(after)
        assert words == words_today
        assert numbers == pytest.approx(numbers_today, rel=0.05)
        assert before.execution_count == after.execution_count  # a verdict names In[2]
    assert [path.name for path in tmp_path.iterdir()] in ([], ["gradscaler-runs"])


WATCHED = [
    "%load_ext gradscaler\nimport torch",
    """
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")""",
    """
def train(last, scaler=None):
    for step in range(last + 1):
        loss = (model(torch.randn(8, 4)) * (step < last)).square().sum().sqrt()
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()""",
    "train(2, scaler)",
    "train(3, scaler)",
    "train(4)",
    "import gradscaler; gradscaler.watch()",
    """
model.reset_parameters()
optimizer.zero_grad()
loss = model(torch.ones(4)).square().sum()
loss.backward()
optimizer.step()
raise KeyboardInterrupt""",
    "%unload_ext gradscaler",
    "train(2)\ntorch.amp.GradScaler('cpu')",
    "%run -m gradscaler run train.py",
    "train(2)",
    """
from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler
model.reset_parameters()
optimizer.zero_grad()
scaler = GradScaler("cpu")
monitor = Monitor(scaler, model, path="run.jsonl")
train(2, scaler)
monitor""",
]


@only_torch
def test_each_cell_of_a_notebook_that_trains_has_a_verdict_and_a_run(tmp_path):
    script = "import torch\n" + "".join(WATCHED[1:3]) + "\ntrain(4)\n"
    (tmp_path / "train.py").write_text(script)
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in [*WATCHED, WATCHED[-1]]]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    texts = [" ".join(" ".join(o.get("text", "") for o in c.outputs).split()) for c in cells]
    load, make, define, first, second, plain, show, interrupted, unload, unwatched = texts[:10]
    assert load == make == define == show == unload == unwatched == ""
    assert first.startswith("gradscaler: after 3 steps: 1 of 3 steps was skipped, in step 3")
    assert second.startswith("gradscaler: after 4 steps: 1 of 4 steps was skipped, in step 4")
    assert plain.count("by the gradient of sqrt at In[3]:3") == 2
    assert "gradscaler: after 5 steps, as said above" in plain
    assert "The gradient of weight is NaN" in cells[6].outputs[0].data["text/html"]
    assert "gradscaler: after 1 step: " in interrupted
    (made,) = cells[9].outputs
    assert "torch.amp.grad_scaler.GradScaler" in made.data["text/plain"]
    (block,) = (o.data for o in cells[5].outputs if o.output_type == "display_data")
    marked = "loss = (model(torch.randn(8, 4)) * (step < last)).square().sum().sqrt()"
    assert re.findall(r"^> (.*)", block["text/plain"], re.MULTILINE) == [f"3          {marked}"]
    assert block["text/html"].count("<mark>") == 1
    run, after_run, monitored, again = texts[10:]
    assert "by the gradient of sqrt at train.py:9" in run
    assert "after 5 steps" in run
    assert after_run == ""
    assert monitored == ""
    assert (
        again == "run.jsonl: holds a run of 3 steps already; this one is appended, and judged alone"
    )
    for cell in cells[-2:]:
        assert "1 of 3 steps was skipped" in cell.outputs[-1].data["text/html"]
    assert len(list((tmp_path / "gradscaler-runs").iterdir())) == 5


@only_torch
def test_the_lines_for_other_frameworks_are_those_of_their_start_pages():
    (notebook,) = (read(path) for path in ALL if path.stem == "start")
    text = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    found = dict(re.findall(r"\(\.\./start/(\w+)\.md\):\n\n```python\n(.*?)```", text, re.DOTALL))
    pages = {path.stem: path for path in (DOCS / "start").glob("*.md")}
    assert found.keys() == pages.keys() - {"torch"}
    for name, code in found.items():
        lines = {line.strip() for line in pages[name].read_text().splitlines()}
        assert {line.strip() for line in code.splitlines()} <= lines
