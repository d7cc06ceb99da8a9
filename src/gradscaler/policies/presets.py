"""Each framework's own rule, by name: its defaults, and its parameters in its spelling."""

from __future__ import annotations

from typing import TypeVar

from gradscaler.policies import checks
from gradscaler.policies.spelling import spelled

T = TypeVar("T", bound="Presets")

PADDLE = {
    "init_loss_scaling": "init_scale",
    "incr_ratio": "growth_factor",
    "decr_ratio": "backoff_factor",
    "incr_every_n_steps": "growth_interval",
    "decr_every_n_nan_or_inf": "hysteresis",
}
"""Paddle's names of a :class:`gradscaler.DynamicScale`'s parameters."""


class Presets:
    """Named constructors of :class:`gradscaler.DynamicScale`.

    Where a framework lets the scale grow to inf or sink to 0, the preset does not. An error names
    the parameter as the caller spelled it.

    >>> from gradscaler import DynamicScale
    >>> DynamicScale.keras(dynamic_growth_steps=100).min_scale
    1.0
    """

    @classmethod
    def torch(
        cls: type[T],
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> T:
        """``torch.amp.GradScaler`` (torch 2.13)."""
        return spelled(
            cls,
            {},
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
        )

    tensorplay = torch  # TensorPlay 1.0 has PyTorch's rule, and its parameters

    @classmethod
    def paddle(
        cls: type[T],
        init_loss_scaling: float = 2.0**15,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 1000,
        decr_every_n_nan_or_inf: int = 2,
    ) -> T:
        """``paddle.amp.GradScaler`` as its reference documentation has it.

        Release 3.3.1 itself defaults to 2**16, 2000 and 1.
        """
        return spelled(
            cls,
            PADDLE,
            init_loss_scaling=init_loss_scaling,
            incr_ratio=incr_ratio,
            decr_ratio=decr_ratio,
            incr_every_n_steps=incr_every_n_steps,
            decr_every_n_nan_or_inf=decr_every_n_nan_or_inf,
        )

    @classmethod
    def keras(cls: type[T], initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000) -> T:
        """``LossScaleOptimizer`` of Keras 2 and 3: halves and doubles, never below 1.

        The floor is Keras 2's; Keras 3.15 dropped it.
        """
        return spelled(
            cls,
            {"initial_scale": "init_scale", "dynamic_growth_steps": "growth_interval"},
            initial_scale=initial_scale,
            dynamic_growth_steps=dynamic_growth_steps,
            min_scale=1.0,
        )

    @classmethod
    def mindspore(
        cls: type[T],
        init_loss_scale: float = 2.0**24,
        scale_factor: float = 2,
        scale_window: int = 2000,
    ) -> T:
        """``mindspore.amp.DynamicLossScaleManager`` (MindSpore 2.10), never below 1."""
        factor = checks.growth_factor("scale_factor", scale_factor)
        return spelled(
            cls,
            {"init_loss_scale": "init_scale", "scale_window": "growth_interval"},
            init_loss_scale=init_loss_scale,
            growth_factor=factor,
            backoff_factor=1 / factor,
            scale_window=scale_window,
            min_scale=1.0,
        )

    @classmethod
    def flax(
        cls: type[T],
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        scale: float = 65536.0,
        minimum_scale: float | None = checks.SMALLEST_SCALE,
    ) -> T:
        """``flax.training.dynamic_scale.DynamicScale`` (flax 0.12).

        It grows at the step after ``growth_interval`` finite ones, so ``growth_interval`` here is
        one more than the argument. A ``minimum_scale`` of None is the default.
        """
        if minimum_scale is None:
            minimum_scale = checks.SMALLEST_SCALE
        return spelled(
            cls,
            {"scale": "init_scale", "minimum_scale": "min_scale"},
            scale=scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=checks.count("growth_interval", growth_interval) + 1,
            minimum_scale=minimum_scale,
        )

    @classmethod
    def jmp(
        cls: type[T],
        loss_scale: float = 2.0**15,
        period: int = 2000,
        factor: float = 2,
        min_loss_scale: float = 1.0,
    ) -> T:
        """``jmp.DynamicLossScale`` (jmp 0.0.4), whose ``loss_scale`` has no default there."""
        ratio = checks.growth_factor("factor", factor)
        return spelled(
            cls,
            {
                "loss_scale": "init_scale",
                "period": "growth_interval",
                "min_loss_scale": "min_scale",
            },
            loss_scale=loss_scale,
            growth_factor=ratio,
            backoff_factor=1 / ratio,
            period=period,
            min_loss_scale=min_loss_scale,
        )

    @classmethod
    def apex(
        cls: type[T],
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
    ) -> T:
        """Apex's ``update_scale_hysteresis``: any finite step refills the hysteresis.

        The kernel has no defaults; these are PyTorch's, whose scaler it extends.
        """
        return spelled(
            cls,
            {},
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            hysteresis_reset="finite_step_only",
        )

    @classmethod
    def megatron(
        cls: type[T],
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> T:
        """Megatron-LM's ``DynamicGradScaler``: only growth refills the hysteresis."""
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
