"""A rule that also uses the largest gradient, so that bad batches cannot sink the scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from gradscaler.errors import ParameterError
from gradscaler.policies import _checks
from gradscaler.policies._libraries import moved, prepared, rounded
from gradscaler.policies.state import AmaxState, Scalar, Where

_LARGEST_FP16 = 65504.0
_MOST_REACH = _LARGEST_FP16 / 4  # so that a gradient of four times the peak still fits
_DOUBTS = 8  # the reach can fall this many powers of 2 below the floor
_FORGIVEN_AFTER = 5  # finite steps in a row that cancel one non-finite step


class Constants(NamedTuple):
    """A policy's parameters in the types that the rule computes with: float32, or an integer."""

    growth: Scalar
    backoff: Scalar
    min_scale: Scalar
    max_scale: Scalar
    decay: Scalar  # the peak's factor, from one measurement to the next
    floor: Scalar  # the smallest reach, until too many steps are non-finite
    least: Scalar  # the smallest reach of all
    most: Scalar  # the largest reach
    smallest: Scalar  # the smallest amax that counts
    largest: Scalar  # the largest amax that counts
    growth_interval: int
    patience: int
    amax_interval: int


@dataclass(frozen=True)
class AmaxScale:
    """Dynamic loss scaling that uses the size of recent gradients.

    The peak is the largest recent gradient. The reach is the largest ``scale * peak`` that is
    allowed; the rule learns it slowly from overflows. The scale follows the peak immediately, so
    that ``scale * peak`` stays near the reach. With ``a`` the largest magnitude of a step's
    unscaled gradients, ``F = 65504`` the largest float16 and ``floor = F / 2**margin``::

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

    A non-finite step is one of three things:

    - A spike of large gradients. It lowers the scale. If the next finite step shows gradients more
      than twice the peak, the reach stays, and the scale is back as soon as the spike is over.
    - An overflow of ordinary gradients, at ``scale * peak`` above the floor. It lowers the scale
      and the reach by one backoff.
    - A bad batch. At or below the floor, only gradients ``2**margin`` times the peak would
      overflow, so a non-finite step is taken for a bad batch, and the scale stays. This may be
      wrong, for example if gradients of activations are that much larger than those of parameters.
      So if more than one step in six is non-finite for long, or one in eight at random distances,
      the scale backs off after all. The reach then falls below the floor by at most 8 powers of 2.

    If ``a`` is never known, the scale moves like that of :class:`gradscaler.DynamicScale`, and
    grows after ``growth_interval + 1`` finite steps. As there, scales stay between ``min_scale``
    and ``max_scale``, and all values are float32, on the host and on any device.

    Args:
        init_scale: the scale before the first step.
        growth_factor: multiplies the scale, and the reach, when they grow, > 1.
        backoff_factor: multiplies the scale, and the reach, when they back off, in (0, 1).
        growth_interval: finite steps in a row before the reach grows.
        margin: the room between ``scale * peak`` and ``F``, in powers of 2, >= 3. The scale grows
            immediately until only this room is left. With this room or more, a non-finite step is
            taken for a bad batch.
        patience: non-finite steps before the peak is forgotten, so that the scale backs off.
        half_life: finite steps in which the peak halves if no gradient renews it.
        amax_interval: the gradients are measured every so many finite steps. These are counted
            from the last non-finite step or growth of the reach.
        min_scale: the floor of the scale.
        max_scale: the ceiling of the scale.

    Raises:
        TypeError: a parameter is not a number of the right kind; a bool is not a number.
        ValueError: a parameter is out of range; the message names it and its value.

    >>> policy = AmaxScale(init_scale=1024.0)
    >>> state = policy.update(policy.init(), found_inf=False, amax=0.001)
    >>> float(state.scale)
    2048.0
    >>> float(policy.update(state, found_inf=True).scale)  # the batch was bad, not the scale
    2048.0
    """

    # ClassVar keeps these from being fields, but each policy has its own.
    _constants: ClassVar[Constants]
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
        )
        object.__setattr__(self, "_constants", rounded(constants, _checks.in_float32))
        object.__setattr__(self, "_host_constants", rounded(constants, np.float32))

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
            state: host scalars, or tensors of one framework: a float32, two integers and two
                float32.
            found_inf: whether the step's gradients held an Inf or a NaN: a bool, or a boolean
                tensor of that framework.
            where: that framework's ``where``. If left out, it is found by the type of the scale.
            amax: the largest magnitude of the step's unscaled gradients, a float32 scalar. It is
                used in finite steps in which ``state.finite_steps`` is a multiple of
                ``amax_interval``, and may be None in all others. A value that is 0, subnormal or
                not finite is ignored.

        Returns:
            A new state of the same types. The method can be traced and compiled, because it reads
            no value on the host, unless the state is host scalars and ``where`` is left out: then
            the new state is float32 and ints.
        """
        state, found_inf, where = prepared(AmaxState(*state), found_inf, where)
        if amax is not None and isinstance(state.scale, (np.ndarray, np.generic)):
            amax = np.float32(amax)
        return moved(next_values, self, state, found_inf, where, amax)


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
    """The state after one step, by arithmetic, comparisons and ``where``: no branch on a value.

    No decision depends on a subnormal value, because some devices flush these to 0. State and
    result are plain values, because MindSpore's compiler loses the dtypes in a named tuple.
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
    used = where(kept_peak > 0, scale * peak, most)  # the part of fp16's range in use
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
