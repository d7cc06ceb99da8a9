"""Drop-ins for the loss scalers of Megatron-LM (megatron-core 0.16), with its names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch

from gradscaler._formats.state_dicts import count_in, number_in
from gradscaler.policies import DynamicScale, ScaleState, _checks
from gradscaler.policies._spelling import changed

StateDict = dict[str, torch.Tensor | int]


class MegatronGradScaler(ABC):
    """The base class of both scalers: a loss scale on the device that Megatron trains on.

    The device is the current accelerator, or the CPU if there is none. Megatron's own class needs
    CUDA.

    Args:
        initial_scale: the scale before the first step.

    Raises:
        ValueError: ``initial_scale`` is not positive and finite in float32.
        TypeError: ``initial_scale`` is not a number.
    """

    def __init__(self, initial_scale: float) -> None:
        self._scale = _placed(_checks.loss_scale("initial_scale", initial_scale))

    @property
    def scale(self) -> torch.Tensor:
        """The loss scale, float32 of shape (1,). When the scale moves, it is another tensor."""
        return self._scale

    @property
    def inv_scale(self) -> torch.Tensor:
        """1/scale, float32 of shape (1,)."""
        return self._scale.reciprocal()

    @abstractmethod
    def update(self, found_inf: bool) -> None:
        """Move the scale after a step whose gradients were non-finite (``found_inf``) or finite."""

    @abstractmethod
    def state_dict(self) -> StateDict:
        """The values that change from step to step."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Load the values that ``state_dict`` returned."""


class ConstantGradScaler(MegatronGradScaler):
    """A loss scale that never moves: a drop-in for Megatron's ``ConstantGradScaler``.

    >>> scaler = ConstantGradScaler(128.0)
    >>> scaler.update(True)
    >>> scaler.scale.item()
    128.0
    """

    def update(self, found_inf: bool) -> None:
        """Do nothing."""

    def state_dict(self) -> StateDict:
        """An empty dict."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Do nothing."""


def _parameter(name: str, doc: str) -> property:
    """A property for a field of the policy; a float is given as a tensor of shape (1,)."""

    def get(self: DynamicGradScaler) -> int | torch.Tensor:
        value = getattr(self._policy, name)
        return value if isinstance(value, int) else _placed(value)

    def set_(self: DynamicGradScaler, value: object) -> None:
        self._policy = changed(self._policy, {}, **{name: number_in(name, value)})

    return property(get, set_, doc=doc)


class DynamicGradScaler(MegatronGradScaler):
    """A loss scale that moves: a drop-in for Megatron's ``DynamicGradScaler``.

    The rule is :meth:`gradscaler.DynamicScale.megatron`. The scale backs off to ``max(scale *
    backoff_factor, min_scale)`` at the ``hysteresis``-th non-finite step since it last grew, in a
    row or not, and at each non-finite step after that. It grows by ``growth_factor`` after
    ``growth_interval`` finite steps in a row, unless float32 cannot hold the product.

    Megatron reduces found_inf over its processes and reads it before it calls ``update``. So the
    rule runs on the host, and the scale is copied to the device only when it moves.

    Args:
        initial_scale: the scale before the first step.
        min_scale: the floor, > 0.
        growth_factor: multiplies the scale when it grows, > 1.
        backoff_factor: multiplies the scale when it backs off, in (0, 1).
        growth_interval: finite steps in a row before the scale grows.
        hysteresis: the number of the non-finite step at which the scale backs off; earlier ones
            leave it.

    Raises:
        ValueError: a parameter is out of range; the message names it and its value.
        TypeError: a parameter is not a number of the right kind.

    >>> scaler = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, growth_interval=2, hysteresis=2)
    >>> for found_inf in [True, False, True, False, False]:
    ...     scaler.update(found_inf)
    ...     print(scaler.scale.item())
    8.0
    8.0
    4.0
    4.0
    8.0
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int,
    ) -> None:
        self._policy = DynamicScale.megatron(
            initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis
        )
        super().__init__(initial_scale)
        self._scale_on_host = self._policy.init().scale
        self._growth_tracker = 0
        self._hysteresis_tracker = hysteresis

    min_scale = _parameter("min_scale", "The floor, float32 of shape (1,).")
    growth_factor = _parameter("growth_factor", "The factor of growth, float32 of shape (1,).")
    backoff_factor = _parameter("backoff_factor", "The factor of a backoff, float32 of shape (1,).")
    growth_interval = _parameter("growth_interval", "Finite steps in a row before the scale grows.")
    hysteresis = _parameter("hysteresis", "The non-finite step at which the scale backs off.")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(scale={float(self._scale_on_host)!r}, "
            f"growth_tracker={self._growth_tracker}, "
            f"hysteresis_tracker={self._hysteresis_tracker}, policy={self._policy!r})"
        )

    def update(self, found_inf: bool) -> None:
        """Move the scale after a step.

        Args:
            found_inf: whether the step's gradients held an Inf or a NaN in any process.
        """
        found_inf = bool(found_inf)
        # Megatron's tracker counts down, even below 0; the policy counts up.
        hysteresis = self._policy.hysteresis
        nonfinite_steps = hysteresis - self._hysteresis_tracker
        scale = self._scale_on_host
        state = self._policy.update(
            ScaleState(scale, self._growth_tracker, nonfinite_steps), found_inf
        )
        self._growth_tracker = state.finite_steps
        if found_inf:
            self._hysteresis_tracker -= 1
        elif state.scale > scale:
            self._hysteresis_tracker = hysteresis
        if state.scale != scale:
            self._scale_on_host = state.scale
            self._scale = _placed(state.scale)

    def state_dict(self) -> StateDict:
        """The scale as a tensor, and both trackers as ints, under Megatron's keys."""
        return {
            "scale": self._scale,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Load the scale and the trackers from a state dict of Megatron's class or this one.

        If this raises, nothing changes.

        Raises:
            KeyError: a key is missing, as in the empty dict of a ``ConstantGradScaler``.
            ValueError: a value is out of range; the message names it.
            TypeError: a value is not a number.
        """
        missing = [key for key in self.state_dict() if key not in state_dict]
        if missing:
            raise KeyError(
                f"missing from the state dict of a DynamicGradScaler: {', '.join(missing)}; "
                f"it holds {', '.join(map(str, state_dict)) or 'nothing'}"
            )
        scale = _checks.loss_scale("scale", number_in("scale", state_dict["scale"]))
        growth_tracker = count_in("growth_tracker", state_dict["growth_tracker"])
        hysteresis_tracker = _checks.count(
            "hysteresis_tracker",
            number_in("hysteresis_tracker", state_dict["hysteresis_tracker"]),
            least=-_checks.LONGEST_COUNT,
            most=_checks.LONGEST_COUNT,
        )
        self._scale_on_host = np.float32(scale)
        self._scale = _placed(scale)
        self._growth_tracker = growth_tracker
        self._hysteresis_tracker = hysteresis_tracker


def _placed(value: float) -> torch.Tensor:
    """``value`` in float32, of shape (1,), on the current accelerator if there is one."""
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    return torch.tensor([float(value)], dtype=torch.float32, device=accelerator or "cpu")
