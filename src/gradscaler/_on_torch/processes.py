"""Many processes: which decide together, and which hold parts of one norm.

A decision is a MAX over processes that must act alike. A norm is a SUM over processes that hold
different parts. Parameters and arguments alone determine which collectives run, and in which order.
Gradients must not, because one process may have some and another none.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
import torch
import torch.distributed as dist

from gradscaler._eager.decision import Order, ballot, bounds, check_same, result
from gradscaler._eager.operations import FoundInf, Optimizer
from gradscaler._eager.processes import ALONE, Deciders, OnePart, Parts
from gradscaler._on_torch import widening
from gradscaler._torch_like.float64 import widest
from gradscaler._torch_like.operations import TorchLikeOperations, parameters_of
from gradscaler.errors import ParameterError
from gradscaler.policies import State

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

_CPU = torch.device("cpu")
_IS_AVAILABLE = dist.is_available()

Group = Any  # dist.ProcessGroup, which a build without distributed lacks
Overflow = Callable[[], "bool | torch.Tensor"]
"""Returns whether hardware or an engine has detected an overflow since the last call."""


def is_distributed() -> bool:
    """Whether there are other processes."""
    return _IS_AVAILABLE and dist.is_initialized() and dist.get_world_size() > 1


def check_group(name: str, group: Group | None) -> None:
    """Raise TypeError if ``group`` is not a process group that this process belongs to.

    Any object with a group's methods is taken, such as the stand-ins of PyTorch's own tests.
    """
    methods = getattr(group, "rank", None), getattr(group, "size", None)
    if group is None or (all(map(callable, methods)) and not isinstance(group, type)):
        return
    raise TypeError(
        f"{name} must be a process group that this process is in, such as "
        f"torch.distributed.group.WORLD or mesh.get_group(), got {group!r}"
    )


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor. This does not import their module."""
    module: ModuleType | None = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, with each DTensor replaced by a view of this process's part."""
    module: ModuleType | None = sys.modules.get("torch.distributed.tensor")
    if module is None or set(map(type, tensors)) <= {torch.Tensor}:
        return tensors
    dtensor = module.DTensor
    # Their own attribute: detach().to_local() takes 20 times as long, in Python for each tensor.
    parts = [t._local_tensor.detach() if isinstance(t, dtensor) else t for t in tensors]
    if set(map(type, parts)) == {torch.Tensor}:
        return parts
    return [part.wait() if hasattr(part, "wait") else part for part in parts]


def is_displaced(parameter: torch.Tensor) -> bool:
    """Whether a gradient is placed in another way than its parameter, such as a partial sum."""
    grad = parameter.grad
    placements = getattr(parameter, "placements", None)
    return grad is not None and is_dtensor(grad) and grad.placements != placements


def placed(optimizer: Optimizer, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """All gradients of an optimizer, DTensors placed as their parameters. May run collectives."""
    if set(map(type, gradients)) <= {torch.Tensor} or "torch.distributed.tensor" not in sys.modules:
        return gradients
    owners: Any = [p for p in parameters_of(optimizer) if p.grad is not None]
    return [
        grad.redistribute(placements=owner.placements) if is_displaced(owner) else grad  # type: ignore[attr-defined]
        for owner, grad in zip(owners, gradients, strict=True)
    ]


def group_of(optimizer: Optimizer) -> Group | None:
    """The processes that hold the optimizer's DTensors, along all dimensions of their meshes.

    None if there are no DTensors. Then each process decides by itself. Under DDP all decide alike,
    because its all-reduce gives them the same gradients.

    Raises:
        ParameterError: it is unknown which processes decide together.
    """
    if not is_distributed():
        return None
    parameters = parameters_of(optimizer)
    if any(map(is_flattened, parameters)):
        raise ParameterError(
            "the optimizer has parameters that FullyShardedDataParallel flattened, and it is "
            "unknown which processes hold their shards: construct GradScaler(group=...) with the "
            "process group that decides together, such as torch.distributed.group.WORLD, or "
            "gradscaler.torch.ShardedGradScaler()"
        )
    if "torch.distributed.tensor" not in sys.modules:
        return None
    on_meshes = filter(is_dtensor, parameters)
    meshes = tuple(dict.fromkeys(parameter.device_mesh for parameter in on_meshes))
    world: Group = dist.group.WORLD
    found_in, found = _found.get(meshes, (None, None))
    if found_in is not world:  # comparing the ranks of 10,000 processes takes half a millisecond
        ranks = _connected(meshes)
        found = None if len(ranks) < 2 else _group_with(ranks, meshes)
        _found[meshes] = world, found
    return found


# For each tuple of meshes, the group that was found, after the world in which it was found.
_found: dict[tuple[DeviceMesh, ...], tuple[Group, Group | None]] = {}
# For each set of ranks, the group that was made, after the world in which it was made.
_made: dict[tuple[int, ...], tuple[Group, Group]] = {}


def _group_with(ranks: list[int], meshes: tuple[DeviceMesh, ...]) -> Group:
    """A process group of these ranks: the world's, a mesh's, or else one that is made once.

    All its processes search in the same order, so they find the same group.
    """
    world: Group = dist.group.WORLD
    of_meshes = (mesh.get_group(i) for mesh in meshes for i in range(mesh.ndim))
    for group in chain((world,), of_meshes):
        if sorted(dist.get_process_group_ranks(group)) == ranks:
            return group
    # Kept, because each new group makes connections, which take seconds with many processes.
    made_in, made = _made.get(tuple(ranks), (None, None))
    if made is None or made_in is not world:  # processes were initialized again since
        made = dist.new_group(ranks, use_local_synchronization=True)
        _made[tuple(ranks)] = world, made
    return made


def is_flattened(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a flat parameter of FSDP1, or a view into one."""
    return getattr(parameter, "_fsdp_flattened", False)


def _connected(meshes: tuple[DeviceMesh, ...]) -> list[int]:
    """The ranks that these meshes connect with this process, sorted.

    Raises:
        ParameterError: the meshes have no common root that connects them.
    """
    if not meshes:
        return []
    ranks = [sorted(mesh.mesh.flatten().tolist()) for mesh in meshes]
    largest = max(ranks, key=len)
    if all(set(largest).issuperset(few) for few in ranks):
        return largest
    roots = set(map(_root_of, meshes))
    names = {name for mesh in meshes for name in mesh.mesh_dim_names or ()}
    root = roots.pop()
    of_root = tuple(name for name in root.mesh_dim_names or () if name in names)
    if roots or len(of_root) < len(names):
        raise ParameterError(
            f"the optimizer's parameters lie on meshes of the ranks {ranks}, which nothing "
            "connects: construct GradScaler(group=...) with the process group that decides together"
        )
    return sorted(root[of_root].mesh.flatten().tolist())


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a mesh was sliced from.

    PyTorch has no public name for it; this private one is PyTorch 2.13's. In a release without it
    every mesh is its own root, so several meshes raise, and the error asks the user for the group.
    """
    root = getattr(mesh, "_get_root_mesh", None)
    return mesh if root is None else root()


class TorchProcesses:
    """Which processes decide together in PyTorch, and which hold other parts of the gradients.

    Args:
        operations: the scaler's tensor operations.
        group: the process group that the user named; None to find it by the parameters.
        overflow: a callable that returns whether there was an overflow that gradients may not
            show; or None.
    """

    def __init__(
        self,
        operations: TorchLikeOperations,
        group: Group | None,
        overflow: Overflow | None = None,
    ) -> None:
        self.group = group
        self._operations = operations
        self._overflow = overflow
        self._vote = Vote(operations)

    def named(self) -> Group | None:
        """The group that decides about all optimizers, if there is one."""
        return self.group

    def deciders_of(self, optimizer: Optimizer) -> Deciders:
        if self.group is None and self._overflow is None and not is_distributed():
            return ALONE  # without asking for any of these, as in most trainings
        return self._with_outside_flag(self._deciders_of(optimizer))

    def repeaters_of(self, optimizer: Optimizer) -> Deciders:
        deciders = self._deciders_of(optimizer)
        if deciders is ALONE and self.named() is None and is_distributed():
            raise ParameterError(
                "attempts() must repeat a backward pass on all processes that share it, or on "
                "none, and it is unknown which share it: construct GradScaler(group=...) with the "
                "process group that decides together, such as torch.distributed.group.WORLD"
            )
        return self._with_outside_flag(deciders)

    def _deciders_of(self, optimizer: Optimizer) -> Deciders:
        group = self.named() or group_of(optimizer)
        return (
            ALONE
            if group is None or group.size() == 1
            else GroupOfDeciders(self._vote, group, optimizer)
        )

    def _with_outside_flag(self, deciders: Deciders) -> Deciders:
        if self._overflow is None:
            return deciders
        return WithOutsideFlag(deciders, self._operations, self._overflow)

    def parts_of(self, optimizer: Optimizer, shards: Group | None) -> Parts:
        if shards is None and not is_distributed():
            return OnePart(optimizer)
        return PartsOfGroups(split_by(optimizer, shards))


class WorldProcesses(TorchProcesses):
    """All processes decide together, unless the user named a group.

    Attributes:
        may_mix: whether the others may have PyTorch's own ShardedGradScaler.
    """

    may_mix = False

    def named(self) -> Group | None:
        return self.group or (dist.group.WORLD if dist.is_initialized() else None)

    def _deciders_of(self, optimizer: Optimizer) -> Deciders:
        group = self.named()
        if not self.may_mix or group is None:
            return super()._deciders_of(optimizer)
        return MixedDeciders(self._operations, group)


class GroupOfDeciders:
    """The processes of a group that decide about an optimizer together."""

    def __init__(self, vote: Vote, group: Group, optimizer: Optimizer) -> None:
        self._vote, self._group, self._optimizer = vote, group, optimizer

    def agree(
        self, state: State, found_inf: FoundInf, amax: torch.Tensor | None
    ) -> tuple[FoundInf, torch.Tensor | None]:
        identity = self._vote.identity(self._optimizer, self._group)
        return self._vote.agree(self._group, state, found_inf, amax, identity)

    def is_anywhere(self, flag: bool) -> bool:
        vote = torch.tensor(float(flag), device=_device_of(self._group, _CPU))
        dist.all_reduce(vote, dist.ReduceOp.MAX, self._group)
        return bool(vote.item())


class MixedDeciders:
    """The processes of a group, some of which have PyTorch's own ``ShardedGradScaler``.

    So this sends what that sends: the sum of each device's flag, in float32. Nothing shows whether
    another process has another scale, or gradients.
    """

    def __init__(self, operations: TorchLikeOperations, group: Group) -> None:
        self._operations, self._group = operations, group

    def agree(
        self, state: State, found_inf: FoundInf, amax: torch.Tensor | None
    ) -> tuple[FoundInf, torch.Tensor | None]:
        device = state.scale.device
        flags, found = found_inf or {device: self._operations.scalar(0.0, device)}, {}
        for key, flag in flags.items():
            sent = flag.to(device, copy=True)
            dist.all_reduce(sent, group=self._group)
            found[key] = self._operations.on_device(sent.clamp(max=1.0), flag.device)
        return found, amax

    def is_anywhere(self, flag: bool) -> bool:
        return flag


class WithOutsideFlag:
    """Deciders with one more vote, from hardware or an engine that detects overflow itself."""

    def __init__(
        self, deciders: Deciders, operations: TorchLikeOperations, overflow: Overflow
    ) -> None:
        self._deciders, self._operations, self._overflow = deciders, operations, overflow
        self.is_anywhere = deciders.is_anywhere

    def agree(
        self, state: State, found_inf: FoundInf, amax: torch.Tensor | None
    ) -> tuple[FoundInf, torch.Tensor | None]:
        if found_inf:  # without gradients there is no step to skip
            found_inf = self._with_vote(found_inf)
        return self._deciders.agree(state, found_inf, amax)

    def _with_vote(self, found_inf: FoundInf) -> FoundInf:
        """The flags, all set if the outside flag is. A tensor is not read on the host."""
        vote, operations = self._overflow(), self._operations
        if isinstance(vote, torch.Tensor):
            is_set = vote.detach().any().float()
        elif isinstance(vote, (bool, np.bool_)):
            is_set = operations.scalar(float(vote), next(iter(found_inf.values())).device)
        else:
            raise TypeError(f"overflow() must return a bool or a tensor, got {vote!r}")
        return {
            key: torch.maximum(flag, operations.on_device(is_set, flag.device))
            for key, flag in found_inf.items()
        }


class Vote:
    """Combines the flags of all processes of a group in one all-reduce. A scaler has one.

    Args:
        operations: the scaler's tensor operations.
    """

    def __init__(self, operations: TorchLikeOperations) -> None:
        self._operations = operations
        self._unread: Callable[[], None] | None = None
        self._group: Group | None = None
        self._orders: defaultdict[Group, Order] = defaultdict(Order)

    def identity(self, optimizer: Optimizer, group: Group) -> int:
        """A number for this optimizer, the same in all processes of the group.

        It includes the full shapes of the DTensors whose mesh is the whole group, because all
        processes have those. Other parameters may belong to one stage, expert or shard.
        """

        def shapes() -> Iterator[torch.Size]:
            members = sorted(dist.get_process_group_ranks(group))
            for parameter in filter(is_dtensor, parameters_of(optimizer)):
                if sorted(parameter.device_mesh.mesh.flatten().tolist()) == members:
                    yield parameter.shape

        return self._orders[group].identity(optimizer, shapes())

    def agree(
        self,
        group: Group,
        state: State,
        found_inf: FoundInf,
        amax: torch.Tensor | None = None,
        optimizer: int = 0,
    ) -> tuple[FoundInf, torch.Tensor | None]:
        """Combine what the processes of a group found.

        On the host, one all-reduce is enough in most steps; a second finds the largest gradient,
        in the steps in which the policy needs it. On a device, nothing waits unless this process
        has no gradients, and scales are compared one step later.

        Args:
            group: the processes.
            state: the scaler's state.
            found_inf: the flags of this process.
            amax: the largest gradient of this process. On the host, either all processes have one
                or none has, unless gradients overflowed.
            optimizer: the ``identity`` of the optimizer.

        Returns:
            The flags and the largest gradient over all processes. There are no flags if no process
            has gradients.

        Raises:
            ScaleMismatchError: the processes hold different scales or counters, or decide about
                different optimizers.
        """
        operations, scale = self._operations, state.scale
        if operations.on_host(scale):
            if group is not self._group:
                self._group, self._count = group, group.size()
                device = _device_of(group, scale.device)
                self._packed = torch.zeros((), dtype=torch.int64, device=device)
            count, vote, values = self._count, self._packed, operations.read(state)
            own = ballot(operations.any_set(found_inf), bool(found_inf), values, optimizer, count)
            vote.fill_(own)
            dist.all_reduce(vote, dist.ReduceOp.SUM, group)  # the one collective of most steps
            total = int(vote.item())
            if total == own * count and amax is None:  # in most steps all found the same
                return found_inf, None
            found, has_gradients, is_same = result(total, own, count)
            if not is_same:
                # All ranks see that they differ, so all of them take part in this collective.
                check_same(state._fields, _maxima(group, bounds((*values, optimizer))))
            flag = operations.scalar(float(found), scale.device)
            if amax is not None and not found:
                (largest,) = _maxima(group, [amax.item()])
                amax = operations.scalar(largest, scale.device)
        else:
            unread, self._unread = self._unread, None  # if it raises, the next call works again
            if unread is not None and not _is_captured(scale):
                unread()
            # Stacked into one tensor, because a collective costs more than its contents.
            zero, one = (operations.scalar(value, scale.device) for value in (0.0, 1.0))
            flag = operations.combine([found_inf], scale.device) if found_inf else zero
            seen = [] if amax is None else [operations.on_device(amax, scale.device)]
            dtype = widest(torch, scale.device)  # float32 rounds alike on all processes
            identity = torch.full((), optimizer, dtype=dtype, device=scale.device)
            scalars = [flag, one if found_inf else zero, *seen, *bounds((*state, identity))]
            vote = torch.stack([scalar.to(dtype) for scalar in scalars])
            dist.all_reduce(vote, dist.ReduceOp.MAX, group)
            self._unread = _read_later(state._fields, vote[2 + len(seen) :])
            flag = vote[0].float()
            amax = vote[2].float() if seen else None
            has_gradients = bool(found_inf) or bool(vote[1].item())
        if not has_gradients:
            return {}, amax
        devices = found_inf or [scale.device]
        return {device: operations.on_device(flag, device) for device in devices}, amax


def _maxima(group: Group, values: list[float]) -> list[float]:
    device = _device_of(group, _CPU)
    maxima = torch.tensor(values, dtype=widest(torch, device), device=device)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
    found: list[float] = maxima.tolist()
    return found


def _is_captured(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured. During a capture the host may not wait."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _read_later(fields: Iterable[str], maxima: torch.Tensor) -> Callable[[], None] | None:
    """Start copying the maxima to the host; return a callable that waits and compares them.

    None while a CUDA graph is captured.
    """
    if _is_captured(maxima):
        return None
    copy = maxima.to("cpu", non_blocking=True)
    copied = None if maxima.is_cpu else torch.Event(maxima.device)
    if copied is not None:
        copied.record()

    def read() -> None:
        if copied is not None:
            copied.synchronize()  # an iteration ago
        check_same(fields, copy.tolist())

    return read


def _device_of(group: Group, device: torch.device) -> torch.device:
    """A device on which the group's backend can reduce: ``device`` if it can, else another."""
    backends = dist.get_backend_config(group).split(",")  # such as cpu:gloo,cuda:nccl
    types = [backend.partition(":")[0] for backend in backends]
    return device if device.type in types else torch.device(types[0])


def reduce_norm(norms: dict[tuple[Group, ...], torch.Tensor], norm_type: float) -> torch.Tensor:
    """The p-norm of gradients whose parts lie on many processes, a scalar.

    It is ``(sum of n**p)**(1/p)``, in float64 if the device has it, where n are the norms of the
    parts, and the largest n for p = inf. Each all-reduce takes one value, however many parts this
    process has, because another process may have fewer.

    Args:
        norms: the norm of this process's part of the gradients that are split over each tuple of
            groups, the outermost group first.
        norm_type: p.

    Returns:
        A float64 scalar if a norm of a part is float64, else a float32 scalar.
    """
    is_max = math.isinf(norm_type)
    power = 1.0 if is_max or norm_type == 0 else norm_type
    first = next(iter(norms.values()))
    dtype = widest(torch, first.device)
    parts = {groups: norm.to(first.device, dtype) ** power for groups, norm in norms.items()}
    while groups := max(parts, key=len):
        part, rest = _all_reduced(parts.pop(groups), groups[-1], is_max), groups[:-1]
        if rest in parts:
            part = torch.maximum(part, parts[rest]) if is_max else part + parts[rest]
        parts[rest] = part
    total: torch.Tensor = parts[()] ** (1.0 / power)
    has_float64 = any(norm.dtype == torch.float64 for norm in norms.values())
    return total if has_float64 else total.float()


def _all_reduced(value: torch.Tensor, group: Group, is_max: bool) -> torch.Tensor:
    """The sum of a scalar over a group, or the largest value; NaN if any value is."""
    device = _device_of(group, value.device)
    dtype = widest(torch, device)
    if not is_max:
        total = value.to(device, dtype, copy=True)
        dist.all_reduce(total, dist.ReduceOp.SUM, group)
        return total.to(value)
    # A backend's maximum may drop a NaN, so whether there is one is reduced beside it.
    pair = torch.stack([value.nan_to_num(torch.inf, torch.inf), value.isnan().to(value.dtype)])
    pair = pair.to(device, dtype)
    dist.all_reduce(pair, dist.ReduceOp.MAX, group)
    largest, is_nan = pair.to(value)
    return torch.where(is_nan == 0, largest, torch.nan)


class Part(NamedTuple):
    """Some of an optimizer's parameters, in the form that operations on optimizers take."""

    param_groups: list[dict[str, list[torch.Tensor]]]
    widens: bool = False  # as the optimizer does: see gradscaler._on_torch.widening


class PartsOfGroups:
    """An optimizer's gradients in parts, one for each tuple of groups that it is split over.

    Args:
        split: the parts by groups, from :func:`split_by`.
    """

    def __init__(self, split: dict[tuple[Group, ...], Optimizer | Part]) -> None:
        self._groups, self.parts = list(split), list(split.values())

    @property
    def can_be_measured(self) -> bool:
        """Whether every gradient is placed as its parameter is."""
        parameters = (p for part in self.parts for p in parameters_of(part))
        return not any(map(is_displaced, parameters))

    def norm(self, norms: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        if self._groups == [()]:
            return norms[0]
        return reduce_norm(dict(zip(self._groups, norms, strict=True)), norm_type)


def split_by(
    optimizer: Optimizer, shards: Group | None
) -> dict[tuple[Group, ...], Optimizer | Part]:
    """Parts of an optimizer, by the groups that the elements of their parameters are split over.

    A DTensor is split over the dimensions of its mesh that it is sharded on. ``shards`` is one more
    group that splits all parameters; but if some are flat parameters of FSDP1, it splits only
    these, because FSDP1 leaves the others whole on each process.

    Raises:
        ParameterError: there are flat parameters, and ``shards`` does not name the group that they
            are split over; or ``shards`` counts the parts of a DTensor twice.
        TypeError: ``shards`` is not a process group.
    """
    check_group("shards", shards)
    if shards is not None:
        _check_apart(shards, optimizer)
    elif not is_distributed():
        return {(): optimizer}
    parameters = parameters_of(optimizer)
    flattened = [is_flattened(parameter) for parameter in parameters]
    if any(flattened) and shards is None:
        raise ParameterError(
            "FullyShardedDataParallel has split these parameters: call clip_grad_norm_(optimizer, "
            "max_norm, shards=...) with the process group that it sharded them over"
        )
    split: dict[tuple[Group, ...], list[torch.Tensor]] = {}
    known: dict[tuple[int, tuple[Placement, ...]], tuple[Group, ...]] = {}
    if not parameters:
        split[() if shards is None else (shards,)] = []
    for parameter, is_flat in zip(parameters, flattened, strict=True):
        groups: tuple[Group, ...] = ()
        if is_dtensor(parameter):
            key = id(parameter.device_mesh), parameter.placements
            if key not in known:
                known[key] = _split_over(parameter)
            groups = known[key]
        if shards is not None and (is_flat or not any(flattened)):
            groups = (shards, *groups)
        split.setdefault(groups, []).append(parameter)
    widens = widening.widens(optimizer)
    return {groups: Part([{"params": members}], widens) for groups, members in split.items()}


def _split_over(parameter: DTensor) -> tuple[Group, ...]:
    """The groups over which a DTensor's elements are split."""
    mesh, placements = parameter.device_mesh, enumerate(parameter.placements)
    # Not is_shard(): FSDP2 over tensor parallelism strides its shards.
    return tuple(mesh.get_group(i) for i, p in placements if not p.is_replicate())


def _check_apart(shards: Group, optimizer: Optimizer) -> None:
    parameters = filter(is_dtensor, parameters_of(optimizer))
    meshes = dict.fromkeys(parameter.device_mesh for parameter in parameters)
    others = set(dist.get_process_group_ranks(shards)) - {dist.get_rank()}
    for mesh in meshes:
        if not others.isdisjoint(mesh.mesh.flatten().tolist()):
            raise ParameterError(
                f"shards has ranks of {mesh}, over which the norm of its DTensors is summed "
                "already: leave out shards, or name the group of processes with other parameters"
            )
