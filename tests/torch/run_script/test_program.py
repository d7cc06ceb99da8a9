"""A program under ``gradscaler run`` is as under ``python``: one process each, compared.

Two scripts import PyTorch in a process of their own: in one, scalers become ours, and in the other,
trainings fail with and without one. All others run in forks of a process that has imported it.
"""

import argparse
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gradscaler._run_script.files import RunFiles
from gradscaler.diagnose import read_run
from tests.support import programs

PACKAGE = {
    "package/__init__.py": "",
    "package/other.py": "name = 'other'",
    "package/inner.py": "from .other import name; print(name, __package__, __spec__.name)",
    "package/__main__.py": "from . import other; print(other.name, __spec__.name, __package__)",
    "folder/__main__.py": "import sys; print(sys.argv, sys.path[0], __file__, __spec__.name)",
}
SHOW = """
    import __main__, os, pickle, sys
    class Own:
        pass
    print(__name__, __file__, sys.argv, sys.path[:2], __spec__, __package__, __builtins__)
    print(type(pickle.loads(pickle.dumps(Own()))) is Own, __main__.Own is Own)
    print("numpy" in sys.modules, "torch" in sys.modules, 1 / 3)
"""
HOOK = """
    import sys, traceback
    sys.excepthook = lambda kind, error, trace: print(traceback.format_tb(trace))
    1 / 0
"""
PROGRAMS = {
    "script": (["script.py", "--every", "3", "-h", "--"], SHOW),
    "relative": (["./script.py"], SHOW),
    "exit": (["script.py"], "raise SystemExit(7)"),
    "exit with a text": (["script.py"], "raise SystemExit('no data')"),
    "exception": (["script.py"], "def f(): 1 / 0\ntry: f()\nfinally: print('end')"),
    "chained": (["script.py"], "try: 1 / 0\nexcept Exception as e: raise OSError from e"),
    "broken pipe": (["script.py"], "raise BrokenPipeError('theirs')"),
    "interrupt": (["script.py"], "import atexit; atexit.register(print); raise KeyboardInterrupt"),
    "syntax": (["script.py"], "x = = 3"),
    "error of ours": (["script.py"], "import gradscaler; gradscaler.FixedScale(-1)"),
    "own hook": (["script.py"], HOOK),
    "module": (["-m", "script", "-m", "x"], "import sys; print(sys.argv, sys.path[0], __file__)"),
    "inner module": (["-m", "package.inner"], ""),
    "package": (["-m", "package"], ""),
    "folder": (["folder"], ""),
}
SPAWN = """
    import multiprocessing, sys
    class Own:
        value = 3
    def work(given):
        return type(given).__module__, given.value, "gradscaler" in sys.modules
    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(work, [Own()]))
"""


@pytest.fixture
def started(tmp_path):
    """Starts a program below ``python`` or ``python -m gradscaler run``."""
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def start(command, script, under=("-m", "gradscaler", "run")):
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        line = [sys.executable, "-B", *under, *command]
        return subprocess.Popen(
            line, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    return start


@pytest.fixture
def trained(tmp_path):
    """Runs a script that trains with PyTorch."""

    def run(script, *arguments, under=("-m", "gradscaler", "run")):
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        done = programs.run(*under, "script.py", *arguments, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    return run


SECONDS = 300  # for a process that imports PyTorch, on a busy machine
UNWATCHED = (
    "gradscaler: no step of a training was seen in this process, so there is no verdict. Weights "
    "that a\n  script changes by hand, without an optimizer, are not seen.\n"
)


def ended(process):
    """The exit status, stdout, and stderr without the word at its end on what was not watched."""
    out, error = process.communicate(timeout=SECONDS)
    return process.returncode, out, error.removesuffix(UNWATCHED)


def state_of(process):
    """What Linux says of a process: R if it runs or could, S if it sleeps."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(("command", "script"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_prints_and_ends_as_under_python(started, command, script):
    ours, theirs = started(command, script), started(command, script, under=())
    result = ended(ours)
    assert result == ended(theirs)
    assert any(result)


def test_a_class_of_the_script_is_unpickled_in_a_spawned_process_that_nothing_watches(started):
    assert ended(started(["script.py"], SPAWN)) == (0, "[('__mp_main__', 3, False)]\n", "")


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        ([], 2, "give a script, or -m and a module"),
        (["nothing.py"], 2, "can't open 'nothing.py': No such file"),
        (["-m", "nothing"], 1, "No module named nothing"),
        (["-m", "package.nothing"], 1, "No module named package.nothing"),
        (["--every", "0", "script.py"], 2, "--every: must be a whole number of at least 1"),
        (["-o", f"{sys.executable}/runs", "script.py"], 2, "--output: cannot write to"),
    ],
    ids=["none", "script", "module", "inner", "every", "folder"],
)
def test_what_cannot_be_run_is_said(started, command, status, says):
    process = started(command, "")
    out, error = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (status, "")
    assert "no verdict" not in error
    assert says in error
    assert "Traceback" not in error


WAIT = "import time\nprint('ready', flush=True)\ntime.sleep(60)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_program_as_under_python(started, number):
    ends = []
    for under in (("-m", "gradscaler", "run"), ()):
        process = started(["script.py"], WAIT, under)
        process.stdout.readline()
        while state_of(process) != "S":  # its traceback names the line of sleep() alone
            time.sleep(0.01)
        process.send_signal(number)
        ends.append(ended(process))
    assert ends[0] == ends[1]
    assert ends[0][0] == -number


def test_a_program_without_pytorch_is_told_so(started):
    assert started(["script.py"], "print(1)").communicate(timeout=SECONDS) == ("1\n", UNWATCHED)


SCALERS = """
    import sys
    before = {"numpy", "torch", "gradscaler.torch"} & set(sys.modules)
    import torch
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    made = torch.amp.GradScaler("cpu"), torch.cuda.amp.GradScaler(), ShardedGradScaler("cpu")
    print(before, *(type(each).__module__ for each in made))
"""


@pytest.mark.parametrize("is_imported", [False, True])
@pytest.mark.parametrize(
    "end", ["sys.exit(0)", "__import__('argparse').ArgumentParser().parse_args()"]
)
def test_a_script_that_ends_before_its_first_step_hears_no_word(started, trained, is_imported, end):
    script = f"import sys\n{end}"
    if is_imported:
        code, _, error = trained(script, "--help")
    else:
        process = started(["--", "script.py", "--help"], script)
        (_, error), code = process.communicate(timeout=SECONDS), process.wait()
    assert (code, error) == (0, "")


def test_scalers_become_ours_once_the_script_imports_pytorch(started, tmp_path):
    code, out, error = ended(started(["script.py"], SCALERS))
    ours = "gradscaler.torch.scaler gradscaler.torch._install gradscaler.torch.sharded"
    assert (code, out) == (0, f"set() {ours}\n")
    assert "no optimizer of this process took a step" in error
    assert not (tmp_path / "gradscaler-runs").exists()


BY_HAND = """
    import sys
    import torch
    torch.manual_seed(0)
    how, rate = sys.argv[1], 3.0 if sys.argv[1] == "grown" else 0.01
    model = torch.nn.Linear(4, 1)
    def loss_at(step):
        loss = model(torch.ones(8, 4)).square().mean()
        return (-1 - loss).sqrt() if how == "negative" and step == 5 else loss
    for step in range(60):
        model.zero_grad()
        loss_at(step).backward()
        for p in model.parameters():
            p.data.add_(p.grad.nan_to_num(0), alpha=-rate)
    if how == "followed":
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for step in range(12):
            optimizer.zero_grad()
            loss_at(step).backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("negative", "The loss is nan in backward pass 6, first seen in sqrt. No optimizer is"),
        ("grown", ", after it grew from"),
        ("finite", "no optimizer of this process took a step"),
        ("followed", "gradscaler: after 12 steps: None of 12"),
    ],
)
def test_a_loss_of_nan_is_told_where_the_script_moves_weights_by_hand(trained, how, said):
    code, out, error = trained(BY_HAND, how)
    told = " ".join(error.split())
    assert (code, out) == (0, "")
    assert said in told
    is_bad = how in ("negative", "grown")
    assert ("by hand. " in told, "as said above: The loss is" in told) == (is_bad, is_bad)
    assert ("lower the rate of these updates" in told.lower()) is is_bad


WITHOUT_BACKWARD = """
    import sys
    import torch
    model = torch.nn.Linear(4, 4)
    class Own(torch.optim.SGD):
        pass  # one that tries steps, and needs no gradient
    kind = Own if "own" in sys.argv else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)
    for step in range(int(sys.argv[1])):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        if "grad" in sys.argv:
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, model.parameters())):
                p.grad = g
        optimizer.step()
    if "backward" in sys.argv:
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("given", "is_told"),
    [
        (["5"], True),
        (["4"], False),
        *((["20", way], False) for way in ("grad", "backward", "own")),
    ],
)
def test_steps_without_a_backward_pass_are_told_with_their_line(trained, given, is_told):
    code, out, error = trained(WITHOUT_BACKWARD, *given)
    assert (code, out) == (0, "")
    told = " ".join(error.split())
    assert ("step() was called 5 times at script.py:15, and backward() never" in told) is is_told
    assert ("and backward() never" in told) is is_told


OF_ANOTHER = """
    import sys
    import torch
    def train(model, optimizer, cuts=False):
        for step in range(20):
            outputs = model(torch.randn(8, 4))
            optimizer.zero_grad()
            (first(outputs.detach()) if cuts else outputs).square().mean().backward()
            optimizer.step()
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    train(first, torch.optim.SGD(first.parameters(), lr=0.1))
    held = {"first": first, "second": second}[sys.argv[1]].parameters()
    train(second, torch.optim.SGD(held, lr=0.1), "cuts" in sys.argv)
"""


@pytest.mark.parametrize(("given", "is_told"), [(["first"], True), (["second", "cuts"], False)])
def test_an_optimizer_of_another_model_than_the_trained_one_is_told(trained, given, is_told):
    code, out, error = trained(OF_ANOTHER, *given)
    told = " ".join(error.split())
    assert (code, out) == (0, "")
    said = "depends on parameters that no optimizer holds. Unless its part of the loss begins later"
    assert (said in told) is is_told
    assert ("the model that is trained, at script.py:13: it holds" in told) is is_told
    assert ("those of a copied optimizer" in told) is False


CUT_SHORT = """
    import torch
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 5):
        outputs = model(torch.ones(8, 4)) / (step < 4)
        assert outputs.isfinite().all()
        outputs.square().mean().backward()
        optimizer.step()
"""


def test_a_watched_step_that_is_cut_short_is_told_with_its_cure(trained):
    code, _, error = trained(CUT_SHORT, under=("-m", "gradscaler", "run", "--watch", "4"))
    told = " ".join(error.split())
    assert code == 1
    assert "step watched: forward of a function (float32), div at script.py:6: 32 inf" in told
    assert "Clamp the divisor" in told


FAILS = """
    import torch
    def train(scaler=None):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            loss = (model(torch.randn(8, 4)) * (step < 3)).square().sum().sqrt()
            optimizer.zero_grad()
            if scaler:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
    train()
    train(torch.amp.GradScaler("cpu"))
"""


def test_trainings_that_fail_are_told_once_the_script_imports_pytorch(started, tmp_path):
    code, out, error = ended(started(["script.py"], FAILS))
    assert (code, out) == (0, "")
    _, plain, scaled = " ".join(error.split()).split("gradscaler: after 4 steps")
    assert "as said above: The gradient of weight is NaN, by the gradient of sqrt at" in plain
    assert "1 of 4 steps was skipped, in step 4 with NaN and no Inf in the gradient of" in scaled
    runs = [read_run(file) for file in tmp_path.glob("gradscaler-runs/*.jsonl")]
    assert sorted(bool(run.scales) for run in runs) == [False, True]


def test_a_file_has_the_name_of_a_script_that_begins_after_pytorch_was_imported(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "argv", ["gradscaler"])
    files = RunFiles(argparse.Namespace(folder=tmp_path))  # at the import of PyTorch
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert files.next().name.startswith("train-")


NAN = """
import contextlib, io, sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = (model(torch.randn(8, 4)) * (step < 3)).square().sum().sqrt()
    optimizer.zero_grad()
    with contextlib.redirect_stderr(io.StringIO()) as own:
        loss.backward()
        optimizer.step()
    print(repr(own.getvalue()))
"""


@pytest.mark.parametrize("end", ["sys.stderr = None", "sys.stderr = open('/dev/null', 'w')"])
def test_what_a_script_does_with_its_stderr_hides_no_finding_and_holds_none(trained, end):
    code, out, error = trained(f"{NAN}\n{end}")
    assert (code, out) == (0, "''\n" * 4)
    said = " ".join(error.split())
    assert said.count("by the gradient of sqrt at script.py:6") == 2
    assert "gradscaler: after 4 steps, as said above" in said


def test_quiet_says_the_whole_verdict_after_the_training_and_nothing_before(tmp_path):
    (tmp_path / "script.py").write_text(f"{NAN}\nprint('trained')")
    options = "-m", "gradscaler", "run", "--quiet", "--watch", "4"
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = programs.run(*options, "script.py", cwd=tmp_path, env=unbuffered, is_one_stream=True)
    before, found, after = done.stdout.partition("trained\n")
    assert (done.returncode, before, found != "") == (0, "''\n" * 4, True)
    watched, verdict = " ".join(after.split()).split("gradscaler: ")[1:]
    assert watched.startswith("step watched: ")
    assert verdict.startswith("after 4 steps: The gradient of weight is NaN")
    assert "as said above" not in verdict
    assert verdict.count("Add a small number under the root") == 1


def test_a_run_has_no_file_but_a_verdict_where_none_can_be_written(trained, tmp_path):
    (tmp_path / "gradscaler-runs").write_text("not a folder")
    code, _, error = trained(NAN)
    said = " ".join(error.split())
    assert code == 0
    assert said.count("by the gradient of sqrt at script.py:6") == 2
    assert "file: none, as gradscaler-runs cannot be written to (File exists); name another" in said
    assert "report:" not in said


FRESH = """
    import torch
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(40):
        if step % {every} == 0:
            scaler = torch.amp.GradScaler("cpu")
        loss = model(torch.ones(4, 2)).sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize("every", [1, 8])
def test_a_scaler_that_is_made_for_each_step_is_told(trained, tmp_path, every):
    code, _, said = trained(FRESH.format(every=every))
    files = list(tmp_path.glob("gradscaler-runs/*.jsonl"))
    assert code == 0
    if every == 1:
        assert said.count("makes a new GradScaler for each step") == 2  # when it is seen, and last
        assert said.count("Make the scaler once, before the loop.") == 1
        assert files == []
    else:  # such as one for each epoch, whose steps its own file shows
        assert "new GradScaler" not in said
        assert len(files) == 5


THREADS = """
    import threading
    import torch
    def train(number):
        generator = torch.Generator().manual_seed(number)
        for _ in range(30):
            optimizers[number].zero_grad()
            models[number](torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizers[number].step()
        all_alive.wait()
    all_alive = threading.Barrier(4)
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh()) for _ in range(4)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print([parameter.tolist() for model in models for parameter in model.parameters()])
"""


def test_trainings_in_threads_are_the_same_and_one_word_says_that_the_watch_ended(trained):
    _, native, _ = trained(THREADS, under=())
    code, out, error = trained(THREADS)
    assert code == 0
    assert out == native
    assert error.count("the watch ended, and the training goes on: a second thread") == 1
    assert "Nothing wrong was seen" not in error
    assert "Call loss.backward()" not in error
