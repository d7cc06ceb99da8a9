"""Optimizers written as people write them, each with another way to keep what it needs."""

import math
from collections import deque
from typing import NamedTuple

import torch
from torch.optim import SGD, AdamW, Optimizer


class Simple(Optimizer):
    """Steps each parameter that has a gradient by a method ``update``."""

    def __init__(self, params, lr=0.05, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group, self.state[p])


class Lion(Simple):
    """Steps by signs, and decays ``p.data`` in place."""

    def update(self, p, group, state):
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        p.data.mul_(1 - 0.1 * group["lr"])
        sign = (0.9 * state["exp_avg"] + 0.1 * p.grad).sign()
        p.add_(sign, alpha=-group["lr"])
        state["exp_avg"].mul_(0.99).add_(p.grad, alpha=0.01)


class Adan(Simple):
    """Keeps the last gradient without a copy, and gives parameters other memory."""

    def update(self, p, group, state):
        change = p.grad - state.get("last", p.grad)
        state["m"] = 0.9 * state.get("m", 0) + p.grad + change
        state["n"] = 0.9 * state.get("n", 0) + (p.grad + change) ** 2
        state["last"] = p.grad
        p.data = p.data - group["lr"] * state["m"] / (state["n"].sqrt() + 1e-8)


class Sophia(Simple):
    """Counts steps in an attribute, which its state dict has."""

    steps = 0

    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict):
        state_dict = dict(state_dict)
        self.steps = state_dict.pop("steps")
        super().load_state_dict(state_dict)

    def step(self, closure=None):
        super().step()
        self.steps += 1

    def update(self, p, group, state):
        if not state:
            state.update(m=torch.zeros_like(p), h=torch.zeros_like(p))
        if self.steps % 2 == 0:
            state["h"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        state["m"].lerp_(p.grad, 0.04)
        ratio = (state["m"].abs() / (0.04 * state["h"] + 1e-15)).clamp(max=1)
        p.addcmul_(state["m"].sign(), ratio, value=-group["lr"])


class Lamb(Simple):
    """Scales each step to the norm of its parameter."""

    def update(self, p, group, state):
        if not state:
            state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["step"] += 1
        state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
        state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        corrected = (state["v"] / (1 - 0.99 ** state["step"])).sqrt()
        step = state["m"] / (1 - 0.9 ** state["step"]) / (corrected + 1e-6) + 0.01 * p
        ratio = (p.double() ** 2).sum().sqrt() / (step.double() ** 2).sum().sqrt()
        p.add_(step * ratio, alpha=-group["lr"])


class Muon(Optimizer):
    """Makes groups of its own: matrices, and the rest."""

    def __init__(self, params, lr=0.05):
        params = list(params)
        matrices = [p for p in params if p.ndim > 1]
        others = [p for p in params if p.ndim < 2]
        groups = [{"params": matrices, "is_muon": True}, {"params": others, "is_muon": False}]
        super().__init__(groups, {"lr": lr, "is_muon": False})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 0.05)
                step = buffer / buffer.norm() if group["is_muon"] else buffer.sign()
                if group["is_muon"]:
                    step = 1.5 * step - 0.5 * step @ step.T @ step
                p.add_(step, alpha=-group["lr"])


class Prodigy(Optimizer):
    """Estimates its rate from all parameters, and keeps it in its groups."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr, "d": 1e-3, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        first = self.param_groups[0]
        d, numerator, denominator = first["d"], first["numerator"], 0.0
        trained = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for _, p in trained:
            state = self.state[p]
            if "start" not in state:
                state.update(start=p.detach().clone(), s=torch.zeros_like(p))
            state["s"].add_(p.grad, alpha=d)
            numerator += d * (p.grad.double() * (state["start"] - p)).sum().item()
            denominator += state["s"].double().abs().sum().item()
        d = max(d, min(numerator / denominator, 2 * d)) if denominator else d
        for group in self.param_groups:
            group.update(d=d, numerator=numerator)
        for group, p in trained:
            p.data.add_(p.grad, alpha=-d * group["lr"])


class Adafactor(Simple):
    """Casts 16-bit parameters by itself, and keeps means of rows and columns."""

    def update(self, p, group, state):
        square = p.grad.data.float() ** 2 + 1e-30
        if p.ndim > 1:
            state["rows"] = 0.9 * state.get("rows", 0) + square.mean(-1)
            state["columns"] = 0.9 * state.get("columns", 0) + square.mean(-2)
            rows = state["rows"] / state["rows"].mean(-1, keepdim=True)
            square = rows.unsqueeze(-1) * state["columns"].unsqueeze(-2)
        values = p.data.float() if p.dtype in (torch.float16, torch.bfloat16) else p.data
        values.sub_(group["lr"] * p.grad / square.sqrt())
        if values is not p.data:
            p.data.copy_(values)


class Lookahead(SGD):
    """Goes back to slow weights, which its constructor makes, with gradients or without."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr=lr, momentum=0.9)
        for group in self.param_groups:
            group["count"] = 0
            for p in group["params"]:
                self.state[p]["slow"] = p.data.clone()

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"] if group["count"] % 3 == 0 else ():
                slow = self.state[p].setdefault("slow", p.data.clone())
                slow.add_(p.data - slow, alpha=0.5)
                p.data.copy_(slow)


class ScheduleFree(Simple):
    """Must be told by ``train()`` and ``eval()`` where its parameters shall be."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr, is_training=False, steps=0)

    def train(self):
        self._move(to_training=True, weight=0.1)

    def eval(self):
        self._move(to_training=False, weight=1 - 1 / 0.9)

    @torch.no_grad()
    def _move(self, to_training, weight):
        for group in self.param_groups:
            for p in group["params"] if group["is_training"] is not to_training else ():
                if "z" in self.state[p]:
                    p.lerp_(end=self.state[p]["z"], weight=weight)
            group["is_training"] = to_training

    def step(self, closure=None):
        for group in self.param_groups:
            if not group["is_training"]:
                raise RuntimeError("call optimizer.train() before you step")
            group["steps"] += 1
        super().step()

    def update(self, p, group, state):
        z, weight = state.setdefault("z", p.detach().clone()), 1 / group["steps"]
        p.lerp_(end=z, weight=weight)
        p.add_(p.grad, alpha=group["lr"] * (0.9 * (1 - weight) - 1))
        z.sub_(p.grad, alpha=group["lr"])


class ByPlace(Simple):
    """Keeps its buffers in a list of each group."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            buffers = group.setdefault("buffers", [torch.zeros_like(p) for p in group["params"]])
            for p, buffer in zip(group["params"], buffers, strict=True):
                if p.grad is not None:
                    buffer.mul_(0.5).add_(p.grad)
                    p.sub_(buffer, alpha=group["lr"])


class ByKey(Simple):
    """Keeps its buffers in a dict of its own, and rates in attributes of parameters."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.buffers = {}

    def update(self, p, group, state):
        buffer = self.buffers.setdefault(p, torch.zeros_like(p))
        buffer.mul_(0.5).add_(p.grad)
        p.sub_(buffer, alpha=group["lr"] * getattr(p, "rate", 1.0))


class SetsMemory(Simple):
    """Decays all parameters, also without gradients, by ``set_``, and keeps the old memory."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                new = p.detach() * 0.99 - group["lr"] * gradient
                new += 0.1 * (p.detach() - state.get("old", p.detach()))
                state["old"] = p.detach()
                with torch.no_grad():
                    p.set_(new)


class History(Simple):
    """Keeps the last gradients of all parameters, without copies, in attributes."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.past, self.first = deque(maxlen=3), None

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.past.append([p.grad for p in parameters])
        for i, p in enumerate(parameters):
            gradients = [each[i] for each in self.past if len(each) > i and each[i] is not None]
            if gradients:
                p.sub_(sum(gradients) / len(gradients), alpha=self.param_groups[0]["lr"])
        if self.first is not None:
            parameters[0].sub_(self.first, alpha=0.01)
        self.first = parameters[0].grad


class Cautious(AdamW):
    """Takes only the part of a step that goes against the gradient."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr=lr)

    def step(self, closure=None):
        before = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}
        super().step()
        for p, old in before.items():
            if p.grad is not None:
                with torch.no_grad():
                    p.copy_(torch.where((p - old) * p.grad < 0, p, old))


class AdaBelief(Simple):
    """Makes all state in its constructor, also one of no parameter, and replaces its tensors."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.state["all"] = {"steps": 0}
        for group in self.param_groups:
            group["is_made"] = True
            for p in group["params"]:
                self.state[p] = {"m": torch.zeros_like(p), "s": torch.zeros_like(p)}

    def step(self, closure=None):
        self.state["all"]["steps"] += 1
        super().step()

    def update(self, p, group, state):
        state["m"] = 0.9 * state.get("m", 0) + 0.1 * p.grad
        state["s"] = 0.99 * state.get("s", 0) + 0.01 * (p.grad - state["m"]) ** 2
        rate = group["lr"] / math.sqrt(self.state["all"]["steps"])
        p -= rate * state["m"] / (state["s"].sqrt() + 1e-8)


class Foreach(Simple):
    """Steps all parameters of a group in one call."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p].setdefault("buffer", torch.zeros_like(p)) for p in parameters]
            if parameters:
                torch._foreach_mul_(states, 0.9)
                torch._foreach_add_(states, [p.grad for p in parameters])
                torch._foreach_add_(parameters, states, alpha=-group["lr"])


class GaLore(Simple):
    """Has state in objects and in nested lists."""

    class Projection:
        def __init__(self, gradient):
            self.rows = gradient[:2].clone()

    def update(self, p, group, state):
        if not state:
            state["projection"], state["last"] = self.Projection(p.grad), [[p.grad]]
        step = p.grad + 0.1 * state["last"][0][0]
        step[:2] -= 0.1 * state["projection"].rows
        state["last"][0][0] = p.grad
        p.add_(step, alpha=-group["lr"])


class NovoGrad(Simple):
    """Keeps a number for each parameter by its ``id``."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.squares = {}

    def update(self, p, group, state):
        square = (p.grad.double() ** 2).sum().item()
        self.squares[id(p)] = 0.9 * self.squares.get(id(p), 0.0) + 0.1 * square
        p.sub_(p.grad / math.sqrt(self.squares[id(p)] + 1e-8), alpha=group["lr"])


class Centralized(SGD):
    """Replaces gradients in its step, and takes only parameters that require them."""

    def __init__(self, params, lr=0.05):
        chosen = [p for p in params if p.requires_grad]
        super().__init__(chosen, lr=lr, momentum=0.9, nesterov=True)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.ndim > 1:
                    p.grad = p.grad - p.grad.mean(1, keepdim=True)
        super().step()


class Counting(Simple):
    """Steps by a count of its own, also in steps without gradients, which a hook saves."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.count = 0
        self.register_state_dict_post_hook(lambda own, saved: {**saved, "count": own.count})

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "count"})

    def step(self, closure=None):
        self.count += 1
        super().step()

    def update(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"] / self.count)


class Pair(NamedTuple):
    """What :class:`Pairs` keeps of a step."""

    parameter: torch.Tensor
    gradient: torch.Tensor


class Note:
    """An object that holds a pair."""

    def __init__(self, pair):
        self.pair = pair


class Pairs(Simple):
    """Keeps gradients without copies, in objects and tuples with names."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.notes = {}

    def update(self, p, group, state):
        for note in self.notes.get(p, []):
            p.sub_(note.pair.gradient, alpha=0.5 * group["lr"])
        p.sub_(p.grad, alpha=group["lr"])
        self.notes[p] = [Note(Pair(p, p.grad)), *self.notes.get(p, [])][:2]


KINDS = [
    each
    for each in list(globals().values())
    if isinstance(each, type)
    and issubclass(each, Optimizer)
    and each.__module__ == __name__
    and each is not Simple
]
# What natively loses on resume what they keep in attributes.
FORGETFUL = {ByKey, History, NovoGrad, Pairs}
