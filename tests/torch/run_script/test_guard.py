"""An error of ours ends the watch, and never the training: raised wherever PyTorch calls us."""

import gc
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import gradscaler
from gradscaler.diagnose import Monitor

# The guard itself has no public name.
from gradscaler.diagnose._graph import guard as guards
from gradscaler.diagnose._graph.guard import guard
from gradscaler.torch import GradScaler

OWN = Path(gradscaler.__file__).parent
ROOMS = str(OWN / "diagnose"), str(OWN / "_run_script")
STEPS = 5


class InjectedError(RuntimeError):
    """Stands for any error of ours."""


def fail(_):
    """Raise it."""
    raise InjectedError


def training(with_scaler, begun=lambda *_: None):
    """The bits of a training that fails now and then; ``begun`` is called before its first step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler() if with_scaler else None
    begun(model, scaler)
    for step in range(STEPS):
        batch = torch.rand(3, 4).masked_fill_(torch.tensor(step == 3), torch.inf)
        loss = (model(batch - batch.mean()) * (step != 1)).square().sum().sqrt()
        optimizer.zero_grad()
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            for parameter in model.parameters():
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
            optimizer.step()
    state = [
        *model.state_dict().values(),
        *(s["momentum_buffer"] for s in optimizer.state.values()),
    ]
    return [tensor.tolist() for tensor in state], torch.rand(3).tolist()


@contextmanager
def monitored(tmp_path, with_scaler):
    """A monitor that is opened before the first step; yields a function for ``training``."""
    opened = []

    def begin(model, scaler):
        opened.append(Monitor(scaler, model, 2, f"{tmp_path}.jsonl", tell=lambda _: None))

    yield begin
    opened[0].close()


@contextmanager
def under_run(tmp_path, with_scaler):
    """The launcher's session, which finds the model itself; what it replaces is put back."""
    with gradscaler.watch(tmp_path, every=2, step=4):
        guard.say = guards._print  # to the stderr of now
        yield lambda *_: None


WAYS = {"monitor": monitored, "run": under_run}


# They call on what the user calls, and all else in them is guarded.
CALLS_ON = "initialized", "announced", "call", "__call__", "__torch_function__"


def is_own(frame):
    """Whether a frame is of our code, and not of the guard or of a function that guards a call."""
    code = frame.f_code
    is_guard = code.co_name == "safe" or code.co_filename == guards.__file__
    return code.co_filename.startswith(ROOMS) and not is_guard


@contextmanager
def seeing_calls(see, code=None):
    """Call ``see`` with the code of each of our functions that PyTorch, or the guard, calls.

    An error in one that they call ends there, too. If ``code`` is given, only its calls are seen.
    """

    def trace(frame, event, _):
        if code is not None and frame.f_code is not code:  # first, as it is the fastest to tell
            return
        is_called = is_own(frame) and not is_own(frame.f_back)
        if is_called and frame.f_code.co_name not in CALLS_ON:
            see(frame.f_code)

    before = sys.gettrace()
    try:
        yield lambda: sys.settrace(trace)
    finally:
        sys.settrace(before)


def leftovers():
    """What of ours is still in PyTorch."""
    optimizers = sys.modules["torch.optim.optimizer"]
    hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    return (
        sum(map(len, hooks)),
        bool(torch.nn.modules.module._has_any_global_hook()),
        hasattr(torch.autograd.backward, "__wrapped__"),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_function_stack(),
        torch._dynamo.eval_frame._stance.stance,
    )


CLEAN = (0, False, False, False, 0, "default")


@pytest.mark.parametrize("with_scaler", [False, True], ids=["loop", "scaler"])
@pytest.mark.parametrize("way", WAYS)
def test_an_error_wherever_we_are_called_changes_no_bit(way, with_scaler, tmp_path, capfd):
    native = training(with_scaler)

    def watched(name, *seen):
        with WAYS[way](tmp_path / name, with_scaler) as begin, seeing_calls(*seen) as arm:
            if way == "run":  # which sees the optimizer and the scaler made, too
                arm()
            return training(with_scaler, lambda *given: (begin(*given), arm()))

    seen = {}
    assert watched("all", seen.setdefault) == native
    assert len(seen) > 5
    wrong, num_told = {}, 0
    for number, code in enumerate(seen):
        capfd.readouterr()
        try:
            problem = "" if watched(str(number), fail, code) == native else "other bits"
        except InjectedError:
            problem = "it reached the training"
        told = capfd.readouterr().err.count("ended the watch")
        num_told += told > 0
        gc.collect()  # hooks of a watch that ended while PyTorch was calling them
        if problem or told > 1 or leftovers() != CLEAN:
            wrong[f"{code.co_filename}:{code.co_firstlineno}"] = problem, told, leftovers()
    assert wrong == {}
    assert num_told > len(seen) / 2  # the rest is called by what reads any graph, and may fail


def test_what_a_handler_of_a_signal_raises_in_our_code_reaches_the_training(capfd):
    def limit(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGINT, limit)
    try:
        with pytest.raises(TimeoutError):
            guards.guarded(signal.raise_signal)(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == ""
