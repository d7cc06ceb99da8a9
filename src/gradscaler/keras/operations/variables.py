"""What ``minimize`` takes for variables, on every backend."""

from __future__ import annotations

from typing import Any

import keras


def variables_of(var_list: Any) -> list[Any]:
    """A flat list of the variable or variables, or of what a function returns.

    Raises:
        TypeError: something else is among them.
    """
    variables: list[Any] = keras.tree.flatten(var_list() if callable(var_list) else var_list)
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise TypeError(
                "var_list must be a variable, variables or a function that returns them, "
                f"but holds: {variable!r}"
            )
    return variables
