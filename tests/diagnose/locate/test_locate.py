"""Which module made the first Inf or NaN: models that are small, and wrong in one place."""

import copy
import inspect
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradscaler.diagnose import Located, locate

# A monitor decides by itself which steps its hooks see; these tests start and stop them.
from gradscaler.diagnose._locate.module_hooks import ModuleHooks
from gradscaler.diagnose._record.located import BadGradient, Given, MadeInModule, MadeOutside
from gradscaler.torch import GradScaler

seq, INF, NAN = nn.Sequential, math.inf, math.nan


class Times(nn.Module):
    """Multiplies its input, and so the gradient of its output, by numbers of their own."""

    def __init__(self, forward=1.0, backward=1.0):
        super().__init__()
        self.factors = forward, backward

    def forward(self, inputs):
        return _Times.apply(inputs, *self.factors)


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs, forward, backward):
        context.factor = backward
        return inputs * forward

    @staticmethod
    def backward(context, grad):
        return grad * context.factor, None, None


class InPlace(nn.Module):
    def forward(self, inputs):
        return inputs.mul_(1e30)


class Keyword(nn.Module):
    def forward(self, *, x):
        return x * 1.0


class Calls(nn.Module):
    """A model with a given forward method, and with modules by name."""

    def __init__(self, forward, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = forward

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def ones(*shape):
    return torch.ones(shape or (2, 4), requires_grad=True)


def located(model, *inputs):
    inputs = inputs or (ones(),)
    return locate(model, lambda: model(*inputs).sum().backward())  # as a closure


def line_of(source, text="closure"):
    """The line of a function or a class that holds a text, as located names it."""
    lines, first = inspect.getsourcelines(source)
    (number,) = (first + n for n, line in enumerate(lines) if text in line)
    return f"{Path(__file__).relative_to(Path.cwd())}:{number}"


def named(found):
    return found and (found.kind, found.module)


def filled(module, value, where=slice(None), parameter="weight"):
    """The module, with some elements of a parameter set."""
    with torch.no_grad():
        getattr(module, parameter)[where] = value
    return module


def one(function):
    """A model of one module, `bad`, whose forward method is given."""
    return Calls(lambda self, x: (self.bad(x), x)[1], bad=Calls(function))


def used_often(self, x):
    x = x * 1.0
    return self.fine(x) + self.bad(x) + self.last(x)


def hands_on_beside_another_output(self, x):
    same, double = self.both(x)
    return _Times.apply(same, 1, INF) + double


def sharing_a_weight():
    """A model of two modules that share their weight; the second is given a bad gradient."""
    modules = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4), "bad": Times(1, INF)}
    modules["second"].weight = modules["first"].weight
    return Calls(lambda self, x: self.first(x) + self.bad(self.second(x)), **modules)


MASK = nn.Transformer.generate_square_subsequent_mask(3)
ATTENTION = filled(nn.MultiheadAttention(4, 1, batch_first=True), 1e30, parameter="in_proj_weight")
MASKED = Calls(lambda self, x: self.layer(x, x, x, attn_mask=MASK)[0], layer=ATTENTION)
LAYER = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True)
TRANSFORMER = Calls(lambda self, x: self.layer(x, MASK), layer=LAYER)
SPARSE = Calls(lambda self, x: self.times(torch.sparse.mm(x, ones(4, 4))), times=Times(INF))
OVERFLOWS = Calls(lambda self, x: self.b(self.a(x) * 1e39), a=Times(), b=Times())
OVERFLOWS_BACKWARD = Calls(lambda self, x: _Times.apply(self.a(x), 1, INF), a=Times())
IN_PLACE = seq(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), Times(1, INF))
HANDED_ON = seq(Times(), nn.Identity(), Times(1, INF), nn.Identity(), nn.Identity())
USED_OFTEN = Calls(used_often, fine=Times(), bad=Times(1, INF), last=Times())
TWO_OUTPUTS = Calls(hands_on_beside_another_output, both=Calls(lambda self, x: (x, x * 2)))
FORWARD = {  # the first whose output is not finite although its inputs are
    "the innermost": ("0.0.1", seq(seq(seq(Times(), Times(INF))))),
    "a container": ("1", seq(Times(), OVERFLOWS)),
    "the model": ("", Calls(lambda self, x: self.a(x=x * INF), a=Keyword())),
    "before a backward overflow": ("0", seq(Times(INF), Times(1, INF))),
    "beside a mask": ("layer", MASKED, ones(2, 3, 4)),
    "of a sparse input": ("times", SPARSE, torch.eye(4).to_sparse().requires_grad_()),
}
BACKWARD = {  # else the first whose gradient is not finite although its output's is
    "after in-place activations": ("3", IN_PLACE),
    "the innermost, backward": ("0.1.0", seq(seq(Times(), seq(Times(1, INF))), Times())),
    "a container, backward": ("1", seq(Times(), OVERFLOWS_BACKWARD, Times())),
    "one of several uses": ("bad", USED_OFTEN),
    "not one that hands its input on": ("2", HANDED_ON),
    "nor beside another output": ("", TWO_OUTPUTS),
    "nor for a shared weight": ("bad", sharing_a_weight(), torch.ones(2, 4)),
}
NOTHING = {
    "in a healthy model": (None, seq(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))),
    "in what is not a tensor": (None, one(lambda self, x: "text")),
    "in a mask": (None, TRANSFORMER, ones(2, 3, 4)),
    "in empty tensors": (None, seq(Times()), ones(0, 3)),
}
LOCATED = {"forward": FORWARD, "backward": BACKWARD, None: NOTHING}


@pytest.mark.parametrize(("kind", "which"), [(kind, w) for kind in LOCATED for w in LOCATED[kind]])
def test_the_module_that_makes_the_first_inf_or_nan_is_located(kind, which):
    module, model, *inputs = LOCATED[kind][which]
    assert named(located(model, *inputs)) == (kind and (kind, module))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # and still in use
def test_a_scripted_module_is_part_of_the_module_that_holds_it():
    scripted = filled(torch.jit.script(nn.Linear(4, 4)), INF, 0, "bias")
    assert named(located(seq(seq(scripted, nn.ReLU())))) == ("forward", "0.0")


def test_without_a_backward_pass_only_the_forward_pass_is_judged():
    overflows_backward = seq(Times(1, INF))
    assert locate(overflows_backward, lambda: overflows_backward(ones())) is None
    model = seq(Calls(lambda self, x: torch.complex(x, x)), Times(INF))
    assert named(locate(model, lambda: model(ones()))) == ("forward", "1")


def test_the_first_module_to_overflow_is_located_and_counted():
    linear = filled(filled(nn.Linear(4, 3, bias=False).half(), 1.0), 4.0, 1)
    model = seq(nn.Identity(), linear, nn.ReLU(), nn.ReLU())
    found = located(model, torch.full((2, 4), 8192.0, dtype=torch.float16))
    place = None, "matmul", line_of(located)
    assert found == Located("1", "forward", "Linear", "float16", 2, 0, 6, 32768.0, 8192.0, *place)
    what = "2 inf of 6; largest input 8192"
    assert str(found) == f"forward of 1 (Linear, float16), matmul at {place[-1]}: {what}"


def test_the_first_module_to_overflow_in_the_backward_pass_is_located_and_counted():
    found = located(seq(Times(1, INF), Times(), Times(1, INF), Times()))
    nothing_else = pytest.approx(NAN, nan_ok=True)
    place = None, "_Times", line_of(_Times, "grad * context.factor")
    counts = 8, 0, 8, nothing_else, 1.0
    assert found == Located("2", "backward", "Times", "float32", *counts, *place)
    what = "8 inf of 8; largest gradient 1"
    assert str(found) == f"backward of 2 (Times, float32), _Times at {place[-1]}: {what}"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: (x * torch.tensor([0.0, 0.0, 1.0, 2.0])) / 0, "4 inf, 4 nan of 8"),
        (lambda x: x * INF, "8 inf of 8; largest input 1"),
    ],
)
def test_the_text_counts_inf_and_nan_and_says_that_it_is_the_model_itself(function, text):
    found = str(located(Calls(lambda self, x: function(x))))
    assert found.startswith("forward of the model (Calls, float32), ")
    assert text in found


def test_a_parameter_that_is_not_finite_is_named():
    found = located(seq(nn.Linear(4, 4), filled(nn.Linear(4, 4), NAN, 0, parameter="bias")))
    assert (*named(found), found.parameter) == ("forward", "1", "bias")
    assert str(found).endswith("; its bias is not finite")


@pytest.mark.parametrize(
    ("model", "module", "largest"),
    [
        (seq(Times(), InPlace(), InPlace()), "2", 1e30),
        (Calls(lambda self, x: self.twice(self.twice(x)), twice=Times(1e25)), "twice", 1e25),
    ],
    ids=["changed in place", "of the second call"],
)
def test_the_input_is_judged_as_it_went_in(model, module, largest):
    found = located(model)
    assert (*named(found), found.largest_input) == ("forward", module, pytest.approx(largest))


def test_what_autocast_makes_is_judged():
    model = seq(nn.Linear(4, 4), filled(nn.Linear(4, 4), 1e5))
    found = locate(model, torch.autocast("cpu", torch.float16)(lambda: model(ones())))
    assert (*named(found), found.dtype) == ("forward", "1", "float16")


def test_a_weight_whose_gradient_overflows_in_float16_is_named():
    second = filled(nn.Linear(4, 2, bias=False), 2.0**-8)
    model = seq(nn.Linear(4, 4), second).half()
    inputs = torch.full((64, 4), 1024.0, dtype=torch.float16)

    def closure():
        hidden = model[0](inputs) * 0 + 1024
        (model[1](hidden) * 8.0).sum(dtype=torch.float32).backward()

    found = locate(model, closure)
    assert (*named(found), found.parameter) == ("backward", "1", "weight")
    assert str(found) == (
        "backward of 1 (Linear, float16), gradient of weight, matmul at "
        f"{line_of(closure, 'hidden) * 8')}: 8 inf of 8; largest gradient 8"
    )


@pytest.mark.parametrize(
    ("loss_factor", "factor", "expected"),
    [(1e-3, 1, None), (1e10, 1, ("backward", None)), (1, 1e10, ("backward", "1"))],
    ids=["in scaling the loss", "in a function", "in a module"],
)
def test_a_scale_that_is_too_large_is_located_where_it_overflows(loss_factor, factor, expected):
    model = seq(nn.Linear(4, 4), Times(1, factor), nn.Linear(4, 1))
    scaler = GradScaler(init_scale=2.0**120)
    loss = 1e5 / loss_factor  # so that the scaled loss always overflows
    found = locate(model, lambda: scaler.scale(model(ones()).sum() * loss_factor + loss).backward())
    assert named(found) == expected


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("factors", "expected"), [((INF, 1), "forward"), ((1, INF), "backward"), ((1, 1), None)]
)
def test_checkpointed_modules_are_judged(reentrant, factors, expected):
    block = seq(nn.Linear(4, 4), Times(*factors), nn.Linear(4, 4))
    model = Calls(lambda self, x: checkpoint(self.block, x, use_reentrant=reentrant), block=block)
    assert named(located(model)) == (expected and (expected, "block.1"))


# The state after a call of locate.


def everything(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    tensors = *model.state_dict().values(), *gradients, torch.get_rng_state()
    return [tensor if tensor is None else tensor.clone() for tensor in tensors]


def has_hooks(model):
    modules = [(m._forward_hooks, m._forward_pre_hooks) for m in model.modules()]
    is_seen = torch.nn.modules.module._has_any_global_hook()
    return is_seen or any(map(any, modules)) or any(p._backward_hooks for p in model.parameters())


def assert_as_before(model, before):
    for old, new in zip(before, everything(model), strict=True):
        assert old is new is None or torch.equal(old, new)
    assert not has_hooks(model)


def noisy():
    """A model with buffers, random numbers and gradients."""
    model = seq(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4), Times())
    model(ones(3, 4)).sum().backward()
    model[3].bias.grad = None
    return model


@pytest.mark.parametrize("factors", [(1, 1), (INF, 1), (1, INF)])
def test_the_model_is_left_as_it_was(factors):
    model = noisy()
    model[-1].factors = factors
    inputs = torch.randn(3, 4)
    before = everything(model)
    kept = [parameter.grad for parameter in model.parameters()]
    located(model, inputs)
    assert_as_before(model, before)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), kept, strict=True))
    copy.deepcopy(model)  # which a hook would prevent


def test_the_model_is_left_as_it_was_by_a_closure_that_raises():
    model = noisy()
    before = everything(model)

    def closure():
        model(torch.randn(3, 4)).sum().backward()
        model.zero_grad()
        raise KeyError("closure")

    with pytest.raises(KeyError, match="closure"):
        locate(model, closure)
    assert_as_before(model, before)


def test_gradients_under_the_hooks_are_those_without():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    model = seq(nn.Linear(4, 4), nn.ReLU(inplace=True), layer)
    inputs, seen = torch.randn(3, 2, 4), []

    def closure():
        for parameter in model.parameters():
            parameter.grad = None
        model(inputs).square().sum().backward()
        seen.append([parameter.grad.clone() for parameter in model.parameters()])

    closure()
    assert locate(model, closure) is None
    for plain, hooked in zip(*seen, strict=True):
        torch.testing.assert_close(hooked, plain, rtol=1e-6, atol=1e-6)


def test_what_is_not_a_module_is_refused_before_the_closure_runs():
    with pytest.raises(TypeError, match=r"must be a Module of .* or a Cell of MindSpore, got int"):
        locate(3, pytest.fail)


@pytest.mark.parametrize("module", [nn.LazyLinear(4), nn.LazyBatchNorm1d()])
def test_a_lazy_module_must_have_been_called_before(module):
    inputs = torch.full((8, 3), 3e38)
    with pytest.raises(ValueError, match="lazy modules: call it once before"):
        locate(module, lambda: module(inputs))
    module(inputs / 3e38)
    assert locate(module, lambda: module(inputs / 3e38)) is None


# Hooks in a training that runs anyway.


def seen_by_hooks(model, is_started=True):
    """The modules of the tensors that hooks see in a call of a model."""
    hooks, seen = ModuleHooks(model), []
    hooks.see_output = lambda tensor, module: seen.append(module)
    if is_started:
        hooks.start()
    model(ones())
    hooks.stop()
    model(ones())
    return seen


def test_hooks_see_outputs_from_their_start_to_their_stop():
    model = seq(Times(), Times())
    assert seen_by_hooks(model, is_started=False) == []
    assert seen_by_hooks(model) == ["0", "1", ""]


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: (None, [x * INF]),
        lambda self, x: {"a": 3, "b": {"c": x * INF}},
        lambda self, x: Located(x * INF, *[None] * 8),
    ],
    ids=["a sequence", "a mapping", "a dataclass"],
)
def test_hooks_see_the_tensors_in_any_structure(function):
    assert seen_by_hooks(one(function)) == ["bad", ""]


def test_hooks_hand_every_tensor_on_as_it_is():
    seen = []
    model = seq(Calls(lambda self, x: (seen.append(x), x)[1]))
    inputs = ones()
    ModuleHooks(model).start()
    outputs = model(inputs)
    assert seen[0] is inputs
    assert outputs is inputs


def test_hooks_that_are_started_twice_are_all_removed():
    model = noisy()
    hooks = ModuleHooks(model)
    hooks.start()
    hooks.start()
    model(torch.randn(3, 4))
    hooks.stop()
    assert_as_before(model, everything(model))


@pytest.mark.parametrize(
    ("module", "kind", "made"),
    [
        ("fc", "forward", MadeInModule),
        ("", "forward", MadeInModule),
        (None, "forward", MadeOutside),
        (None, "input", Given),
        ("fc", "input", Given),
        ("fc", "backward", BadGradient),
    ],
)
def test_a_place_is_of_the_class_of_its_kind(module, kind, made):
    found = Located(module, kind, "Linear", "float16", 1, 0, 6, 2.0, math.nan)
    assert type(found) is made
    assert isinstance(found, Located)
    assert type(replace(found, kind="input")) is Given
    for again in (
        copy.copy(found),
        pickle.loads(pickle.dumps(found)),
        replace(found, line="t.py:1"),
    ):
        assert type(again) is made
        assert replace(again, line=None).is_at(found)
