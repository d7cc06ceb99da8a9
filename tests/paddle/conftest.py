"""Fixtures of several test modules, which cannot import one another."""

from types import MethodType

import numpy as np
import paddle
import pytest
from paddle.utils import unique_name

from gradscaler.paddle import GradScaler
from tests.support.eager import library

INF = float("inf")


def _make(*shapes):
    """Parameters of these shapes, the same values and the same names each time."""
    with unique_name.guard():
        paddle.seed(0)
        return [
            paddle.create_parameter(
                shape, "float32", default_initializer=paddle.nn.initializer.Normal()
            )
            for shape in shapes
        ]


@pytest.fixture
def native(monkeypatch):
    return library.native(monkeypatch)


@pytest.fixture(scope="session")
def make():
    return _make


@pytest.fixture(scope="session")
def backward():
    return library.backward


def _replace_unscale(scaler):
    """Put a method in place of ``_unscale`` as Fleet does: it knows the scaler's names alone."""

    def unscale_method(self, optimizer):
        if not self._enable:
            return
        gradients = [p.grad for p in library.owned(optimizer) if p.grad is not None]
        self._found_inf = self._temp_found_inf_value_false
        if gradients:
            _, found = paddle._C_ops.check_finite_and_unscale_(gradients, self._scale)
            self._found_inf = paddle._C_ops.bitwise_or(self._found_inf, found)

    scaler._unscale = MethodType(unscale_method, scaler)


@pytest.fixture(scope="session")
def replace_unscale():
    return _replace_unscale


@pytest.fixture
def parameters():
    return _make([2, 3], [4])


@pytest.fixture
def finite():
    """Gradients of those parameters, finite at any scale up to 2**120."""
    random = np.random.default_rng(1)
    return [random.standard_normal(shape).astype(np.float32) for shape in ([2, 3], [4])]


@pytest.fixture
def overflowed(finite):
    """The same gradients, with an inf in the last one."""
    return [*finite[:-1], np.full_like(finite[-1], INF)]


@pytest.fixture
def scaler():
    return GradScaler(init_loss_scaling=1024.0)
