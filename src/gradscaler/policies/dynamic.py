"""The rule that raises the scale after finite steps and lowers it after non-finite ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from gradscaler.policies import checks
from gradscaler.policies.rule import Constants, next_state
from gradscaler.policies.state import (
    Scalar,
    ScaleState,
    Where,
    host_where,
    on_host,
    where_for,
)

HysteresisReset = Literal["finite_step", "finite_step_only", "growth"]
_RESETS = ("finite_step", "finite_step_only", "growth")


@dataclass(frozen=True)
class DynamicScale:
    """Dynamic loss scaling, the rule behind every framework's scaler.

    With ``g`` finite steps in a row and ``b`` counted non-finite ones::

        non-finite step: g = 0;  b += 1
                         b >= hysteresis:       scale = max(scale * backoff_factor, min_scale)
        finite step:     g += 1
                         g >= growth_interval:  g = 0
                                                scale *= growth_factor, unless past max_scale

    Scales and factors are float32 and a move is one float32 multiplication, on the host as on any
    device, so one sequence of found_inf gives the same bits everywhere. Counters compare with
    ``>=``: lowering an interval below its counter grows at the next finite step.

    Args:
        init_scale: the scale before the first step.
        growth_factor: multiplies the scale when it grows, > 1.
        backoff_factor: multiplies the scale when it backs off, in (0, 1).
        growth_interval: finite steps in a row before the scale grows.
        hysteresis: the scale backs off at this non-finite step, and tolerates those before it.
        hysteresis_reset: what makes ``b`` start from 0 again. ``"finite_step"``: a finite step,
            and the backoff itself (Paddle). ``"finite_step_only"``: a finite step; until one
            comes, each further non-finite step backs off (Apex). ``"growth"``: growth alone, so
            that non-finite steps count however far apart they are (Megatron).
        min_scale: the floor. The default is the smallest normal float32: 1/scale stays finite.
        max_scale: growth that would pass it is not made, so that a power of two stays one.

    Raises:
        TypeError: a parameter is not the kind of number it should be (a bool never is).
        ValueError: a parameter is out of range; the message names it and its value.

    The rule is that of Micikevicius et al., "Mixed Precision Training" (2018), section 3.2, with
    the bounds and the hysteresis that its implementations added.

    >>> policy = DynamicScale(init_scale=8.0, growth_interval=2)
    >>> state = policy.init()
    >>> for found_inf in [True, False, False]:
    ...     state = policy.update(state, found_inf)
    ...     print(float(state.scale), state.finite_steps)
    4.0 0
    4.0 1
    8.0 0
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    hysteresis_reset: HysteresisReset = "finite_step"
    min_scale: float = checks.SMALLEST_SCALE
    max_scale: float = checks.LARGEST_SCALE

    def __post_init__(self) -> None:
        min_scale = checks.loss_scale("min_scale", self.min_scale)
        max_scale = checks.loss_scale("max_scale", self.max_scale)
        if min_scale > max_scale:
            raise ValueError(
                f"min_scale must not be above max_scale, got {self.min_scale!r} > "
                f"{self.max_scale!r}"
            )
        if self.hysteresis_reset not in _RESETS:
            raise ValueError(
                f"hysteresis_reset must be one of {', '.join(map(repr, _RESETS))}, "
                f"got {self.hysteresis_reset!r}"
            )
        checked = {
            "min_scale": min_scale,
            "max_scale": max_scale,
            "init_scale": checks.loss_scale("init_scale", self.init_scale, min_scale, max_scale),
            "growth_factor": checks.growth_factor("growth_factor", self.growth_factor),
            "backoff_factor": checks.backoff_factor("backoff_factor", self.backoff_factor),
            "growth_interval": checks.count("growth_interval", self.growth_interval),
            "hysteresis": checks.count("hysteresis", self.hysteresis),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def init(self) -> ScaleState:
        """The state before the first step, in host scalars: a float32 and two ints."""
        return ScaleState(np.float32(self.init_scale), 0, 0)

    def update(
        self, state: ScaleState, found_inf: Scalar, where: Where | None = None
    ) -> ScaleState:
        """The state after one step, by the rule in the class's docstring.

        Args:
            state: scalars, or tensors of any one framework: float32 and twice an integer type.
            found_inf: whether the step's gradients held an Inf or a NaN; a bool, or a boolean
                tensor of that framework.
            where: that framework's ``where``. Left out, it is found by the type of the scale.

        Returns:
            A new state of the same types. No value is read on the host, so the method can be
            traced and compiled.
        """
        if not on_host(state.scale):
            where = where or where_for(state.scale)
            return next_state(self._constants, state, found_inf, where)
        scale, finite_steps, nonfinite_steps = state
        state = ScaleState(np.float32(scale), finite_steps, nonfinite_steps)
        if scale * self.growth_factor < checks.LARGEST_SCALE:
            return next_state(self._host_constants, state, bool(found_inf), host_where)
        with np.errstate(over="ignore"):  # entering this takes longer than the rule does
            return next_state(self._host_constants, state, bool(found_inf), host_where)

    @cached_property
    def _constants(self) -> Constants:
        """The parameters as a device computes with them: float32 values, int32 limits."""
        return Constants(
            checks.in_float32(self.growth_factor),
            checks.in_float32(self.backoff_factor),
            checks.in_float32(self.min_scale),
            checks.in_float32(self.max_scale),
            checks.as_counter_limit(self.growth_interval),
            checks.as_counter_limit(self.hysteresis),
            finite_step_resets=self.hysteresis_reset != "growth",
            backoff_resets=self.hysteresis_reset == "finite_step",
        )

    @cached_property
    def _host_constants(self) -> Constants:
        """The same as NumPy scalars: NumPy 1 makes a float64 of float32 * float."""
        constants = self._constants
        return constants._replace(
            growth_factor=np.float32(constants.growth_factor),
            backoff_factor=np.float32(constants.backoff_factor),
            min_scale=np.float32(constants.min_scale),
            max_scale=np.float32(constants.max_scale),
        )

    # Presets: each framework's own defaults, with its parameters in its spelling. Where a framework
    # lets the scale grow to inf or sink to 0, the preset does not.

    @classmethod
    def torch(
        cls,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> DynamicScale:
        """``torch.amp.GradScaler`` (torch 2.13)."""
        return cls(init_scale, growth_factor, backoff_factor, growth_interval)

    @classmethod
    def tensorplay(
        cls,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> DynamicScale:
        """``tensorplay.amp.GradScaler`` (TensorPlay 1.0): PyTorch's rule."""
        return cls(init_scale, growth_factor, backoff_factor, growth_interval)

    @classmethod
    def paddle(
        cls,
        init_loss_scaling: float = 2.0**15,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 1000,
        decr_every_n_nan_or_inf: int = 2,
    ) -> DynamicScale:
        """``paddle.amp.GradScaler`` as its reference documentation has it.

        Release 3.3.1 itself defaults to 2**16, 2000 and 1.
        """
        return cls(
            init_loss_scaling,
            incr_ratio,
            decr_ratio,
            incr_every_n_steps,
            decr_every_n_nan_or_inf,
        )

    @classmethod
    def keras(
        cls, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
    ) -> DynamicScale:
        """``LossScaleOptimizer`` of Keras 2 and 3: halves and doubles, never below 1.

        The floor is Keras 2's; Keras 3.15 dropped it.
        """
        return cls(initial_scale, growth_interval=dynamic_growth_steps, min_scale=1.0)

    @classmethod
    def mindspore(
        cls, init_loss_scale: float = 2.0**24, scale_factor: float = 2, scale_window: int = 2000
    ) -> DynamicScale:
        """``mindspore.amp.DynamicLossScaleManager`` (MindSpore 2.10), never below 1."""
        factor = checks.growth_factor("scale_factor", scale_factor)
        return cls(init_loss_scale, factor, 1 / factor, scale_window, min_scale=1.0)

    @classmethod
    def flax(
        cls,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        scale: float = 65536.0,
        minimum_scale: float = checks.SMALLEST_SCALE,
    ) -> DynamicScale:
        """``flax.training.dynamic_scale.DynamicScale`` (flax 0.12).

        It grows at the step after ``growth_interval`` finite ones, so ``growth_interval`` here is
        one more than the argument.
        """
        return cls(
            scale,
            growth_factor,
            backoff_factor,
            checks.count("growth_interval", growth_interval) + 1,
            min_scale=minimum_scale,
        )

    @classmethod
    def jmp(
        cls,
        loss_scale: float = 2.0**15,
        period: int = 2000,
        factor: float = 2,
        min_loss_scale: float = 1.0,
    ) -> DynamicScale:
        """``jmp.DynamicLossScale`` (jmp 0.0.4), whose ``loss_scale`` has no default there."""
        ratio = checks.growth_factor("factor", factor)
        return cls(loss_scale, ratio, 1 / ratio, period, min_scale=min_loss_scale)

    @classmethod
    def apex(
        cls,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
    ) -> DynamicScale:
        """Apex's ``update_scale_hysteresis``: any finite step refills the hysteresis.

        The kernel has no defaults; these are PyTorch's, whose scaler it extends.
        """
        return cls(
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            hysteresis,
            "finite_step_only",
        )

    @classmethod
    def megatron(
        cls,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> DynamicScale:
        """Megatron-LM's ``DynamicGradScaler``: only growth refills the hysteresis."""
        return cls(
            initial_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            hysteresis,
            "growth",
            min_scale=min_scale,
        )
