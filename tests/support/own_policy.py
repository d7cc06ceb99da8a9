"""A policy that is nobody's: no class of gradscaler's, and a state with a field of its own."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

TRACE = "ooxxoxooxo"
"""Finite steps, and at "x" a non-finite one."""

SCALES = [24.0, 72.0, 36.0, 18.0, 54.0, 27.0, 81.0, 162.0, 81.0, 162.0]
PROVEN = [8.0, 24.0, 24.0, 24.0, 24.0, 24.0, 27.0, 81.0, 81.0, 81.0]
"""The scale, and the largest one that a finite step used, after each step of ``TRACE``."""


class ProvenState(NamedTuple):
    """A state with a fourth field, ``proven``: the largest scale that a finite step used."""

    scale: Any
    finite_steps: Any
    nonfinite_steps: Any
    proven: Any


@dataclass(frozen=True)
class Proven:
    """Halves at an overflow. A finite step triples a scale below ``limit``, and doubles others."""

    start: float = 8.0
    limit: float = 60.0

    def init(self):
        return ProvenState(np.float32(self.start), 0, 0, np.float32(0))

    def update(self, state, found_inf, where=None):
        if where is None:
            where = choose
        scale = state.scale
        grown = where(scale < self.limit, scale * 3, scale * 2)
        proven = where(scale > state.proven, scale, state.proven)
        return ProvenState(
            where(found_inf, scale * 0.5, grown),
            where(found_inf, state.finite_steps * 0, state.finite_steps + 1),
            where(found_inf, state.nonfinite_steps + 1, state.nonfinite_steps),
            where(found_inf, state.proven, proven),
        )

    # As Keras asks of any object that its files hold.

    def get_config(self):
        return asdict(self)

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def choose(condition, a, b):
    return a if condition else b
