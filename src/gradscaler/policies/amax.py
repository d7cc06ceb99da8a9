"""The rule that looks at the largest gradient, so that bad batches cannot sink the scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from gradscaler.errors import ParameterError
from gradscaler.policies import _checks
from gradscaler.policies.state import AmaxState, Scalar, Where, host_where, on_host, where_for

_LARGEST_FP16 = 65504.0
_MOST_REACH = _LARGEST_FP16 / 4  # a gradient that is four times as large still fits
_DOUBTS = 8  # powers of 2 below the margin that the reach can fall to
_FORGIVEN_AFTER = 5  # finite steps in a row make up for one non-finite step


class Constants(NamedTuple):
    """A policy's parameters in the types that the rule computes with: float32, or an integer."""

    growth: Scalar
    backoff: Scalar
    min_scale: Scalar
    max_scale: Scalar
    decay: Scalar  # of the peak, from one measurement to the next
    floor: Scalar  # of the reach, as long as the scale is not doubted
    least: Scalar  # reach
    most: Scalar  # reach
    smallest: Scalar  # amax that counts
    largest: Scalar  # amax that counts
    growth_interval: int
    patience: int
    amax_interval: int

    def rounded(self, to_float32: Callable[[float], Scalar]) -> Constants:
        """The same with each float made a float32."""
        return Constants(*(to_float32(v) if isinstance(v, float) else v for v in self))


@dataclass(frozen=True)
class AmaxScale:
    """Dynamic loss scaling that knows how large gradients have been.

    The scale follows the size of the gradients at once, ``scale * peak`` staying near the reach.
    The reach is what the rule learns slowly: how much of fp16's range these gradients may use. With
    ``a`` the largest magnitude of the unscaled gradients, ``F = 65504`` the largest float16 and
    ``floor = F / 2**margin``::

        non-finite step:
            g = 0;  b += 1
            b > patience:                    b = 0;  peak = 0
            unless peak > 0 and scale * peak <= min(reach, floor):
                                             scale *= backoff_factor

        finite step:
            peak is 0, reach is not:         reach = max(reach * backoff_factor, floor / 2**8)
            first after a non-finite one,
            and a <= 2 * peak:               reach = max(reach * backoff_factor, min(reach, floor))
            peak = max(a, peak * 0.5**(1 / half_life))
            reach is 0:                      reach = min(max(scale * peak, floor), F / 4)
            g += 1
            g is a multiple of 5:            b = max(b - 1, 0)
            g > growth_interval:             g = 1;  reach = min(reach * growth_factor, F / 4)
            scale * growth_factor * peak <= reach:             scale *= growth_factor
            scale * peak > 2 * reach:                          scale *= backoff_factor

    So a spike of large gradients lowers the scale, and as soon as they are gone it is back: the
    reach stays as it is where the next finite step shows a spike. Any other overflow above the
    floor costs the reach one backoff. Below the floor, gradients would have to be ``2**margin``
    times as large as of late, so a non-finite step is taken for a bad batch. That may be wrong, as
    where gradients of activations are that much larger than those of parameters. Therefore many
    such steps, more than one in six for long, do lower the scale, by 8 powers of 2 at most. Where
    ``a`` is never known, the scale moves as that of :class:`gradscaler.DynamicScale`, and grows
    after ``growth_interval + 1`` finite steps.

    Scales stay between ``min_scale`` and ``max_scale`` as in :class:`gradscaler.DynamicScale`, and
    all values are float32, on the host as on any device.

    Args:
        init_scale: the scale before the first step.
        growth_factor: multiplies the scale, and the reach, when they grow, > 1.
        backoff_factor: multiplies the scale, and the reach, when they back off, in (0, 1).
        growth_interval: finite steps in a row before the reach grows.
        margin: the room above the peak, in powers of 2, that is tried without waiting, and in which
            a non-finite step is taken for a bad batch; 3 at least.
        patience: non-finite steps before the peak is forgotten, so that the scale backs off.
        half_life: finite steps in which the peak halves if no gradient renews it.
        amax_interval: how many finite steps each measurement of the gradients is good for; 1
            measures every step. It counts from the last non-finite step, or growth of the reach.
        min_scale: the floor of the scale.
        max_scale: the ceiling of the scale.

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

    _constants: ClassVar[Constants]  # not fields; each policy has its own
    _host_constants: ClassVar[Constants]

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    margin: int = 12
    patience: int = 20
    half_life: float = 10.0
    amax_interval: int = 1
    min_scale: float = _checks.SMALLEST_SCALE
    max_scale: float = _checks.LARGEST_SCALE

    def __post_init__(self) -> None:
        min_scale, max_scale = _checks.bounds(self.min_scale, self.max_scale)
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
            "margin": _checks.count("margin", self.margin, least=3, most=100),
            "patience": _checks.count("patience", self.patience, 0, _checks.LONGEST_COUNT - 1),
            "half_life": half_life,
            "amax_interval": _checks.count("amax_interval", self.amax_interval),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        floor = _LARGEST_FP16 / 2.0**self.margin
        constants = Constants(
            self.growth_factor,
            self.backoff_factor,
            self.min_scale,
            self.max_scale,
            0.5 ** (self.amax_interval / self.half_life),
            floor,
            floor / 2**_DOUBTS,
            _MOST_REACH,
            _checks.SMALLEST_SCALE,
            _checks.LARGEST_SCALE,
            min(self.growth_interval, _checks.LONGEST_COUNT - 1),
            self.patience,
            min(self.amax_interval, _checks.LONGEST_COUNT),
        ).rounded(_checks.in_float32)
        object.__setattr__(self, "_constants", constants)
        # NumPy 1 turns float32 * float into float64.
        object.__setattr__(self, "_host_constants", constants.rounded(np.float32))

    def init(self) -> AmaxState:
        """The state before the first step, in host scalars: a float32, two ints, two float32."""
        return AmaxState(np.float32(self.init_scale), 0, 0, np.float32(0), np.float32(0))

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
                twice float32.
            found_inf: whether the step's gradients held an Inf or a NaN; a bool, or a boolean
                tensor of that framework.
            where: that framework's ``where``, found by the type of the scale if it is left out.
            amax: the largest magnitude of the step's unscaled gradients, a float32 scalar. It
                counts in finite steps whose ``finite_steps`` is a multiple of ``amax_interval``,
                and may be None in all others. One that is 0, subnormal or not finite says nothing.

        Returns:
            A new state of the same types. No value is read on the host, so the method can be
            traced and compiled, unless the state is host scalars and ``where`` is left out.
        """
        scale, finite_steps, nonfinite_steps, peak, reach = state
        if where is None and on_host(scale):
            state = AmaxState(
                np.float32(scale),
                int(finite_steps),
                int(nonfinite_steps),
                np.float32(peak),
                np.float32(reach),
            )
            found_inf, where = bool(found_inf), host_where
        where = where or where_for(scale)
        if isinstance(found_inf, (bool, np.bool_)) and not on_host(scale):
            # A tensor of True or False.
            found_inf = scale == scale if found_inf else scale != scale  # noqa: PLR0124
        if not isinstance(state.scale, (np.ndarray, np.generic)):
            return AmaxState(*next_values(self._constants, *state, found_inf, where, amax))
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            amax = None if amax is None else np.float32(amax)
            return AmaxState(*next_values(self._host_constants, *state, found_inf, where, amax))


def next_values(  # noqa: PLR0913, PLR0917 # a state and its inputs, without an object to trace
    constants: Constants,
    scale: Scalar,
    finite_count: Scalar,
    nonfinite_count: Scalar,
    peak: Scalar,
    reach: Scalar,
    found_inf: Scalar,
    where: Where,
    amax: Scalar | None,
) -> tuple[Scalar, Scalar, Scalar, Scalar, Scalar]:
    """The state after one step: arithmetic, comparisons and ``where``, and no branch on a value.

    No subnormal value decides: some devices flush those to 0. State and result are plain values:
    MindSpore's compiler loses the dtypes in a named tuple.
    """
    zero, none = finite_count * 0, peak - peak  # peak * 0 is a float64 in NumPy 1
    floor, least, most = none + constants.floor, none + constants.least, none + constants.most
    grown, reduced = scale * constants.growth, scale * constants.backoff
    larger = where(grown <= constants.max_scale, grown, scale)
    smaller = where(reduced > constants.min_scale, reduced, none + constants.min_scale)
    low = where(reach < floor, reach, floor)

    # After a non-finite step.
    doubt = nonfinite_count >= constants.patience
    kept_peak = where(doubt, none, peak)
    used = where(kept_peak > 0, scale * peak, most)  # of fp16's range
    kept_scale = where(used <= low, scale, smaller)

    # After a finite step.
    steps = finite_count + 1
    grow = steps > constants.growth_interval
    seen = none
    if amax is not None:
        seen = where(finite_count % constants.amax_interval == 0, amax, none)
        seen = where(seen >= constants.smallest, seen, none)
        seen = where(seen <= constants.largest, seen, none)
    decayed = peak * constants.decay
    new_peak = where(seen > 0, where(seen > decayed, seen, decayed), peak)

    wider, lower = reach * constants.growth, reach * constants.backoff
    wider = where(wider < most, wider, most)
    after_skip = where(seen <= peak * 2, where(lower > low, lower, low), reach)
    after_doubt = where(seen > 0, where(lower > least, lower, least), reach)
    new_reach = where(finite_count > 0, where(grow, wider, reach), after_skip)
    new_reach = where(peak > 0, new_reach, after_doubt)
    first = scale * new_peak
    first = where(first < most, first, most)
    first = where(first > floor, first, floor)
    new_reach = where(reach > 0, new_reach, where(new_peak > 0, first, reach))

    followed = where(scale * new_peak > new_reach * 2, smaller, scale)
    followed = where(grown * new_peak <= new_reach, larger, followed)
    new_scale = where(new_peak > 0, followed, where(grow, larger, scale))
    forgiven = where(nonfinite_count > 0, nonfinite_count - 1, nonfinite_count)
    forgiven = where(steps % _FORGIVEN_AFTER == 0, forgiven, nonfinite_count)
    return (
        where(found_inf, kept_scale, new_scale),
        where(found_inf, zero, where(grow, zero + 1, steps)),
        where(found_inf, where(doubt, zero, nonfinite_count + 1), forgiven),
        where(found_inf, kept_peak, new_peak),
        where(found_inf, reach, new_reach),
    )
