"""Which operation made the first Inf or NaN, and at which line: each failure is marked HERE."""

import gc
import inspect
import math
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gradscaler.diagnose import locate

# What locate() starts before its closure, and stops after it.
from gradscaler.diagnose._graph.search import Search
from gradscaler.torch import GradScaler
from tests.support.watched import is_watched

INF, HALF = math.inf, torch.float16
FAILURES = {}


def fails(kind, operation, module=None, marked=None):
    """A function from the output of a linear layer to a loss; the failure is at its mark."""

    def add(function):
        FAILURES[function.__name__] = kind, operation, module, marked or function, function
        return function

    return add


def line_of(source):
    """Where a function or a class is marked, as a location names it."""
    lines, first = inspect.getsourcelines(source)
    (number,) = (first + n for n, line in enumerate(lines) if line.rstrip().endswith("# HERE"))
    return f"{Path(__file__).relative_to(Path.cwd())}:{number}"


@fails("forward", "exp")
def exp_of_a_large_number(h):
    h = h * 0 + 100
    return h.exp().sum()  # HERE


@fails("forward", "log")
def log_of_0(h):
    logs = (h * 0).relu().log()  # HERE
    return -logs.mean()


@fails("forward", "log")
def log_of_0_times_0(h):
    logs = torch.log((h * 0).relu())  # HERE
    return (logs * torch.zeros(8, 4)).mean()


@fails("forward", "div")
def zero_by_zero(h):
    h = h * 0
    return (h / h).sum()  # HERE


@fails("backward", "sqrt")
def square_root_of_0(h):
    root = (h * 0).sqrt()  # HERE
    return (root + h).sum()


@fails("backward", "sqrt")
def norm_of_0_by_hand(h):
    squares = (h - h).square().sum(-1)
    return squares.sqrt().sum()  # HERE


@fails("forward", "softmax")
def softmax_of_a_masked_row(h):
    keep = torch.ones(8, 4, dtype=torch.bool)
    keep[2] = False
    scores = h.masked_fill(~keep, -INF)
    return scores.softmax(-1).square().sum()  # HERE


@fails("forward", "softmax")
def softmax_of_a_row_masked_by_a_cast(h):
    mask = torch.full((8, 4), -1e9).to(HALF)
    return F.softmax(h + mask, -1).square().sum()  # HERE


@fails("forward", "matmul")
def matmul_in_float16(h):
    h = h.half() * 0 + 300
    return (h @ h.t()).float().mean()  # HERE


@fails("forward", "sum")
def sum_in_float16(h):
    h = h.half() * 0 + 5000
    return h.sum()  # HERE


@fails("forward", "pow")
def power_in_float16(h):
    h = h.half() * 0 + 500
    return (h**2).float().mean()  # HERE


@fails("forward", "div")
def division_by_a_tiny_number(h):
    ones = h.half() * 0 + 1
    return (ones / 1e-6).float().mean()  # HERE


@fails("forward", "var")
@pytest.mark.filterwarnings("ignore:var")
def variance_of_one_element(h):
    first = h[:1]
    return first.var(0).sum()  # HERE


@fails("forward", "log")
def divergence_of_zeros(h):
    target = torch.tensor([0.0, 0.5, 0.5, 0.0]).expand(8, 4)
    logs = target.log()  # HERE
    return (target * (logs - h.log_softmax(-1))).sum()


@fails("forward", "kl_div")
def divergence_from_infinite_logits(h):
    logits = h.log_softmax(-1) + torch.tensor([-INF, 0.0, 0.0, 0.0])
    return F.kl_div(logits, torch.full((8, 4), 0.25), reduction="sum")  # HERE


@fails("forward", "matmul")
def attention_in_float16(h):
    q = h.half() * 0 + 300
    scores = q @ q.transpose(0, 1)  # HERE
    return (scores.softmax(-1) @ q).float().sum()


@fails("forward", "layer_norm")
def layer_norm_of_large_numbers(h):
    h = (h * 0 + 1e30) * torch.tensor([1.0, 2.0, 3.0, 4.0])
    return F.layer_norm(h, (4,)).sum()  # HERE


@fails("forward", "norm")
def norm_in_float16(h):
    h = h.half() * 0 + 60000
    return h.norm(dim=-1).float().sum()  # HERE


@fails("forward", "to")
def cast_to_float16(h):
    h = h * 0 + 1e6
    return h.half().float().sum()  # HERE


@fails("forward", "cross_entropy")
def cross_entropy_of_a_masked_class(h):
    logits = h + torch.tensor([0.0, -INF, 0.0, 0.0])
    return F.cross_entropy(logits, torch.ones(8, dtype=torch.long))  # HERE


@fails("forward", "exp")
def change_in_place(h):
    h = h * 0 + 200
    h.exp_()  # HERE
    return h.sum()


@fails("forward", "mul")
def write_to_a_part(h):
    out = torch.zeros(8, 4)
    out[:, 1] = h[:, 1] * 1e39  # HERE
    return (out + h).sum()


@fails("backward", "div")
def where_hides_the_value_but_not_the_gradient(h):
    h = h.relu() * 0
    inverse = 1 / h  # HERE
    return torch.where(h > 0, inverse, torch.zeros_like(h)).sum()


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        return inputs * 1

    @staticmethod
    def backward(context, grad):
        return grad / 0  # HERE


class Forward(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        return inputs / 0  # HERE

    @staticmethod
    def backward(context, grad):
        return grad


@fails("backward", "Backward", marked=Backward)
def custom_function_backward(h):
    return Backward.apply(h).sum()


@fails("forward", "div", marked=Forward)
def custom_function_forward(h):
    return Forward.apply(h).sum()


def overflowing_block(h):
    h = h * 0 + 200
    return h.exp()  # HERE


def overflowing_block_backward(h):
    return (h * 0).sqrt() + h  # HERE


@fails("forward", "exp", marked=overflowing_block)
def checkpoint_forward(h):
    return checkpoint(overflowing_block, h, use_reentrant=False).sum()


@fails("forward", "exp", marked=overflowing_block)
def reentrant_checkpoint_forward(h):
    return checkpoint(overflowing_block, h, use_reentrant=True).sum()


@fails("backward", "sqrt", marked=overflowing_block_backward)
def checkpoint_backward(h):
    return checkpoint(overflowing_block_backward, h, use_reentrant=False).sum()


@fails("backward", "sqrt", marked=overflowing_block_backward)
def reentrant_checkpoint_backward(h):
    return checkpoint(overflowing_block_backward, h, use_reentrant=True).sum()


@fails("forward", "div")
def gradient_penalty(h):
    inputs = torch.zeros(4, requires_grad=True)
    roots = inputs.abs().sqrt().sum()
    (grad,) = torch.autograd.grad(roots, inputs, create_graph=True)  # HERE
    return grad.square().sum() + h.sum()


@fails("backward", "hook")
def hook_that_divides_by_0(h):
    def normalize(grad):
        return grad / (grad - grad).norm()  # HERE

    h.register_hook(normalize)
    return h.sum()


@fails("forward", "cross_entropy")
def label_smoothing_of_a_masked_class(h):
    logits = h.masked_fill(torch.tensor([False, True, False, False]), -INF)
    return F.cross_entropy(logits, torch.zeros(8, dtype=torch.long), label_smoothing=0.1)  # HERE


@fails("forward", "copy")
def a_number_that_is_written(h):
    costs = h * 1.0
    costs[0, 0] = INF  # HERE
    return costs.sum()


@fails("forward", "to")
def a_mask_of_a_cast_in_a_sum(h):
    penalty = torch.full((4,), -1e9).half()  # HERE
    return (h + penalty).sum()


@fails("forward", "weight_norm")
def weight_norm_of_zeros(h):
    directions = torch.zeros(4, 4)
    return (h @ torch._weight_norm(directions, torch.ones(4, 1))).sum()  # HERE


@fails("forward", "log")
def operator_of_higher_order(h):
    chosen = torch.cond(h.sum() < INF, torch.zeros_like, torch.ones_like, (h.detach(),))
    return (chosen.log() + h).sum()  # HERE


@fails("input", "mul")
def given_nan(h):
    factors = torch.tensor([1.0, math.nan, 1.0, 1.0])
    return (h * factors).sum()  # HERE


def trained(function):
    torch.manual_seed(0)
    layer, inputs = nn.Linear(4, 4), torch.randn(8, 4)
    scaler = GradScaler(init_scale=2.0)
    return layer, lambda: scaler.scale(function(layer(inputs))).backward()


@pytest.mark.filterwarnings("ignore:var..:UserWarning")
@pytest.mark.parametrize("case", FAILURES)
def test_the_operation_and_the_line_are_those_that_failed(case):
    kind, operation, module, marked, function = FAILURES[case]
    found = locate(*trained(function))
    assert (found.kind, found.operation, found.module) == (kind, operation, module)
    assert found.line == line_of(marked)


def divided_by_a_root(h, eps):
    centred = h - h.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()  # HERE


def times_an_inverse_root(h, eps):
    centred = h - h.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)  # HERE


def inverse_root_in_place(h, eps):
    centred = h - h.mean(-1, keepdim=True)
    return centred * (centred.detach().square().mean(-1, keepdim=True) + eps).rsqrt_()  # HERE


def divided_by_a_norm(h, eps):
    return h * 0 / (torch.linalg.vector_norm(h * 0, dim=-1, keepdim=True) + eps)  # HERE


def normalized(h, eps):
    return F.normalize(h * 0, dim=-1, eps=eps)  # HERE


@pytest.mark.parametrize("eps", [1e-8, 1e-12])
@pytest.mark.parametrize("how", ["autocast", "half"])
@pytest.mark.parametrize(
    ("function", "operation", "divisor"),
    [
        (divided_by_a_root, "div", 0.0),
        (times_an_inverse_root, "rsqrt", 0.0),
        (inverse_root_in_place, "rsqrt", None),
        (divided_by_a_norm, "div", 0.0),
        (normalized, "normalize", 0.0),
    ],
)
def test_a_norm_whose_eps_is_0_in_float16_is_located(function, operation, divisor, how, eps):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    inputs = torch.full((8, 4), 2.0**-16)  # whose squares are 0 in float16 too
    nn.init.zeros_(model.bias)
    scaler = GradScaler(init_scale=2.0)
    if how == "half":
        model, inputs = model.half(), inputs.half()

    def closure():
        with torch.autocast("cpu", HALF, enabled=how == "autocast"):
            outputs = function(model(inputs), eps)
        scaler.scale(outputs.float().square().mean()).backward()

    found = locate(model, closure)
    assert (found.kind, found.operation, found.dtype) == ("forward", operation, "float16")
    assert (found.line, found.smallest_divisor) == (line_of(function), divisor)


def test_a_division_by_a_number_says_it():
    model, closure = trained(lambda h: ((h.half() * 0 + 10) / 1e-4).float().sum())
    assert locate(model, closure).smallest_divisor == 1e-4


NEGATIVE = torch.tensor(-0.5)


def without_a_graph(h, power):
    with torch.no_grad():
        weights = power(torch.tensor([0.0, 400.0]))
    return (h.float()[:, :2] * weights).sum()


@pytest.mark.parametrize(
    ("power", "exponent"),
    [
        (lambda x: x**-0.5, -0.5),
        (lambda x: x.pow(exponent=-2), -2.0),
        (lambda x: torch.pow(x, NEGATIVE), -0.5),
        (lambda x: (x + 100) ** 20, 20.0),
        (lambda x: 2 ** (x + 200), None),
        (lambda x: x ** torch.tensor([-1.0, -2.0]), None),
    ],
)
@pytest.mark.parametrize("has_graph", [True, False])
def test_a_power_says_its_exponent_if_it_is_one_number(power, exponent, has_graph):
    def loss(h):
        return power(h.float()[:, :2] * 0).sum() if has_graph else without_a_graph(h, power)

    model, closure = trained(loss)
    found = locate(model, closure)
    assert (found.kind, found.operation, found.exponent) == ("forward", "pow", exponent)
    assert f"; exponent {exponent}" in str(found) or exponent != -0.5


def test_a_number_divided_by_a_tensor_is_a_division_by_it():
    counts = torch.tensor([0.0, 3.0])

    def loss(h):
        weights = 1.0 / counts  # which has no graph
        return (h.float()[:, :2] * weights).sum()

    model, closure = trained(loss)
    found = locate(model, closure)
    assert (found.operation, found.num_inf, found.smallest_divisor) == ("div", 1, 0)


def test_a_division_says_the_smallest_of_its_divisors():
    halves = torch.tensor([1, -(2.0**-24), 1, 1]).half()
    model, closure = trained(lambda h: (h.half() / halves).float().sum())
    found = locate(model, closure)
    assert found.smallest_divisor == 2.0**-24
    assert "; smallest divisor 5.96046e-08" in str(found)


class Module(nn.Module):
    """Calls a function between two layers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, inputs):
        hidden = self.first(inputs)
        return self.last(self.function(hidden))  # HERE


@pytest.mark.parametrize(
    ("case", "block", "marked"),
    [
        ("forward", overflowing_block, overflowing_block),
        ("backward", overflowing_block_backward, overflowing_block_backward),
        ("backward", lambda h: Backward.apply(h) * 2, Backward),
    ],
)
def test_a_module_of_the_operation_is_named(case, block, marked):
    model = nn.Sequential(nn.Linear(4, 4), Module(block))
    found = locate(model, lambda: model(torch.ones(2, 4)).sum().backward())
    assert (found.kind, found.module, found.type) == (case, "1", "Module")
    assert found.line == line_of(marked)


def test_an_operation_of_pytorch_s_own_module_has_the_line_that_called_the_module():
    model = Module(lambda h: h)
    with torch.no_grad():
        model.last.weight.fill_(1e30)
        model.first.weight.fill_(1e30)
    found = locate(model, lambda: model(torch.ones(2, 4)).sum().backward())
    assert (found.module, found.type, found.operation) == ("last", "Linear", "matmul")
    assert found.line == line_of(Module)


def test_a_weight_that_is_not_finite_is_no_operation_s_fault():
    model = nn.Embedding(5, 4)
    with torch.no_grad():
        model.weight[2] = INF
    found = locate(model, lambda: model(torch.tensor([1, 2, 3])).sum().backward())  # HERE
    assert (found.kind, found.module, found.parameter) == ("forward", "", "weight")
    assert found.operation is None
    assert found.line == line_of(test_a_weight_that_is_not_finite_is_no_operation_s_fault)


ZEROS = torch.zeros(8, 4)
HARMLESS = {
    "a mask that a cast makes": lambda h: (h + torch.full((8, 4), -1e9).half().triu(1)).softmax(-1),
    "a mask that a logarithm makes": lambda h: (h + torch.ones(8, 4).tril().log()).softmax(-1),
    "what where leaves out": lambda h: torch.where(h < INF, h, h.detach() / 0),
    "and its gradient": lambda h: torch.where(h < INF, h, torch.where(h < INF, ZEROS, h).sqrt()),
    "what is replaced": lambda h: torch.nan_to_num(h / 0 * 0, 1.0, 1.0, 1.0).detach() + h,
    "what is replaced in place": lambda h: (h.detach() / 0).nan_to_num_(1.0, 1.0, 1.0) + h,
    "memory that nothing has written": lambda h: torch.empty(8, 4).fill_(INF).copy_(h),
    "half of the double where": lambda h: torch.where(
        h > 0, torch.where(h > 0, h, torch.ones_like(h)).log(), torch.zeros_like(h)
    ),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_does_no_harm_is_not_named(case):
    model, closure = trained(lambda h: HARMLESS[case](h).sum())
    assert locate(model, closure) is None
    closure()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # PyTorch's, in tracing
def test_a_compiled_function_is_run_as_it_was_written():
    calls = []

    def backend(graph, _):
        def run(*args):
            calls.append(1)
            return graph(*args)

        return run

    compiled = torch.compile(overflowing_block, backend=backend)
    model, closure = trained(lambda h: compiled(h).sum())
    closure()
    assert calls
    calls.clear()
    assert locate(model, closure).line == line_of(overflowing_block)
    assert not calls


class Counting(TorchFunctionMode):
    """The user's own mode."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **kwargs or {})


def test_what_is_logged_and_is_not_in_the_loss_is_not_named():
    def loss(h):
        ratio = (h / 0).mean().item()
        assert not math.isfinite(ratio)
        return exp_of_a_large_number(h)

    found = locate(*trained(loss))
    assert (found.operation, found.line) == ("exp", line_of(exp_of_a_large_number))


def test_without_a_backward_pass_the_result_is_what_the_closure_returns():
    model = nn.Linear(4, 4)

    def closure(returned):
        hidden = model(torch.ones(2, 4))
        results = {"good": hidden, "bad": hidden / 0}
        return results[returned]

    assert locate(model, lambda: closure("good")) is None
    assert locate(model, lambda: closure("bad")).operation == "div"


def test_a_mode_of_the_user_s_is_left_alone():
    model, closure = trained(log_of_0)
    with Counting() as mode:
        locate(model, closure)
        assert mode.calls
    watch = Search(nn.Identity())
    watch.start()
    with Counting() as mode:
        watch.stop()
        closure()
        assert mode.calls
    assert watch.located is None
    watch.stop()
    assert not is_watched()


def test_a_watch_that_is_dropped_watches_no_more_before_the_collector_runs():
    model, closure = trained(log_of_0)
    watch = Search(model)
    gc.disable()
    try:
        watch.start()
        closure()
        assert is_watched()
        del watch
        assert not is_watched()
    finally:
        gc.enable()


def test_a_gradient_under_watch_has_the_same_bits():
    def gradients(watch):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        inputs = torch.randn(2, 3, 8)
        with watch, torch.autocast("cpu", HALF):
            loss = checkpoint(layer, inputs, use_reentrant=False).float().square().mean()
            loss.backward()
        return [parameter.grad for parameter in layer.parameters()], torch.get_rng_state()

    class Watched(nullcontext):
        def __enter__(self):
            self.watch = Search(nn.Identity())
            self.watch.start()

        def __exit__(self, *_):
            self.watch.stop()

    (plain, state), (watched, state_after) = gradients(nullcontext()), gradients(Watched())
    assert all(map(torch.equal, plain, watched))
    assert torch.equal(state, state_after)
