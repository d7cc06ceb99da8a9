"""A drop-in for the loss scale of flax (0.12), with its names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradscaler.jax import _operations, _trees
from gradscaler.jax._operations import AxisName, Leaf, Tree
from gradscaler.jax.scaler import GradScaler
from gradscaler.policies import DynamicScale as DynamicPolicy
from gradscaler.policies import ScaleState, _checks


class DynamicScaleResult(NamedTuple):
    """The results of a function that ``DynamicScale.value_and_grad`` returns.

    Attributes:
        dynamic_scale: the loss scale for the next step.
        finite: whether no gradient holds an Inf or a NaN, a boolean scalar.
        aux: the result of the differentiated function: its value, or its pair of value and aux.
        grad: the unscaled gradients, in float32.
    """

    dynamic_scale: DynamicScale
    finite: Array
    aux: Tree
    grad: Tree


def _static(cls: type) -> list[str]:
    """The fields that are not leaves: the rule's, and those that flax's metadata excludes."""
    rule = ["growth_factor", "backoff_factor", "growth_interval", "minimum_scale"]
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.name in rule or not field.metadata.get("pytree_node", True)
    ]


@dataclass(frozen=True)
class DynamicScale:
    """A drop-in for ``flax.training.dynamic_scale.DynamicScale``, which is also a pytree.

    As in flax, the scale grows at the first step after ``growth_interval`` finite ones.

    Args:
        growth_factor: multiplies the scale when it grows, > 1.
        backoff_factor: multiplies the scale when it backs off, in (0, 1).
        growth_interval: the number of finite steps after which the scale grows.
        fin_steps: finite steps since the scale moved or a step was not finite, an int32 scalar.
        scale: the loss scale, a float32 scalar.
        minimum_scale: the floor. None means the default, 2**-126; flax's own scale sinks to 0.

    A subclass becomes a frozen dataclass and a pytree, too. Its own fields are leaves, except those
    of ``flax.struct.field(pytree_node=False)``. As in flax, ``fin_steps`` and ``scale`` may be
    other objects, such as shardings or axes for ``vmap``. Only numbers and arrays are checked. If
    both are the same int, 0 or less, they count as axes.

    Raises:
        ValueError: the scale is not positive and finite in float32, or ``fin_steps`` is no count.

    >>> dynamic_scale = DynamicScale(scale=8.0, growth_interval=1)
    >>> for _ in range(2):
    ...     dynamic_scale, finite, value, grad = dynamic_scale.value_and_grad(lambda x: x**2)(3.0)
    ...     print(float(value), float(grad), bool(finite), float(dynamic_scale.scale))
    9.0 6.0 True 8.0
    9.0 6.0 True 16.0
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    fin_steps: Leaf = 0
    scale: Leaf = 65536.0
    minimum_scale: float | None = _checks.SMALLEST_SCALE

    _flax_dataclass: ClassVar[bool]  # flax.struct.dataclass leaves a class that has it as it is

    def __init_subclass__(cls, **options: bool) -> None:
        super().__init_subclass__()
        _trees.register(dataclass(**{"frozen": True, **options})(cls), _static(cls))
        cls._flax_dataclass = True

    def __post_init__(self) -> None:
        if not _operations.are_axes(self.fin_steps, self.scale):
            _operations.check_scale("scale", self.scale, np.float32)
            _operations.check_number("fin_steps", self.fin_steps, np.int32, lowest=0)
            # With weak types, jit would compile the second call again.
            object.__setattr__(self, "fin_steps", _operations.strong(self.fin_steps, np.int32))
            object.__setattr__(self, "scale", _operations.strong(self.scale, np.float32))
        _trees.serialise()

    replace = dataclasses.replace  # a copy with some fields changed

    def value_and_grad(
        self,
        fun: Callable[..., object],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: AxisName | None = None,
    ) -> Callable[..., DynamicScaleResult]:
        """:meth:`GradScaler.value_and_grad` with results of type :class:`DynamicScaleResult`.

        Like flax's method, it has no ``finite_axis``.
        """
        floor = _checks.SMALLEST_SCALE if self.minimum_scale is None else self.minimum_scale
        policy = DynamicPolicy.flax(
            self.growth_factor, self.backoff_factor, self.growth_interval, floor, floor
        )
        scaler = GradScaler(policy, ScaleState(self.scale, self.fin_steps, 0))
        differentiated = scaler.value_and_grad(fun, argnums, has_aux, axis_name)

        @functools.wraps(fun)
        def unscaled(*args: object, **kwargs: object) -> DynamicScaleResult:
            moved, finite, aux, grad = differentiated(*args, **kwargs)
            scale, fin_steps, _ = moved.state
            grad = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grad)
            dynamic_scale = _trees.replaced(self, fin_steps=fin_steps, scale=scale)
            return DynamicScaleResult(dynamic_scale, finite, aux, grad)

        return unscaled


_trees.register(DynamicScale, _static(DynamicScale))
