"""MindSpore's data_parallel: an overflow in one skips in all, and they end as one process does."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "data_parallel.py"
TIME_LIMIT = 300.0  # seconds, for several imports of MindSpore on a busy machine


@pytest.fixture(scope="module")
def workers():
    """The module that the workers run."""
    specification = importlib.util.spec_from_file_location(WORKER.stem, WORKER)
    module = importlib.util.module_from_spec(specification)
    sys.modules[WORKER.stem] = module  # where MindSpore looks up the code that it compiles
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(workers, tmp_path_factory):
    """The results of each worker, by its mode."""
    folder = tmp_path_factory.mktemp("workers")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        Path(sys.executable).parent / "msrun",
        f"--worker_num={workers.WORLD}",
        f"--local_worker_num={workers.WORLD}",
        f"--master_port={port}",
        f"--log_dir={folder}",
        "--join=True",
        WORKER,
        folder,
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # msrun starts "python"
    environment = {**os.environ, "PATH": path}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            process.wait(TIME_LIMIT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    logs = "\n".join(log.read_text()[-2000:] for log in folder.glob("worker_*.log"))
    assert process.returncode == 0, logs
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers.WORLD)]


def test_workers_skip_together_and_end_as_one_process(mode, workers, results):
    expected = workers.train(None)
    first, second = (result[mode] for result in results)
    assert first == second
    assert [overflow for overflow, *_ in first] == [index in workers.BAD for index in range(6)]
    assert [scale for _, scale, *_ in first] == [1024.0, 512.0, 512.0, 256.0, 256.0, 512.0]
    for found, alone in zip(first, expected, strict=True):
        assert found[:4] == alone[:4]
        assert np.allclose(found[4], alone[4], rtol=1e-5)


def test_what_one_worker_finds_all_find(workers, results):
    assert [result["flags"] for result in results] == [[True] * workers.WORLD + [False]] * 2


def test_the_largest_gradient_is_that_of_all_workers(workers, results):
    assert [result["largest"] for result in results] == [float(workers.WORLD)] * workers.WORLD
