"""Processes that are joined by gloo over the loopback, each for many cases."""

import importlib.util
import multiprocessing
import os
import socket
import traceback
from functools import cache
from multiprocessing.connection import wait
from time import monotonic

import pytest

TIME_LIMIT = 90.0  # seconds, for each case
ABANDONED = 5.0  # seconds that the others have to end once one has raised


@cache
def _module_at(path):
    spec = importlib.util.spec_from_file_location("cases", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(rank, world, port, degrees, connection):
    """One rank: run each function that comes, and send back what it returns or raises."""
    os.environ.update(
        PADDLE_DISTRI_BACKEND="gloo",
        PADDLE_TRAINER_ID=str(rank),
        PADDLE_TRAINERS_NUM=str(world),
        PADDLE_TRAINER_ENDPOINTS=",".join(f"127.0.0.1:{port}" for _ in range(world)),
        PADDLE_CURRENT_ENDPOINT=f"127.0.0.1:{port}",
        PADDLE_MASTER=f"127.0.0.1:{port}",
    )
    import paddle
    import paddle.distributed as dist
    from paddle.distributed import fleet

    dist.init_parallel_env()
    if degrees:
        _start_fleet(dist, fleet, degrees)
    while True:
        path, name, args = connection.recv()
        paddle.seed(0)
        try:
            connection.send((True, getattr(_module_at(path), name)(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


def _start_fleet(dist, fleet, degrees):
    """Lay the ranks out by fleet; gloo cannot join two groups of ranks at the same moment."""
    new_group = dist.new_group

    def one_after_another(*args, **kwargs):
        dist.barrier()
        return new_group(*args, **kwargs)

    dist.new_group = one_after_another
    strategy = fleet.DistributedStrategy()
    degrees = {"dp": 1, **dict(degrees)}
    strategy.hybrid_configs = {f"{name}_degree": degree for name, degree in degrees.items()}
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 4}
    fleet.init(is_collective=True, strategy=strategy)
    dist.new_group = new_group


class Ranks:
    """The ranks of one process group, forked from a process that has imported Paddle."""

    def __init__(self, world, degrees):
        self.world, self.degrees = world, degrees
        self._processes = []

    def run(self, function, *args):
        """What each rank returns from ``function(*args)``; all are killed if one hangs or raises.

        It is the module-level function of this name in its file, so it need not be picklable.
        """
        if not self._processes:
            self._start()
        answers = {}
        end = monotonic() + TIME_LIMIT
        for connection in self._connections:
            connection.send((function.__code__.co_filename, function.__name__, args))
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
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["paddle.distributed.fleet", "gradscaler.paddle"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._connections = []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            args = rank, self.world, port, self.degrees, theirs
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def kill(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []


@pytest.fixture(scope="session")
def ranks():
    """``ranks(2, mp=2)``: so many processes, laid out by fleet if degrees are given, and kept."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    made = cache(lambda world, degrees: Ranks(world, degrees))
    kept = set()

    def of(world, **degrees):
        group = made(world, tuple(degrees.items()))
        kept.add(group)
        return group

    yield of
    for group in kept:
        group.kill()
