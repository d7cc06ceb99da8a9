"""What a type checker says of a user's code."""

import re
import subprocess
import sys

import pytest

SETUP = """
import torch
from gradscaler import StepOutcome
from gradscaler.torch import GradScaler
parameter = torch.nn.Parameter(torch.zeros(3))
optimizer: torch.optim.Optimizer = torch.optim.SGD([parameter])
loss = parameter.sum()
scaler = GradScaler(init_scale=1024.0)
"""
RIGHT = """
a: torch.Tensor = scaler.scale(loss)
b: list[torch.Tensor] = scaler.scale([loss])
c: tuple[torch.Tensor, ...] = scaler.scale((loss, loss))
d: torch.Tensor = scaler.clip_grad_norm_(optimizer, 1.0)
e: float | None = scaler.step(optimizer)
f: StepOutcome = scaler.last_step(optimizer)
scaler.update(2.0)
"""
WRONG = {
    "scaler.step(5)": "arg-type",
    "scaler.unscale_(loss)": "arg-type",
    "scaler.clip_grad_norm_(optimizer)": "call-arg",
    "scaler.clip_grad_norm_(5, 1.0)": "arg-type",
    "scaler.last_step('adam')": "arg-type",
    "scaler.scale(5)": "call-overload",
    "scaler.scale(loss).no_such_method()": "attr-defined",
    "scaler.clip_grad_norm_(optimizer, 1.0).no_such_method()": "attr-defined",
    "scaler.step(optimizer).no_such_method()": "union-attr",
    "GradScaler(1024.0)": "arg-type",
}


def findings(code, folder):
    (folder / "script.py").write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", folder / "cache"]
    result = subprocess.run([*command, "script.py"], cwd=folder, capture_output=True, text=True)
    errors = re.findall(r"script.py:(\d+): error: .*\[([a-z-]+)\]", result.stdout)
    return {int(line): code for line, code in errors}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("types")


def test_every_wrong_call_is_an_error_and_no_right_one(folder):
    code = (SETUP + RIGHT + "\n".join(WRONG)).splitlines()
    first = len(code) - len(WRONG) + 1
    assert findings("\n".join(code), folder) == dict(enumerate(WRONG.values(), start=first))
