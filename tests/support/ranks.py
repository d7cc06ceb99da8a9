"""Processes in one group over the loopback, which run many cases."""

import contextlib
import gc
import importlib.util
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import traceback
from functools import cache
from multiprocessing.connection import wait
from time import monotonic

import pytest

FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "torch")
ON_TORCH = "torch" in (FRAMEWORK, os.environ.get("KERAS_BACKEND"))
TIME_LIMIT = 120.0  # seconds, for each case, on a busy machine
ABANDONED = 5.0  # seconds for the other ranks to end after one has raised
SEED = {  # the functions that seed a framework; the others take seeds as arguments
    "torch": "manual_seed",
    "tensorplay": "manual_seed",
    "paddle": "seed",
    "mindspore": "set_seed",
}
ATTEMPTS = 10  # to join, before any test's code runs
# What each rank would import, the compiler in an optimizer's first step.
PRELOADED = ["torch.distributed.fsdp", "torch._dynamo"] * ON_TORCH
PRELOADED += ["paddle.distributed.fleet"] * (FRAMEWORK == "paddle")


@cache
def _module_at(path):
    spec = importlib.util.spec_from_file_location("cases", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seed_frameworks():
    """Seed each framework that is loaded."""
    for name, seed in SEED.items():
        if sys.modules.get(name):
            getattr(sys.modules[name], seed)(0)


def free_ports(count):
    """Ports that are free, below those that Linux gives to connections, as of another test."""
    ports = []
    for port in random.SystemRandom().sample(range(20_000, 32_768), 1000):
        with contextlib.suppress(OSError), socket.socket() as each:
            each.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            break
    return ports


def _join_by_gloo(rank, ports):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{ports[0]}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=len(ports))


def _join_by_paddle(rank, ports, **degrees):
    """Join the ranks, and lay them out by fleet if degrees are given."""
    address = f"127.0.0.1:{ports[0]}"
    os.environ.update(
        PADDLE_DISTRI_BACKEND="gloo",
        PADDLE_TRAINER_ID=str(rank),
        PADDLE_TRAINERS_NUM=str(len(ports)),
        PADDLE_TRAINER_ENDPOINTS=",".join(address for _ in ports),
        PADDLE_CURRENT_ENDPOINT=address,
        PADDLE_MASTER=address,
    )
    import paddle.distributed as dist
    from paddle.distributed import fleet

    dist.init_parallel_env()
    if not degrees:
        return
    new_group = dist.new_group

    def one_after_another(*args, **kwargs):
        dist.barrier()  # gloo cannot join two groups of ranks at the same moment
        return new_group(*args, **kwargs)

    dist.new_group = one_after_another
    strategy = fleet.DistributedStrategy()
    degrees = {"dp": 1, **degrees}
    strategy.hybrid_configs = {f"{name}_degree": degree for name, degree in degrees.items()}
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 4}
    fleet.init(is_collective=True, strategy=strategy)
    dist.new_group = new_group


def _name_the_workers_of_tensorflow(rank, ports, strategy=None):
    """Name the workers; ``strategy`` only gives each strategy processes of its own."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    task = {"type": "worker", "index": rank}
    if len(ports) > 1:
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})


JOIN = {"torch": _join_by_gloo, "paddle": _join_by_paddle}.get(
    "torch" if ON_TORCH else FRAMEWORK, _name_the_workers_of_tensorflow
)


def _serve(rank, ports, options, connection):
    """One rank: run each function that comes, and send back what it returns or raises."""
    gc.freeze()  # else each collection looks at all that was imported, and copies it
    JOIN(rank, ports, **options)
    connection.send("joined")
    while True:
        path, name, args = connection.recv()
        seed_frameworks()
        try:
            connection.send((True, getattr(_module_at(path), name)(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class Ranks:
    """The ranks of one process group, forked from a process that has imported the framework."""

    def __init__(self, world, options):
        self.world, self.options = world, dict(options)
        self._processes = []

    def run(self, function, *args):
        """Run ``function(*args)`` in each rank, and return the results.

        All ranks are killed if one hangs or raises. The function is found by its name in its file,
        so it need not be picklable.
        """
        for _ in range(ATTEMPTS):
            if self._processes or self._start():
                break
            self.kill()
        else:
            pytest.fail(f"{self.world} processes could not join in {ATTEMPTS} attempts")
        for connection in self._connections:
            connection.send((function.__code__.co_filename, function.__name__, args))
        answers = {}
        end = monotonic() + TIME_LIMIT
        while len(answers) < self.world and monotonic() < end:
            waiting = [c for c in self._connections if c not in answers]
            for connection in wait(waiting, timeout=max(0.0, end - monotonic())):
                try:
                    answers[connection] = connection.recv()
                except EOFError:
                    answers[connection] = False, "the process died"
                if not answers[connection][0]:
                    end = min(end, monotonic() + ABANDONED)
        wrong = {
            rank: "it did not end" if c not in answers else answers[c][1]
            for rank, c in enumerate(self._connections)
            if c not in answers or not answers[c][0]
        }
        if wrong:
            self.kill()
            pytest.fail("\n".join(f"rank {rank}: {text}" for rank, text in wrong.items()))
        return [answers[c][1] for c in self._connections]

    def _start(self):
        """Start the processes; False if they could not join, as gloo cannot now and then."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, f"gradscaler.{FRAMEWORK}"])
        ports = free_ports(self.world)
        self._connections = []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            arguments = rank, ports, self.options, theirs
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        end = monotonic() + TIME_LIMIT
        try:
            return all(c.poll(max(0.0, end - monotonic())) and c.recv() for c in self._connections)
        except EOFError:
            return False

    def kill(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []


def agreed(results):
    """The result of all ranks, which must be the same."""
    assert all(result == results[0] for result in results)
    return results[0]


def output_of(*arguments, cwd):
    """Run a Python script that starts processes itself, and return its output.

    PyTorch may abort a process that ends while a thread of gloo's still holds a tensor
    (pytorch#179291): one in twenty on a busy machine, with its own scaler, too. The script is then
    run again.
    """
    command = [sys.executable, *arguments]
    for _ in range(4):
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def ranks():
    """``ranks(world)``: that many processes in one group, kept from case to case.

    ``ranks(2, mp=2)`` are laid out by Paddle's fleet.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    made = {}

    def of(world, **options):
        key = world, tuple(options.items())
        return made.setdefault(key, Ranks(*key))

    yield of
    for group in made.values():
        group.kill()
