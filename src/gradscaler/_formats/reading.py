"""Reads the rule and the state from the state dict of any framework's scaler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradscaler._formats.layouts import LAYOUTS, OPTIONAL, Layout, Values
from gradscaler._formats.state_dicts import saved_number
from gradscaler.policies import Rule, ScaleState

_KEYS = [(layout, frozenset(layout.keys)) for layout in LAYOUTS]


def layout_of(state_dict: Values) -> Layout | None:
    """The layout that a state dict's keys match, or None.

    Raises:
        TypeError: ``state_dict`` is not a dict.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
    keys = state_dict.keys()
    for layout, own in _KEYS:
        if keys >= own if len(own) > 1 else keys == own:
            return layout
    return None


def detect(state_dict: Values) -> str | None:
    """The format of a state dict, by its keys, or None.

    Raises:
        TypeError: ``state_dict`` is not a dict.
    """
    layout = layout_of(state_dict)
    return layout and layout.format


def read(state_dict: Values) -> tuple[Rule, ScaleState]:
    """The rule and the state in a state dict of any format.

    Raises:
        TypeError: ``state_dict`` is not a dict, or a value has the wrong type.
        ValueError: the keys match no format, or a value is out of range.
    """
    layout = layout_of(state_dict)
    if layout is None:
        raise ValueError(_unrecognised(state_dict))
    rule, state = layout.read(numbers(layout, state_dict))
    _must_lose_no_field(layout, state_dict)
    return rule, state


def _must_lose_no_field(layout: Layout, state_dict: Values) -> None:
    """Raise ValueError if the dict holds a field of a policy's own state, as ``write_leaves`` does.

    Other formats than torch's and Paddle's do not mark these, and may hold what is not ours.
    """
    known = (*layout.keys, *OPTIONAL)
    for key in state_dict:
        if layout.format in ("torch", "paddle") and key.startswith("_") and key not in known:
            raise ValueError(
                f"{key} belongs to a policy of your own, which this state dict does not describe: "
                "write(policy, state, to) takes a DynamicScale in its place"
            )


def numbers(layout: Layout, state_dict: Values) -> dict[str, Any]:
    """The values of a layout as Python numbers."""
    return {
        key: saved_number(key, value)
        for key, value in state_dict.items()
        if key in layout.keys or key in OPTIONAL
    }


_EMPTY = (
    "like that of a disabled scaler, so it holds no scale. Construct the next scaler with the "
    "scale to start from, and load nothing"
)


def _unrecognised(state_dict: Values) -> str:
    if not state_dict:
        return f"the state dict is empty, {_EMPTY}"
    closest = max(LAYOUTS, key=lambda layout: len(state_dict.keys() & set(layout.keys)))
    missing = [key for key in closest.keys if key not in state_dict]
    held = ", ".join(f"{key!s:.80}" for key in list(state_dict)[:12])
    if len(missing) == len(closest.keys):
        places = {k: v for k, v in state_dict.items() if isinstance(v, Mapping)}
        if places:
            empty = [key for key, value in places.items() if not value]
            hint = f". {empty[0]!s:.80} is empty, {_EMPTY}" if empty else ""
            return f"no entry has the keys of any known format; the keys are {held}{hint}"
        return f"these keys do not match any known format: {held}"
    return f"missing from the state dict for {closest.format}'s format: {', '.join(missing)}"
