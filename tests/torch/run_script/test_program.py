"""A program under ``gradscaler run`` is as under ``python``: one process each, compared."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

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


UNWATCHED = (
    "gradscaler: this process did not import PyTorch or call Keras' fit, so there is no verdict.\n"
)


def ended(process):
    """The exit status, stdout, and stderr without the word at its end on what was not watched."""
    out, error = process.communicate(timeout=60)
    return process.returncode, out, error.removesuffix(UNWATCHED)


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
    out, error = process.communicate(timeout=60)
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
        time.sleep(0.2)  # until it waits
        process.send_signal(number)
        ends.append(ended(process))
    assert ends[0] == ends[1]
    assert ends[0][0] == -number


def test_a_program_without_pytorch_is_told_so(started):
    assert started(["script.py"], "print(1)").communicate(timeout=60) == ("1\n", UNWATCHED)


SCALERS = """
    import sys
    before = {"numpy", "torch", "gradscaler.torch"} & set(sys.modules)
    import torch
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    made = torch.amp.GradScaler("cpu"), torch.cuda.amp.GradScaler(), ShardedGradScaler("cpu")
    print(before, *(type(each).__module__ for each in made))
"""


@pytest.mark.parametrize("imports", ["sys", "torch, sys"])
@pytest.mark.parametrize(
    "end", ["sys.exit(0)", "__import__('argparse').ArgumentParser().parse_args()"]
)
def test_a_script_that_ends_before_its_first_step_hears_no_word(started, imports, end):
    process = started(["--", "script.py", "--help"], f"import {imports}\n{end}")
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")


def test_scalers_become_ours_once_the_script_imports_pytorch(started, tmp_path):
    code, out, error = ended(started(["script.py"], SCALERS))
    ours = "gradscaler.torch.scaler gradscaler.torch._install gradscaler.torch.sharded"
    assert (code, out) == (0, f"set() {ours}\n")
    assert "no optimizer of this process took a step" in error
    assert not (tmp_path / "gradscaler-runs").exists()


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
def test_what_a_script_does_with_its_stderr_hides_no_finding_and_holds_none(started, end):
    code, out, error = ended(started(["script.py"], f"{NAN}\n{end}"))
    assert (code, out) == (0, "''\n" * 4)
    said = " ".join(error.split())
    assert said.count("by the gradient of sqrt at script.py:6") == 2
    assert "gradscaler: after 4 steps, as said above" in said


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
def test_a_scaler_that_is_made_for_each_step_is_told(started, tmp_path, every):
    process = started(["script.py"], FRESH.format(every=every))
    _, said = process.communicate(timeout=60)
    files = list(tmp_path.glob("gradscaler-runs/*.jsonl"))
    assert process.returncode == 0
    if every == 1:
        assert said.count("makes a new GradScaler for each step") == 2  # when it is seen, and last
        assert said.count("Make the scaler once, before the loop.") == 1
        assert files == []
    else:  # such as one for each epoch, whose steps its own file shows
        assert "new GradScaler" not in said
        assert len(files) == 5
