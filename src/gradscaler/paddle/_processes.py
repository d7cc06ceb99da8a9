"""Many processes: which decide together, and which hold parts of one norm.

A decision is a MAX over processes that must act alike. A norm is a SUM over processes that hold
different parts. Fleet's topology and arguments alone determine which collectives run, and in which
order. Gradients must not, because one process may have some and another none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.communication.group import Group

from gradscaler._eager.decision import Order, ballot, bounds, check_same, result
from gradscaler._eager.operations import FoundInf, Optimizer, Tensor
from gradscaler._eager.processes import ALONE, Deciders, Parts
from gradscaler.errors import ParameterError
from gradscaler.paddle import _operations
from gradscaler.policies import Scalar, State


def is_distributed() -> bool:
    """Whether there are other processes."""
    return dist.is_initialized() and dist.get_world_size() > 1


def check_group(name: str, group: object) -> None:
    """Check a process group that the user gave.

    Raises:
        TypeError: ``group`` is not a process group.
        ParameterError: this process is not in the group.
    """
    if not isinstance(group, Group):
        raise TypeError(
            f"{name} must be a process group, as paddle.distributed.new_group() returns one, "
            f"got {group!r}"
        )
    if dist.get_rank() not in group.ranks:
        raise ParameterError(
            f"{name} has the ranks {group.ranks}, and this process is not one of them: name the "
            "group that it is in"
        )


def group_of(optimizer: Optimizer) -> Group | None:
    """All processes, if the optimizer is fleet's and its processes hold different gradients.

    Fleet's own scaler asks all processes, too. None for other optimizers, and under data
    parallelism alone: there the backward pass gives all processes the same gradients.

    Raises:
        ParameterError: sharding may still be reducing the gradients, and only fleet can wait for
            that.
    """
    if _topology_of(optimizer) is None:
        return None
    if getattr(optimizer, "comm_overlap", False):
        raise ParameterError(
            "sharding with comm_overlap reduces gradients while the backward pass goes on, and "
            "only fleet's scaler waits for them: write scaler = fleet.distributed_scaler(scaler)"
        )
    return dist.get_group(0)


def _topology_of(optimizer: Optimizer) -> Any:
    """Fleet's HybridCommunicateGroup; None without one, or if each process has the whole model."""
    topology = getattr(optimizer, "_hcg", None)
    if topology is None or topology.get_parallel_mode() == dist.ParallelMode.DATA_PARALLEL:
        return None
    return topology


class PaddleProcesses:
    """Which processes decide together in Paddle, and which hold other parts of the gradients.

    Args:
        group: the process group that the user named, or None.
        asks_fleet: whether to find the group by fleet's topology. False if fleet has replaced
            ``_unscale``, which then asks all processes itself.
        orders: the order of the optimizers that each group decides about.
        show: is called with the flags of each decision.
    """

    def __init__(
        self,
        group: Group | None,
        asks_fleet: bool,
        orders: defaultdict[Group, Order],
        show: Callable[[FoundInf], None],
    ) -> None:
        self._group, self._asks_fleet = group, asks_fleet
        self._orders, self._show = orders, show

    def deciders_of(self, optimizer: Optimizer) -> ShownDeciders:
        group = self._group  # the group that the user named comes before fleet's
        if group is None and self._asks_fleet:
            group = group_of(optimizer)
        if group is None or group.nranks == 1:
            return ShownDeciders(ALONE, self._show)
        own = GroupOfDeciders(group, self._orders[group], optimizer)
        return ShownDeciders(own, self._show)

    def repeaters_of(self, optimizer: Optimizer) -> Deciders:
        deciders = self.deciders_of(optimizer)
        if deciders.are_alone and self._group is None and is_distributed():
            raise ParameterError(
                "attempts() must repeat a backward pass on all processes that share it, or on "
                "none, and it is unknown which share it: construct GradScaler(group=...) with the "
                "process group that decides together, such as paddle.distributed.get_group(0)"
            )
        return deciders

    def parts_of(self, optimizer: Optimizer, shards: Group | None) -> Parts:
        check_shards(optimizer, shards)
        return PartsOfGroups(split_by(optimizer, shards))


class ShownDeciders:
    """Deciders that pass each decision to ``show``, so that fleet can read it.

    Attributes:
        are_alone: whether this process decides by itself.
    """

    def __init__(self, deciders: Deciders, show: Callable[[FoundInf], None]) -> None:
        self.are_alone = deciders is ALONE
        self.is_anywhere = deciders.is_anywhere
        self._agree, self._show = deciders.agree, show

    def agree(
        self, state: State, found_inf: FoundInf, amax: np.float32 | None
    ) -> tuple[FoundInf, np.float32 | None]:
        found_inf, amax = self._agree(state, found_inf, amax)
        self._show(found_inf)
        return found_inf, amax


class GroupOfDeciders:
    """The processes of a group that decide about an optimizer together."""

    def __init__(self, group: Group, order: Order, optimizer: Optimizer) -> None:
        self._group, self._order, self._optimizer = group, order, optimizer

    def agree(
        self, state: State, found_inf: FoundInf, amax: np.float32 | None
    ) -> tuple[FoundInf, np.float32 | None]:
        # All processes have the tensors on a mesh; others may belong to one stage or shard.
        parameters = _operations.parameters_of(self._optimizer)
        shapes = (parameter.shape for parameter in parameters if parameter.is_dist())
        identity = self._order.identity(self._optimizer, shapes)
        return agree(self._group, identity, state, found_inf, amax)

    def is_anywhere(self, flag: bool) -> bool:
        vote: Tensor = paddle.to_tensor(float(flag), "float32", _place_of(self._group))
        dist.all_reduce(vote, dist.ReduceOp.MAX, self._group)
        return bool(vote.item())


class PartsOfGroups:
    """An optimizer's gradients in parts, one for each tuple of groups that it is split over.

    Args:
        split: the parts by groups, from :func:`split_by`.
    """

    def __init__(self, split: dict[tuple[Group, ...], Optimizer]) -> None:
        self._groups, self.parts = list(split), list(split.values())
        self.can_be_measured = len(split) == 1

    def norm(self, norms: list[Tensor], norm_type: float) -> Tensor:
        return reduce_norm(dict(zip(self._groups, norms, strict=True)), norm_type)


def agree(
    group: Group, optimizer: int, state: State, found_inf: FoundInf, amax: np.float32 | None
) -> tuple[FoundInf, np.float32 | None]:
    """Combine what the processes of a group found.

    One all-reduce is enough in most steps. A second finds the largest gradient, in the steps in
    which the policy needs it.

    Args:
        group: the processes.
        optimizer: the ``Order.identity`` of the optimizer.
        state: the scaler's state.
        found_inf: the flags of this process.
        amax: the largest gradient of this process. Either all processes have one or none has,
            unless gradients overflowed.

    Returns:
        The flag and the largest gradient over all processes. There is no flag if no process has
        gradients.

    Raises:
        ScaleMismatchError: the processes hold different scales or counters, or decide about
            different optimizers.
    """
    count = group.nranks
    own = ballot(_operations.any_set(found_inf), bool(found_inf), state, optimizer, count)
    vote: Tensor = paddle.to_tensor(own, "int64", _place_of(group))
    dist.all_reduce(vote, dist.ReduceOp.SUM, group)
    found, has_gradients, is_same = result(int(vote.item()), own, count)
    if not is_same:
        check_same(state._fields, _maxima(group, bounds((*state, optimizer))))
    if amax is not None and not found:
        amax = np.float32(_maxima(group, [amax])[0])
    return {"found_inf": found} if has_gradients else {}, amax


def _maxima(group: Group, values: list[Scalar]) -> list[float]:
    maxima: Tensor = paddle.to_tensor(list(map(float, values)), "float64", _place_of(group))
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
    found: list[float] = maxima.tolist()
    return found


def unscaled_by_fleet(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that a fleet wrapper's ``_unscale`` has divided.

    With ``comm_overlap`` these are the gradients of this process's own parameters.
    """
    optimizer = getattr(optimizer, "_optim", optimizer)  # GroupShardedScaler wraps it
    if getattr(optimizer, "comm_overlap", False):
        parameters = optimizer._local_parameter_list
    else:
        parameters = _operations.parameters_of(optimizer)
    found = []
    for parameter in parameters:
        main_grad = getattr(parameter, "main_grad", None)
        found.append(parameter.grad if main_grad is None else main_grad)
    return [grad for grad in found if grad is not None]


def asked_by_fleet(unscale: Callable[[Optimizer], None]) -> Group | None:
    """The processes that this ``_unscale`` shares found_inf with, or None.

    Fleet's wrappers share it with all processes. ``MixPrecisionScaler`` does not if there is only
    data parallelism.
    """
    module: str = unscale.__module__
    if not (is_distributed() and module.startswith("paddle.distributed.")):
        return None
    if module.endswith(".mix_precision_utils"):
        topology: Any = fleet.get_hybrid_communicate_group()
        if topology is None or topology.nranks == topology.get_data_parallel_world_size():
            return None
    return dist.get_group(0)


def largest_of(grads: list[Tensor], group: Group | None) -> np.float32:
    """The largest magnitude of gradients over a group of processes; None is this process alone."""
    own = _operations.largest(grads)
    return own if group is None else np.float32(_maxima(group, [own])[0])


def _place_of(group: Group) -> Any:
    """The place on which the group's backend reduces; None is the device in use."""
    return paddle.CPUPlace() if group.backend == "GLOO" else None


def check_shards(optimizer: Optimizer, shards: object) -> None:
    """Check that gradients may be clipped before the step.

    Raises:
        TypeError: ``shards`` is neither None nor a process group.
        ParameterError: this process is not in ``shards``; or ``optimizer.step`` averages the
            gradients, so their norm is not known before it.
    """
    if shards is not None:
        check_group("shards", shards)
        return
    topology = _topology_of(optimizer)
    if topology is None:
        return
    degrees = {
        "data parallelism": topology.get_data_parallel_world_size(),
        "sharding": topology.get_sharding_parallel_world_size(),
        "segment parallelism": topology.get_sep_parallel_world_size(),
    }
    averaging = [name for name, degree in degrees.items() if degree > 1]
    if averaging:
        raise ParameterError(
            f"with {' and '.join(averaging)}, fleet averages gradients in optimizer.step(), so "
            "they cannot be clipped before it: construct the optimizer with "
            "grad_clip=paddle.nn.ClipGradByGlobalNorm(max_norm)"
        )


def split_by(optimizer: Optimizer, shards: Group | None) -> dict[tuple[Group, ...], Optimizer]:
    """Parts of an optimizer, by the groups that the elements of their parameters are split over.

    ``shards``, if given, is the group that all parameters are split over. Fleet's parameters are
    split over the stages of the pipeline; those with ``is_distributed`` are also split over model
    parallelism. A weight that two stages share counts on the first of them. All processes have the
    same keys, but a part may be empty.
    """
    if shards is not None:
        return {(shards,) if shards.nranks > 1 else (): optimizer}
    topology = _topology_of(optimizer)
    if topology is None:
        return {(): optimizer}
    stages, slices = topology.get_pipe_parallel_group(), topology.get_model_parallel_group()
    over_stages = tuple(group for group in (stages,) if group.nranks > 1)
    over_both = tuple(group for group in (slices, stages) if group.nranks > 1)
    parts: dict[tuple[Group, ...], list[Tensor]] = {over_both: [], over_stages: []}
    for parameter in _operations.parameters_of(optimizer):
        if getattr(parameter, "is_firstly_shared", True):
            parts[over_both if getattr(parameter, "is_distributed", False) else over_stages].append(
                parameter
            )
    return {
        groups: SimpleNamespace(_parameter_list=parameters) for groups, parameters in parts.items()
    }


def reduce_norm(norms: dict[tuple[Group, ...], Tensor], norm_type: float) -> Tensor:
    """The p-norm of gradients whose parts lie on many processes, a scalar.

    It is ``(sum of n**p)**(1/p)`` in float64, where n are the norms of the parts, and the largest n
    for p = inf.

    Args:
        norms: the norm of this process's part of the gradients that are split over each tuple of
            groups.
        norm_type: p.
    """
    groups = dict.fromkeys(group for split in norms for group in split)
    first = next(iter(norms.values()))
    if not groups:
        return first
    is_max = math.isinf(norm_type)
    power = 1.0 if is_max or norm_type == 0 else norm_type
    place = _place_of(next(iter(groups)))
    values: Tensor = paddle.to_tensor([norm.item() for norm in norms.values()], "float64", place)
    values = values**power
    for group in groups:
        is_split = paddle.to_tensor([group in split for split in norms], place=values.place)
        values = paddle.where(is_split, _reduced(values, is_max, group), values)
    total = values.max() if is_max else values.sum() ** (1.0 / power)
    return paddle.to_tensor(total.item(), first.dtype, first.place)


def _reduced(values: Tensor, is_max: bool, group: Group) -> Tensor:
    """The sum of each value over a group, or its maximum; NaN if any is NaN."""
    if not is_max:
        sums = values.clone()
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        return sums
    is_nan = paddle.isnan(values)  # a backend's maximum may drop a NaN, so it is reduced beside it
    largest = paddle.stack([values.masked_fill(is_nan, -1.0), is_nan.astype(values.dtype)])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return largest[0].masked_fill(largest[1] > 0, math.nan)
