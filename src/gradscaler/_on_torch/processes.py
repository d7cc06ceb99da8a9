"""Many processes: who decides together, and whose gradients belong to one norm.

A decision is a MAX over those who must act alike; a norm is a SUM over those who hold different
parts. Which collectives run, and in which order, follows from parameters and arguments alone: never
from gradients, which one process may have and another not.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from gradscaler._eager.decision import Order, ballot, bounds, check_same, result
from gradscaler._eager.operations import FoundInf
from gradscaler._eager.processes import ALONE, Deciders, OnePart, Parts
from gradscaler._torch_like.operations import TorchLikeOperations, parameters_of
from gradscaler.errors import ParameterError
from gradscaler.policies import State

_CPU = torch.device("cpu")
_IS_AVAILABLE = dist.is_available()

Group = Any  # dist.ProcessGroup, which a build without distributed lacks
Overflow = Callable[[], "bool | torch.Tensor"]
"""Tells whether something outside of the gradients found an overflow since it was last called."""


def is_distributed() -> bool:
    """Whether there are other processes at all."""
    return _IS_AVAILABLE and dist.is_initialized() and dist.get_world_size() > 1


def check_group(name: str, group: Group | None) -> None:
    """Raise TypeError for what is not a process group that this process belongs to.

    One that stands in for it, as in PyTorch's own tests, has its methods.
    """
    methods = getattr(group, "rank", None), getattr(group, "size", None)
    if group is None or (all(map(callable, methods)) and not isinstance(group, type)):
        return
    raise TypeError(
        f"{name} must be a process group that this process is in, such as "
        f"torch.distributed.group.WORLD or mesh.get_group(), got {group!r}"
    )


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor; its module is not imported for the question."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, DTensors by this process' part; what is changed in it changes in them."""
    if set(map(type, tensors)) <= {torch.Tensor} or "torch.distributed.tensor" not in sys.modules:
        return tensors
    parts: list[Any] = [t.detach().to_local() if is_dtensor(t) else t for t in tensors]  # type: ignore[attr-defined]
    return [part.wait() if hasattr(part, "wait") else part for part in parts]


def is_displaced(parameter: torch.Tensor) -> bool:
    """Whether its gradient is placed in another way than it: as a partial sum, for example."""
    grad: Any = parameter.grad
    placements = getattr(parameter, "placements", None)
    return grad is not None and is_dtensor(grad) and grad.placements != placements


def placed(optimizer: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """All gradients of an optimizer, DTensors placed as their parameters; may be collectives."""
    if set(map(type, gradients)) <= {torch.Tensor} or "torch.distributed.tensor" not in sys.modules:
        return gradients
    owners: Any = [p for p in parameters_of(optimizer) if p.grad is not None]
    return [
        grad.redistribute(placements=owner.placements) if is_displaced(owner) else grad  # type: ignore[attr-defined]
        for owner, grad in zip(owners, gradients, strict=True)
    ]


def group_of(optimizer: Any) -> Group | None:
    """The processes that hold the optimizer's DTensors, by all dimensions of their meshes.

    None if nothing is distributed: then each process decides by itself, as under DDP, whose
    all-reduce gives all of them the same gradients.

    Raises:
        ParameterError: nothing tells who decides together.
    """
    if not is_distributed():
        return None
    parameters = parameters_of(optimizer)
    if any(map(is_flattened, parameters)):
        raise ParameterError(
            "the optimizer has parameters that FullyShardedDataParallel flattened, and nothing "
            "tells which processes hold their shards: construct GradScaler(group=...) with the "
            "process group that decides together, such as torch.distributed.group.WORLD, or "
            "gradscaler.torch.ShardedGradScaler()"
        )
    if "torch.distributed.tensor" not in sys.modules:
        return None
    on_meshes: Any = filter(is_dtensor, parameters)
    meshes = list(dict.fromkeys(parameter.device_mesh for parameter in on_meshes))
    ranks = _connected(meshes)
    return None if len(ranks) < 2 else _group_with(ranks, meshes)


_made: dict[tuple[int, ...], tuple[Group, Group]] = {}  # by ranks: the world then, and the group


def _group_with(ranks: list[int], meshes: list[Any]) -> Group:
    """A process group of these ranks: that of the world or of a mesh, or one that is made once.

    All its processes look for it in the same order, so they take the same.
    """
    world: Any = dist.group.WORLD
    of_meshes = (mesh.get_group(i) for mesh in meshes for i in range(mesh.ndim))
    for group in chain((world,), of_meshes):
        if sorted(dist.get_process_group_ranks(group)) == ranks:
            return group
    made_in, made = _made.get(tuple(ranks), (None, None))
    if made is None or made_in is not world:  # the processes may have been initialized again
        made = dist.new_group(ranks, use_local_synchronization=True)
        _made[tuple(ranks)] = world, made
    return made


def is_flattened(parameter: torch.Tensor) -> bool:
    """Whether it is a flat parameter of FSDP's first version, or a view into one."""
    return getattr(parameter, "_fsdp_flattened", False)


def _connected(meshes: list[Any]) -> list[int]:
    """The ranks that these meshes connect with this process, sorted."""
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


def _root_of(mesh: Any) -> Any:
    """The mesh that a mesh is a part of.

    PyTorch has no public name for it. This one was seen in PyTorch 2.13; in a release without it
    each mesh stands for itself, nothing connects several, and the user is asked for the group.
    """
    root = getattr(mesh, "_get_root_mesh", None)
    return mesh if root is None else root()


class TorchProcesses:
    """Who decides together in PyTorch, and who holds other parts of the gradients.

    Args:
        operations: the scaler's.
        group: the process group that the user named; None where parameters tell.
        overflow: tells of an overflow that the gradients may not show; None where nothing does.
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

    def deciders_of(self, optimizer: Any) -> Deciders:
        return self._with_outside_flag(self._deciders_of(optimizer))

    def repeaters_of(self, optimizer: Any) -> Deciders:
        deciders = self._deciders_of(optimizer)
        if deciders is ALONE and self.named() is None and is_distributed():
            raise ParameterError(
                "attempts() is to repeat a backward pass on all processes or on none, and nothing "
                "tells on which: construct GradScaler(group=...) with the process group that "
                "decides together, such as torch.distributed.group.WORLD"
            )
        return self._with_outside_flag(deciders)

    def _deciders_of(self, optimizer: Any) -> Deciders:
        if self.group is None and not is_distributed():
            return ALONE
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

    def parts_of(self, optimizer: Any, shards: Group | None) -> Parts:
        if shards is None and not is_distributed():
            return OnePart(optimizer)
        return PartsOfGroups(split_by(optimizer, shards))


class WorldProcesses(TorchProcesses):
    """The same, where all processes decide together unless the user named a group."""

    def named(self) -> Group | None:
        return self.group or (dist.group.WORLD if dist.is_initialized() else None)


class GroupOfDeciders:
    """The processes of a group, which decide about an optimizer together."""

    def __init__(self, vote: Vote, group: Group, optimizer: Any) -> None:
        self._vote, self._group, self._optimizer = vote, group, optimizer

    def agree(
        self, state: State, found_inf: FoundInf, amax: torch.Tensor | None
    ) -> tuple[FoundInf, torch.Tensor | None]:
        identity = self._vote.identity(self._optimizer, self._group)
        return self._vote.settle(self._group, state, found_inf, amax, identity)

    def is_anywhere(self, flag: bool) -> bool:
        vote = torch.tensor(float(flag), device=_device_of(self._group, _CPU))
        dist.all_reduce(vote, dist.ReduceOp.MAX, self._group)
        return bool(vote.item())


class WithOutsideFlag:
    """Deciders, with one more vote: that of hardware or an engine that sees overflows itself."""

    def __init__(
        self, deciders: Deciders, operations: TorchLikeOperations, overflow: Overflow
    ) -> None:
        self._deciders, self._operations, self._overflow = deciders, operations, overflow
        self.is_anywhere = deciders.is_anywhere

    def agree(
        self, state: State, found_inf: FoundInf, amax: torch.Tensor | None
    ) -> tuple[FoundInf, torch.Tensor | None]:
        if found_inf:  # without gradients, there is no step to skip
            found_inf = self._with_vote(found_inf)
        return self._deciders.agree(state, found_inf, amax)

    def _with_vote(self, found_inf: FoundInf) -> FoundInf:
        """The flags, set where the outside flag is; a tensor is not read on the host."""
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
    """Settles one flag for all processes of a group, from one all-reduce. A scaler has one.

    Args:
        operations: those of the scaler.
    """

    def __init__(self, operations: TorchLikeOperations) -> None:
        self._operations = operations
        self._unread: Callable[[], None] | None = None
        self._group: Group | None = None
        self._orders: defaultdict[Group, Order] = defaultdict(Order)

    def identity(self, optimizer: Any, group: Group) -> int:
        """A number that all processes of the group have for this optimizer.

        They hold alike the DTensors that are laid out over all of them, whose shape is that of the
        whole. Other parameters may be those of a stage, an expert or a shard.
        """

        def shapes() -> Iterator[torch.Size]:
            members = sorted(dist.get_process_group_ranks(group))
            for parameter in filter(is_dtensor, parameters_of(optimizer)):
                mesh: Any = parameter
                if sorted(mesh.device_mesh.mesh.flatten().tolist()) == members:
                    yield parameter.shape

        return self._orders[group].identity(optimizer, shapes())

    def settle(
        self,
        group: Group,
        state: State,
        found_inf: FoundInf,
        amax: torch.Tensor | None = None,
        optimizer: int = 0,
    ) -> tuple[FoundInf, torch.Tensor | None]:
        """What the processes of a group found together; no flags if none of them has gradients.

        ``amax`` is this process' largest gradient. On the host all have one or none has, if no
        gradients overflowed; another all-reduce then finds the largest. ``optimizer`` is its
        ``identity``.

        On a device nothing waits for the host, unless this process has no gradients. There
        scales are compared one step later.

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
            if total == own * count and amax is None:  # all found the same, as in most steps
                return found_inf, None
            found, has_gradients, is_same = result(total, own, count)
            if not is_same:
                # All ranks see that they differ, so all of them take part in this one, too.
                check_same(state._fields, _maxima(group, bounds((*values, optimizer))))
            flag = operations.scalar(float(found), scale.device)
            if amax is not None and not found:
                (largest,) = _maxima(group, [amax.item()])
                amax = operations.scalar(largest, scale.device)
        else:
            unread, self._unread = self._unread, None  # after an error, the next call goes on
            if unread is not None and not _is_captured(scale):
                unread()
            # Stacked into one tensor, as each collective costs more than what it carries.
            zero, one = (operations.scalar(value, scale.device) for value in (0.0, 1.0))
            flag = operations.combine([found_inf], scale.device) if found_inf else zero
            seen = [] if amax is None else [operations.on_device(amax, scale.device)]
            identity = torch.full((), optimizer, dtype=torch.float64, device=scale.device)
            scalars = [flag, one if found_inf else zero, *seen, *bounds((*state, identity))]
            vote = torch.stack([scalar.double() for scalar in scalars])
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
    maxima = torch.tensor(values, dtype=torch.float64, device=_device_of(group, _CPU))
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
    found: list[float] = maxima.tolist()
    return found


def _is_captured(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is captured, in which the host may not wait."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _read_later(fields: Iterable[str], maxima: torch.Tensor) -> Callable[[], None] | None:
    """What compares the scales once the device has them; None while a CUDA graph is captured."""
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
    """A device that the group's backend reduces on, ``device`` if it can."""
    backends = dist.get_backend_config(group).split(",")  # such as cpu:gloo,cuda:nccl
    types = [backend.partition(":")[0] for backend in backends]
    return device if device.type in types else torch.device(types[0])


def reduce_norm(norms: dict[tuple[Group, ...], torch.Tensor], norm_type: float) -> torch.Tensor:
    """The p-norm of parts of gradients that lie on many processes, a scalar.

    ``(sum of n**p)**(1/p)``, in float64; the largest n for p = inf. Each all-reduce takes one
    value, however many parts this process has: another may have fewer.

    Args:
        norms: of this process' part of the gradients that are split over each of these groups,
            the outermost first.
        norm_type: p.

    Returns:
        float64 if a norm is, else float32.
    """
    is_max = math.isinf(norm_type)
    power = 1.0 if is_max or norm_type == 0 else norm_type
    first = next(iter(norms.values()))
    parts = {groups: norm.to(first.device).double() ** power for groups, norm in norms.items()}
    while groups := max(parts, key=len):
        part, rest = _all_reduced(parts.pop(groups), groups[-1], is_max), groups[:-1]
        if rest in parts:
            part = torch.maximum(part, parts[rest]) if is_max else part + parts[rest]
        parts[rest] = part
    total: torch.Tensor = parts[()] ** (1.0 / power)
    has_float64 = any(norm.dtype == torch.float64 for norm in norms.values())
    return total if has_float64 else total.float()


def _all_reduced(value: torch.Tensor, group: Group, is_max: bool) -> torch.Tensor:
    """The sum of a float64 scalar over a group, or the largest, NaN if one is."""
    device = _device_of(group, value.device)
    if not is_max:
        total = value.to(device, copy=True)
        dist.all_reduce(total, dist.ReduceOp.SUM, group)
        return total.to(value.device)
    # A maximum may lose a NaN.
    pair = torch.stack([value.nan_to_num(torch.inf, torch.inf), value.isnan().double()]).to(device)
    dist.all_reduce(pair, dist.ReduceOp.MAX, group)
    largest, is_nan = pair.to(value.device)
    return torch.where(is_nan == 0, largest, torch.nan)


class Part(NamedTuple):
    """Some parameters of an optimizer, for operations that take an optimizer."""

    param_groups: list[dict[str, list[torch.Tensor]]]


class PartsOfGroups:
    """An optimizer's gradients in parts, by the groups that each is split over.

    Args:
        split: as :func:`split_by` gives it.
    """

    def __init__(self, split: dict[tuple[Group, ...], Any]) -> None:
        self._groups, self.parts = list(split), list(split.values())

    @property
    def can_be_measured(self) -> bool:
        """Not where a gradient is placed in another way than its parameter."""
        parameters = (p for part in self.parts for p in parameters_of(part))
        return not any(map(is_displaced, parameters))

    def norm(self, norms: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        if self._groups == [()]:
            return norms[0]
        return reduce_norm(dict(zip(self._groups, norms, strict=True)), norm_type)


def split_by(optimizer: Any, shards: Group | None) -> dict[tuple[Group, ...], Any]:
    """Parts of an optimizer, by the groups that the elements of their parameters are split over.

    A DTensor is split over the dimensions of its mesh that it is sharded on. ``shards`` splits all;
    but beside flat parameters of FSDP's first version, the others are on each process as a whole.

    Raises:
        ParameterError: flat parameters are split over a group that only the user can name; or
            ``shards`` counts a DTensor's parts twice.
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
    if not parameters:
        split[() if shards is None else (shards,)] = []
    for parameter, is_flat in zip(parameters, flattened, strict=True):
        groups: tuple[Group, ...] = ()
        if is_dtensor(parameter):
            placements = enumerate(parameter.placements)
            mesh: Any = parameter.device_mesh
            # Not is_shard(): FSDP2 over tensor parallelism strides its shards.
            groups = tuple(mesh.get_group(i) for i, p in placements if not p.is_replicate())
        if shards is not None and (is_flat or not any(flattened)):
            groups = (shards, *groups)
        split.setdefault(groups, []).append(parameter)
    return {groups: Part([{"params": members}]) for groups, members in split.items()}


def _check_apart(shards: Group, optimizer: Any) -> None:
    parameters: list[Any] = parameters_of(optimizer)
    meshes = dict.fromkeys(p.device_mesh for p in parameters if is_dtensor(p))
    others = set(dist.get_process_group_ranks(shards)) - {dist.get_rank()}
    for mesh in meshes:
        if not others.isdisjoint(mesh.mesh.flatten().tolist()):
            raise ParameterError(
                f"shards has ranks of {mesh}, over which the norm of its DTensors is summed "
                "already: leave out shards, or name the group of those who hold other parameters"
            )
