"""What differs from framework to framework in the words of a finding: who finds an operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Framework(NamedTuple):
    """What a monitor is told in a framework, and what its user can call.

    Attributes:
        name: its name in a run file.
        finder: what names the operation that makes an Inf or a NaN, also in the backward pass of a
            batch whose loss is finite; empty if nothing is known to.
        is_recorded: whether the user records each step; else the scaler announces it.
        has_replay: whether ``record(replay=)`` names the operation.
        has_watch: whether ``gradscaler run --watch`` watches a step's operations.
        first_watched: the first step that it can watch. The monitor of a loop may begin with the
            backward pass of step 1.
    """

    name: str = ""
    finder: str = ""
    is_recorded: bool = True
    has_replay: bool = False
    has_watch: bool = False
    first_watched: int = 2


_FRAMEWORKS = {
    "torch": Framework(finder="locate()", is_recorded=False, has_watch=True, first_watched=1),
    "tensorplay": Framework(finder="locate()", is_recorded=False, has_watch=True, first_watched=1),
    "paddle": Framework(finder="locate()", is_recorded=False, has_watch=True, first_watched=1),
    "jax": Framework(finder="locate_jax()", has_replay=True, has_watch=True, first_watched=1),
    **dict.fromkeys(
        ("keras on tensorflow", "tf_keras"),
        Framework(finder="locate()", has_replay=True, has_watch=True),
    ),
    **dict.fromkeys(
        ("keras on jax", "keras on torch"), Framework(finder="locate()", has_replay=True)
    ),
    "mindspore": Framework(finder="locate()", has_replay=True, has_watch=True, first_watched=1),
}


def framework_named(name: str, packages: Mapping[str, str]) -> Framework:
    """A framework by its name; Keras is on a backend, which is among the packages of its run.

    In one that is not known, as in the file of a later version, nothing is promised.
    """
    names = (name, *(f"{name} on {package}" for package in packages))
    found = next((_FRAMEWORKS[each] for each in names if each in _FRAMEWORKS), Framework())
    return found._replace(name=name)
