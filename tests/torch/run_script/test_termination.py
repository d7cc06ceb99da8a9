"""The last word before SIGTERM; that it ends the process is tested with a whole training."""

import faulthandler
import os
import signal

import pytest

# The launcher's parts are not public.
from gradscaler._run_script.termination import before_termination
from gradscaler.diagnose import read_run
from tests.support import programs

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@pytest.fixture(autouse=True)
def default():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_program_that_asks_for_the_handler_sees_the_default():
    before_termination(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.signal(signal.SIGTERM, signal.SIG_IGN) is signal.SIG_DFL


def test_a_handler_of_the_program_stays():
    def own(*_):
        pass

    signal.signal(signal.SIGTERM, own)
    before_termination(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is own


def end_of(child):
    """How a forked child ends that runs a function, and then gets SIGTERM."""
    process = os.fork()
    if process == 0:
        try:
            child()
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def word():
    os.write(1, b"word")


def test_a_forked_child_dies_without_the_word(capfd):
    before_termination(word)
    assert end_of(lambda: None) == -signal.SIGTERM
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(("processes", "printed"), [("1", "word"), ("2", "")])
def test_one_of_several_processes_dies_without_the_word(processes, printed, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", processes)
    assert end_of(lambda: before_termination(word)) == -signal.SIGTERM
    assert capfd.readouterr().out == printed


def test_a_process_that_becomes_one_of_several_dies_without_the_word(monkeypatch, capfd):
    def child():
        before_termination(word)
        monkeypatch.setenv("WORLD_SIZE", "2")
        before_termination(word)

    assert end_of(child) == -signal.SIGTERM
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("is_first", [True, False])
def test_a_handler_in_c_stays(is_first, tmp_path, capfd):
    with (tmp_path / "traces").open("w") as file:
        calls = [
            lambda: faulthandler.register(signal.SIGTERM, file),
            lambda: before_termination(word),
        ]

        def child():
            for call in calls if is_first else calls[::-1]:
                call()
            assert end_of(lambda: None) == 0  # and in a child of the child

        assert end_of(child) == 0
    assert (tmp_path / "traces").read_text().count("most recent call first") == 2
    assert capfd.readouterr().out == ""


WAITS = """
import os, signal, time, torch
import torch.distributed as dist

waiting, waits = os.pipe()
rank = 0 if os.fork() else 1
store = "file://" + os.path.abspath("store")
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
if rank == 1:
    other = os.getppid()
    os.read(waiting, 1)
    time.sleep(0.5)  # until it does, most likely: it ends at once before that, too
    os.kill(other, signal.SIGTERM)
    end = time.monotonic() + 60
    while os.getppid() == other:
        time.sleep(0.05)
        if time.monotonic() > end:
            os.kill(other, signal.SIGKILL)
    os._exit(0)
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(3):
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
os.write(waits, b"!")
dist.all_reduce(torch.ones(3))
"""


WAITS_TO_JOIN = """
import os, signal, time, torch
from torch.distributed import init_process_group

def state(process):
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]

layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(3):
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
if not os.fork():
    other = os.getppid()
    while state(other) != "S":  # until it waits
        time.sleep(0.01)
    os.kill(other, signal.SIGTERM)
    end = time.monotonic() + 60
    while os.getppid() == other:
        time.sleep(0.05)
        if time.monotonic() > end:
            os.kill(other, signal.SIGKILL)
    os._exit(0)
init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=0, world_size=2)
"""


@pytest.mark.parametrize("script", [WAITS, WAITS_TO_JOIN], ids=["collective", "group"])
def test_a_rank_that_waits_for_others_dies_at_once(script, tmp_path):
    (tmp_path / "waits.py").write_text(script)
    done = programs.run("-m", "gradscaler", "run", "waits.py", cwd=tmp_path)
    assert done.returncode == -signal.SIGTERM, done.stderr
    (file,) = (tmp_path / "gradscaler-runs").iterdir()
    assert read_run(file).num_steps == 2  # the third ends with the next backward pass
