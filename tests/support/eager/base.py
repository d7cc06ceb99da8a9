"""The interface of each framework's library, with the parts that need no framework."""

import importlib
from collections.abc import Mapping

import numpy as np

SHAPES = (2, 3), (4,)


def normal(seed, *shapes):
    """Standard normal float32 arrays; no framework's random numbers are used up."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


class Library:
    """One framework.

    Attributes:
        name: the name of its module, and of gradscaler's module for it.
        framework: its module: ``library.framework.no_grad()``, ``nn.utils.clip_grad_norm_``, ...
        GradScaler: gradscaler's class for it.
        places: "host", and "accelerator" if its adapter has code for accelerators alone.
        fused: the values of ``fused`` that its optimizers take.
        dtypes: the dtypes of gradients that it unscales. float16 needs the options
            ``with_float16``.
        optimizers: functions from parameters to an optimizer, by name.
        closure_optimizers: the same for optimizers whose ``step`` takes a closure.
        spelling: its names of the parameters of :meth:`scaler`, by PyTorch's names, and by
            ``hysteresis`` if it can be set. Its getters and setters have these names too.
        state_keys: its keys of a state dict, by the same names, ``scale`` and ``finite_steps``.
    """

    places = ("host",)
    fused = (False,)
    dtypes = ("float16", "bfloat16", "float32", "float64")

    def __init__(self, name):
        self.name = name
        self.with_float16 = {}
        self.framework = importlib.import_module(name)
        self.GradScaler = importlib.import_module(f"gradscaler.{name}").GradScaler

    # Tensors.

    def is_tensor(self, value):
        return isinstance(value, self.framework.Tensor)

    def tensor(self, values, dtype="float32"):
        """A tensor of an array or a nested list; a tensor is returned as it is."""
        raise NotImplementedError

    def numpy(self, tensor):
        """A tensor's values in float64, which can represent every real dtype."""
        raise NotImplementedError

    def exact(self, value):
        """An object that is equal for two values if and only if they are the same to the bit.

        Values are tensors, arrays, and mappings and lists of them.
        """
        if self.is_tensor(value):
            return self.exact_tensor(value)
        if isinstance(value, np.ndarray):
            return (str(value.dtype), value.shape, repr(value.tolist()))
        if isinstance(value, Mapping):
            return {key: self.exact(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.exact(item) for item in value]
        return repr(value)

    def exact_tensor(self, tensor):
        raise NotImplementedError

    def expanded(self, value, size):
        """A tensor of ``size`` elements that are all one number in memory."""
        raise NotImplementedError

    def through_float16(self, tensor):
        """The tensor, cast to float16 and back: its gradients overflow as float16's do."""
        raise NotImplementedError

    # Parameters and gradients.

    def make_parameters(self, *arrays):
        """Parameters of these values, with the same names each time."""
        raise NotImplementedError

    def parameters(self, *shapes, seed=0):
        """Parameters of these shapes, else two of ``SHAPES``; the same each time."""
        return self.make_parameters(*normal(seed, *(shapes or SHAPES)))

    def model(self):
        """Linear(4, 3), Tanh, Linear(3, 1): the same weights each time."""
        raise NotImplementedError

    def backward(self, scaler, parameters, gradients):
        """Run a backward pass whose unscaled gradients are ``gradients``; return the scaled loss.

        A parameter whose gradient is None takes no part in the loss.
        """
        used = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
        scaled = scaler.scale(sum((p * self.tensor(g, p.dtype)).sum() for p, g in used))
        scaled.backward()
        return scaled

    def set_gradients(self, parameters, gradients):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = self.tensor(gradient, parameter.dtype)

    def clear_gradients(self, optimizer):
        """Clear the gradients as a training loop does, such as by ``optimizer.zero_grad()``."""
        raise NotImplementedError

    # Optimizers.

    def sgd(self, parameters, lr=0.1, momentum=0.0, fused=False):
        """An optimizer of parameters or of groups; its ``step`` takes a closure."""
        raise NotImplementedError

    def adamw(self, parameters, lr=0.1, fused=False):
        raise NotImplementedError

    def owned(self, optimizer):
        """The optimizer's parameters, groups flattened."""
        raise NotImplementedError

    def state(self, optimizer):
        """The optimizer's state, by names that do not depend on when it was made."""
        raise NotImplementedError

    def kept(self, optimizer):
        """The parameters and the state, which a skipped step must not change, for ``==``."""
        return {
            "parameters": self.exact(self.owned(optimizer)),
            "state": self.exact(self.state(optimizer)),
        }

    def stepped(self, optimizer):
        """All that a step may change: parameters, state and gradients, for ``==``."""
        gradients = [parameter.grad for parameter in self.owned(optimizer)]
        return {**self.kept(optimizer), "gradients": self.exact(gradients)}

    def everything(self, scaler, *optimizers):
        """All that a call must not change if it raises, for ``==``."""
        state = self.exact(scaler.state_dict())
        return state, self.records(scaler), [self.stepped(optimizer) for optimizer in optimizers]

    # Scalers.

    def scaler(self, **options):
        """gradscaler's scaler, from parameters with PyTorch's names and PyTorch's defaults.

        So in each framework the first scale is 2**16, and the first overflow halves it. With
        ``policy=`` there are no other parameters of the rule.
        """
        return self.GradScaler(**self.spelled(options))

    def native(self, monkeypatch):
        """A function that makes the framework's own scaler, enabled on the CPU.

        It takes the parameters of :meth:`scaler`.
        """
        raise NotImplementedError

    def spelled(self, options):
        return {self.spelling.get(name, name): value for name, value in options.items()}

    def records(self, scaler):
        """A scaler's record of each optimizer in this iteration, for ``==``."""
        raise NotImplementedError

    def scale_of(self, scaler):
        """The loss scale, as a float."""
        return float(np.asarray(scaler.state_dict()[self.state_keys["scale"]]).item())

    def finite_steps_of(self, scaler):
        """The finite steps since the scale last moved."""
        return scaler.state_dict()[self.state_keys["finite_steps"]]

    def set_scale(self, scaler, value):
        """Set the scale by the framework's own call."""
        raise NotImplementedError

    def on_accelerator(self, monkeypatch):
        """Send CPU tensors through the code for accelerators, which reads nothing back."""
        raise NotImplementedError

    def placed(self, **options):
        """A scaler that has scaled a loss, so that gradients may be set by hand."""
        scaler = self.scaler(**options)
        scaler.scale(self.tensor([1.0]))
        return scaler

    @property
    def other_rule(self):
        """Parameters of :meth:`scaler`, each with another value than its default."""
        rule = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3, "hysteresis": 5}
        rule = {name: value for name, value in rule.items() if name in self.spelling}
        return {"init_scale": 512.0, **rule}

    def train(self, scaler, trace="ooo"):
        """Run an iteration for each letter, which overflows at "x"; return the scale after each."""
        (parameter,) = self.make_parameters(np.ones(2, np.float32))
        optimizer = self.sgd([parameter], lr=1e-3)
        scales = []
        for letter in trace:
            self.clear_gradients(optimizer)
            gradient = np.full(2, np.inf if letter == "x" else 2.0**-30, np.float32)
            self.backward(scaler, [parameter], [gradient])
            scaler.step(optimizer)
            scaler.update()
            scales.append(self.scale_of(scaler))
        return scales
