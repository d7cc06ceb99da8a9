"""Which of a wrapper's variables takes which value in a file.

A file has no names. First come the variables that every wrapper has, Keras' own included. Then come
the counters of the policy, if it has any: non-finite steps, and the fields that are its own. Last
come all others, such as the inner optimizer's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradscaler._keras_like.wrapper import Variable

NUM_SHARED = 4
"""Every wrapper has its own step count and learning rate, the finite steps, and the scale."""


def paired(
    variables: list[Variable], counters: list[Variable], values: list[Any]
) -> list[tuple[Variable, Any]]:
    """Pairs of variable and value, from a file of any policy. Counters that it lacks become 0.

    If the file has another number of counters, it is another policy's: only the first is the same.

    Args:
        variables: the wrapper's, in order.
        counters: those of its policy, which are some of these variables.
        values: the arrays in the file.

    Returns:
        The pairs; none if the file is of another inner optimizer.
    """
    others = variables[NUM_SHARED + len(counters) :]
    end = len(values) - len(others)
    if end < NUM_SHARED:
        return []
    shared, stored = variables[:NUM_SHARED], values[NUM_SHARED:end]
    known = list(zip([*shared, *others], [*values[:NUM_SHARED], *values[end:]], strict=True))
    if any(value.shape for value in stored) or not all(_fits(*pair) for pair in known):
        return []
    same = stored if len(stored) == len(counters) else stored[:1]
    absent = [(counter, 0) for counter in counters[len(same) :]]
    return [*known, *absent, *zip(counters, same, strict=False)]


def is_of_a_wrapper(values: list[Any]) -> bool:
    """Whether values may come from a wrapper: its own learning rate is 0."""
    shared = values[:NUM_SHARED]
    return len(shared) == NUM_SHARED and not any(v.shape for v in shared) and bool(shared[1] == 0)


def _fits(variable: Variable, value: Any) -> bool:
    """Whether a value has a variable's shape, and is an integer if the variable is."""
    is_integer = np.issubdtype(value.dtype, np.integer)
    return tuple(variable.shape) == value.shape and is_integer == ("int" in variable.dtype)
