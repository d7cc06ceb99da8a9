"""What a type checker says of a user's code."""

import re
import subprocess
import sys

CODE = """
import paddle
from gradscaler import StepOutcome
from gradscaler.paddle import GradScaler

weight = paddle.zeros([3])
optimizer = paddle.optimizer.SGD(parameters=[weight])
scaler = GradScaler()
a: paddle.Tensor = scaler.scale(weight)
b: paddle.Tensor = scaler.clip_grad_norm_(optimizer, 1.0)
c: StepOutcome = scaler.last_step(optimizer)
scaler.step(optimizer)
scaler.minimize(optimizer, a)
scaler.step(5)  # arg-type
scaler.unscale_(5)  # arg-type
scaler.minimize(5)  # arg-type
scaler.clip_grad_norm_(5, 1.0)  # arg-type
scaler.clip_grad_norm_(optimizer)  # call-arg
scaler.scale(5)  # arg-type
"""


def test_every_wrong_call_is_an_error_and_no_right_one(tmp_path):
    (tmp_path / "script.py").write_text(CODE)
    command = [sys.executable, "-m", "mypy", "--strict", "script.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines = enumerate(CODE.splitlines(), start=1)
    expected = {number: line.partition("  # ")[2] for number, line in lines if "  # " in line}
    errors = re.findall(r"script.py:(\d+): error: .*\[([a-z-]+)\]", result.stdout)
    assert {int(line): code for line, code in errors} == expected, result.stdout
