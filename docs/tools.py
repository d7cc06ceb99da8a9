"""Compare what frameworks' own switches and ``gradscaler run`` name, and write docs/run.md's table.

    python docs/tools.py torch

Each case is a script of the framework's, which trains 12 steps and fails in step 8. It runs with
the switch and without gradscaler; then without the switch and with ``gradscaler run``, and by the
second command if that proposes one. A row is made by these runs: it says whether the operation that
made the first Inf or NaN was named, and its line in the script.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_name("run.md")
SCRIPT = "train.py"
NUM_STEPS, BAD = 12, 8
TABLE = re.compile(r"(\| Script \|.*\n\|[-|]+\n)((?:\|.*\n)*)")
PROPOSED = re.compile(r"--watch \d+")
CASES = {  # the words of a row, the operation, and the loss, in which `ops` is the framework
    "the logarithm of 0 in the loss": (
        "log",
        "{log}({sum}({abs}(x)) + 0 * {sum}(out))",
    ),
    "the root of 0, which only the gradient shows": (
        "sqrt",
        "{sqrt}({sum}(out**2))",
    ),
    "0 / 0 in the branch that where() leaves out": (
        "div",
        "{sum}({where}({sum}(x) == 0, out, out / {sum}({abs}(x) + 0 * out)))",
    ),
    "a NaN in the batch": ("batch", "{sum}(out**2)"),
}


class Tool(NamedTuple):
    """A framework, and its own switch.

    Attributes:
        name: what the page calls it.
        switch: the switch on the page.
        setup: lines that turn it on, in the script.
        environment: variables that turn it on.
        before: the script up to the loss.
        after: the script from the loss on.
        words: the framework's names of what a loss calls.
    """

    name: str
    switch: str
    setup: str
    environment: dict[str, str]
    before: str
    after: str
    words: dict[str, str]


def words(package: str, **others: str) -> dict[str, str]:
    """The names of functions in a package."""
    own = {
        each: f"{package}.{each}"
        for each in ("log", "sqrt", "sum", "abs", "where")
    }
    return {**own, **others}


DATA = f"""
import numpy as np
data = np.random.default_rng(0).normal(size=({NUM_STEPS}, 8, 4)).astype("float32")
if CASE == "batch":
    data[{BAD - 1}, 2, 1] = np.nan
else:
    data[{BAD - 1}] = 0
"""
TOOLS = {
    "torch": Tool(
        "PyTorch",
        "`torch.autograd.set_detect_anomaly(True)`",
        "import torch; torch.autograd.set_detect_anomaly(True)",
        {},
        """import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for x in map(torch.tensor, data):
    optimizer.zero_grad()
    out = model(x)
""",
        """
    loss.backward()
    optimizer.step()
""",
        words("torch"),
    ),
    "jax": Tool(
        "JAX",
        "`JAX_DEBUG_NANS=True`",
        "",
        {"JAX_DEBUG_NANS": "True"},
        """import jax, jax.numpy as jnp
w = jnp.ones((4, 1))
def loss_of(w, x):
    out = x @ w
""",
        """
    return loss
@jax.jit
def step(w, x):
    loss, gradient = jax.value_and_grad(loss_of)(w, x)
    return w - 1e-3 * gradient, loss
for x in data:
    w, loss = step(w, x)
""",
        words("jnp"),
    ),
    "keras": Tool(
        "TensorFlow",
        "`tf.debugging.enable_check_numerics()`",
        "import tensorflow as tf; tf.debugging.enable_check_numerics()",
        {},
        """import tensorflow as tf, keras
model = keras.layers.Dense(1, use_bias=False)
model.build((None, 4))
optimizer = keras.optimizers.SGD(1e-3)
@tf.function
def step(x):
  with tf.GradientTape() as tape:
    out = model(x)
""",
        """
  gradients = tape.gradient(loss, model.trainable_variables)
  optimizer.apply(gradients, model.trainable_variables)
  return loss
for x in data:
    step(tf.constant(x))
""",
        words("tf", log="tf.math.log", sum="tf.reduce_sum"),
    ),
    "paddle": Tool(
        "Paddle",
        "`FLAGS_check_nan_inf=1`",
        "",
        {"FLAGS_check_nan_inf": "1"},
        """import paddle
paddle.seed(0)
model = paddle.nn.Linear(4, 1, bias_attr=False)
optimizer = paddle.optimizer.SGD(1e-3, parameters=model.parameters())
for x in map(paddle.to_tensor, data):
    out = model(x)
""",
        """
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
""",
        words("paddle"),
    ),
}


def script(tool: Tool, case: str, *, has_switch: bool) -> tuple[str, int]:
    """A script, and the number of the line whose operation fails."""
    operation, loss = CASES[case]
    head = f"CASE = {operation!r}\n{DATA}{tool.setup if has_switch else ''}\n{tool.before}"
    code = f"{head}    loss = {loss.format(**tool.words)}{tool.after}"
    return code, head.count("\n") + 1


def said(code: str, environment: dict[str, str], *command: str) -> str:
    """What a script, or a command that runs it, prints."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, SCRIPT).write_text(code, encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, *command, SCRIPT],
            cwd=folder,
            env={**os.environ, "KERAS_BACKEND": "tensorflow", **environment},
            text=True,
            capture_output=True,
            check=False,
        )
    return ended.stdout + ended.stderr


def named(printed: str, operation: str, line: int) -> str:
    """What a text names: the operation, in a message, and its line, in a message or a traceback."""
    messages = re.sub(r'^ *File ".*\n(?: {4}.*\n)*', "", printed, flags=re.M)
    words_of = {"batch": r"row \d+ of \d+", "div": r"div"}
    has_operation = (
        re.search(words_of.get(operation, operation), messages, re.I)
        is not None
    )
    has_line = (
        re.search(rf'{SCRIPT}(?:", line |:){line}\b', printed) is not None
    )
    what = "the row" if operation == "batch" else "operation"
    found = [what] * has_operation + ["line"] * has_line
    if found:
        return " and ".join(found)
    return (
        "stops"
        if re.search(r"^\S*Error|nan or inf", messages, re.I | re.M)
        else "nothing"
    )


def rows(framework: str) -> list[str]:
    """The rows of a framework."""
    tool, found = TOOLS[framework], []
    for case, (operation, _) in CASES.items():
        code, line = script(tool, case, has_switch=True)
        own = named(said(code, tool.environment), operation, line)
        code, line = script(tool, case, has_switch=False)
        run = "-m", "gradscaler", "run"
        printed = said(code, {}, *run)
        ours = named(printed, operation, line)
        proposed = PROPOSED.search(printed)
        if proposed is not None:
            again = said(code, {}, *run, *proposed[0].split())
            ours = f"{named(again, operation, line)}, by `--watch`"
        found.append(
            f"| {tool.name}: {case} | {tool.switch}: {own} | {ours} |\n"
        )
    return found


def main() -> None:
    """Write the rows of the frameworks that are named."""
    page = PAGE.read_text(encoding="utf-8")
    head, old = TABLE.search(page).groups()
    kept = dict.fromkeys(TOOLS, "")
    for row in old.splitlines(keepends=True):
        kept[
            next(
                f
                for f, tool in TOOLS.items()
                if row.startswith(f"| {tool.name}:")
            )
        ] += row
    kept |= {framework: "".join(rows(framework)) for framework in sys.argv[1:]}
    page = page.replace(head + old, head + "".join(kept.values()))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
