"""A check of gradients for Inf and NaN, in one reading of them that waits for no device."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gradscaler.diagnose._gradients.arrays import dtype_name, local, shape_of
from gradscaler.diagnose._gradients.reading import Tensor, inspect
from gradscaler.diagnose._graph.call_site import Node
from gradscaler.outcome import NonfiniteGradient


class HostCopy:
    """A copy of a PyTorch tensor, which arrives on the host when its device gets there.

    A tensor that is on the host already is kept as it is.
    """

    def __init__(self, tensor: Tensor) -> None:
        torch: Any = sys.modules["torch"]
        self._copy = tensor.to("cpu", non_blocking=True)
        self._event = None if tensor.device.type == "cpu" else torch.Event(tensor.device)
        if self._event is not None:
            self._event.record()

    @property
    def is_on_host(self) -> bool:
        """Whether the tensor was on the host from the start."""
        return self._event is None

    @property
    def has_arrived(self) -> bool:
        """Whether the values are on the host."""
        return self._event is None or bool(self._event.query())

    def values(self) -> Tensor:
        """The tensor on the host; waits until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy

    def item(self) -> float:
        """The only value; waits until it has arrived."""
        return float(self.values())


class GradientCheck:
    """The norms of the gradients of PyTorch parameters, given by their names.

    A norm is Inf or NaN if a gradient holds one. On a CPU, where the 2-norm takes a fifth of the
    time of the largest magnitude, squares may overflow too, so a second look tells which gradients
    are bad. On a device it is the largest magnitude, which tells that at once.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._groups: list[tuple[list[str], HostCopy]] = []
        of_device: dict[Any, dict[str, Tensor]] = {}
        for name, parameter in parameters.items():
            if (gradient := parameter.grad) is not None:
                of_device.setdefault(gradient.device, {})[name] = gradient
        for device, gradients in of_device.items():
            order = 2.0 if device.type == "cpu" else math.inf
            self._groups.append((list(gradients), HostCopy(_norms([*gradients.values()], order))))

    @property
    def is_on_host(self) -> bool:
        """Whether no gradient is on a device."""
        return all(norms.is_on_host for _, norms in self._groups)

    @property
    def has_arrived(self) -> bool:
        """Whether the norms are on the host."""
        return all(norms.has_arrived for _, norms in self._groups)

    def suspects(self) -> dict[str, float]:
        """The gradients that may hold an Inf or a NaN, and their norms; waits for their arrival."""
        found: dict[str, float] = {}
        for names, copy in self._groups:
            norms = copy.values()
            if _is_bad(float(norms.sum())):
                both = zip(names, norms.tolist(), strict=True)
                found |= {name: norm for name, norm in both if _is_bad(norm)}
        return found

    def nonfinite(self, parameters: Mapping[str, Tensor]) -> tuple[NonfiniteGradient, ...]:
        """The gradients on a device that held an Inf or a NaN, and are gone: counts are 1 or 0."""
        return tuple(
            NonfiniteGradient(
                *(name, shape_of(parameters[name]), dtype_name(parameters[name])),
                *(int(math.isinf(norm)), int(math.isnan(norm)), math.nan),
            )
            for name, norm in self.suspects().items()
        )


class Glance:
    """A look at some gradients on a CPU, which show whether the others are finite.

    Args:
        parameters: the parameters to check.
        shown: for a matrix among them the vector whose gradient is bad if that of the matrix is, by
            their ids.
    """

    def __init__(self, parameters: Iterable[Tensor], shown: Mapping[int, int]) -> None:
        every = {id(parameter): parameter for parameter in parameters}
        seen = {matrix: every[v] for matrix, v in shown.items() if matrix in every and v in every}
        self._vectors = list({id(vector): vector for vector in seen.values()}.values())
        skipped = seen.keys() | {id(vector) for vector in self._vectors}
        self._others = [each for key, each in every.items() if key not in skipped]

    def is_clean(self) -> bool:
        """Whether the gradients are finite; False if that was not seen, too."""
        tensor_class: Any = sys.modules["torch"].Tensor
        vectors = [parameter.grad for parameter in self._vectors]
        others = [each.grad for each in self._others if each.grad is not None]
        for gradient in vectors + others:
            if type(gradient) is not tensor_class or not gradient.is_cpu or gradient.requires_grad:
                return False  # a vector without a gradient shows nothing
        vectors += [gradient for gradient in others if gradient.ndim == 1]
        return _have_finite_sum(vectors, [each for each in others if each.ndim != 1])


def _have_finite_sum(vectors: Sequence[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether the sum of all elements is finite, which an Inf or NaN among them prevents."""
    torch: Any = sys.modules["torch"]
    try:
        total = float(torch.cat(vectors).sum()) if vectors else 0.0  # in two calls, for speed
        for each in others:
            total += float(each.sum())
    except (RuntimeError, TypeError, NotImplementedError):  # one is sparse or complex
        return False
    return math.isfinite(total)


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

    @property
    def is_clean(self) -> bool:
        """Whether it has arrived, and no gradient holds an Inf or a NaN."""
        return self.check.has_arrived and not self.check.suspects()


def nonfinite(parameters: Mapping[str, Tensor]) -> tuple[NonfiniteGradient, ...]:
    """The gradients of parameters that hold an Inf or a NaN; waits for their device."""
    return inspect({name: p.grad for name, p in parameters.items() if p.grad is not None})


def total_norm(parameters: Iterable[Tensor]) -> float:
    """The 2-norm of all gradients of parameters as one vector; waits for their device."""
    of_device: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            of_device.setdefault(parameter.grad.device, []).append(parameter.grad)
    return math.hypot(*(n for each in of_device.values() for n in _norms(each, 2.0).tolist()))


def _is_bad(norm: float) -> bool:
    return not math.isfinite(norm)


def _norms(gradients: list[Tensor], order: float) -> Tensor:
    """The norm of each gradient, of an order; of a distributed one, of this process' part."""
    torch: Any = sys.modules["torch"]
    gradients = [each if type(each) is torch.Tensor else local(each) for each in gradients]
    with torch.no_grad():
        try:
            return torch.stack(torch._foreach_norm(gradients, order))
        except (RuntimeError, TypeError, NotImplementedError):  # one is sparse, split or empty
            return torch.stack([elements_of(gradient).norm() for gradient in gradients])


def elements_of(gradient: Tensor) -> Tensor:
    """The elements of a gradient that this process holds; of a sparse one, its values."""
    own = local(gradient).detach()
    return own.coalesce().values() if own.is_sparse else own
