"""A policy that needs the largest gradient, and a trace of largest gradients."""

import math

import numpy as np

from gradscaler import AmaxScale

INF, NAN = math.inf, math.nan
TRACE = [2.0**-20, NAN, 0.1, NAN, 0.3, 7.0, INF, NAN, NAN]
TRACE += [1e-3, 0.0, -5.0, *[1e-4] * 8, 300.0, -INF, 2.0]


def policy(**parameters):
    """A policy that shows each part of its rule within a few steps."""
    options = {"init_scale": 1024.0, "growth_interval": 3, "patience": 1, "half_life": 3.0}
    return AmaxScale(**{**options, **parameters})


def as_bits(state):
    """The values of a state as float32, to the bit."""
    return [np.asarray(value, np.float32).tobytes() for value in state]
