"""Runs Python programs that train, without an import of the framework for each.

A process of its own takes most of its time to import the framework and, in the first step of an
optimizer of PyTorch, its compiler. So one process imports both, and each program runs in a fork of
it. The fork has the program's arguments, folder, variables and streams, and ends as an interpreter
does: with exit handlers, and with the status of an exception or of a signal. PyTorch is no module
of its until it imports it, which then takes no time. Other frameworks are modules from its start,
so a program that is watched from their import needs a process of its own (``scripts``).

So does what depends on other modules that a framework imports, or on variables that it reads
meanwhile.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from tests.support.ranks import FRAMEWORK, free_ports

SECONDS = 600.0  # for a program, on a busy machine

IMPORTED = {"torch": ["torch", "torch._dynamo"], "jax": ["jax", "optax"]}.get(
    FRAMEWORK, [FRAMEWORK]
)
HIDE_TORCH = """
spec = torch.__spec__
hidden = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "torch"}
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            return ModuleSpec(name, self, origin=spec.origin, is_package=True)
    def create_module(self, _):
        return hidden["torch"]
    def exec_module(self, module):
        module.__spec__ = spec
        sys.modules.update(hidden)
        sys.meta_path.remove(self)
sys.meta_path.insert(0, Finder())
"""
SERVER = f"""
import gc, json, os, runpy, sys, types, warnings
from importlib.machinery import ModuleSpec
usual = warnings.filters[:]
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # a framework may print at its import
import {", ".join(IMPORTED)}
{HIDE_TORCH if FRAMEWORK == "torch" else ""}
gc.freeze()  # else a fork copies what its collector touches
for requests in map(json.loads, sys.stdin):
    forks = []
    for request in requests:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns that its threads do not survive
            forks.append(os.fork())
        if not forks[-1]:
            break
    else:
        statuses = (os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks)
        print(*statuses, file=answers, flush=True)
        continue
    break
else:
    sys.exit()
answers.close()
for number, path in enumerate([os.devnull, *request["streams"]]):
    os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["variables"])
sys.stdout.reconfigure(line_buffering="PYTHONUNBUFFERED" in os.environ)
if request["is_strict"]:  # before the usual filters, and after the framework's, as by -W error
    sys.warnoptions.append("error")
    warnings.filters[:] = [each for each in warnings.filters if each not in usual]
    warnings.simplefilter("error", append=True)
kind, sys.argv = request["kind"], request["arguments"]
sys.path[0] = "" if kind else os.path.dirname(os.path.realpath(sys.argv[0]))
if kind == "-m":
    runpy._run_module_as_main(sys.argv[0])  # as Python does
else:
    code, name = sys.argv[0], "<string>"
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-c":
        sys.argv[0] = "-c"
    else:
        main.__file__ = name = code
        with open(name) as file:
            code = file.read()
    exec(compile(code, name, "exec"), vars(main))
"""


@cache
def _server() -> Any:
    """The process that has imported the framework."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # threads do not survive a fork
        start_new_session=True,  # it is killed with its forks
    )
    atexit.register(_kill, server)
    return server


def _kill(server: Any) -> None:
    with server:  # which closes its streams
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)


def run(
    *command: object,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    is_strict: bool = False,
    is_one_stream: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``-m MODULE``, ``-c CODE`` or a script with its arguments.

    Args:
        cwd: the folder in which it starts.
        env: its environment variables; those of this process unless they are given.
        is_strict: a warning is an error, as by ``python -W error``.
        is_one_stream: stderr goes where stdout does.
    """
    own = os.environ if env is None else env
    (done,) = _run(command, cwd, [own], is_strict, is_one_stream)
    return done


def run_ranks(world: int, *command: object, cwd: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run a program as that many processes at once, with the variables that torchrun sets."""
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports(1)[0])}
    shared = {**os.environ, **place, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    own = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return _run(command, cwd, own)


def _run(
    command: Sequence[object],
    cwd: Path,
    variables: Sequence[Mapping[str, str]],
    is_strict: bool = False,
    is_one_stream: bool = False,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program at once with each of some variables."""
    kind, *rest = map(str, command)
    kind, arguments = (kind, rest) if kind in ("-c", "-m") else ("", [kind, *rest])
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        streams = [
            [Path(folder, f"{name}{number}") for name in ("stdout", "stderr")]
            for number in range(len(variables))
        ]
        for stream in chain(*streams):
            stream.touch()
        requests = [
            {
                "kind": kind,
                "arguments": arguments,
                "folder": str(cwd),
                "variables": dict(own),
                "streams": [str(out), str(out if is_one_stream else error)],
                "is_strict": is_strict,
            }
            for own, (out, error) in zip(variables, streams, strict=True)
        ]
        server.stdin.write(json.dumps(requests) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], SECONDS)[0]:
            _kill(server)
            _server.cache_clear()
            raise TimeoutError(f"{command} takes more than {SECONDS:g} seconds")
        statuses = map(int, server.stdout.readline().split())
        return [
            subprocess.CompletedProcess(command, status, out.read_text(), error.read_text())
            for status, (out, error) in zip(statuses, streams, strict=True)
        ]
