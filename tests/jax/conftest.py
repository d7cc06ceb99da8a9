"""Fixtures of several test modules, which cannot import one another."""

import os

from tests.support import xla
from tests.support.chosen import cover_values

os.environ["XLA_FLAGS"] = xla.flags(devices=8)  # before JAX starts

import jax
import numpy as np
import pytest


def pytest_collection_modifyitems(items):
    """Eager and compiled calls run the same code of ours; pairs find no more, and compile."""
    cover_values(items, __file__)


def _exact(tree):
    """Something that compares equal if and only if two pytrees are the same to the bit."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf) for leaf in leaves]
    return str(structure), [(str(a.dtype), a.shape, a.tobytes()) for a in arrays]


def _is_key(leaf):
    return jax.numpy.issubdtype(jax.numpy.result_type(leaf), jax.dtypes.prng_key)


def _jit(function, **options):
    """``jax.jit(function)``, and a list that grows by one with each trace of it."""
    traces = []

    def traced(*args):
        traces.append(args)
        return function(*args)

    return jax.jit(traced, **options), traces


@pytest.fixture(scope="session")
def exact():
    return _exact


@pytest.fixture(scope="session")
def counted_jit():
    return _jit


@pytest.fixture(scope="session", autouse=True)
def devices():
    assert jax.device_count() == 8
    return jax.devices()
