"""What ``gradscaler run`` says of a training that fails, where it says it, and how it ends."""

import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from gradscaler.diagnose import read_run
from tests.support import programs
from tests.support.marked_lines import lines_marked_in

RUN = "-m", "gradscaler", "run"
FAILING = Path(__file__).with_name("failing.py")
LINE = Path(lines_marked_in(str(FAILING))("fails")).name
STOPPED = 3
LOOKS = {
    **dict.fromkeys(("looks", "looks at once", "looks elsewhere", "looks beside it"), ()),
    "looks again": ("--watch", "30"),
    "looks later": ("--watch", "31"),
}
ENDS = {"raise": 1, "SIGINT": -signal.SIGINT, "SIGTERM": -signal.SIGTERM}


class Ended(NamedTuple):
    status: int
    printed: str
    said: str
    file: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The script after each way to end. A warning in it would be an error."""
    ways = *ENDS, "--stop", *LOOKS
    folders = {way: tmp_path_factory.mktemp("runs") / "inner" for way in ways}
    options = {"--stop": ["--stop"], "SIGINT": ["--watch", "30"], **LOOKS}

    def run(way):
        command = *RUN, *options.get(way, ()), "-o", folders[way], "--", "failing.py", way
        done = programs.run(*command, cwd=FAILING.parent, is_strict=True)
        (file,) = folders[way].iterdir()
        return Ended(done.returncode, done.stdout, done.stderr, file)

    return {way: run(way) for way in ways}


def words(text):
    """A text without the ends of its lines."""
    return " ".join(text.split())


@pytest.mark.parametrize("way", ENDS)
def test_a_training_ends_as_without_it_and_the_verdict_comes_last(ended, way):
    status, printed, said, file = ended[way]
    assert (status, printed) == (ENDS[way], "trained\n")
    *_, verdict = said.split("gradscaler: ")
    assert verdict.startswith("after 40 steps, as said above: ")
    assert LINE in words(verdict)
    assert f"  file:   {file}\n" in verdict
    assert f"  report: python -m gradscaler report {file} -o report.html\n" in verdict
    assert read_run(file).num_steps == 40


def test_the_place_is_said_once_on_the_way_and_what_to_do_is_said_once(ended):
    before, *_ = ended["raise"].said.split("gradscaler: after")
    assert words(before).count(LINE) == 1
    assert words(before).count("go back to a checkpoint") == 1
    assert words(ended["raise"].said).count("go back to a checkpoint") == 1
    assert "FindingWarning" not in before


@pytest.mark.parametrize(("way", "last"), [("raise", "RuntimeError"), ("SIGINT", "Keyboard")])
def test_a_traceback_has_no_frame_of_gradscaler(ended, way, last):
    trace = ended[way].said.partition("Traceback")[2].partition("gradscaler: after")[0]
    files = [line for line in trace.splitlines() if line.startswith("  File")]
    assert FAILING.name in files[0]
    assert [line for line in files if "gradscaler" in line.replace(str(FAILING), "")] == []
    assert trace.splitlines()[-1].startswith(last)


def test_stop_ends_it_at_the_first_bad_step(ended):
    status, printed, said, file = ended["--stop"]
    assert (status, printed) == (STOPPED, "")
    assert "after 30 steps" in said
    assert "Traceback" not in said
    assert read_run(file).num_steps == 30


def test_a_step_that_is_watched_names_its_operation(ended):
    found = words(ended["SIGINT"].said)
    assert f"gradscaler: step watched: forward of a function (float32), sqrt at {LINE}: " in found
    assert found.count("step watched") == 1
    assert "step watched" not in ended["raise"].said


@pytest.mark.parametrize(("way", "steps"), [("looks", 29), ("looks at once", 0)])
def test_a_script_that_ends_at_a_nan_loss_is_told_its_operation(ended, way, steps):
    status, printed, said, file = ended[way]
    assert (status, printed) == (1, "")
    assert words(said).count(LINE) == 1
    start = f"gradscaler: after {steps} steps: Code outside of the model makes 8 NaN in float32, by"
    assert f"{start} sqrt at {LINE}" in words(said)
    assert f"so the loss of step {steps + 1} is nan, and no backward pass took it" in words(said)
    (bad,) = read_run(file).bad_steps
    assert (bad.step, bad.is_left_out, read_run(file).num_steps) == (steps + 1, True, steps)


def test_a_script_that_ends_at_another_nan_is_told_how_to_find_the_operation(ended):
    status, printed, said, file = ended["looks elsewhere"]
    assert (status, printed) == (1, "")
    assert "Nothing wrong was seen" not in said
    found = "If it found a NaN, the same command with --watch 30 names the operation."
    assert f"ended after step 29. {found}" in words(said)
    assert f"  file:   {file}\n" in said
    again = words(ended["looks again"].said)
    assert f"step watched: forward of a function (float32), sqrt at {LINE}: " in again
    assert "--watch" not in again


def test_what_is_not_finite_where_a_script_ends_is_said(ended):
    status, printed, said, _ = ended["looks beside it"]
    assert (status, printed) == (1, "")
    held = "gradscaler: the script ended in step 30, where distances held 8 Inf or NaN in float32"
    assert f"{held}: the same command with --watch 30 names what made it." in words(said)
    assert "If it found a NaN" not in said
    assert "where distances held" not in words(ended["raise"].said)


def test_a_step_that_the_run_does_not_reach_is_said_to_be_unwatched(ended):
    said = words(ended["looks later"].said)
    assert "the run ended after step 29, so step 31 was not watched" in said


FORKS = """
import os, torch
model = torch.nn.Linear(64, 64, bias=False)  # no gradient is small
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    child = os.fork() if step == 3 else None
    optimizer.zero_grad()
    inputs = torch.full((3, 64), float("nan") if child == 0 else 1.0)
    model(inputs).square().mean().backward()
    optimizer.step()
    if child:
        os.waitpid(child, 0)
print("trained")
"""


def test_a_forked_child_trains_on_and_says_nothing(tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    done = programs.run(*RUN, "forks.py", cwd=tmp_path, is_strict=True)
    assert (done.returncode, done.stdout) == (0, "trained\n" * 2), done.stderr
    assert done.stderr.count("gradscaler: ") == 1
    assert "after 6 steps: None of 6 steps" in done.stderr


PREPARES = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 8):
    rewards = torch.rand(8 if step != 6 else 1)
    weight = (rewards - rewards.mean()) / rewards.std()
    loss = (model(torch.randn(len(rewards), 4))[:, 0] * weight).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


# An empty row of a checkpointed attention, whose tensors may be unpacked only once.
CHECKPOINTED = """
import torch
from torch.utils.checkpoint import checkpoint
score = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(score.parameters(), lr=0.01)
def attend(x, mask):
    return torch.softmax(torch.nn.functional.gelu(score(x)) + mask, -1)
for step in range(1, 8):
    mask = torch.zeros(8, 4)
    mask[3] = -torch.inf if step == 6 else 0
    optimizer.zero_grad()
    outputs = checkpoint(attend, torch.randn(8, 4), mask, use_reentrant=False)
    (outputs * torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


# Two checkpoints: the quotient of the first has a gradient of 0 / 0, which the plain run can't see.
CHECKPOINTED_BACKWARD = """
import torch
from torch.utils.checkpoint import checkpoint
score = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(score.parameters(), lr=0.01)
def share(x, m):
    return torch.where(m > 0, score(x) / m.sum(-1, keepdim=True), m)
def root(x):
    return (score(x).square() + 1).sqrt()
for step in range(1, 8):
    mask = torch.ones(8, 4)
    mask[3] = 0 if step == 6 else 1
    optimizer.zero_grad()
    shares = checkpoint(share, torch.randn(8, 4), mask, use_reentrant=False)
    checkpoint(root, shares, use_reentrant=False).mean().backward()
    optimizer.step()
"""
MAKERS = {
    "prepares": (PREPARES, "std at script.py:7"),
    "checkpointed": (CHECKPOINTED, "softmax at script.py:7"),
    "checkpointed backward": (CHECKPOINTED_BACKWARD, "div at script.py:7"),
}


@pytest.mark.parametrize(("text", "maker"), MAKERS.values(), ids=MAKERS)
def test_what_a_watched_step_shows_is_what_the_verdict_says(tmp_path, text, maker):
    (tmp_path / "script.py").write_text(text)
    first, again = (
        words(programs.run(*RUN, *watch, "script.py", cwd=tmp_path).stderr)
        for watch in ([], ["--watch", "6"])
    )
    assert "the same command with --watch 6 names what made it" in first
    assert maker not in first
    watched, verdict = again.partition("step watched: ")[2], again.rpartition("gradscaler: ")[2]
    assert maker in watched.partition("gradscaler: ")[0]
    assert maker in verdict
    assert "--watch" not in verdict


EPS_OF_0 = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # whose eps of 1e-8 is 0 in float16
for step in range(9):
    optimizer.zero_grad()
    model(torch.ones(8, 4).half()).float().square().mean().mul(1e-6).backward()
    optimizer.step()
"""


def test_no_watch_is_proposed_where_an_eps_of_0_is_the_cause(tmp_path):
    (tmp_path / "script.py").write_text(EPS_OF_0)
    said = words(programs.run(*RUN, "script.py", cwd=tmp_path).stderr)
    assert "the optimizer divides by an eps of 1e-08, which is 0 in the float16 of its" in said
    assert "--watch" not in said


FIRST = """
import torch
model = torch.nn.Linear(4, 1)
degrees = torch.arange(8.0)[:, None]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kinds = torch.ones(8, 4)
kinds[0] = 0
for step in range(3):
    optimizer.zero_grad()
    model(kinds / degrees).square().mean().backward()
    optimizer.step()
    degrees = torch.ones(8, 1)
"""


def test_a_watch_of_the_first_step_is_proposed_and_names_what_made_a_batch(tmp_path):
    (tmp_path / "script.py").write_text(FIRST)
    first, again = (
        words(programs.run(*RUN, *watch, "script.py", cwd=tmp_path).stderr)
        for watch in ([], ["--watch", "1"])
    )
    assert "the same command with --watch 1 names what made it" in first
    assert "div at script.py" not in first
    assert "step watched: forward of a function (float32), div at script.py:10: 4 nan" in again
    assert "by div at script.py:10" in again.rpartition("gradscaler: ")[2]
    assert "0 / 0 is NaN" in again


def test_a_watch_of_the_first_step_of_two_optimizers_changes_no_number(tmp_path):
    text = """
import torch
torch.manual_seed(0)
models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
optimizers = [torch.optim.Adam(each.parameters()) for each in models]
for step in range(3):
    loss = models[1](models[0](torch.randn(8, 4))).square().mean()
    for each in optimizers: each.zero_grad()
    loss.backward()
    for each in optimizers: each.step()
    print(loss.item())
"""
    (tmp_path / "script.py").write_text(text)
    watched = programs.run(*RUN, "--watch", "1", "script.py", cwd=tmp_path)
    assert words(watched.stderr).startswith("gradscaler: step watched: no operation made")
    assert watched.stdout == programs.run("script.py", cwd=tmp_path).stdout


WRITES = """
import torch
model = torch.nn.Linear(4, 1).half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def ascend():
    with torch.no_grad():
        norm = model.weight.grad.norm()
        model.weight.add_(0.05 * model.weight.grad / (norm + 1e-12))
for step in range(1, 8):
    x = torch.rand(8, 4).half()
    for is_first in (True, False):
        (model(x) + (3 if step != 5 else -100)).relu().square().mean().backward()
        if is_first:
            ascend()
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_watch_names_what_wrote_a_nan_into_a_parameter(tmp_path):
    (tmp_path / "script.py").write_text(WRITES)
    first, again = (
        words(programs.run(*RUN, *watch, "script.py", cwd=tmp_path).stderr)
        for watch in ([], ["--watch", "5"])
    )
    assert "the same command with --watch 5 names what made it" in first
    told = again.partition("is itself Inf or NaN")[2]
    assert "div at script.py:8 wrote it in float16. 0 / 0 is NaN" in told
    assert "an eps/min below 3e-8 is 0" in told
    assert "find what wrote it" not in told


FROM_NUMPY = """
import sys
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset
class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, place):  # of a row
        row = np.ones(4, dtype=np.float32)
        return row / row.std() if place == 20 else row
def main():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = Subset(Rows(), range(48))
    for batch in DataLoader(rows, batch_size=8, num_workers=int(sys.argv[1])):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
np.seterr(all="ignore")
if __name__ == "__main__":
    main()
"""


def test_a_watch_is_not_proposed_where_worker_processes_prepare_the_batch(tmp_path):
    (tmp_path / "script.py").write_text(FROM_NUMPY)
    said = words(programs.run(*RUN, "script.py", "1", cwd=tmp_path).stderr)
    made = "made before PyTorch saw it, by the code that prepares the batch of step 3"
    assert f"origin: {made} (Rows at script.py:9)" in said
    assert "--watch" not in said


def test_a_watch_says_that_no_operation_of_the_process_made_the_batch(tmp_path):
    (tmp_path / "script.py").write_text(FROM_NUMPY)
    first, again = (
        words(programs.run(*RUN, *watch, "script.py", "0", cwd=tmp_path).stderr)
        for watch in ([], ["--watch", "3"])
    )
    assert "--watch 3 names what made it" in first
    assert (
        "It was made before PyTorch saw it, by the code that prepares the batch of step 3" in again
    )
    assert "(Rows at script.py:9)" in again.partition("gradscaler: after")[0]


WARNED = FROM_NUMPY.replace('np.seterr(all="ignore")', "").replace(
    "return row / row.std() if place == 20 else row",
    """way = sys.argv[2]
        row[0] = 0 if place == 20 else 1
        if way == "log":
            return np.log(row)  # logarithm
        if way == "std":
            row[:] = 3
            return (row - 3) / row.std() if place == 20 else row  # deviation
        if way == "mean" and place == 20:
            row[:] = row[4:].mean()  # of none
        return row""",
)


@pytest.mark.parametrize(
    ("way", "text", "marked"),
    [
        ("log", "divide by zero encountered in log", "logarithm"),
        ("std", "invalid value encountered in divide", "deviation"),
        ("mean", "Mean of empty slice", "of none"),
    ],
)
def test_a_warning_of_numpy_s_names_the_line_that_may_have_made_the_batch(
    tmp_path, way, text, marked
):
    (tmp_path / "script.py").write_text(WARNED)
    said = words(programs.run(*RUN, "script.py", "0", way, cwd=tmp_path).stderr)
    lines = WARNED.splitlines()
    line = next(number for number, each in enumerate(lines, 1) if each.endswith(f"# {marked}"))
    assert f'after NumPy warned of "{text}" at script.py:{line}, so step 3 was applied' in said
    assert "in row 4 of 8" in said
    assert f"Look at script.py:{line} first" in said
    assert "--watch" not in said


def test_a_watched_step_names_the_batch_of_infs_and_not_the_product_that_reads_it(tmp_path):
    (tmp_path / "script.py").write_text(WARNED)
    said = words(programs.run(*RUN, "--watch", "3", "script.py", "0", "log", cwd=tmp_path).stderr)
    assert "step watched: input of the model (Linear, float32), matmul at" in said
    assert "outliers" not in said


LATER = """
import numpy as np
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    x = np.ones((8, 4), dtype=np.float32)
    if step == 2:
        x[3] = 0
        x = np.where(x > 0, np.log(x), 0)
    if step == 10:
        x[5] = np.nan
    loss = model(torch.from_numpy(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_warning_of_numpy_s_that_did_no_harm_is_not_named_later(tmp_path):
    (tmp_path / "script.py").write_text(LATER)
    said = words(programs.run(*RUN, "script.py", cwd=tmp_path).stderr)
    assert "in row 5 of 8" in said
    assert "after NumPy warned" not in said


def test_a_training_s_own_filters_of_warnings_stay_in_force(tmp_path):
    recorded = """
import warnings
with warnings.catch_warnings(record=True) as kept:
    warnings.simplefilter("always")
    np.log(np.zeros(1))
    np.log(np.zeros(1))
print(len(kept), kept[0].lineno)
"""
    code = LATER.replace("model = torch.nn", f"{recorded}model = torch.nn")
    (tmp_path / "script.py").write_text(code)
    plain = programs.run("script.py", cwd=tmp_path)
    watched = programs.run(*RUN, "script.py", cwd=tmp_path)
    assert plain.stdout == watched.stdout == "2 8\n"
    assert plain.stderr in watched.stderr


LEFT_OUT = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in range(9):
    loss = model(torch.randn(8, 4)).square().mean()
    count = torch.tensor(0.0 if batch == 6 else 8.0)
    loss = loss * count / count
    if not loss.isfinite():
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_watched_step_names_a_nan_that_the_script_leaves_out(tmp_path):
    (tmp_path / "script.py").write_text(LEFT_OUT)
    said = words(programs.run(*RUN, "--watch", "7", "script.py", cwd=tmp_path).stderr)
    assert "step watched: no Inf or NaN reached a gradient; the latest: forward of" in said
    assert "div at script.py:9" in said.partition("gradscaler: after")[0]
