"""Each framework's own rule, with its defaults, under its names of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gradscaler.policies import _checks
from gradscaler.policies._spelling import spelled

T = TypeVar("T")

PADDLE = {
    "init_loss_scaling": "init_scale",
    "incr_ratio": "growth_factor",
    "decr_ratio": "backoff_factor",
    "incr_every_n_steps": "growth_interval",
    "decr_every_n_nan_or_inf": "hysteresis",
}
"""Maps Paddle's names of parameters to those of :class:`gradscaler.DynamicScale`."""

KERAS = {"initial_scale": "init_scale", "dynamic_growth_steps": "growth_interval"}
"""Maps the names of parameters in Keras 2 and 3 to those of :class:`gradscaler.DynamicScale`."""


class Presets:
    """Named constructors of :class:`gradscaler.DynamicScale`.

    Some frameworks let the scale grow to Inf or sink to 0; the presets do not. Errors use the
    framework's names of parameters.

    >>> from gradscaler import DynamicScale
    >>> DynamicScale.tf_keras(dynamic_growth_steps=100).min_scale
    1.0
    """

    @classmethod
    def torch(
        cls: Callable[..., T],
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> T:
        """``torch.amp.GradScaler`` (torch 2.13)."""
        return cls(init_scale, growth_factor, backoff_factor, growth_interval)

    tensorplay = torch  # TensorPlay 1.0 has PyTorch's rule, and its parameters

    @classmethod
    def paddle(
        cls: Callable[..., T],
        init_loss_scaling: float = 2.0**15,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 1000,
        decr_every_n_nan_or_inf: int = 2,
    ) -> T:
        """``paddle.amp.GradScaler``, with the defaults of the documentation of Paddle 2.2.

        Releases from 2.5 to 3.3.1 default to 2**16, 2000 and 1.
        """
        counts = incr_every_n_steps, decr_every_n_nan_or_inf
        return spelled(cls, PADDLE, init_loss_scaling, incr_ratio, decr_ratio, *counts)

    @classmethod
    def keras(
        cls: Callable[..., T], initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
    ) -> T:
        """``LossScaleOptimizer`` of Keras 3 (3.15): halves and doubles, also below 1."""
        return spelled(cls, KERAS, initial_scale, dynamic_growth_steps)

    @classmethod
    def tf_keras(
        cls: Callable[..., T], initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
    ) -> T:
        """``LossScaleOptimizer`` of Keras 2 (tf-keras 2.21): halves and doubles, never below 1."""
        return spelled(cls, KERAS, initial_scale, dynamic_growth_steps, min_scale=1.0)

    @classmethod
    def mindspore(
        cls: Callable[..., T],
        init_loss_scale: float = 2.0**24,
        scale_factor: float = 2,
        scale_window: int = 2000,
    ) -> T:
        """``mindspore.amp.DynamicLossScaleManager`` (MindSpore 2.10), with a floor of 1."""
        factor = _checks.growth_factor("scale_factor", scale_factor)
        factors = {"growth_factor": factor, "backoff_factor": 1 / factor}
        fields = {"init_loss_scale": "init_scale", "scale_window": "growth_interval"}
        return spelled(cls, fields, init_loss_scale, scale_window, **factors, min_scale=1.0)

    @classmethod
    def flax(
        cls: Callable[..., T],
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        scale: float = 65536.0,
        minimum_scale: float | None = _checks.SMALLEST_SCALE,
    ) -> T:
        """``flax.training.dynamic_scale.DynamicScale`` (flax 0.12).

        It grows at the first step after ``growth_interval`` finite ones, so the policy's
        ``growth_interval`` is the argument plus 1. A ``minimum_scale`` of None is the default.
        """
        if minimum_scale is None:
            minimum_scale = _checks.SMALLEST_SCALE
        interval = _checks.count("growth_interval", growth_interval) + 1
        factors = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
        fields = {"scale": "init_scale", "minimum_scale": "min_scale"}
        return spelled(cls, fields, scale, minimum_scale, **factors, growth_interval=interval)

    @classmethod
    def jmp(
        cls: Callable[..., T],
        loss_scale: float = 2.0**15,
        period: int = 2000,
        factor: float = 2,
        min_loss_scale: float = 1.0,
    ) -> T:
        """``jmp.DynamicLossScale`` (jmp 0.0.4). jmp itself has no default for ``loss_scale``."""
        ratio = _checks.growth_factor("factor", factor)
        factors = {"growth_factor": ratio, "backoff_factor": 1 / ratio}
        fields = {"loss_scale": "init_scale", "period": "growth_interval"}
        fields["min_loss_scale"] = "min_scale"
        return spelled(cls, fields, loss_scale, period, min_loss_scale, **factors)

    @classmethod
    def apex(
        cls: Callable[..., T],
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
    ) -> T:
        """Apex's ``update_scale_hysteresis``: any finite step resets the count of overflows.

        The kernel has no defaults; these are those of PyTorch's scaler, which it extends.
        """
        rule = init_scale, growth_factor, backoff_factor, growth_interval
        return cls(*rule, hysteresis, hysteresis_reset="finite_step_only")

    @classmethod
    def megatron(
        cls: Callable[..., T],
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> T:
        """Megatron-LM's ``DynamicGradScaler``: only growth resets the count of overflows."""
        return spelled(
            cls,
            {"initial_scale": "init_scale"},
            initial_scale=initial_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            hysteresis_reset="growth",
            min_scale=min_scale,
        )

    @classmethod
    def deepspeed(
        cls: Callable[..., T],
        init_scale: float = 2.0**16,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 2,
        consecutive_hysteresis: bool = False,
    ) -> T:
        """DeepSpeed's ``DynamicLossScaler`` (0.19), with the defaults of its fp16 config.

        It grows at the first step after ``scale_window`` finite ones, so the policy's
        ``growth_interval`` is the argument plus 1. DeepSpeed counts that step towards the next
        growth, too: if nothing overflows after a growth, its next one comes one step sooner than
        this policy's.
        """
        if not isinstance(consecutive_hysteresis, bool):
            raise TypeError(
                f"consecutive_hysteresis must be a bool, got {consecutive_hysteresis!r}"
            )
        return spelled(
            cls,
            {"delayed_shift": "hysteresis"},
            init_scale=init_scale,
            growth_interval=_checks.count("scale_window", scale_window) + 1,
            min_scale=min_scale,
            delayed_shift=delayed_shift,
            hysteresis_reset="finite_step_only" if consecutive_hysteresis else "growth",
        )
