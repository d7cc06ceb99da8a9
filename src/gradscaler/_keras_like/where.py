"""``where`` for the rule of a policy, some of whose conditions are known."""

from __future__ import annotations

from typing import Any

from gradscaler.policies.state import Where


def where_or_choose(where: Where, found_inf: Any = None, known: bool | None = None) -> Where:
    """``where``, or the choice itself where the condition is known before the graph runs.

    A Python bool is: it comes of a count that nobody keeps. So is ``found_inf`` within a branch on
    it, where it is ``known``.
    """

    def chosen(condition: Any, a: Any, b: Any) -> Any:
        if known is not None and condition is found_inf:
            return a if known else b
        if isinstance(condition, bool):
            return a if condition else b
        return where(condition, a, b)

    return chosen
