"""The rule that raises the scale after finite steps and lowers it after non-finite ones."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np

from gradscaler.policies import _checks
from gradscaler.policies._libraries import moved, prepared, rounded
from gradscaler.policies._presets import Presets
from gradscaler.policies.state import Scalar, ScaleState, Where, host_where

HysteresisReset = Literal["finite_step", "finite_step_only", "growth"]
_RESETS = get_args(HysteresisReset)


class Constants(NamedTuple):
    """A policy's parameters in the types that the rule computes with."""

    growth_factor: Scalar
    backoff_factor: Scalar
    min_scale: Scalar
    max_scale: Scalar
    growth_interval: int
    hysteresis: int
    finite_step_resets: bool
    backoff_resets: bool
    growth_tiers: tuple[tuple[float, int], ...] = ()


def next_values(
    constants: Constants,
    scale: Scalar,
    finite_count: Scalar,
    nonfinite_count: Scalar,
    found_inf: Scalar,
    where: Where,
) -> tuple[Scalar, Scalar, Scalar]:
    """The rule below, by arithmetic, comparisons and ``where``: no branch on a state's value.

    State and result are plain values, because MindSpore's compiler loses the dtypes in a named
    tuple.
    """
    zero = finite_count * 0  # of the counters' own type

    # After a non-finite step.
    reduced = scale * constants.backoff_factor
    reduced = where(reduced > constants.min_scale, reduced, constants.min_scale)
    after_nonfinite, counted = reduced, zero
    if constants.hysteresis > 1:
        nonfinite_steps = nonfinite_count + 1
        back_off = nonfinite_steps >= constants.hysteresis
        after_nonfinite = where(back_off, reduced, scale)
        # If a backoff does not reset the count, it stays below the hysteresis, and cannot overflow.
        spent = zero if constants.backoff_resets else zero + (constants.hysteresis - 1)
        counted = where(back_off, spent, nonfinite_steps)

    # After a finite step.
    finite_steps = finite_count + 1
    interval = constants.growth_interval
    if constants.growth_tiers:  # MindSpore's compiler takes no loop over an empty tuple
        for below, steps in constants.growth_tiers[::-1]:
            interval = where(scale < below, zero + steps, interval)
    grow = finite_steps >= interval
    grown = scale * constants.growth_factor
    in_range = grown <= constants.max_scale
    after_finite = where(grow, where(in_range, grown, scale), scale)
    kept = zero
    if not constants.finite_step_resets:
        kept = where(grow, where(in_range, zero, nonfinite_count), nonfinite_count)

    return (
        where(found_inf, after_nonfinite, after_finite),
        where(found_inf, zero, where(grow, zero, finite_steps)),
        where(found_inf, counted, kept),
    )


@dataclass(frozen=True)
class DynamicScale(Presets):
    """Dynamic loss scaling, the rule of every framework's scaler.

    With ``g`` finite steps in a row and a count ``b`` of non-finite ones::

        non-finite step: g = 0;  b += 1
                         b >= hysteresis:       scale = max(scale * backoff_factor, min_scale)
        finite step:     g += 1
                         g >= growth_interval:  g = 0
                                                scale *= growth_factor, unless above max_scale

    Scales and factors are float32, and the scale moves by one float32 multiplication, on the host
    and on any device. So one sequence of found_inf gives the same bits everywhere. Counters are
    compared with ``>=``: if an interval is lowered below its counter, the scale grows at the next
    finite step.

    Args:
        init_scale: the scale before the first step.
        growth_factor: multiplies the scale when it grows, > 1.
        backoff_factor: multiplies the scale when it backs off, in (0, 1).
        growth_interval: finite steps in a row before the scale grows.
        hysteresis: the number of the non-finite step at which the scale backs off; earlier ones
            leave it.
        hysteresis_reset: the events that set ``b`` to 0. ``"finite_step"``: a finite step, and a
            backoff (Paddle). ``"finite_step_only"``: a finite step; until then, each further
            non-finite step backs off (Apex). ``"growth"``: only growth, so non-finite steps count
            however far apart they are (Megatron).
        min_scale: the floor. The default is the smallest normal float32, so 1/scale is finite.
        max_scale: the ceiling. A growth that would exceed it does not happen, so that a scale that
            is a power of two stays one.
        growth_tiers: pairs ``(below, interval)``, the lowest scale first. While the scale is less
            than ``below``, it grows after ``interval`` finite steps, not ``growth_interval``.
            icefall's recipes do this by hand, with ``((1.0, 100), (8.0, 400))``.

    Raises:
        TypeError: a parameter is not a number of the right kind; a bool is not a number.
        ValueError: a parameter is out of range; the message names it and its value.

    The rule is that of Micikevicius et al., "Mixed Precision Training" (2018), section 3.2, with
    the bounds and the hysteresis that implementations have added.

    >>> policy = DynamicScale(init_scale=8.0, growth_interval=2)
    >>> state = policy.init()
    >>> for found_inf in [True, False, False]:
    ...     state = policy.update(state, found_inf)
    ...     print(float(state.scale), state.finite_steps)
    4.0 0
    4.0 1
    8.0 0
    """

    # ClassVar keeps these from being fields, but each policy has its own.
    _constants: ClassVar[Constants]
    _host_constants: ClassVar[Constants]
    _shortest_interval: ClassVar[int]

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    hysteresis_reset: HysteresisReset = "finite_step"
    min_scale: float = _checks.SMALLEST_SCALE
    max_scale: float = _checks.LARGEST_SCALE
    growth_tiers: tuple[tuple[float, int], ...] = ()

    def __post_init__(self) -> None:
        min_scale, max_scale = _checks.bounds(self.min_scale, self.max_scale)
        _checks.choice("hysteresis_reset", self.hysteresis_reset, _RESETS)
        checked = {
            "min_scale": min_scale,
            "max_scale": max_scale,
            "init_scale": _checks.loss_scale("init_scale", self.init_scale, min_scale, max_scale),
            "growth_factor": _checks.growth_factor("growth_factor", self.growth_factor),
            "backoff_factor": _checks.backoff_factor("backoff_factor", self.backoff_factor),
            "growth_interval": _checks.count("growth_interval", self.growth_interval),
            "hysteresis": _checks.count("hysteresis", self.hysteresis),
            "growth_tiers": _checks.growth_tiers("growth_tiers", self.growth_tiers),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._set_constants()

    def _set_constants(self) -> None:
        longest = _checks.LONGEST_COUNT
        constants = Constants(
            self.growth_factor,
            self.backoff_factor,
            self.min_scale,
            self.max_scale,
            min(self.growth_interval, longest),
            min(self.hysteresis, longest),
            finite_step_resets=self.hysteresis_reset != "growth",
            backoff_resets=self.hysteresis_reset == "finite_step",
            growth_tiers=tuple(
                (_checks.in_float32(below), min(interval, longest))
                for below, interval in self.growth_tiers
            ),
        )
        intervals = (interval for _, interval in constants.growth_tiers)
        shortest = min((constants.growth_interval, *intervals))
        object.__setattr__(self, "_constants", rounded(constants, _checks.in_float32))
        object.__setattr__(self, "_host_constants", rounded(constants, np.float32))
        object.__setattr__(self, "_shortest_interval", shortest)

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, state: dict[str, object]) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, state.get(field.name, field.default))
        self._set_constants()

    def init(self) -> ScaleState:
        """The state before the first step, in host scalars: a float32 and two ints."""
        return ScaleState(np.float32(self.init_scale), 0, 0)

    def update(
        self, state: ScaleState, found_inf: Scalar, where: Where | None = None
    ) -> ScaleState:
        """The state after one step, by the rule in the class's docstring.

        Args:
            state: host scalars, or tensors of one framework: a float32 and two integers.
            found_inf: whether the step's gradients held an Inf or a NaN: a bool, or a boolean
                tensor of that framework.
            where: that framework's ``where``. If left out, it is found by the type of the scale.

        Returns:
            A new state of the same types. The method can be traced and compiled, because it reads
            no value on the host, unless the state is host scalars and ``where`` is left out: then
            the new state is a float32 and two ints.
        """
        state, found_inf, where = prepared(ScaleState(*state), found_inf, where)
        if where is host_where and self._only_counts(state, found_inf):
            return ScaleState(state.scale, state.finite_steps + 1, state.nonfinite_steps)
        return moved(next_values, self, state, found_inf, where)

    def _only_counts(self, state: ScaleState, found_inf: bool) -> bool:
        """Whether a step only adds 1 to ``finite_steps``, for counts on the host.

        That holds for most steps, and the full rule takes three times as long.
        """
        is_early = state.finite_steps + 1 < self._shortest_interval
        return is_early and not (found_inf or state.nonfinite_steps)
