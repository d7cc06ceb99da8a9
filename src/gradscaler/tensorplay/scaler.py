"""``tensorplay.amp.GradScaler``, implemented by the engine."""

from __future__ import annotations

import warnings
from enum import Enum
from typing import ClassVar

import tensorplay
from tensorplay.amp.grad_scaler import OptState

from gradscaler._eager.gradients import Gradients
from gradscaler._eager.retries import DEFAULT_MAX_RETRIES
from gradscaler._torch_like.gradients import TorchLikeGradients
from gradscaler._torch_like.scaler import TorchLikeScaler
from gradscaler.policies import Policy
from gradscaler.tensorplay._operations import TensorPlayOperations

WITHOUT_CUDA = "tensorplay.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."


class _Gradients(TorchLikeGradients):
    opt_state: ClassVar[type[Enum]] = OptState


class GradScaler(
    TorchLikeScaler[tensorplay.Tensor, tensorplay.optim.Optimizer], tensorplay.amp.GradScaler
):
    """Loss scaling for TensorPlay: a drop-in for ``tensorplay.amp.GradScaler``.

    The rule is PyTorch's. In addition to TensorPlay's own scaler, it takes closures, which
    TensorPlay's LBFGS needs; it clips; and it reports each step. If ``growth_interval`` is lowered
    during training, the scale still grows. The scale stays between 2**-126 and the largest float32.

    Args:
        device: ``"cpu"`` or ``"cuda"``. The default is that of TensorPlay's documentation. In
            release 1.0.0 the default is ``"cuda"``, and the scaler disables itself without CUDA.
        init_scale: the scale before the first step.
        growth_factor: multiplies the scale when it grows, > 1.
        backoff_factor: multiplies the scale when it backs off, in (0, 1).
        growth_interval: finite steps in a row before the scale grows.
        enabled: if False, ``step`` only calls ``optimizer.step``, and other calls pass their
            arguments through.
        policy: the rule, in place of the four parameters before.
        allow_fp16_gradients: whether to unscale float16 gradients in place. If False they raise.
        max_retries: the largest number of repetitions, by default 16, of an evaluation that
            overflows, in ``step(optimizer, closure)``, and of the body of a loop over ``attempts``.

    Raises:
        ValueError: a parameter is out of range; the message names it and its value.
        TypeError: a parameter is not a number of the right kind, or ``device`` is a number.

    >>> import tensorplay
    >>> model = tensorplay.nn.Linear(2, 1)
    >>> optimizer = tensorplay.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = GradScaler()
    >>> scaler.scale(model(tensorplay.ones((1, 2))).sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> scaler.last_step(optimizer)
    StepOutcome(applied, reason='finite', scale=65536.0)
    """

    _operations: ClassVar[TensorPlayOperations] = TensorPlayOperations()
    _gradients_type: ClassVar[type[Gradients]] = _Gradients

    def __init__(  # noqa: PLR0913 # TensorPlay's, with ours
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: Policy | None = None,
        allow_fp16_gradients: bool = False,
        max_retries: int = DEFAULT_MAX_RETRIES,
    ) -> None:
        given: object = device
        if isinstance(given, (int, float)):
            raise TypeError(
                f"device must be the name of a device, got {device!r}; for the scale before the "
                f"first step, write init_scale={device!r}"
            )
        if enabled and device == "cuda" and not tensorplay.cuda.is_available():
            warnings.warn(WITHOUT_CUDA, stacklevel=2)
            enabled = False
        self._device = device
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
