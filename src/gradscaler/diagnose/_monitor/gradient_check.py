"""A check of gradients for Inf and NaN, in one reading of them that waits for no device."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gradscaler.diagnose._gradients.arrays import dtype_name, local, shape_of
from gradscaler.diagnose._gradients.reading import Tensor, inspect
from gradscaler.diagnose._locate.call_site import Node
from gradscaler.diagnose._monitor.host_copy import HostCopy
from gradscaler.outcome import NonfiniteGradient


class GradientCheck:
    """The norms of the gradients of PyTorch parameters, given by their names.

    The norm of a gradient is Inf or NaN if the gradient holds one. On a CPU the 2-norm is fastest.
    It is also Inf if the squares overflow, so :meth:`nonfinite` looks at such a gradient itself. On
    a device the largest magnitude costs the same, and needs no second look.

    Args:
        parameters: the parameters.
        order: the order of the norms; None for the fastest that shows an Inf or a NaN.
    """

    def __init__(self, parameters: Mapping[str, Tensor], order: float | None = None) -> None:
        self._names: list[list[str]] = []
        self._norms: list[HostCopy] = []
        of_device: dict[Any, dict[str, Tensor]] = {}
        for name, parameter in parameters.items():
            if (gradient := parameter.grad) is not None:
                of_device.setdefault(gradient.device, {})[name] = gradient
        for device, gradients in of_device.items():
            self._names.append(list(gradients))
            fastest = 2.0 if device.type == "cpu" else math.inf
            norms = _norms_of(list(gradients.values()), fastest if order is None else order)
            self._norms.append(HostCopy(norms))

    @property
    def is_on_host(self) -> bool:
        """Whether no gradient is on a device."""
        return all(norms.is_on_host for norms in self._norms)

    @property
    def has_arrived(self) -> bool:
        """Whether the norms are on the host."""
        return all(norms.has_arrived for norms in self._norms)

    def norms(self) -> list[float]:
        """The norms of all gradients; waits until they have arrived."""
        return [norm for norms in self._norms for norm in norms.values().tolist()]

    def suspects(self) -> dict[str, float]:
        """The norms that are Inf or NaN, by the parameter's name; waits until all have arrived."""
        return {name: norm for name, norm in self._all() if not math.isfinite(norm)}

    def nonfinite(self, parameters: Mapping[str, Tensor]) -> tuple[NonfiniteGradient, ...]:
        """The gradients that held an Inf or a NaN, which are gone: each count is 1 or 0."""
        return tuple(
            NonfiniteGradient(
                *(name, shape_of(parameters[name]), dtype_name(parameters[name])),
                *(int(math.isinf(norm)), int(math.isnan(norm)), math.nan),
            )
            for name, norm in self.suspects().items()
        )

    def _all(self) -> Iterator[tuple[str, float]]:
        for names, norms in zip(self._names, self._norms, strict=True):
            found = norms.values()
            if not bool(found.isfinite().all()):
                yield from zip(names, found.tolist(), strict=True)


class LateCheck(NamedTuple):
    """A check of gradients on a device, which is read once it has arrived.

    Attributes:
        check: the check.
        loss: the loss of the backward pass; None if it was not seen.
        root: the node of that loss, whose graph shows the operations; None if it was not seen.
    """

    check: GradientCheck
    loss: HostCopy | None
    root: Node


def nonfinite(parameters: Mapping[str, Tensor]) -> tuple[NonfiniteGradient, ...]:
    """The gradients of parameters that hold an Inf or a NaN; waits for their device."""
    return inspect({name: p.grad for name, p in parameters.items() if p.grad is not None})


def _norms_of(gradients: list[Tensor], order: float) -> Tensor:
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        try:
            return torch.stack(torch._foreach_norm(gradients, order))
        except (RuntimeError, TypeError, NotImplementedError):  # one is sparse, split or empty
            return torch.stack([_norm_of(gradient) for gradient in gradients])


def _norm_of(gradient: Tensor) -> Tensor:
    """The 2-norm of the elements of a gradient that this process holds."""
    own = local(gradient).detach()
    return (own.coalesce().values() if own.is_sparse else own).norm()
