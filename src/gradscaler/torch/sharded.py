"""FSDP's ``ShardedGradScaler``, implemented by the engine."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import sharded_grad_scaler

from gradscaler._eager.retries import DEFAULT_MAX_RETRIES
from gradscaler._on_torch.operations import TorchOperations
from gradscaler._on_torch.processes import Overflow, TorchProcesses, WorldProcesses, check_group
from gradscaler.policies import Policy
from gradscaler.torch.scaler import GradScaler

if issubclass(sharded_grad_scaler.ShardedGradScaler, GradScaler):
    raise ImportError(
        "torch.amp.GradScaler was replaced by gradscaler's before torch.distributed.fsdp was "
        "imported, so FSDP's ShardedGradScaler derives from it: call gradscaler.torch.install() "
        "instead of assigning to torch.amp.GradScaler"
    )


class _Operations(TorchOperations):
    """Gives a scaled loss the dtype of the loss, as FSDP's scaler does."""

    def multiply(self, output: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = super().multiply(output, scale)
        return scaled.to(output.dtype)


class ShardedGradScaler(GradScaler, sharded_grad_scaler.ShardedGradScaler):
    """Loss scaling for ``FullyShardedDataParallel``: a drop-in for FSDP's own class.

    It is a :class:`gradscaler.torch.GradScaler` whose ``group`` is the world. Like FSDP's class, it
    unscales float16 gradients, and a scaled loss keeps its dtype. Unlike FSDP's class, it needs one
    all-reduce for a decision, and raises if processes hold different scales.

    Args:
        device: the type of device, as for :class:`gradscaler.torch.GradScaler`. None takes the
            device of the first scaled tensor.
        init_scale: the scale before the first step.
        backoff_factor: multiplies the scale when it backs off, in (0, 1).
        growth_factor: multiplies the scale when it grows, > 1.
        growth_interval: finite steps in a row before the scale grows.
        enabled: if False, ``step`` only calls ``optimizer.step``, and other calls pass their
            arguments through.
        process_group: the processes that decide together; None is the world.
        policy: the rule, in place of the four numbers above.
        max_retries: the largest number of repetitions of an evaluation that overflows, in
            ``step(optimizer, closure)``, and of the body of a loop over ``attempts``.
        overflow: a callable for hardware or engines that detect overflow themselves, as for
            :class:`gradscaler.torch.GradScaler`.

    Raises:
        ValueError: a parameter is out of range; the message names it and its value.
        TypeError: a parameter is not a number of the right kind; ``device`` is a number;
            ``process_group`` is not a process group; or ``overflow`` is not callable.
    """

    _operations: ClassVar[TorchOperations] = _Operations()
    _processes_type: ClassVar[type[TorchProcesses]] = WorldProcesses
    _processes: WorldProcesses

    def __init__(  # noqa: PLR0913 # PyTorch's, with ours
        self,
        device: str | torch.device | None = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
        *,
        policy: Policy | None = None,
        max_retries: int = DEFAULT_MAX_RETRIES,
        overflow: Overflow | None = None,
    ) -> None:
        check_group("process_group", process_group)
        GradScaler.__init__(
            self,
            device,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            policy=policy,
            allow_fp16_gradients=True,
            max_retries=max_retries,
            group=process_group,
            overflow=overflow,
        )

    def _start(self) -> None:
        super()._start()
        self._processes.may_mix = self._allows_mixed

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The processes that decide together; None is the world."""
        return self._group

    @process_group.setter
    def process_group(self, process_group: dist.ProcessGroup | None) -> None:
        check_group("process_group", process_group)
        # Both: a pickled scaler holds only self._group, and makes its processes from it.
        self._group = self._processes.group = process_group
