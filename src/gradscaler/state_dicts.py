"""Reading a state dict: every key there, every value a Python number or flag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def state_values(state_dict: object, keys: tuple[str, ...]) -> dict[str, Any]:
    """The values of ``keys``, in their order.

    Raises:
        TypeError: ``state_dict`` is no dict.
        RuntimeError: it is empty, as one saved with scaling disabled is.
        KeyError: a key is missing; the message names it.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
    if not state_dict:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled "
            "instance of GradScaler."
        )
    missing = [key for key in keys if key not in state_dict]
    if missing:
        raise KeyError(
            f"missing from the state dict: {', '.join(missing)}; it holds "
            f"{', '.join(map(str, state_dict))}"
        )
    return {key: number_in(state_dict[key]) for key in keys}


def number_in(value: Any) -> Any:
    """The Python number in a tensor or array of one element; anything else as it is."""
    return value.item() if hasattr(value, "item") else value
