"""``torch.amp.GradScaler``, on any device, with the engine behind it."""

from __future__ import annotations

import warnings
from enum import Enum
from importlib.util import find_spec
from numbers import Number
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from gradscaler._eager.gradients import Gradients
from gradscaler._eager.repeating import DEFAULT_MAX_RETRIES
from gradscaler._on_torch.operations import TorchOperations
from gradscaler._on_torch.processes import Overflow, TorchProcesses, check_group
from gradscaler._torch_like.gradients import TorchLikeGradients
from gradscaler._torch_like.operations import parameters_of
from gradscaler._torch_like.scaler import TorchLikeScaler
from gradscaler.policies import Policy


class _Gradients(TorchLikeGradients):
    opt_state: ClassVar[type[Enum]] = OptState


class GradScaler(TorchLikeScaler[torch.Tensor, torch.optim.Optimizer], torch.amp.GradScaler):
    """Loss scaling for PyTorch: a drop-in for ``torch.amp.GradScaler``.

    Scaling and unscaling, skipping and moving the scale are torch's, to the bit where float32
    holds the factors exactly. Beyond it: any device without being told, closures, clipping in any
    order of calls, what happened in each step, growth that an interval lowered on the way does
    not freeze, and a scale that stays between 2**-126 and the largest float32.

    Args:
        device: the type of device to work on, such as ``"cuda"``, or a device of that type. None
            takes the device of the first scaled tensor. ``"cuda"`` without CUDA warns and disables
            the scaler, as torch does.
        init_scale: the scale before the first step.
        growth_factor: multiplies the scale when it grows, > 1.
        backoff_factor: multiplies the scale when it backs off, in (0, 1).
        growth_interval: finite steps in a row before the scale grows.
        enabled: if False, ``step`` is ``optimizer.step`` and all else passes through.
        policy: the rule as a whole, in place of the four parameters before: a
            :class:`gradscaler.DynamicScale`, with bounds and hysteresis, a
            :class:`gradscaler.FixedScale`, or a :class:`gradscaler.AmaxScale`.
        allow_fp16_gradients: unscale float16 gradients in place rather than refuse them. What
            underflows in that division is lost; torch always refuses.
        max_retries: how often ``step(optimizer, closure)`` repeats an evaluation that overflows,
            and a loop over ``attempts`` its body.
        group: the process group that decides together whether to step, and at which scale. None
            takes the processes that hold the optimizer's DTensors, so FSDP2, tensor parallelism and
            their products need no group; nor does DDP, which gives all the same gradients. Name it
            for FSDP1, pipeline and expert parallelism, ZeRO and parameters of one process alone.
            Name it for a loop over ``attempts``, too, under DDP: its gradients are not the same
            in ``no_sync()``. It must exist: before ``init_process_group``, ``group.WORLD`` is None.
            Each of them then calls ``step`` for the same optimizers in the same order; a stage of
            a pipeline that has no loss need not call ``scale``.
        overflow: called once for each check of an optimizer's gradients; where it returns True, or
            a tensor with an element that is not 0, the step is skipped and the scale backs off, as
            if a gradient were not finite. For hardware and engines that detect overflow
            themselves: where an NPU saturates, its gradients stay finite. A tensor is not read on
            the host. It is not called where the optimizer has no gradients.

    Raises:
        ValueError: a parameter is out of range; the message names it and its value.
        TypeError: a parameter is not the kind of number it should be; ``device`` is a number,
            as in ``torch.cuda.amp.GradScaler(1024.0)``; ``group`` is not a process group; or
            ``overflow`` cannot be called.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = GradScaler()
    >>> scaler.scale(model(torch.ones(2)).sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> scaler.last_step(optimizer)
    StepOutcome(applied, reason='finite', scale=65536.0)
    """

    if TYPE_CHECKING:

        def step(  # noqa: D102 # the engine's, with torch's type of what it returns
            self,
            optimizer: torch.optim.Optimizer,
            *args: Any,
            max_retries: int | None = None,
            **kwargs: Any,
        ) -> float | None: ...

    _operations: ClassVar[TorchOperations] = TorchOperations()
    _gradients_type: ClassVar[type[Gradients]] = _Gradients
    _processes_type: ClassVar[type[TorchProcesses]] = TorchProcesses
    _processes: TorchProcesses
    _overflow: Overflow | None = None

    def __init__(  # noqa: PLR0913 # PyTorch's, with ours
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: Policy | None = None,
        allow_fp16_gradients: bool = False,
        max_retries: int = DEFAULT_MAX_RETRIES,
        group: dist.ProcessGroup | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        given: object = device
        # What may be meant as a scale is refused. All else is taken, such as a trainer's stand-in.
        if isinstance(given, (Number, torch.Tensor)):
            is_number = not isinstance(given, (bool, torch.Tensor))
            meant = given if is_number else 65536.0
            raise TypeError(
                f"device must be the name of a device or None, got {given!r}; for the scale "
                f"before the first step, write init_scale={meant!r}"
            )
        if isinstance(device, torch.device):
            device = device.type
        if enabled and device == "cuda" and not _cuda_may_be_available():
            warnings.warn(  # it begins as torch's does, which users' filters look for
                "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling. "
                "Leave out device to scale losses wherever they are.",
                stacklevel=2,
            )
            enabled = False
        check_group("group", group)
        if overflow is not None and not callable(overflow):
            raise TypeError(f"overflow must be a callable, got {overflow!r}")
        self._device = device
        # Before the base class starts, and makes the processes of them.
        self._group = group
        self._overflow = overflow
        super().__init__(
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            policy,
            allow_fp16_gradients,
            max_retries,
        )

    # Many processes.

    def _start(self) -> None:
        super()._start()
        self._processes = self._processes_type(self._operations, self._group, self._overflow)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_processes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_policy" in state:
            super().__setstate__(state)
            return
        # One of torch's own, copied or unpickled while install() holds.
        GradScaler.__init__(self, state["_device"], enabled=state["_enabled"])
        if self._enabled:
            scale, tracker = state["_init_scale"], state["_init_growth_tracker"]
            given = {**{name[1:]: value for name, value in state.items()}, "scale": scale}
            self.load_state_dict({**given, "_growth_tracker": tracker})

    def _place_before_loss(self, optimizer: Any) -> None:
        # Another process of the group may have scaled the loss: the last stage of a pipeline.
        if self._processes.named() is not None:
            first = next(iter(parameters_of(optimizer)), None)
            self._place(torch.device("cpu") if first is None else first.device)


def _cuda_may_be_available() -> bool:
    return torch.cuda.is_available() or find_spec("torch_xla") is not None
