"""The costs of a scaler's step, by the numbers of processes, tensors and parameters.

    python benchmarks/scale.py                       the tables of docs/scale.md
    python benchmarks/scale.py --ranks 2 4 8         counts in real processes beside predicted ones
    python benchmarks/scale.py --measure             the costs of this machine, for the model

Counts are exact: they are taken from the real code, while it runs. The world is PyTorch's fake
process group, so one process is enough for 10,000; all other processes are taken to hold the same
as this one. ``--ranks`` repeats the counts in processes that gloo joins. Times are a model: counts
multiplied by the costs that the options give.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.multiprocessing.spawn import spawn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_scaler import IdleOptimizer

from gradscaler.torch import GradScaler

SCALE = 1024.0
WARM_UP = 3  # iterations, in which caches are filled
FEW, MANY = 20, 110  # tensors; a count is a line through both
SMALL, LARGE = 4, 16  # elements of a tensor; bytes are a line through both
TENSORS_A_KERNEL = 110  # multi_tensor_apply's: aten/src/ATen/native/cuda/MultiTensorApply.cuh
NODE = 8  # processes that share one machine


class Layout(NamedTuple):
    """How parameters lie on processes.

    Attributes:
        mesh: the sizes of a mesh's dimensions, for a number of processes; None for plain tensors.
        placements: where DTensors lie on that mesh.
        is_grouped: whether the user names the group, and ``shards=`` to clip.
        optimizers: how many optimizers share the tensors.
    """

    mesh: Callable[[int], tuple[int, ...]] | None = None
    placements: tuple[Placement, ...] = ()
    is_grouped: bool = False
    optimizers: int = 1


LAYOUTS = {
    "DDP": Layout(),
    "A named group": Layout(is_grouped=True),
    "FSDP2": Layout(lambda p: (p,), (Shard(0),)),
    "HSDP": Layout(lambda p: (2, p // 2), (Replicate(), Shard(0))),
    "FSDP2 and tensor parallelism": Layout(lambda p: (p // 2, 2), (Shard(0), Shard(0))),
    "FSDP2, two optimizers": Layout(lambda p: (p,), (Shard(0),), optimizers=2),
}


class Operations(type(GradScaler._operations)):  # type: ignore[misc]
    """Takes CPU tensors for tensors of a device, on which reading one waits."""

    def on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor can be read without waiting: never."""
        return False


class OnDevice(GradScaler):
    """Our scaler with the operations that it uses on a device."""

    _operations = Operations()


@dataclass
class Counts:
    """The counts of one step in one process.

    Attributes:
        collectives: all-reduces.
        reduced: bytes that this process gives to them.
        operations: PyTorch's operations that compute, each on one tensor or one list.
        list_operations: those of them that take a list. On a GPU a kernel takes 110 of its tensors.
        moved: bytes of memory that the operations read and write.
        allocated: bytes of the tensors that they make.
        calls: calls in Python, of Python's functions and of C's.
        lists: bytes of Python's objects at their peak.
    """

    collectives: float = 0
    reduced: float = 0
    operations: float = 0
    list_operations: float = 0
    moved: float = 0
    allocated: float = 0
    calls: float = 0
    lists: float = 0


class Counting(TorchDispatchMode):
    """Counts what PyTorch is asked for, below DTensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # DTensors' operations on this process' part come here instead
        result = func(*args, **(kwargs or {}))
        counts, given = self.counts, tensors_in((args, kwargs))
        if func.namespace in ("c10d", "_c10d_functional"):
            if "all_reduce" in func.__name__ or "allreduce" in func.__name__:
                counts.collectives += 1
                counts.reduced += sum(tensor.nbytes for tensor in given)
        elif func.namespace == "aten" and not func.is_view:
            length = max((len(a) for a in args if isinstance(a, (list, tuple))), default=1)
            counts.operations += 1
            counts.list_operations += length >= FEW // 2
            made = tensors_in(result)
            known = {tensor.untyped_storage().data_ptr() for tensor in given}
            new = [t for t in made if t.untyped_storage().data_ptr() not in known]
            is_written = (a.alias_info is not None for a in func._schema.arguments)
            written = tensors_in([a for a, w in zip(args, is_written, strict=False) if w])
            counts.allocated += sum(tensor.nbytes for tensor in new)
            counts.moved += sum(tensor.nbytes for tensor in (*given, *new, *written))
        return result


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


@contextmanager
def fake_world(processes: int) -> Iterator[None]:
    """A world of which this process is the first, and all others hold what it holds."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    all_reduce = dist.all_reduce

    def among_equals(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        all_reduce(tensor, op, group)
        if op == dist.ReduceOp.SUM:  # through NumPy, so that no mode counts it
            tensor.detach().numpy()[...] *= dist.get_world_size(group)

    def reduced(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op:  # PyTorch's own, of a flag that is 0
            return all_reduce(tensor, op, group, async_op=True)
        return among_equals(tensor, op, group)

    dist.all_reduce = reduced
    try:
        yield
    finally:
        dist.all_reduce = all_reduce
        dist.destroy_process_group()


def optimizers_of(layout: Layout, tensors: int, elements: int) -> list[IdleOptimizer]:
    """Optimizers of so many tensors, of which this process has so many elements each."""
    processes, mesh = dist.get_world_size(), None
    if layout.mesh is not None:
        mesh = init_device_mesh("cpu", layout.mesh(processes))

    def tensor() -> torch.Tensor:
        local = torch.ones(elements)
        if mesh is None:
            return local
        return DTensor.from_local(local, mesh, layout.placements, run_check=False)

    parameters = [torch.nn.Parameter(tensor()) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = tensor()
    count = layout.optimizers
    return [IdleOptimizer(parameters[i::count]) for i in range(count)]


def iteration_of(
    whose: str, layout: Layout, clip: bool, optimizers: list[IdleOptimizer], on_device: bool
) -> Callable[[], None]:
    """The calls of one iteration with our scaler or with PyTorch's."""
    world = dist.group.WORLD if layout.is_grouped else None
    if whose == "ours":
        kind = OnDevice if on_device else GradScaler
        scaler: torch.amp.GradScaler = kind("cpu", SCALE, group=world)
    elif layout.is_grouped:
        scaler = ShardedGradScaler("cpu", SCALE, process_group=world)
    else:
        scaler = torch.amp.GradScaler("cpu", SCALE)
    loss = torch.ones(())

    def iteration() -> None:
        scaler.scale(loss)
        for optimizer in optimizers:
            if clip and isinstance(scaler, GradScaler):
                scaler.clip_grad_norm_(optimizer, 1.0, shards=world)
            elif clip:
                scaler.unscale_(optimizer)
                parameters = optimizer.param_groups[0]["params"]
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
        scaler.update()

    return iteration


def counts_of(
    whose: str, name: str, clip: bool, tensors: int, elements: int = SMALL, on_device: bool = False
) -> Counts:
    """The counts of one iteration in the world that is there."""
    layout = LAYOUTS[name]
    optimizers = optimizers_of(layout, tensors, elements)
    iteration = iteration_of(whose, layout, clip, optimizers, on_device)
    for _ in range(WARM_UP):
        iteration()
    with Counting() as counting:
        iteration()
    counts: Counts = counting.counts

    def profile(frame: FrameType, event: str, argument: object) -> None:
        counts.calls += event in ("call", "c_call")

    sys.setprofile(profile)
    iteration()
    sys.setprofile(None)
    if dist.get_backend() == "fake":  # gloo's threads crash if they allocate as tracemalloc stops
        tracemalloc.start()
        iteration()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        iteration()
        counts.lists = max(0, tracemalloc.get_traced_memory()[1] - before)
        tracemalloc.stop()
    return counts


class Line(NamedTuple):
    """A count that grows with the tensors: ``fixed + each * tensors``."""

    fixed: float
    each: float

    def at(self, tensors: int) -> float:
        """The count at a number of tensors."""
        return self.fixed + self.each * tensors

    def __str__(self) -> str:
        each = f"{self.each:.3g} T" if self.each else ""
        return f"{self.fixed:.0f} + {each}" if each else f"{self.fixed:.0f}"


def line(few: float, many: float) -> Line:
    """The line through two counts."""
    each = (many - few) / (MANY - FEW)
    return Line(few - each * FEW, each)


def is_possible(whose: str, name: str, clip: bool) -> bool:
    """Whether a scaler clips by the norm of this layout: PyTorch's has no ``shards=``."""
    return whose == "ours" or not (clip and LAYOUTS[name].is_grouped)


def predicted(processes: int) -> list[dict[str, Any]]:
    """The counts of every layout as lines, from two small numbers of tensors."""
    rows = []
    with fake_world(processes):
        for name, clip, whose in product(LAYOUTS, (False, True), ("ours", "native")):
            if not is_possible(whose, name, clip):
                continue
            for on_device in (False, True)[: 1 + (whose == "ours")]:
                few, many = (
                    asdict(counts_of(whose, name, clip, tensors, on_device=on_device))
                    for tensors in (FEW, MANY)
                )
                large = counts_of(whose, name, clip, MANY, LARGE, on_device=on_device)
                lines = {key: line(few[key], many[key]) for key in few}
                moved = (large.moved - many["moved"]) / (MANY * (LARGE - SMALL))
                rows.append(
                    {"layout": name, "clip": clip, "whose": whose, "on_device": on_device}
                    | {"moved_per_element": moved, "lines": lines}
                )
    return rows


EXACT = "collectives", "reduced", "operations"


def leave() -> None:
    """End one of the real processes; do not return."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # else a thread of gloo's may abort the process as it ends (pytorch#179291)


def count_in_rank(rank: int, folder: str, world: int, tensors: list[int]) -> None:
    """Be one of the real processes: count every layout, and write a file."""
    torch.set_num_threads(1)
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    found = []
    for name, clip, whose, count in product(LAYOUTS, (False, True), ("ours", "native"), tensors):
        mesh = LAYOUTS[name].mesh
        has_peers = mesh is None or min(mesh(world)) > 1  # else a dimension takes no all-reduce
        if has_peers and is_possible(whose, name, clip):
            counts = asdict(counts_of(whose, name, clip, count))
            found.append(((name, clip, whose), count, [counts[key] for key in EXACT]))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    leave()


def counted(processes: int, tensors: list[int]) -> list[Any]:
    """The counts in processes that gloo joins; RuntimeError if they are not the same in all."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(count_in_rank, (folder, processes, tensors), nprocs=processes)
        first, *others = (
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)
        )
    if any(found != first for found in others):
        raise RuntimeError(f"{processes} processes count differently")
    return list(first)


def cross_check(rows: list[dict[str, Any]], ranks: list[int], tensors: list[int]) -> str:
    """A table of counts in real processes beside those predicted, summed over all layouts."""
    lines = {
        (row["layout"], row["clip"], row["whose"]): row["lines"]
        for row in rows
        if not row["on_device"]
    }
    table = [
        "| Processes | Tensors | Steps counted | Collectives, predicted / counted | Bytes "
        "| Operations | Steps that differ |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for processes in ranks:
        found = counted(processes, tensors)
        for count in tensors:
            pairs = [
                ([round(lines[tuple(key)][name].at(count)) for name in EXACT], values)
                for key, number, values in found
                if number == count
            ]
            differ = sum(before != now for before, now in pairs)
            sums = [
                f"{sum(before[i] for before, _ in pairs):,} / {sum(now[i] for _, now in pairs):,}"
                for i in range(len(EXACT))
            ]
            cells = " | ".join(sums)
            table.append(f"| {processes} | {count:,} | {len(pairs)} | {cells} | {differ} |")
    return "\n".join(table)


def is_shown(row: dict[str, Any]) -> bool:
    """Whether the tables show a row: ours as on a device; PyTorch's does the same on the CPU."""
    return bool(row["on_device"] == (row["whose"] == "ours"))


def first_table(rows: list[dict[str, Any]]) -> str:
    """Collectives and bytes of each layout, on a device."""
    table = [
        "| Layout | Collectives, ours / PyTorch's | Bytes | With clipping: collectives | Bytes |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in LAYOUTS:
        cells = [name]
        for clip, key in product((False, True), ("collectives", "reduced")):
            shown = {"ours": "-", "native": "-"}
            for row in rows:
                if (row["layout"], row["clip"]) == (name, clip) and is_shown(row):
                    shown[row["whose"]] = str(row["lines"][key])
            cells.append(f"{shown['ours']} / {shown['native']}")
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def second_table(rows: list[dict[str, Any]]) -> str:
    """The costs that grow with the tensors."""
    table = [
        "| Layout, scaler | Operations | Python calls | Python's memory, bytes "
        "| Bytes moved per element |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        if row["layout"] not in ("DDP", "FSDP2") or not is_shown(row):
            continue
        clip = ", clipping" * row["clip"]
        whose = {"ours": "ours", "native": "PyTorch's"}[row["whose"]]
        lines = row["lines"]
        cells = [f"{row['layout']}{clip}, {whose}", lines["operations"], lines["calls"]]
        cells += [lines["lists"], f"{row['moved_per_element']:.0f}"]
        table.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(table)


def latency(processes: int) -> float:
    """Seconds of one small all-reduce: NCCL's own model of a tree (src/graph/tuning.cc, LL).

    4.4 + 2 * ((processes in a node - 1) * 1.8 * 0.52 + log2(nodes) * 5.0), in microseconds.
    """
    nodes = max(1, processes // NODE)
    inside = (min(processes, NODE) - 1) * 0.52 * (1.8 if nodes > 1 else 1.0)
    return (4.4 + 2 * (inside + math.log2(nodes) * 5.0)) * 1e-6


def third_table(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """The modelled time of a step of a sharded model, by processes and tensors."""
    table = [
        "| Processes | Tensors | Elements of a process | Step | Host | Kernels | Memory "
        "| Collectives |",
        "|--:|--:|--:|---|--:|--:|--:|--:|",
    ]
    sharded = [row for row in rows if row["layout"] == "FSDP2" and is_shown(row)]
    for (processes, tensors), row in product(arguments.sizes, sharded):
        elements = arguments.parameters // processes
        lines = row["lines"]
        of_a_list = math.ceil(tensors / TENSORS_A_KERNEL)
        more = lines["list_operations"].fixed * (of_a_list - 1)
        kernels = lines["operations"].at(tensors) + more
        times = (
            lines["calls"].at(tensors) * arguments.call,
            kernels * arguments.launch,
            row["moved_per_element"] * elements / arguments.bandwidth,
            lines["collectives"].at(tensors) * (arguments.latency or latency(processes)),
        )
        whose = {"ours": "ours", "native": "PyTorch's"}[row["whose"]] + ", clipping" * row["clip"]
        cells = " | ".join(f"{each * 1e3:,.2f}" for each in times)
        table.append(f"| {processes:,} | {tensors:,} | {elements:.1e} | {whose} | {cells} |")
    return "\n".join(table)


def measure_rank(rank: int, folder: str, world: int) -> None:
    """Time small all-reduces in one of the real processes; the first prints."""
    torch.set_num_threads(1)
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    value, seconds = torch.zeros((), dtype=torch.int64), []
    for _ in range(200):
        begin = perf_counter()
        dist.all_reduce(value)
        seconds.append(perf_counter() - begin)
    if rank == 0:
        median = statistics.median(seconds) * 1e6
        print(f"an all-reduce of one integer by gloo, {world} processes: {median:.0f} us")
    leave()


def measure(ranks: list[int]) -> None:
    """Print the costs of this machine: of a Python call within a step, and of an all-reduce."""
    with fake_world(max(ranks)):
        counts = counts_of("ours", "FSDP2", False, 1000, on_device=True)
        layout = LAYOUTS["FSDP2"]
        optimizers = optimizers_of(layout, 1000, SMALL)
        iteration = iteration_of("ours", layout, False, optimizers, on_device=True)
        seconds = []
        for _ in range(50):
            begin = perf_counter()
            iteration()
            seconds.append(perf_counter() - begin)
    call = statistics.median(seconds) / counts.calls * 1e9
    print(f"a Python call within a step, with the kernels on the CPU: {call:.0f} ns")
    for world in ranks:
        with tempfile.TemporaryDirectory() as folder:
            spawn(measure_rank, (folder, world), nprocs=world)


def sizes(text: str) -> tuple[int, int]:
    """Processes and tensors, from ``10000,100000``."""
    processes, tensors = map(int, text.split(","))
    return processes, tensors


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--processes", type=int, default=10_000, help="the processes of the fake world")
    add("--ranks", type=int, nargs="*", default=[], help="count in so many real processes, too")
    add("--tensors", type=int, nargs="*", default=[20, 1000], help="in the real processes")
    add("--measure", action="store_true", help="measure this machine's costs instead")
    add("--parameters", type=int, default=10**12, help="elements of the model")
    add("--sizes", type=sizes, nargs="*", default=[(8, 1000), (1000, 10**4), (10**4, 10**5)])
    add("--call", type=float, default=1e-7, help="seconds of a Python call: --measure")
    add("--launch", type=float, default=5e-6, help="seconds of launching a kernel")
    add("--bandwidth", type=float, default=3.35e12, help="bytes/s of memory: H100 SXM's")
    add("--latency", type=float, help="seconds of an all-reduce; default: NCCL's model of a tree")
    add("--json", type=Path, help="write the counts here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.measure:
        measure(arguments.ranks or [2, 4])
        return
    rows = predicted(arguments.processes)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(first_table(rows), second_table(rows), third_table(rows, arguments), sep="\n\n")
    if arguments.ranks:
        print("", cross_check(rows, arguments.ranks, arguments.tensors), sep="\n")


if __name__ == "__main__":
    main()
