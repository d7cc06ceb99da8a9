"""What PyTorch warns of, and raises, in a step whose calls are watched."""

import pytest

from tests.support import programs

SCRIPT = """\
import sys
import warnings

import torch
from torch.nn.functional import mse_loss, softmax

torch.manual_seed(0)
if "always" in sys.argv:
    warnings.simplefilter("always")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(3):
    loss = model(torch.rand(4)).square().mean()
    if step > 0:
        row = model(torch.rand(4))
        loss = mse_loss(row.T, torch.rand(1, 4)) + softmax(row)[0]
        if "of C++" in sys.argv:
            row @ torch.rand(3)
        if "of Python" in sys.argv:
            mse_loss(row, torch.rand(3))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

STARTER = 'File "<string>"'  # runs the script alone


@pytest.fixture
def said_by(tmp_path):
    """What Python says of the script, in step 2 of which every call is watched, or alone."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def said(way, is_watched):
        run = ["-m", "gradscaler", "run", "--quiet", "--watch", "2"] if is_watched else []
        ended = programs.run(*run, script, way, cwd=tmp_path, is_strict=way == "strict")
        lines = ended.stderr.split("gradscaler: ")[0].strip().splitlines()
        return "\n".join(line for line in lines if STARTER not in line)

    return said


@pytest.mark.parametrize("way", ["", "always", "strict"])
def test_a_warning_names_the_users_line_and_is_given_as_often_as_alone(said_by, way):
    alone = said_by(way, False)
    assert "Warning: " in alone
    assert said_by(way, True) == alone


@pytest.mark.parametrize("way", ["of C++", "of Python"])
def test_an_error_is_shown_as_alone(said_by, way):
    alone = said_by(way, False)
    assert "Error: " in alone
    assert said_by(way, True) == alone
