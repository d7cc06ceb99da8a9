"""Paddle."""

import contextlib
import io
import sys
import warnings
from types import SimpleNamespace

import paddle
from paddle.base.framework import EagerParamBase
from paddle.utils import unique_name

from tests.support.eager.base import Library


class _TakesClosure:
    """A ``step`` that takes a closure; of Paddle's own optimizers, only LBFGS has one."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        super().step()
        return loss


class SGD(_TakesClosure, paddle.optimizer.SGD):
    pass


class Momentum(_TakesClosure, paddle.optimizer.Momentum):
    pass


class Twice(paddle.optimizer.Adam):
    """Adam, stepped at two evaluations of a closure."""

    def step(self, closure):
        loss = closure()
        super().step()
        closure()
        super().step()
        return loss


class TwiceMultiTensor(Twice):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, use_multi_tensor=True, **kwargs)
        self.__class__ = type("Adam", (TwiceMultiTensor,), {})  # Paddle goes by the name


def _making(kind, **options):
    return lambda parameters: kind(parameters=parameters, **options)


class Paddle(Library):
    def __init__(self):
        super().__init__("paddle")
        rule = {
            "growth_factor": "incr_ratio",
            "backoff_factor": "decr_ratio",
            "growth_interval": "incr_every_n_steps",
            "hysteresis": "decr_every_n_nan_or_inf",
        }
        self.spelling = {"init_scale": "init_loss_scaling", **rule, "enabled": "enable"}
        counts = {"finite_steps": "incr_count", "nonfinite_steps": "decr_count"}
        self.state_keys = {"scale": "scale", **rule, **counts}
        optim = paddle.optimizer
        self.optimizers = {
            "SGD": _making(SGD, learning_rate=0.1),
            "Momentum": _making(optim.Momentum, learning_rate=0.1),
            "AdamW": _making(optim.AdamW, learning_rate=0.1),
        }
        self.closure_optimizers = {
            "SGD": _making(Momentum, learning_rate=0.1),
            "LBFGS": _making(optim.LBFGS, learning_rate=0.5, max_iter=5),
            "LBFGS with line search": _making(
                optim.LBFGS, max_iter=5, line_search_fn="strong_wolfe"
            ),
            "Adam at two evaluations": _making(Twice, learning_rate=0.1),
            "multi-tensor Adam at two evaluations": _making(TwiceMultiTensor, learning_rate=0.1),
        }

    def tensor(self, values, dtype="float32"):
        return values if self.is_tensor(values) else paddle.to_tensor(values, dtype)

    def numpy(self, tensor):
        return tensor.astype("float64").numpy()

    def exact_tensor(self, tensor):
        return (str(tensor.dtype), self.exact(tensor.numpy())) if tensor._is_initialized() else ""

    def expanded(self, value, size):
        return paddle.as_strided(paddle.full([1], value), [size], [0])

    def through_float16(self, tensor):
        return tensor.astype("float16").astype("float32")

    def make_parameters(self, *arrays):
        with unique_name.guard():
            return [EagerParamBase.from_tensor(self.tensor(array)) for array in arrays]

    def model(self):
        with unique_name.guard():
            paddle.seed(0)
            nn = paddle.nn
            return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))

    def clear_gradients(self, optimizer):
        optimizer.clear_grad()

    def sgd(self, parameters, lr=0.1, momentum=0.0, fused=False):
        assert not fused
        return Momentum(lr, momentum, parameters) if momentum else SGD(lr, parameters)

    def adamw(self, parameters, lr=0.1, fused=False):
        assert not fused
        return paddle.optimizer.AdamW(lr, parameters=parameters)

    def owned(self, optimizer):
        parameters = optimizer._parameter_list
        if isinstance(parameters[0], dict):
            return [parameter for group in parameters for parameter in group["params"]]
        return parameters

    def state(self, optimizer):
        kept = {**optimizer._accumulators, "master_weight": optimizer._master_weights}
        by_parameter = {
            (name, parameter): item
            for name, items in kept.items()
            for parameter, item in items.items()
        }
        return {**by_parameter, "LBFGS": dict(getattr(optimizer, "state", {}))}

    def spelled(self, options):
        if "policy" not in options:
            defaults = {"init_scale": 2.0**16, "growth_interval": 2000, "hysteresis": 1}
            options = {**defaults, **options}
        return super().spelled(options)

    def native(self, monkeypatch):
        """Paddle's own scaler as it works on a GPU under float16 autocast, but on the CPU.

        Paddle's scaler asks two functions of its module for the device and the dtype, and disables
        itself on others. It also takes Paddle's own names and positional arguments.
        """
        module = sys.modules["paddle.amp.grad_scaler"]
        gpu = SimpleNamespace(_expected_place=SimpleNamespace(is_gpu_place=lambda: True))
        monkeypatch.setattr(module, "_dygraph_tracer", lambda: gpu)
        float16 = SimpleNamespace(amp_dtype="float16")
        monkeypatch.setattr(module, "amp_global_state", lambda: float16)
        return _Native(self.spelled)

    def records(self, scaler):
        return {
            key: (record.stage, self.exact(record.scale), self.exact(record.found_inf))
            for key, record in scaler._optimizer_states.items()
        }

    def set_scale(self, scaler, value):
        scaler.set_init_loss_scaling(value)


class _Native:
    """Makes Paddle's own scaler, and keeps its output in ``printed``."""

    def __init__(self, spelled):
        self.printed = io.StringIO()
        self._spelled = spelled

    def __call__(self, *args, **options):
        scaler = paddle.amp.GradScaler(*args, **(options if args else self._spelled(options)))
        native_update = scaler._update

        def update_in_silence():
            with contextlib.redirect_stdout(self.printed), warnings.catch_warnings():
                # It calls float() on its scale, an array of shape [1], in order to print it.
                warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
                native_update()

        scaler._update = update_in_silence
        return scaler


instance = Paddle()
