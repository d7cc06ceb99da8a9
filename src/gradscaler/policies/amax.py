"""The rule that looks at the largest gradient, so that bad batches cannot sink the scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradscaler.errors import ParameterError
from gradscaler.policies import _checks
from gradscaler.policies.state import Scalar, Where, host_where, on_host, where_for

_LARGEST_FP16 = 65504.0


class AmaxState(NamedTuple):
    """A :class:`gradscaler.ScaleState`, and what is known of the gradients' size.

    Attributes:
        scale: the loss scale, a float32 scalar.
        finite_steps: finite steps since the scale last moved or a step was non-finite, an integer.
        nonfinite_steps: non-finite steps in a row, an integer.
        peak: the largest magnitude of an unscaled gradient of late, a float32 scalar; 0 before
            anything is known.
    """

    scale: Scalar
    finite_steps: Scalar
    nonfinite_steps: Scalar
    peak: Scalar


@dataclass(frozen=True)
class AmaxScale:
    """Dynamic loss scaling that knows how large gradients have been.

    An overflow lowers the scale only if gradients like those before might overflow at half of it:
    a bad batch overflows at any scale. While all gradients are far from overflow, each finite step
    raises the scale. With ``amax``, the largest magnitude of the unscaled gradients, and
    ``fits(s) = peak > 0 and s * peak * 2**margin <= 65504``::

        non-finite step: g = 0;  b += 1;  b > patience: peak = 0
                         not fits(scale * backoff_factor):  scale *= backoff_factor
        finite step:     b = 0;  g += 1;  peak = max(amax, peak * 0.5**(1 / half_life))
                         fits(scale * growth_factor) or g >= growth_interval:
                                                            g = 0;  scale *= growth_factor

    Scales stay between ``min_scale`` and ``max_scale`` as in :class:`gradscaler.DynamicScale`, and
    all values are float32, on the host as on any device.

    Args:
        init_scale: the scale before the first step.
        growth_factor: multiplies the scale when it grows, > 1.
        backoff_factor: multiplies the scale when it backs off, in (0, 1).
        growth_interval: finite steps in a row before the scale grows past what fits.
        margin: the room above the peak, in powers of 2, that a scale fits with.
        patience: non-finite steps in a row before the peak is forgotten.
        half_life: finite steps in which the peak halves if no gradient renews it.
        amax_interval: how many finite steps each measurement of the gradients is good for; 1
            measures every step. It counts from the last move or non-finite step.
        min_scale: the floor.
        max_scale: the ceiling.

    Raises:
        TypeError: a parameter is not the kind of number it should be; a bool is not a number.
        ValueError: a parameter is out of range; the message names it and its value.

    >>> policy = AmaxScale(init_scale=1024.0)
    >>> state = policy.update(policy.init(), found_inf=False, amax=0.001)
    >>> float(state.scale)
    2048.0
    >>> float(policy.update(state, found_inf=True).scale)  # the batch was bad, not the scale
    2048.0
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    margin: int = 12
    patience: int = 20
    half_life: float = 100.0
    amax_interval: int = 1
    min_scale: float = _checks.SMALLEST_SCALE
    max_scale: float = _checks.LARGEST_SCALE

    def __post_init__(self) -> None:
        min_scale = _checks.loss_scale("min_scale", self.min_scale)
        max_scale = _checks.loss_scale("max_scale", self.max_scale)
        if _checks.in_float32(min_scale) > _checks.in_float32(max_scale):
            bounds = f"{self.min_scale!r} > {self.max_scale!r}"
            raise ParameterError(f"min_scale must not be above max_scale, got {bounds}")
        half_life = _checks.number("half_life", self.half_life)
        if not half_life > 0:
            raise ParameterError(f"half_life must be positive, got {self.half_life!r}")
        checked = {
            "min_scale": min_scale,
            "max_scale": max_scale,
            "init_scale": _checks.loss_scale("init_scale", self.init_scale, min_scale, max_scale),
            "growth_factor": _checks.growth_factor("growth_factor", self.growth_factor),
            "backoff_factor": _checks.backoff_factor("backoff_factor", self.backoff_factor),
            "growth_interval": _checks.count("growth_interval", self.growth_interval),
            "margin": _checks.count("margin", self.margin, least=0, most=100),
            "patience": _checks.count("patience", self.patience, 0, _checks.LONGEST_COUNT - 1),
            "half_life": half_life,
            "amax_interval": _checks.count("amax_interval", self.amax_interval),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def init(self) -> AmaxState:
        """The state before the first step, in host scalars: a float32, two ints and a float32."""
        return AmaxState(np.float32(self.init_scale), 0, 0, np.float32(0))

    def update(
        self,
        state: AmaxState,
        found_inf: Scalar,
        where: Where | None = None,
        amax: Scalar | None = None,
    ) -> AmaxState:
        """The state after one step, by the rule in the class's docstring.

        Args:
            state: scalars, or tensors of any one framework: float32, twice an integer type, and
                float32.
            found_inf: whether the step's gradients held an Inf or a NaN; a bool, or a boolean
                tensor of that framework.
            where: that framework's ``where``, found by the type of the scale if it is left out.
            amax: the largest magnitude of the step's unscaled gradients, a float32 scalar. It
                counts in finite steps whose ``finite_steps`` is a multiple of ``amax_interval``,
                and may be None in all others.

        Returns:
            A new state of the same types. No value is read on the host, so the method can be
            traced and compiled, unless the state is host scalars and ``where`` is left out.
        """
        if where is None and on_host(state.scale):
            numbers = AmaxState(
                np.float32(state.scale), *map(int, state[1:3]), np.float32(state.peak)
            )
            found_inf = bool(found_inf)
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                amax = None if amax is None else np.float32(amax)
                return self._next(numbers, found_inf, host_where, amax, np.float32)
        where = where or where_for(state.scale)
        if isinstance(found_inf, (bool, np.bool_)):
            found_inf = state.scale == state.scale if found_inf else state.scale != state.scale
        return self._next(state, found_inf, where, amax, float)

    def _next(
        self, state: AmaxState, found_inf: Scalar, where: Where, amax: Scalar, as_float: type
    ) -> AmaxState:
        """Arithmetic, comparisons and ``where`` alone; no branch on a value."""
        scale, finite_count, nonfinite_count, peak = state
        zero, none = finite_count * 0, peak * 0
        room = as_float(2.0**self.margin)
        decay = as_float(_checks.in_float32(0.5 ** (1 / self.half_life)))

        def by_fit(
            s: Scalar, most: Scalar, if_fits: Scalar, if_not: Scalar
        ) -> Scalar:  # of gradients up to `most` at the scale `s`
            fits = where(s * most * room <= _LARGEST_FP16, if_fits, if_not)
            return where(most > 0, fits, if_not)

        finite_steps = finite_count + 1
        decayed = peak * decay
        seen = none if amax is None else where(finite_count % self.amax_interval == 0, amax, none)
        peak_after_finite = where(seen > decayed, seen, decayed)
        grown = scale * as_float(_checks.in_float32(self.growth_factor))
        larger = where(grown <= as_float(_checks.in_float32(self.max_scale)), grown, scale)
        grow = finite_steps >= min(self.growth_interval, _checks.LONGEST_COUNT)
        after_finite = by_fit(grown, peak_after_finite, larger, where(grow, larger, scale))
        count = by_fit(grown, peak_after_finite, zero, where(grow, zero, finite_steps))

        forget = nonfinite_count >= self.patience
        nonfinite_steps = where(forget, zero + (self.patience + 1), nonfinite_count + 1)
        peak_after_nonfinite = where(forget, none, peak)
        reduced = scale * as_float(_checks.in_float32(self.backoff_factor))
        least = as_float(_checks.in_float32(self.min_scale))
        reduced = where(reduced > least, reduced, none + least)
        after_nonfinite = by_fit(reduced, peak_after_nonfinite, scale, reduced)

        return AmaxState(
            where(found_inf, after_nonfinite, after_finite),
            where(found_inf, zero, count),
            where(found_inf, nonfinite_steps, zero),
            where(found_inf, peak_after_nonfinite, peak_after_finite),
        )
