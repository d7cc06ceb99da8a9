"""The state that a policy moves, and the one operation that differs between tensor libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

Scalar = Any
"""A host number, a NumPy scalar, or a zero-dimensional tensor of any framework."""

Where = Callable[[Any, Any, Any], Any]
"""``where(condition, a, b)``: ``a`` where the condition holds, ``b`` elsewhere."""

# Libraries whose tensor types live in another module than their `where`.
_HOME_OF_WHERE = {
    "jax": "jax.numpy",
    "jaxlib": "jax.numpy",
    "keras": "keras.ops",
    "mindspore": "mindspore.ops",
}


class ScaleState(NamedTuple):
    """Everything about a loss scale that changes from step to step.

    Attributes:
        scale: the loss scale, a float32 scalar.
        finite_steps: finite steps since the scale last moved or a step was non-finite, an integer.
        nonfinite_steps: non-finite steps counted towards the hysteresis, an integer.
    """

    scale: Scalar
    finite_steps: Scalar
    nonfinite_steps: Scalar


class AmaxState(NamedTuple):
    """A :class:`gradscaler.ScaleState`, and what is known of the gradients' size.

    Attributes:
        scale: the loss scale, a float32 scalar.
        finite_steps: finite steps since the last non-finite one, an integer; 1 after growth.
        nonfinite_steps: non-finite steps that no finite ones have made up for yet, an integer.
        peak: the largest magnitude of an unscaled gradient of late, a float32 scalar; 0 before
            anything is known.
        reach: how large ``scale * peak`` may become without waiting, a float32 scalar; 0 before
            anything is known.
    """

    scale: Scalar
    finite_steps: Scalar
    nonfinite_steps: Scalar
    peak: Scalar
    reach: Scalar


@runtime_checkable
class Policy(Protocol):
    """A rule for the loss scale: immutable, and pure in both methods.

    A policy that has an attribute ``amax_interval`` >= 1 looks at the largest gradient. It is
    handed ``update(..., amax=)``, the largest magnitude of the step's unscaled gradients, wherever
    ``finite_steps`` is a multiple of the interval; in other steps ``amax`` may be left out.
    """

    def init(self) -> ScaleState | AmaxState:
        """The state before the first step, in host scalars."""

    def update(
        self, state: Any, found_inf: Scalar, where: Where | None = None
    ) -> ScaleState | AmaxState:
        """The state after a step whose gradients were non-finite (``found_inf``) or finite."""


def amax_interval(policy: object) -> int:
    """How many finite steps each ``amax`` is good for; 0 if the policy does not look at it."""
    return getattr(policy, "amax_interval", 0)


def leaf_dtypes(state: ScaleState | AmaxState) -> tuple[type[np.float32] | type[np.int32], ...]:
    """The dtype that each field of a host state is kept in: the scale and floats, or a count."""
    return np.float32, *(
        np.float32 if isinstance(value, (float, np.floating)) else np.int32 for value in state[1:]
    )


def on_host(value: Scalar) -> bool:
    """Whether ``value`` is a Python or NumPy scalar."""
    return isinstance(value, (float, int, np.generic)) or (
        isinstance(value, np.ndarray) and value.ndim == 0
    )


def host_where(condition: Any, a: Any, b: Any) -> Any:
    """``where`` on host scalars: a conditional expression."""
    return a if condition else b


def where_for(value: Scalar) -> Where:
    """The ``where`` of the library that defines ``value``'s type. Nothing is imported.

    Raises:
        TypeError: the type's library has no ``where``.
    """
    for base in type(value).__mro__:
        root = base.__module__.partition(".")[0]
        module = sys.modules.get(_HOME_OF_WHERE.get(root, root))
        where: Where | None = getattr(module, "where", None)
        if where is not None:
            return where
    raise TypeError(
        f"no where() is known for a scale of type {type(value).__module__}."
        f"{type(value).__qualname__}: pass update(..., where=) that library's own"
    )
