"""Where the first Inf or NaN of a step began. A mark names each failure."""

import math
import threading

import numpy as np
import pytest

from gradscaler.diagnose import locate
from tests.support.eager import library
from tests.support.marked_lines import lines_marked_in

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")  # Paddle's
    for message in ("When training, we now always track", "Degrees of freedom")
]

fw, nn = library.framework, library.framework.nn
F = nn.functional
IS_PADDLE = library.name == "paddle"
INF, NAN = math.inf, math.nan
FAILURES = {}
line_of = lines_marked_in(__file__)


def fails(kind, operation):
    """A function from the output of a model to a loss, and what is found in it, at its mark."""

    def add(function):
        FAILURES[function.__name__] = kind, operation, function
        return function

    return add


@fails("forward", "log")
def log_of_0(h):
    return fw.log(F.relu(h - 100)).mean()  # log_of_0


@fails("forward", "exp")
def exp_of_a_large_number(h):
    return (h * 0 + 100).exp().mean()  # exp_of_a_large_number


@fails("forward", "div")
def division_by_0(h):
    zero = h - h
    return (h / zero).mean()  # division_by_0


@fails("forward", "div")
def division_by_a_number(h):
    return (h / 0).mean()  # division_by_a_number


@fails("forward", "div")
def one_by_0(h):
    return (1.0 / (h * 0)).mean()  # one_by_0


@fails("forward", "pow")
def root_of_a_negative_number(h):
    return ((h * 0 - 1) ** 0.5).sum()  # root_of_a_negative_number


@fails("forward", "softmax")
def softmax_of_a_masked_row(h):
    masked = fw.where(fw.ones_like(h) > 0, fw.full_like(h, -INF), h)
    return F.softmax(masked, -1).square().sum()  # softmax_of_a_masked_row


@fails("forward", "log")
def in_place(h):
    zeros = (h * 1.0) * 0.0
    zeros.log_()  # in_place
    return (zeros * 1).sum()


@fails("forward", "astype" if IS_PADDLE else "to")
def cast_to_float16(h):
    large = h * 0 + 1e5
    half = large.astype("float16") if IS_PADDLE else large.half()  # cast_to_float16
    return half.float().mean()


@fails("forward", "add")
def sum_of_two_in_float16(h):
    half = (h * 0 + 60000).half()
    return (half + 60000).float().mean()  # sum_of_two_in_float16


@fails("forward", "normalize")
def direction_of_0(h):
    return F.normalize(h * 0, 2.0, 1, 0.0).sum()  # direction_of_0


@fails("forward", "std")
def deviation_of_one(h):
    return h[0, :1].std()  # deviation_of_one


@fails("forward", "exp")
def softmax_by_hand(h):
    exponentials = (h * 0 + 100).exp()  # softmax_by_hand
    return (exponentials / exponentials.sum(-1, keepdim=True)).sum()


@fails("forward", "cumsum")
def cumulative_sum(h):
    return (h * 0 + 3e38).cumsum(0).sum()  # cumulative_sum


@fails("forward", "einsum")
def products_by_einsum(h):
    h = h * 0 + 1e30
    return fw.einsum("ij,kj->ik", h, h).sum()  # products_by_einsum


@fails("backward", "sqrt")
def root_of_0(h):
    zeros = F.relu(h - 100) if IS_PADDLE else h * 0
    roots = fw.sqrt(zeros)  # root_of_0
    return roots.mean() + h.abs().mean()


@fails("backward", "sqrt")
def root_of_0_beside_others(h):
    roots = (h * 0).sqrt()  # root_of_0_beside_others
    return fw.concat([roots, h], 1).sum()  # in Paddle, a node that can have no hook


@fails("backward", "log")
def log_in_the_other_branch(h):
    logs = (h * 0).log()  # log_in_the_other_branch
    return fw.where(h > INF, logs, h).sum()


class OfOwn(fw.autograd.Function):
    """A function with gradients of its own, which divide by 0."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensor() if IS_PADDLE else context.saved_tensors
        return gradient / (x - x)  # own_gradient


@fails("backward", "div")
def own_gradient(h):
    return OfOwn.apply(h).sum()


@fails("backward", "mul")
def own_hook(h):
    h = h * 1
    h.register_hook(lambda gradient: gradient * INF)  # own_hook
    return h.sum()


HEALTHY = {
    "a healthy step": lambda h: F.mse_loss(h, fw.zeros_like(h)),
    "what is not used": lambda h: ((h * 0).log(), h.mean())[1],
    "a mask in a softmax": lambda h: F.softmax(
        h @ h.t() + fw.triu(fw.full((8, 8), -INF), 1), -1
    ).sum(),
    "a mask by where": lambda h: F.softmax(
        fw.where(h > h.mean(), h, fw.full_like(h, -INF)), -1
    ).sum(),
    "whole numbers and flags": lambda h: (h * (h > 0).int().float()).sum(),
}


class Mixed(nn.Module):
    """A model with moving statistics and random numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = (
            nn.Linear(4, 4),
            (nn.BatchNorm1D if IS_PADDLE else nn.BatchNorm1d)(4),
        )
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))


@pytest.fixture
def model():
    return Mixed()


def batch():
    return library.tensor(np.random.default_rng(0).normal(size=(8, 4)).astype("float32"))


def found_in(model, function, inputs=None):
    inputs = batch() if inputs is None else inputs
    return locate(model, lambda: function(model(inputs)).backward())


@pytest.mark.parametrize("name", FAILURES)
def test_the_operation_and_the_line_are_named(model, name):
    kind, operation, function = FAILURES[name]
    found = found_in(model, function)
    assert (found.kind, found.operation, found.line) == (kind, operation, line_of(name))


@pytest.mark.parametrize("name", [name for name in FAILURES if FAILURES[name][0] == "forward"])
def test_a_result_is_judged_without_a_backward_pass(model, name):
    found = locate(model, lambda: FAILURES[name][2](model(batch())))
    assert (found.operation, found.line) == (FAILURES[name][1], line_of(name))


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in(model, name):
    assert found_in(model, HEALTHY[name]) is None


def test_a_division_tells_its_divisor_and_the_largest_input(model):
    found = found_in(model, lambda h: ((h * 0 + 3) / (h * 0 + 1e-45)).sum())
    assert (found.smallest_divisor, found.largest_input) == (pytest.approx(1e-45, rel=0.5), 3)
    assert found_in(model, division_by_a_number).smallest_divisor == 0


@pytest.mark.parametrize(("exponent", "shift"), [(-0.5, 0.0), (20, 100.0)])
def test_a_power_tells_its_exponent_and_the_largest_base(model, exponent, shift):
    found = found_in(model, lambda h: ((h * 0 + shift) ** exponent).sum())
    assert (found.operation, found.exponent, found.largest_input) == ("pow", exponent, shift)
    assert found_in(model, lambda h: (2 ** (h * 0 + 200)).sum()).exponent is None


def test_an_inf_that_the_closure_reads_as_a_number_is_followed(model):
    def loss(h):
        logs = (h * 0).log().mean()  # read
        assert float(h.mean()) < INF
        return h.mean() * float(logs)

    found = found_in(model, loss)
    assert (found.kind, found.operation, found.line) == ("forward", "log", line_of("read"))
    assert found_in(model, lambda h: h.mean() * INF).operation == "mul"


@pytest.mark.parametrize("number", [np.float32, np.float64, lambda x: x.item(), lambda x: x[()]])
def test_an_inf_that_the_closure_reads_as_a_number_of_numpy_is_followed(model, number):
    def loss(h):
        logs = (h * 0).log().mean()  # read by NumPy
        return h.mean() * number(logs.detach().numpy())

    found = found_in(model, loss)
    assert (found.kind, found.operation, found.line) == ("forward", "log", line_of("read by NumPy"))


@pytest.mark.parametrize("number", [NAN, INF, -INF, np.float32(INF)])
def test_a_number_from_outside_of_the_framework_is_an_input(model, number):
    found = found_in(model, lambda h: h.mean() + number)  # from outside
    assert (found.kind, found.operation, found.line) == ("input", "add", line_of("from outside"))
    assert found.is_number
    assert str(found).endswith("; a number from outside of the framework holds it already")


def test_an_inf_that_is_an_option_is_no_input(model):
    def clipped(h):
        return (h.clip if IS_PADDLE else h.clamp)(-INF, INF).sum()

    assert found_in(model, clipped) is None
    found = found_in(model, lambda h: clipped((h * 0).log()))
    assert (found.kind, found.operation) == ("forward", "log")


def test_a_bad_batch_is_an_input_with_its_rows(model):
    values = batch().numpy().copy()
    values[3, 1] = NAN
    found = found_in(model, fw.mean, library.tensor(values))
    assert (found.kind, found.module, found.rows) == ("input", "first", "row 3 of 8")


def test_a_bad_batch_is_an_input_though_the_loss_is_finite():
    model, values = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), batch().numpy().copy()
    values[3, 1] = NAN  # a ReLU of theirs makes 0 of it
    found = found_in(model, fw.mean, library.tensor(values))
    assert (found.kind, found.module, found.rows) == ("input", "0", "row 3 of 8")


def test_a_bad_parameter_is_named(model):
    values = model.last.weight.detach().numpy().copy()
    values[0, 0] = NAN
    with fw.no_grad():
        model.last.weight.copy_(library.tensor(values))
    found = found_in(model, fw.mean)
    assert (found.bad_parameter, found.type) == ("last.weight", "Linear")


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), ByHand()

    def forward(self, x):
        return self.norm(self.linear(x) * 0)


class ByHand(nn.Module):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x / x.square().mean(-1, keepdim=True).sqrt()  # in a layer


@pytest.mark.filterwarnings("ignore:When training, we now always track:UserWarning")  # Paddle's
def test_bad_statistics_are_named():
    model = nn.Sequential((nn.BatchNorm1D if IS_PADDLE else nn.BatchNorm1d)(4))
    names = ("_mean", "_variance") if IS_PADDLE else ("running_mean", "running_var")
    with fw.no_grad():
        for name in names:
            getattr(model[0], name).copy_(library.tensor(np.full(4, NAN, np.float32)))
    model.eval()
    found = found_in(model, fw.mean)
    assert (found.type, found.bad_parameter) == (type(model[0]).__name__, f"0.{names[0]}")


def test_the_layer_of_an_operation_is_named():
    found = found_in(Normalised(), fw.sum)
    assert (found.module, found.type) == ("norm", "ByHand")
    assert (found.operation, found.line) == ("div", line_of("in a layer"))


def test_an_operation_of_a_layer_of_theirs_has_the_users_line(model):
    found = found_in(model, lambda h: nn.BCEWithLogitsLoss()(h, h * INF))  # a loss of theirs
    assert (found.operation, found.line) == ("mul", line_of("a loss of theirs"))
    large = nn.Linear(4, 4)
    with fw.no_grad():
        large.weight.fill_(3e38)
    found = found_in(model, lambda h: large(h * 0 + 3).mean())  # in a Linear
    assert (found.operation, found.line) == ("matmul", line_of("in a Linear"))


def test_an_overflow_of_the_loss_scale_alone_is_none(model):
    scaler = library.scaler(init_scale=2.0**127)
    loss = fw.mean
    assert locate(model, lambda: scaler.scale(loss(model(batch())) * 0 + 1e5).backward()) is None


def state_of(model):
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    numbers = [None if each is None else each.detach().tolist() for each in tensors]
    return numbers, fw.rand([3]).tolist()


if IS_PADDLE:
    OWN = (fw._C_ops, "log"), (fw.tensor.math, "log"), (fw.base.core.eager, "run_backward")
else:
    OWN = (fw._C, "log"), (fw.Tensor, "log"), (fw.autograd, "_backward")
FUNCTIONS = [*OWN, (fw.Tensor, "__add__"), (fw.Tensor, "backward")]


@pytest.mark.parametrize("name", ["log_of_0", "root_of_0", None])
def test_everything_is_left_as_it_was(model, name):
    model(batch()).mean().backward()
    functions = [vars(owner)[own] for owner, own in FUNCTIONS]
    random = fw.get_rng_state()
    before = state_of(model)
    fw.set_rng_state(random)
    found_in(model, FAILURES[name][2] if name else fw.mean)
    assert state_of(model) == before
    assert [vars(owner)[own] for owner, own in FUNCTIONS] == functions


def test_an_error_of_the_closure_passes_and_leaves_the_framework_as_it_was(model):
    functions = [vars(owner)[own] for owner, own in FUNCTIONS]

    def closure():
        model(batch()).mean().backward()
        raise KeyError("closure")

    with pytest.raises(KeyError, match="closure"):
        locate(model, closure)
    assert [vars(owner)[own] for owner, own in FUNCTIONS] == functions


@pytest.mark.parametrize("name", [*FAILURES, *HEALTHY])
def test_the_bits_are_those_without(model, name):
    model.eval()  # no random numbers
    function = HEALTHY[name] if name in HEALTHY else FAILURES[name][2]
    seen = []

    def closure():
        model.zero_grad()
        loss = function(model(batch()))
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        seen.append([each.detach().numpy().tobytes() for each in (loss, *gradients)])

    closure()
    locate(model, closure)
    assert seen[0] == seen[1]


def test_what_another_thread_computes_is_not_taken_for_what_reads_it(model):
    def closure():
        made = []
        hidden = model(batch())
        thread = threading.Thread(target=lambda: made.append((hidden * 0).log()))
        thread.start()
        thread.join()
        made[0].mean().backward()

    assert locate(model, closure) is None


def test_a_root_of_0_that_is_the_loss_itself_is_named(model):
    found = found_in(model, lambda h: (h * 0).sum().sqrt())  # itself
    assert (found.kind, found.operation, found.line) == ("backward", "sqrt", line_of("itself"))


def test_a_search_in_a_search_and_one_after_it(model):
    inner = []

    def closure():
        inner.append(found_in(Normalised(), fw.sum))
        log_of_0(model(batch())).backward()

    found = locate(model, closure)
    assert inner[0].module == "norm"
    assert found.line == inner[0].line == line_of("in a layer")  # it ran first


def test_no_hook_stays_in_a_graph_that_is_kept(model):
    losses = []
    assert locate(model, lambda: losses.append(root_of_0(model(batch())))) is None
    losses[0].backward()  # after the search
    assert math.isnan(model.first.weight.grad.sum().item())
