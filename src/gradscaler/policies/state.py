"""What a policy is, and the state that it moves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

Scalar = Any
"""A host number, a NumPy scalar, or a zero-dimensional tensor of any framework."""

Where = Callable[[Scalar, Scalar, Scalar], Scalar]
"""``where(condition, a, b)``: ``a`` where the condition holds, ``b`` elsewhere."""

# Libraries that define `where` in another module than their tensor types.
_HOME_OF_WHERE = {
    "jax": "jax.numpy",
    "jaxlib": "jax.numpy",
    "keras": "keras.ops",
    "mindspore": "mindspore.ops",
}


class ScaleState(NamedTuple):
    """The values of a loss scale that change from step to step.

    Attributes:
        scale: the loss scale, a float32 scalar.
        finite_steps: finite steps since the scale last moved or a step was non-finite, an integer.
        nonfinite_steps: non-finite steps that count towards the hysteresis, an integer.
    """

    scale: Scalar
    finite_steps: Scalar
    nonfinite_steps: Scalar


class AmaxState(NamedTuple):
    """A :class:`gradscaler.ScaleState`, and two fields about the size of gradients.

    Attributes:
        scale: the loss scale, a float32 scalar.
        finite_steps: finite steps since the last non-finite one, an integer; 1 after growth.
        nonfinite_steps: non-finite steps, less one for every 5 finite steps in a row, an integer
            >= 0.
        peak: the largest magnitude of recent unscaled gradients, which decays, a float32 scalar; 0
            if it is unknown.
        reach: the largest ``scale * peak`` that the scale may reach immediately, a float32 scalar;
            0 if it is unknown.
    """

    scale: Scalar
    finite_steps: Scalar
    nonfinite_steps: Scalar
    peak: Scalar
    reach: Scalar


class State(Protocol):
    """The state of any policy: a named tuple that begins with the fields of a ``ScaleState``."""

    @property
    def _fields(self) -> tuple[str, ...]: ...
    @property
    def scale(self) -> Scalar:
        """The loss scale."""

    @property
    def finite_steps(self) -> Scalar:
        """A count of finite steps."""

    @property
    def nonfinite_steps(self) -> Scalar:
        """A count of non-finite steps."""

    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...
    def _asdict(self) -> dict[str, Any]: ...

    @property
    def _replace(self: T) -> Callable[..., T]: ...


if TYPE_CHECKING:  # typing's has no default before Python 3.13
    from typing_extensions import TypeVar

    T = TypeVar("T")
    S = TypeVar("S", bound=State, covariant=True, default=State)
else:
    from typing import TypeVar

    S = TypeVar("S", covariant=True)


@runtime_checkable
class Policy(Protocol[S]):
    """A rule for the loss scale: immutable, and pure in both methods.

    Its state is a named tuple that begins with the fields of a :class:`gradscaler.ScaleState`.
    Further fields are the policy's own: each is a float32 or an integer scalar. A type checker
    takes ``Policy`` for any of them, and ``Policy[MyState]`` for one.

    A policy with an attribute ``amax_interval`` >= 1 needs the largest gradient. Its scaler calls
    ``update(..., amax=)`` with the largest magnitude of the step's unscaled gradients whenever
    ``finite_steps`` is a multiple of the interval. In other steps ``amax`` may be left out.

    A policy whose scale never moves has an attribute ``fixed`` that is True. State dicts then say
    so. Without it, a scaler that cannot load the policy goes on by its own rule.
    """

    def init(self) -> S:
        """The state before the first step, in host scalars."""

    def update(self, state: Any, found_inf: Scalar, where: Where | None = None) -> S:
        """The state after a step whose gradients were non-finite (``found_inf``) or finite."""


def amax_interval(policy: object) -> int:
    """The number of finite steps from one needed ``amax`` to the next; 0 if none is needed."""
    return getattr(policy, "amax_interval", 0)


def is_fixed(policy: object) -> bool:
    """Whether the policy says that its scale never moves."""
    return getattr(policy, "fixed", False)


def counts_nonfinite_steps(policy: object) -> bool:
    """Whether the policy uses the count of non-finite steps; one without a hysteresis may."""
    return not is_fixed(policy) and getattr(policy, "hysteresis", 2) > 1


def name_of_first_scale(policy: object) -> str:
    """The name of the parameter for the scale before the first step, or for a fixed scale."""
    return "scale" if is_fixed(policy) else "init_scale"


def first_scale(policy: Policy) -> float:
    """The scale before the first step, not rounded to float32 if the policy has it so."""
    scale: Scalar = getattr(policy, name_of_first_scale(policy), policy.init().scale)
    return float(scale)


def leaf_dtypes(state: State) -> tuple[type[np.float32] | type[np.int32], ...]:
    """The dtype of each field of a host state: float32 for scale and floats, int32 for counts."""
    return np.float32, *(
        np.float32 if isinstance(value, (float, np.floating)) else np.int32 for value in state[1:]
    )


def on_host(value: Scalar) -> bool:
    """Whether ``value`` is a Python or NumPy scalar."""
    return isinstance(value, (float, int, np.generic)) or (
        isinstance(value, np.ndarray) and value.ndim == 0
    )


def host_where(condition: Scalar, a: Scalar, b: Scalar) -> Scalar:
    """``where`` on host scalars: a conditional expression."""
    return a if condition else b


def where_for(value: Scalar) -> Where:
    """The ``where`` of the library that defines ``value``'s type. This imports nothing.

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
        f"{type(value).__qualname__}: pass that library's own to update(..., where=)"
    )
