"""``where`` for the rule of a policy that does not count non-finite steps."""

from __future__ import annotations

from typing import Any

from gradscaler.policies.state import Where


def where_or_choose(where: Where) -> Where:
    """``where``, or the choice itself if the condition is known: of a count that nobody keeps."""

    def chosen(condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, bool):
            return a if condition else b
        return where(condition, a, b)

    return chosen
