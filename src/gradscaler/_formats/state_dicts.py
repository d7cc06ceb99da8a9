"""Reads the values of a state dict as Python numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradscaler.policies import _checks


def state_values(state_dict: Mapping[str, object], keys: tuple[str, ...]) -> dict[str, Any]:
    """The values of ``keys``, in their order.

    Raises:
        RuntimeError: ``state_dict`` is empty: it was saved with scaling disabled.
        KeyError: a key is missing; the message names it.
    """
    if not state_dict:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled "
            "instance of GradScaler. It holds no scale: leave out load_state_dict, and this scaler "
            "starts from its own. Or construct it with scaling disabled, as the source was."
        )
    missing = [key for key in keys if key not in state_dict]
    if missing:
        raise KeyError(
            f"missing from the state dict: {', '.join(missing)}; it holds "
            f"{', '.join(map(str, state_dict))}"
        )
    return {key: saved_number(key, state_dict[key]) for key in keys}


def count_in(key: str, value: object) -> int:
    """``value`` as an int, if it is a count that fits an int32."""
    return _checks.count(key, number_in(key, value), least=0, most=_checks.LONGEST_COUNT)


def saved_number(key: str, value: object) -> Any:
    """The Python number in a saved value, which in JSON may be a list of one number."""
    return number_in(key, value[0] if isinstance(value, list) and len(value) == 1 else value)


def number_in(key: str, value: object) -> Any:
    """The Python number in a tensor or array of one element; anything else unchanged."""
    if not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError):
        raise ValueError(f"{key} must be one number, got {value!r}") from None
