"""The first batch of a Keras model: whether it holds NaN or Inf, and in which column."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler._run_script.fit_losses import ends_in_relu
from gradscaler.diagnose._gradients.arrays import to_numpy
from gradscaler.diagnose._gradients.reading import read
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._monitor.fit_batches import FitBatches, Replay
from gradscaler.diagnose._seams.keras import package_of

_PARTS = "batch", "labels", "sample weights"
_MOST_COLUMNS = 3  # that are named
_FEW_ROWS = 8


class FirstBatch:
    """Looks at the first batch of an optimizer's first ``fit`` or ``train_on_batch``.

    Attributes:
        text: what it holds that is not finite, and what to do; empty if all is finite.
        labels: the shape of its labels; None if it has none, or several.
        inputs: a few of its rows, where the model ends in a ReLU and takes one array; else None.
    """

    def __init__(self) -> None:
        self.text, self._is_seen = "", False
        self.labels: tuple[int, ...] | None = None
        self.inputs: NDArray[Any] | None = None

    def callback(self, kind: Any) -> Any:
        """A callback, of a class of Keras, that gets the first batch before its step."""
        first = self

        class Looking(kind):  # type: ignore[misc] # untyped base
            batches: FitBatches | None = None

            @guarded
            def on_train_begin(self, logs: Any = None) -> None:
                if first._is_seen or not _is_usual(self.model):
                    return
                self.batches = FitBatches(self, self._before)
                self.batches.start()

            def _before(self, model: Any, replay: Replay) -> None:
                try:
                    if not first._is_seen:
                        first._is_seen = True
                        first._look(model, replay.batch)
                finally:
                    if self.batches is not None:
                        self.batches.stop()

            @guarded
            def on_train_end(self, logs: Any = None) -> None:
                if self.batches is not None:
                    self.batches.stop()

        return Looking()

    def _look(self, model: Any, batch: Any) -> None:
        package: Any = sys.modules[package_of(model)]
        parts = package.utils.unpack_x_y_sample_weight(batch)
        if hasattr(parts[1], "shape"):
            self.labels = tuple(parts[1].shape)
        if ends_in_relu(model):
            given = list(_arrays_in(package, parts[0]))
            self.inputs = given[0][:_FEW_ROWS].copy() if len(given) == 1 else None
        self.text = _bad_in(package, parts)


def _is_usual(model: Any) -> bool:
    """Whether Keras makes the function that trains a model, which takes an iterator then."""
    return bool(type(model).make_train_function.__module__.startswith(("keras.", "tf_keras.")))


def _bad_in(package: Any, parts: Sequence[Any]) -> str:
    for name, part in zip(_PARTS, parts, strict=False):
        for values in _arrays_in(package, part):
            if values.dtype.kind == "f" and read(values).state == "bad":
                return _told(name, values)
    return ""


def _arrays_in(package: Any, part: Any) -> Iterator[NDArray[Any]]:
    nested = getattr(package, "tree", None) or sys.modules["tensorflow"].nest
    for each in nested.flatten(part):
        if hasattr(each, "shape") and hasattr(each, "dtype") and "str" not in str(each.dtype):
            yield to_numpy(each)


def _told(name: str, values: NDArray[Any]) -> str:
    """What says where values are not finite, and what to look at."""
    is_bad = ~np.isfinite(values)
    what = "NaN" if np.isnan(values).any() else "Inf"
    whole: Any = np.flatnonzero(is_bad.all(axis=0)) if values.ndim == 2 and len(values) > 1 else []
    if 0 < len(whole) <= _MOST_COLUMNS and len(whole) < values.shape[1]:
        columns = ", ".join(map(str, whole))
        are, many = ("are", "s") if len(whole) > 1 else ("is", "")
        return (
            f"Column{many} {columns} of the first {name} {are} {what} in each row: look at the "
            "data, as for a constant column, whose deviation of 0 it was divided by."
        )
    count = int(is_bad.sum())
    return (
        f"The first {name} hold{'s' * (name == 'batch')} {count:,} {what} of {values.size:,} "
        "numbers: look at the data for missing values, and for divisions by 0."
    )
