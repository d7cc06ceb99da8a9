"""PyTorch, and TensorPlay, which ports its API."""

from functools import partial

import numpy as np

from tests.support.eager.base import Library


class TorchLike(Library):
    places = ("host", "accelerator")
    fused = (False, True)

    def __init__(self, name):
        super().__init__(name)
        self.with_float16 = {"allow_fp16_gradients": True}
        rule = "growth_factor", "backoff_factor", "growth_interval"
        self.spelling = {name: name for name in ("init_scale", *rule, "enabled")}
        self.state_keys = {name: name for name in ("scale", *rule)}
        self.state_keys["finite_steps"] = "_growth_tracker"
        self.state_keys["nonfinite_steps"] = "_nonfinite_steps"  # only under a hysteresis
        optim = self.framework.optim
        self.optimizers = {
            "SGD": partial(optim.SGD, lr=0.1, momentum=0.9),
            "foreach Adam": partial(optim.Adam, foreach=True),
            "fused SGD": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
            "fused SGD without momentum": partial(optim.SGD, lr=0.1, fused=True),
            "fused AdamW": partial(optim.AdamW, fused=True),
            "fused Adagrad": partial(optim.Adagrad, fused=True),
        }
        self.closure_optimizers = {
            "SGD": partial(optim.SGD, lr=0.1, momentum=0.9),
            "fused SGD": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
            "Adam": partial(optim.Adam, lr=0.1),
            "Adagrad": partial(optim.Adagrad, lr=0.1),
            "fused AdamW": partial(optim.AdamW, lr=0.1, fused=True),
            "LBFGS": partial(optim.LBFGS, lr=0.5, max_iter=5),
            "LBFGS with line search": partial(
                optim.LBFGS, lr=8.0, max_iter=5, line_search_fn="strong_wolfe"
            ),
        }

    def _dtype(self, dtype):
        return getattr(self.framework, dtype) if isinstance(dtype, str) else dtype

    def tensor(self, values, dtype="float32"):
        if self.is_tensor(values):
            return values
        copy = np.array(values)  # TensorPlay shares an array's memory
        return self.framework.tensor(copy, dtype=self._dtype(dtype))

    def numpy(self, tensor):
        return np.asarray(tensor.detach().tolist(), np.float64)

    def exact_tensor(self, tensor):
        tensor = tensor.detach()
        if tensor.is_sparse:
            return ("sparse", self.exact(tensor._indices()), self.exact(tensor._values()))
        return (str(tensor.dtype), tuple(tensor.shape), repr(tensor.tolist()))

    def expanded(self, value, size):
        return self.tensor([value]).expand(size)

    def through_float16(self, tensor):
        return tensor.half().float()

    def make_parameters(self, *arrays):
        return [self.framework.nn.Parameter(self.tensor(array)) for array in arrays]

    def model(self):
        nn = self.framework.nn
        self.framework.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))

    def clear_gradients(self, optimizer):
        optimizer.zero_grad()

    def sgd(self, parameters, lr=0.1, momentum=0.0, fused=False):
        return self.framework.optim.SGD(parameters, lr=lr, momentum=momentum, fused=fused)

    def adamw(self, parameters, lr=0.1, fused=False):
        return self.framework.optim.AdamW(parameters, lr=lr, fused=fused)

    def owned(self, optimizer):
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def state(self, optimizer):
        return optimizer.state_dict()

    def native(self, monkeypatch):
        return partial(self.framework.amp.GradScaler, "cpu")

    def records(self, scaler):
        return {
            key: (record["stage"], self.exact(record["found_inf_per_device"]))
            for key, record in scaler._per_optimizer_states.items()
        }

    def set_scale(self, scaler, value):
        """Set the scale by ``update``, so a loss must have been scaled before."""
        scaler.update(value)

    def on_accelerator(self, monkeypatch):
        monkeypatch.setattr(self.GradScaler._operations, "on_host", lambda tensor: False)
