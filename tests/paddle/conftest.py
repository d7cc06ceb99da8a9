"""What several test modules need, handed to them as fixtures: they cannot import one another."""

import contextlib
import io
import sys
import warnings
from collections.abc import Mapping
from types import MethodType, SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.utils import unique_name

from gradscaler.paddle import GradScaler

INF = float("inf")


def _exact(value):
    """Something that compares equal if and only if two values are the same to the bit."""
    if isinstance(value, paddle.Tensor):
        return (str(value.dtype), _exact(value.numpy())) if value._is_initialized() else "empty"
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, repr(value.tolist()))
    if isinstance(value, Mapping):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(item) for item in value]
    return repr(value)


def _owned(optimizer):
    """An optimizer's parameters, groups flattened."""
    parameters = optimizer._parameter_list
    if isinstance(parameters[0], dict):
        return [parameter for group in parameters for parameter in group["params"]]
    return parameters


def _stepped(optimizer):
    """All that a step may change in an optimizer, and the gradients."""
    parameters = _owned(optimizer)
    return {
        "parameters": _exact(parameters),
        "gradients": _exact([parameter.grad for parameter in parameters]),
        "state": _exact(_state(optimizer)),
    }


def _state(optimizer):
    """An optimizer's state by names that do not depend on when it was made."""
    kept = {**optimizer._accumulators, "master_weight": optimizer._master_weights}
    by_parameter = {
        (name, parameter): item for name, items in kept.items() for parameter, item in items.items()
    }
    return {**by_parameter, "LBFGS": dict(getattr(optimizer, "state", {}))}


def _everything(scaler, *optimizers):
    """All that a call which raises must leave alone."""
    records = {
        key: (record.stage, _exact(record.scale), _exact(record.found_inf))
        for key, record in scaler._optimizer_states.items()
    }
    return _exact(scaler.state_dict()), records, [_stepped(optimizer) for optimizer in optimizers]


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


def _backward(scaler, parameters, gradients):
    """A backward pass whose unscaled gradients are ``gradients``; None for a parameter left out."""
    used = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    scaled = scaler.scale(sum((p * paddle.to_tensor(g)).sum() for p, g in used))
    scaled.backward()
    return scaled


class _Native:
    """Makes Paddle's own scaler; what it printed is in ``printed``."""

    def __init__(self):
        self.printed = io.StringIO()

    def __call__(self, *args, **kwargs):
        scaler = paddle.amp.GradScaler(*args, **kwargs)
        native_update = scaler._update

        def update_in_silence():
            with contextlib.redirect_stdout(self.printed), warnings.catch_warnings():
                # It calls float() on its scale, an array of shape [1], in order to print it.
                warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
                native_update()

        scaler._update = update_in_silence
        return scaler


@pytest.fixture
def native(monkeypatch):
    """Paddle's own scaler as it works on a GPU under float16 autocast, but on the CPU.

    It asks two functions of its module where it is, and switches itself off on a wrong answer.
    """
    module = sys.modules["paddle.amp.grad_scaler"]
    gpu = SimpleNamespace(_expected_place=SimpleNamespace(is_gpu_place=lambda: True))
    monkeypatch.setattr(module, "_dygraph_tracer", lambda: gpu)
    monkeypatch.setattr(module, "amp_global_state", lambda: SimpleNamespace(amp_dtype="float16"))
    return _Native()


@pytest.fixture(scope="session")
def exact():
    return _exact


@pytest.fixture(scope="session")
def everything():
    return _everything


@pytest.fixture(scope="session")
def stepped():
    return _stepped


@pytest.fixture(scope="session")
def make():
    return _make


@pytest.fixture(scope="session")
def backward():
    return _backward


def _replace_unscale(scaler):
    """Put a method in place of ``_unscale`` as Fleet does: it knows the scaler's names alone."""

    def unscale_method(self, optimizer):
        if not self._enable:
            return
        gradients = [p.grad for p in _owned(optimizer) if p.grad is not None]
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
    """The same, with an inf in the last."""
    return [*finite[:-1], np.full_like(finite[-1], INF)]


@pytest.fixture
def scaler():
    return GradScaler(init_loss_scaling=1024.0)
