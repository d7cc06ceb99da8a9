"""``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``, with the engine behind it."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import sharded_grad_scaler

from gradscaler._eager.repeating import DEFAULT_MAX_RETRIES
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
    """FSDP expects a scaled loss of the loss' own dtype."""

    def multiply(self, output: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = super().multiply(output, scale)
        return scaled.to(output.dtype)


class ShardedGradScaler(GradScaler, sharded_grad_scaler.ShardedGradScaler):
    """Loss scaling for ``FullyShardedDataParallel``: a drop-in for FSDP's own class.

    It is a :class:`gradscaler.torch.GradScaler` whose ``group`` is the world. Like FSDP's, it
    unscales float16 gradients, and a scaled loss keeps its dtype. Unlike with FSDP's, all processes
    agree in one all-reduce, and they notice different scales.

    Args:
        device: as for :class:`gradscaler.torch.GradScaler`; None takes that of the first scaled
            tensor.
        init_scale: the scale before the first step.
        backoff_factor: multiplies the scale when it backs off, in (0, 1).
        growth_factor: multiplies the scale when it grows, > 1.
        growth_interval: finite steps in a row before the scale grows.
        enabled: if False, ``step`` is ``optimizer.step`` and all else passes through.
        process_group: who decides together; None is the world.
        policy: as for :class:`gradscaler.torch.GradScaler`.
        max_retries: as for :class:`gradscaler.torch.GradScaler`.
        overflow: as for :class:`gradscaler.torch.GradScaler`.

    Raises:
        ValueError, TypeError: as :class:`gradscaler.torch.GradScaler` does.
    """

    _operations: ClassVar[TorchOperations] = _Operations()
    _processes_type: ClassVar[type[TorchProcesses]] = WorldProcesses

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

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Who decides together; None is the world."""
        return self._group

    @process_group.setter
    def process_group(self, process_group: dist.ProcessGroup | None) -> None:
        check_group("process_group", process_group)
        # Both: what is pickled has the group, and what decides is made anew from it.
        self._group = self._processes.group = process_group
