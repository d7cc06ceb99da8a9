"""The weights of a model at the ends of ``fit``'s epochs, and their dtype beside the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.arrays import to_numpy
from gradscaler.diagnose._gradients.reading import read
from gradscaler.diagnose._record.thresholds import FEW_CALLS, LEAST_EPS
from gradscaler.diagnose._seams.keras import backend_of

Model = Any

_MOST_KEPT = 4096  # elements of a weight that are compared, beside its sum
_DIVIDING = {"Adam", "Nadam", "Lamb"}  # by the root of mean squares, and then eps is added to it


class FitWeights:
    """What the weights show before ``fit`` and at the ends of its epochs.

    Attributes:
        bad: what says that a weight is NaN or Inf though the losses are finite; empty if none is.
        found_in: the epoch in which it was found; 0 if none is, or if it was so from the start.
    """

    def __init__(self) -> None:
        self.bad, self.found_in = "", 0
        self._names: dict[int, str] = {}  # of those seen, by their ids
        self._trained_first = set[int]()  # those that were trainable when they were first seen
        self._trainable = set[int]()  # those that are so now
        self._before: dict[int, bytes] = {}  # what trainable ones held when they were seen as such
        self._moved, self._stood = set[int](), set[int]()

    def see(self, model: Model, epoch: int) -> None:
        """See the weights before the first step, which is epoch 0, or at the end of an epoch."""
        if not model.built:
            return
        trainable = {id(each) for each in model.trainable_variables}
        self._trainable = trainable
        for name, key, values in _weights_of(model, self._moved if self.bad else set()):
            if key not in self._names:
                self._names[key] = name
                self._trained_first |= {key} & trainable
            if not self.bad and not np.isfinite(values).all() and read(values).state == "bad":
                self.found_in = epoch
                self.bad = _told(name, values, epoch, backend_of(model))
            if key in trainable and key not in self._moved:
                self._compare(key, _mark(values))

    def _compare(self, key: int, mark: bytes) -> None:
        if key not in self._before:
            self._before[key] = mark
        elif self._before[key] == mark:
            self._stood.add(key)
        else:
            self._stood.discard(key)
            self._moved.add(key)
            del self._before[key]

    @property
    def have_stood(self) -> bool:
        """Whether no trainable weight has changed."""
        return bool(self._stood) and not self._moved

    def still(self, num_steps: int, rate: float | None) -> str:
        """What says that trainable weights have not changed; empty if all have.

        The learning rate is None if it is not known.
        """
        stood = self._stood & self._trainable
        if num_steps < FEW_CALLS or not stood:
            return ""
        late = [self._names[key] for key in self._names if key in stood - self._trained_first]
        if late:
            return (
                f"{_listed(late)} became trainable after compile(), and did not change since: "
                "call compile() again after trainable is changed, as the step was made without "
                "them."
            )
        if self.have_stood and rate:
            return (
                f"No weight has changed at a learning rate of {rate:g}: look at what keeps the "
                "loss from the weights."
            )
        if self.have_stood:
            return (
                "No weight has changed: look at the learning rate, which may be 0, and at what "
                "keeps the loss from the weights."
            )
        return ""


def _weights_of(model: Model, known: set[int]) -> Iterator[tuple[str, int, NDArray[Any]]]:
    """Names, ids and values of a model's floating-point weights, except those that are known."""
    for each in model.weights:
        if id(each) not in known and "float" in str(each.dtype):
            name = getattr(each, "path", None) or each.name.partition(":")[0]
            yield str(name), id(each), to_numpy(each)


def _mark(values: NDArray[Any]) -> bytes:
    """What shows whether a weight has changed: its elements, or some of many and their sum."""
    flat = values.reshape(-1)
    apart = max(1, flat.size // _MOST_KEPT)
    kept = flat[::apart].tobytes()
    return kept if apart == 1 else kept + flat.sum(dtype=np.float64).tobytes()


def _told(name: str, values: NDArray[Any], epoch: int, backend: str) -> str:
    what = "NaN" if np.isnan(values).any() else "Inf"
    if not epoch:
        return f"{name} held {what} before the first step: look at what it was loaded or made from."
    hides = "a ReLU" if backend == "tensorflow" else "where() or nan_to_num()"
    return (
        f"{name} is {what} since epoch {epoch}, though the losses are finite: something hides it, "
        f"such as {hides}."
    )


def _listed(names: list[str]) -> str:
    first, *rest = names
    return f"{first} and {len(rest)} more weight{'s' * (len(rest) > 1)}" if rest else first


def of_narrow_weights(model: Model) -> str:
    """What says that an optimizer divides by an eps too small for float16; empty if it does not."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    names = {each.__name__ for each in type(optimizer).__mro__}
    eps = getattr(optimizer, "epsilon", None)
    if names.isdisjoint(_DIVIDING) or not isinstance(eps, (int, float)) or eps >= LEAST_EPS:
        return ""
    weights = model.trainable_variables if model.built else []
    dtypes = {getattr(each.dtype, "name", each.dtype) for each in weights}
    if "float16" not in dtypes:
        return ""
    return (
        "The weights are float16, in which squares of small gradients are 0, so that "
        f"{type(optimizer).__name__} divides by its epsilon of {eps:g} and makes large steps: set "
        'it to 1e-4, or keep the weights in float32 (the policy "mixed_float16").'
    )
