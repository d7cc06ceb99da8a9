"""What scalers of a script do: their losses and steps, and whether each makes a step alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import ref

from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._monitor.by_identity import ByIdentity
from gradscaler.diagnose._record.thresholds import BRIEF_SCALER, FEW_SCALERS

Optimizer = Any  # of any framework


OF_EACH_STEP = (
    "The script makes a new GradScaler for each step, so a scale that an overflow has lowered is "
    "never kept: each step begins at init_scale again."
)
MAKE_ONCE = "Make the scaler once, before the loop."


class ScalerWatch:
    """The first observer of a scaler. A monitor that its first call puts on hears of that loss."""

    def __init__(
        self,
        scaled: Callable[[], None],
        stepped: Callable[[Any], None],
        ended: Callable[[], None],
    ) -> None:
        self._scaled, self._stepped, self._ended = scaled, stepped, ended

    @guarded
    def scaled(self, outputs: object, /) -> None:
        """Make the first call."""
        self._scaled()

    @guarded
    def unscaling(self, optimizer: object, scale: object, /) -> None:
        """Nothing to do."""

    @guarded
    def stepping(self, optimizer: object, scale: object, /) -> None:
        """Nothing to do."""

    @guarded
    def stepped(self, optimizer: object, outcome: object, /) -> None:
        """Make the second call."""
        self._stepped(optimizer)

    @guarded
    def updating(self) -> None:
        """Nothing to do."""

    @guarded
    def updated(self) -> None:
        """Make the third call."""
        self._ended()


class ObservedScalers:
    """The scalers that a watch observes until it stops. It does not keep them alive."""

    def __init__(self) -> None:
        self._watches = ByIdentity[Any]()  # weak references, as a watch knows its scaler

    def add(self, scaler: Any, watch: ScalerWatch) -> None:
        """Observe a scaler."""
        scaler.add_observer(watch)
        self._watches[scaler] = ref(watch)

    def remove(self) -> None:
        """Observe no scaler any more."""
        for scaler in self._watches:
            scaler.remove_observer(self._watches.get(scaler, None)())


class FreshScalers:
    """Counts the steps that each scaler makes with one optimizer."""

    def __init__(self) -> None:
        self._steps = ByIdentity[Counter[int]]()  # by the optimizer, then by the scaler's id

    def note(self, scaler: int, optimizer: Optimizer) -> None:
        """Note a step of an optimizer by the scaler of an id."""
        if optimizer not in self._steps:
            self._steps[optimizer] = Counter()
        self._steps.get(optimizer, Counter())[scaler] += 1

    @property
    def are_made_each_step(self) -> bool:
        """Whether an optimizer was stepped by several scalers, a step or two by each."""
        each = (self._steps.get(optimizer, Counter()) for optimizer in self._steps)
        return any(
            len(steps) >= FEW_SCALERS and max(steps.values()) <= BRIEF_SCALER for steps in each
        )
