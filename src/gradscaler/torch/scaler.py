"""``torch.amp.GradScaler`` on any device, implemented by the engine."""

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
from gradscaler._eager.retries import DEFAULT_MAX_RETRIES
from gradscaler._on_torch.operations import TorchOperations
from gradscaler._on_torch.processes import Overflow, TorchProcesses, check_group
from gradscaler._torch_like.gradients import TorchLikeGradients
from gradscaler._torch_like.operations import parameters_of
from gradscaler._torch_like.scaler import TorchLikeScaler
from gradscaler.errors import levels_to_caller
from gradscaler.policies import Policy


class _Gradients(TorchLikeGradients):
    opt_state: ClassVar[type[Enum]] = OptState


class GradScaler(TorchLikeScaler[torch.Tensor, torch.optim.Optimizer], torch.amp.GradScaler):
    """Loss scaling for PyTorch: a drop-in for ``torch.amp.GradScaler``.

    It scales, unscales, skips and moves the scale as torch does, bit for bit if float32 holds the
    factors exactly. In addition it takes any device, without being told which; it takes closures;
    it clips in any order of calls; and it reports each step. If ``growth_interval`` is lowered
    during training, the scale still grows. The scale stays between 2**-126 and the largest float32.

    Args:
        device: the type of device to work on, such as ``"cuda"``, or a device of that type. None
            takes the device of the first scaled tensor. ``"cuda"`` without CUDA warns and disables
            the scaler, as in torch.
        init_scale: the scale before the first step.
        growth_factor: multiplies the scale when it grows, > 1.
        backoff_factor: multiplies the scale when it backs off, in (0, 1).
        growth_interval: finite steps in a row before the scale grows.
        enabled: if False, ``step`` only calls ``optimizer.step``, and other calls pass their
            arguments through.
        policy: the rule, in place of the four parameters before: a
            :class:`gradscaler.DynamicScale`, which may have bounds and hysteresis, a
            :class:`gradscaler.FixedScale`, a :class:`gradscaler.AmaxScale`, or any other
            :class:`gradscaler.Policy`.
        allow_fp16_gradients: whether to unscale float16 gradients in place. Values that underflow
            in that division are lost. If False they raise, as always in torch.
        max_retries: the largest number of repetitions, by default 16, of an evaluation that
            overflows, in ``step(optimizer, closure)``, and of the body of a loop over ``attempts``.
        group: the process group that decides together whether to step, and at which scale. None
            takes the processes that hold the optimizer's DTensors, so FSDP2, tensor parallelism and
            combinations of them need no group. DDP needs none either: it gives all processes the
            same gradients. Name the group for FSDP1, pipeline and expert parallelism, ZeRO, and
            parameters that only one process has. Under DDP, name it for a loop over ``attempts``:
            in ``no_sync()`` gradients differ between processes. Create it first: before
            ``init_process_group``, ``group.WORLD`` is None. All processes of the group must call
            ``step`` for the same optimizers in the same order; a stage of a pipeline without a loss
            need not call ``scale``.
        overflow: a callable for hardware or engines that detect overflow themselves, such as NPUs
            that saturate, so that gradients stay finite. It is called once for each check of an
            optimizer's gradients, unless there are none. If it returns True, or a tensor with a
            nonzero element, the step is skipped and the scale backs off, as if a gradient were not
            finite. A tensor is not read on the host.

    Raises:
        ValueError: a parameter is out of range; the message names it and its value.
        TypeError: a parameter is not a number of the right kind; ``device`` is a number, as in
            ``torch.cuda.amp.GradScaler(1024.0)``; ``group`` is not a process group; or
            ``overflow`` is not callable.

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
        # Numbers are refused: they may be meant as a scale. Trainers pass other objects.
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
            warnings.warn(  # it begins like torch's warning, because users filter by that
                "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling. "
                "Leave out device to scale losses wherever they are.",
                stacklevel=levels_to_caller(),
            )
            enabled = False
        check_group("group", group)
        if overflow is not None and not callable(overflow):
            raise TypeError(f"overflow must be a callable, got {overflow!r}")
        self._device = device
        # Before the base class calls _start(), which needs both.
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

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_processes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_policy" in state:
            super().__setstate__(state)
            return
        # The state of torch's own scaler, copied or unpickled while install() is in effect.
        GradScaler.__init__(self, state["_device"], enabled=state["_enabled"])
        if self._enabled:
            scale, tracker = state["_init_scale"], state["_init_growth_tracker"]
            given = {**{name[1:]: value for name, value in state.items()}, "scale": scale}
            self.load_state_dict({**given, "_growth_tracker": tracker})

    def _place_before_loss(self, optimizer: torch.optim.Optimizer) -> None:
        # Another process of the group may scale the loss, such as the last stage of a pipeline.
        if self._processes.named() is not None:
            first = next(iter(parameters_of(optimizer)), None)
            self._place(torch.device("cpu") if first is None else first.device)


def _cuda_may_be_available() -> bool:
    return torch.cuda.is_available() or find_spec("torch_xla") is not None
