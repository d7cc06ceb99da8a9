"""What steps in a loop of TensorFlow: an optimizer, its variables, and a step that is watched."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from threading import get_ident
from typing import Any, TypeVar

import numpy as np

from gradscaler._run_script.voice import voice
from gradscaler._run_script.watched_run import WatchedRun
from gradscaler.diagnose import Located
from gradscaler.diagnose._gradients.arrays import to_numpy
from gradscaler.diagnose._graph.threads import end_if_in_threads
from gradscaler.diagnose._record.located import BadGradient
from gradscaler.diagnose._seams.judge import Owned
from gradscaler.diagnose._seams.keras import layers_of, parameters_of
from gradscaler.diagnose._seams.tensorflow import TensorFlowSeam

Optimizer = Any
Tensor = Any
Variable = Any
Model = Any
Function = Any  # what tf.function returns
CalledT = TypeVar("CalledT")

optimizers_stepped: list[None] = []  # not empty once an optimizer of Keras has stepped
_INSIDE = re.compile(r"\{\{[^}]*\}\}\s*|\s*\[Op:.*")  # of TensorFlow, in its errors


class StepOperations:
    """The operations of a step that is watched.

    Those of an eager step are seen while it runs. A compiled step is run once more before it.

    Args:
        seam: shows the operations of a step that runs.

    Attributes:
        is_on: whether the present step is watched, and was not found to be compiled.
        has_failed: whether a step could not be looked at, which was said.
    """

    def __init__(self, seam: TensorFlowSeam) -> None:
        self._seam = seam
        self._located: Located | None = None
        self.is_on = self.has_failed = False

    @property
    def located(self) -> Located | None:
        """The first Inf or NaN that reached a result; None if there is none."""
        return self._located or self._seam.located

    @property
    def may_overflow(self) -> bool:
        """Whether what was located may be an overflow of a scaled loss, which a lower scale cures.

        It was seen at the scale of the step, in float16.
        """
        located = self._seam.located
        return (
            isinstance(located, BadGradient) and located.dtype == "float16" and located.num_inf > 0
        )

    def start(self) -> None:
        """Begin to look."""
        self.is_on = True
        self._seam.start()

    def stop(self) -> None:
        """Look no more."""
        self.is_on = False
        self._seam.stop()

    def end_in(self, results: object) -> None:
        """Note the results of a pass."""
        self._seam.end_in(results)

    def find(self, given: object, locate: Callable[[], Located | None]) -> None:
        """Look at a step that comes next and is compiled, and at what made its arguments."""
        self._seam.end_in(given)
        self.stop()
        try:
            self._located = self._seam.located or locate()
        except Exception as error:
            self.has_failed = True
            text = _INSIDE.sub("", str(error)).partition("\n")[0]
            voice.note(f"the step is not watched: {text or type(error).__name__}")


@dataclass
class Loop:
    """The steps of an optimizer.

    Attributes:
        optimizer: the optimizer, which is kept, so that no other has its id.
        variables: those that it steps.
        model: what holds them; None if they are in no layer.
        is_scaled: whether it scales losses.
        is_compiled: whether it steps in a function that is compiled.
        run: its run; None if there were too many.
        watch: the operations of a step that is watched; None if the user asked for none.
    """

    optimizer: Optimizer
    variables: Sequence[Variable]
    model: Model | None
    is_scaled: bool
    is_compiled: bool
    run: WatchedRun | None = None
    watch: StepOperations | None = None
    num_noted: int = 0  # steps whose operations were noted
    _are_finite: Function | None = None

    @property
    def shown(self) -> tuple[dict[str, Any], list[Owned]]:
        """The layers and the parameters to name."""
        if self.model is not None:
            return layers_of(self.model), parameters_of(self.model)
        return {}, [Owned(each, "", "", self.name_of(each)) for each in self.variables]

    @property
    def scale(self) -> Variable | None:
        """The variable that holds the loss scale; None if none does, as for a fixed scale."""
        if not self.is_scaled or not getattr(self.optimizer, "dynamic", True):
            return None
        kept = getattr(self.optimizer, "_loss_scale", None)  # in tf_keras
        return getattr(kept, "current_loss_scale", None) or self.optimizer.dynamic_scale

    @cached_property
    def is_half(self) -> bool:
        """Whether a layer computes in float16."""
        layers = self.shown[0].values()
        return any(str(getattr(each, "compute_dtype", "")) == "float16" for each in layers)

    def name_of(self, variable: Variable) -> str:
        """The name of a variable: its path in Keras 3."""
        return str(getattr(variable, "path", None) or variable.name.partition(":")[0])

    def are_finite(self) -> list[bool]:
        """Whether each variable is finite, by one call that is compiled."""
        if self._are_finite is None:
            flags = partial(_flags, self.variables)
            self._are_finite = tensorflow().function(flags, autograph=False)
        return list(self._are_finite().numpy())


class Calls(dict[int, CalledT]):
    """What is known of the function that each thread calls, by its id."""

    @property
    def own(self) -> CalledT | None:
        """That of this thread; of a replica's, that of the thread which waits for it."""
        own = self.get(get_ident())
        if own is None and self and tensorflow().distribute.has_strategy():
            own = next(iter(self.values()), None)
        return own


class Divided:
    """A scaled loss or a gradient of it, which is divided by the scale when it is read."""

    def __init__(self, array: Any, scale: float) -> None:
        self._array, self._scale = array, scale
        self.dtype, self.shape = array.dtype, array.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(to_numpy(self._array).astype(np.float32) / self._scale)

    def reshape(self, shape: Any) -> Any:
        """Its values in another shape."""
        return np.asarray(self).reshape(shape)


def _flags(variables: Sequence[Variable]) -> Tensor:
    tf = tensorflow()
    finite = (tf.math.is_finite(tf.convert_to_tensor(each)) for each in variables)
    return tf.stack([tf.reduce_all(each) for each in finite])


def num_replicas() -> int:
    """How many replicas train together, each of which may have a thread of its own."""
    return int(tensorflow().distribute.get_strategy().num_replicas_in_sync)


def thread_of_step() -> int:
    """The id of this thread; 0 for those of replicas, which take one step together."""
    return 0 if tensorflow().distribute.has_strategy() else get_ident()


def end_if_second_trains(*, is_new: bool = False) -> None:
    """End all watches if another thread trains, too, which is no replica's."""
    if num_replicas() == 1:
        end_if_in_threads(is_new=is_new)


def tensorflow() -> Any:
    """The module, which the script has imported."""
    return sys.modules["tensorflow"]
