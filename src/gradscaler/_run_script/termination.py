"""A last word before SIGTERM ends the process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from gradscaler._run_script.undo import on_stop, replace
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of

# The number of processes, by torchrun and most others, Open MPI, MPICH, srun and Horovod.
_NUMBERS = "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "HOROVOD_SIZE"


def before_termination(call: Callable[[], None]) -> None:
    """Call a function when SIGTERM comes, then let it end the process, if nothing else handles it.

    Not in one of several processes. It waits for the others in C++, where no handler in Python can
    run, so it would not end. Call this when a run begins, as one of several is known as such then,
    and may have waited for the others before.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if _is_one_of_several():
        _LastWord.remove()
    elif _in_c() is None:
        signal.signal(signal.SIGTERM, _LastWord(call))
        on_stop.callback(_remove)
        if _LastWord.in_c is None and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_LastWord.remove)
        _LastWord.in_c = _in_c()


def die_in_groups() -> None:
    """Let SIGTERM end this process from when it joins a process group, where it may wait in C++."""
    distributed: Any = sys.modules["torch"].distributed
    if not distributed.is_available():
        return
    join = distributed.init_process_group

    @in_place_of(join)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        _remove()
        join(*args, **kwargs)

    for module in (distributed, distributed.distributed_c10d):
        replace(module, "init_process_group", init_process_group)


@guarded
def _remove() -> None:
    if threading.current_thread() is threading.main_thread():  # another one can set no handler
        _LastWord.remove()


class _LastWord:
    """A handler that passes for ``SIG_DFL``.

    ``signal.getsignal`` looks for an equal constant, and returns that. So a program that installs
    its own handler only where there is none, as Lightning does, still does.
    """

    in_c: int | None = None  # Python's own handler, which calls this

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._call()
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def __eq__(self, other: object) -> bool:
        return other is self or other == signal.SIG_DFL.value

    def __hash__(self) -> int:
        return hash(signal.SIG_DFL.value)

    @classmethod
    def remove(cls) -> None:
        """Give SIGTERM its default action, if it has this handler."""
        passes = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if passes and cls.in_c is not None and _in_c() == cls.in_c:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _in_c() -> int | None:
    """The address of what handles SIGTERM; None for the default action.

    ``signal.getsignal`` does not know handlers in C, such as those of ``faulthandler.register``.
    """
    get = ctypes.pythonapi.PyOS_getsig
    get.restype = ctypes.c_void_p
    address: int | None = get(signal.SIGTERM)
    return address


def _is_one_of_several() -> bool:
    """Whether this process may wait for others; ``TF_CONFIG`` is of TensorFlow's strategies."""
    numbers = [os.environ.get(name, "") for name in _NUMBERS]
    is_many = any(number.isdecimal() and int(number) > 1 for number in numbers)
    return is_many or "TF_CONFIG" in os.environ or _is_distributed()


def _is_distributed() -> bool:
    """Whether ``torch.distributed`` has more than one process."""
    found: Any = getattr(sys.modules.get("torch"), "distributed", None)
    is_ready = found is not None and found.is_available() and found.is_initialized()
    return bool(is_ready and found.get_world_size() > 1)
