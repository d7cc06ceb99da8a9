"""Which steps a monitor takes a sample of."""

from __future__ import annotations

_GOLDEN = 0x9E3779B97F4A7C15  # of 2**64, the golden ratio: the farthest from any fraction
_WHOLE = 2**64


def is_sampled(step: int, every: int) -> bool:
    """Whether a step, counted from 1, is sampled: one of each ``every`` steps is.

    The sample of window ``k``, the steps from ``k * every + 1`` to ``(k + 1) * every``, is
    ``floor(every * frac(k * golden_ratio))`` steps before the window's last step. So the first
    window's is its last step, and the others' move evenly through their windows. A fixed stride
    would see one batch alone where batches repeat with a period that divides it; this sequence
    sees each of them equally often, whatever the period. It is the same in every run and draws no
    random numbers.

    >>> [step for step in range(1, 51) if is_sampled(step, every=10)]
    [10, 14, 28, 32, 46]
    """
    window, place = divmod(step - 1, every)
    before_last = window * _GOLDEN % _WHOLE * every // _WHOLE
    return place == every - 1 - before_last
