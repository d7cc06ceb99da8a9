"""How much code a plain step runs, and whether docs/contributing.md lists it."""

import gc
import re
import sys
from pathlib import Path

import torch

import gradscaler
from gradscaler.torch import GradScaler

PACKAGE = Path(gradscaler.__file__).parent
PAGE = PACKAGE.parent.parent / "docs" / "contributing.md"


def run_by(call):
    """The files of this package that a call runs, in order, and the functions as (file, name)."""
    files, functions = {}, set()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            file = path.relative_to(PACKAGE).as_posix()
            files[file] = None
            functions.add((file, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(files), functions


def a_step():
    """A step of SGD by a scaler that has stepped before."""
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()
    for _ in range(3):
        scaler.scale(model(torch.ones(4, 16)).sum()).backward()
        yield lambda: scaler.step(optimizer)
        scaler.update()


def test_a_plain_step_runs_few_functions_of_the_files_that_the_page_lists():
    gc.collect()  # a monitor that another test has left has a hook in each step
    for step in a_step():
        files, functions = run_by(step)
    text = PAGE.read_text().partition("A plain `scaler.step(optimizer)`")[2].partition("\n## ")[0]
    assert files == re.findall("^- `([a-z_/]+\\.py)`", text, re.MULTILINE)
    assert len(files) <= 10
    assert len(functions) <= 45, sorted(functions)
