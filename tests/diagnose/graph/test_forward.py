"""Losses that are not finite, located in their own graphs before the backward pass."""

import math

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import cross_entropy, ctc_loss, nll_loss

from gradscaler.diagnose._graph.watch import GraphWatch
from gradscaler.diagnose._record.source import source_of
from tests.support.marked_lines import lines_marked_in

line_with = lines_marked_in(__file__)


class Net(nn.Module):
    """An encoder, a function without parameters, and a head."""

    def __init__(self, function=torch.tanh):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = Between(function)

    def forward(self, inputs):
        return self.head(self.between(self.encoder(inputs)))


class Between(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, inputs):
        return self.function(inputs)  # between


def located(model, loss_of):
    """The place of the Inf or NaN in the first loss that a watch sees."""
    watch = GraphWatch(model)
    try:
        torch.manual_seed(0)
        loss = loss_of(model, torch.randn(8, 4))
        assert not loss.detach().isfinite()
        watch.see(loss)
        return watch.located
    finally:
        watch.stop()


def exponential(model, x):
    return (1000 * model(x)).exp().mean()  # exponential


def logarithm(model, x):
    chances = model(x).softmax(-1) * torch.zeros(4)
    return -chances.log().mean()  # logarithm


def empty_mask(model, x):
    mask = torch.zeros(8)
    return (model(x).sum(1) * mask).sum() / mask.sum()  # empty_mask


def half_sum(model, x):
    return (model(x).half().abs() + 6e4).sum(0, dtype=torch.float16).float().mean()  # half_sum


def cast(model, x):
    return (model(x) * 1e6).half().float().mean()  # cast


def masked_class(model, x):
    logits = model(x) + torch.tensor([0, 0, 0, -math.inf])
    return cross_entropy(logits, torch.full((8,), 3))  # masked_class


def masked_row(model, x):
    scores = model(x).masked_fill(torch.arange(8)[:, None] == 3, -math.inf)
    return scores.softmax(-1).square().mean()  # masked_row


def test_an_inf_that_a_difference_makes_negative_is_followed_through_unknown_sums():
    """As of an action of 1 under the inverse of tanh, in a density that is weighted."""
    data = torch.full((8, 4), math.inf)

    def loss_of(model, x):
        out = model(x)
        density = -((data - out) ** 2) / 2 - out.exp().log()  # density
        weights = torch.ones(8)
        return -(weights * (density - 1.0).sum(-1)).mean()

    found = located(Net(), loss_of)
    assert (found.kind, found.operation, found.line) == ("input", "sub", line_with("density"))


@pytest.mark.parametrize(
    ("loss_of", "operation"),
    [
        (exponential, "exp"),
        (logarithm, "log"),
        (empty_mask, "div"),
        (half_sum, "sum"),
        (cast, "to"),
        (masked_class, "cross_entropy"),
        (masked_row, "softmax"),
    ],
)
def test_an_operation_outside_of_the_model_is_named_with_its_line(loss_of, operation):
    found = located(Net(), loss_of)
    assert (found.kind, found.module, found.operation) == ("forward", None, operation)
    assert found.line == line_with(loss_of.__name__)


def test_a_line_of_an_installed_package_has_the_users_line_that_calls_it():
    installed = "/lib/site-packages/trainer/losses.py"
    names = {}
    exec(
        compile("def loss(model, x):\n    return (model(x).sum() * 0).log()", installed, "exec"),
        names,
    )
    found = located(Net(), lambda model, x: names["loss"](model, x))  # calls
    assert found.line == f"{installed}:2 (called from {line_with('calls')})"
    source = source_of(found.line)
    assert source.lines[source.number].endswith("# calls")


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda h: (h * 0).log(), "log"),
        (lambda h: h / torch.zeros(4), "div"),
        (lambda h: torch.where(h.abs() < 9, h, 0).pow(-1) * 0 + (0 * h).pow(-1), "pow"),
        (lambda h: (h - 9).sqrt(), "sqrt"),
    ],
)
def test_an_operation_of_a_module_without_parameters_is_in_that_module(function, operation):
    found = located(Net(function), lambda model, x: model(x).square().mean())
    assert (found.kind, found.module, found.type) == ("forward", "between", "Between")
    assert found.operation == operation


def test_a_product_that_overflows_is_in_the_module_of_its_weight():
    model = Net()
    nn.init.constant_(model.head.weight, 60_000.0)

    def loss_of(model, x):
        with torch.autocast("cpu", torch.float16):
            return model(100 * x).float().mean()

    found = located(model, loss_of)
    assert (found.module, found.type, found.operation) == ("head", "Linear", "matmul")
    assert found.dtype == "float16"
    assert found.largest_input == 60_000


@pytest.mark.parametrize("name", ["encoder.weight", "head.bias"])
def test_a_parameter_that_is_not_finite_is_named(name):
    model = Net()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = math.nan
    found = located(model, lambda model, x: model(x).mean())
    assert f"{found.module}.{found.parameter}" == name
    assert (found.kind, found.num_nan, found.operation) == ("forward", 1, None)


def test_a_buffer_that_is_not_finite_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    model[1].running_mean[2] = math.nan
    found = located(model, lambda model, x: model(x).mean())
    assert (found.module, found.parameter) == ("1", "running_mean")


def with_a_bad_batch(model, x):
    x[3, 2] = math.nan
    return model(x).mean()


def with_bad_targets(model, x):
    return (model(x) - torch.full((8, 4), math.nan)).square().mean()  # targets


def with_bad_weights(model, x):
    classes = torch.tensor([1.0, math.inf, 1.0, 1.0])
    return nll_loss(model(x).log_softmax(-1), torch.ones(8, dtype=int), classes)  # weights


@pytest.mark.parametrize(
    ("loss_of", "operation"),
    [(with_a_bad_batch, "matmul"), (with_bad_targets, "sub"), (with_bad_weights, "nll_loss")],
)
def test_a_tensor_that_no_operation_made_is_an_input_of_the_first_that_reads_it(loss_of, operation):
    found = located(Net(), loss_of)
    assert (found.kind, found.operation) == ("input", operation)


def test_an_inf_that_the_forward_pass_leaves_out_is_not_blamed():
    def loss_of(model, x):
        hidden = model(x)
        kept = torch.where(hidden.isfinite(), 1 / (1 / (hidden * 1e-9) * 1e38), 0.0)
        return kept.sum() + (hidden.abs().sum() * 0).log()  # left out

    found = located(Net(), loss_of)
    assert (found.operation, found.line) == ("log", line_with("left out"))


def three_losses(model, x, bad):
    """A loss that is bad has a negative root."""
    distances = model(x).abs()
    one = (distances - 9 * int(bad == 1)).sqrt().mean()  # one
    two = (distances - 9 * int(bad == 2)).sqrt().mean()  # two
    three = (distances - 9 * int(bad == 3)).sqrt().mean()  # three
    return one, two, three


SUMS = {
    "one after the other": lambda a, b, c: a + b + c,
    "weighted": lambda a, b, c: (a + 0.1 * b - c / 8) / 2,
    "a sum of a list": lambda a, b, c: sum([a, b, c]),
    "stacked": lambda a, b, c: torch.stack([a, b, c]).sum(),
}


@pytest.mark.parametrize("how", SUMS)
@pytest.mark.parametrize(("bad", "mark"), [(1, "one"), (2, "two"), (3, "three")])
def test_the_summand_of_a_loss_that_is_not_finite_is_named(how, bad, mark):
    found = located(Net(), lambda model, x: SUMS[how](*three_losses(model, x, bad)))
    assert found.summand == f"{bad} of 3 (mean at {line_with(mark)})"
    assert f"; in summand {bad} of 3" in str(found)


def test_a_bad_parameter_that_all_summands_read_is_in_none_alone():
    model = Net()
    with torch.no_grad():
        model.encoder.weight[0] = math.nan

    def loss_of(model, x):
        outputs = model(x)
        return outputs.mean() + outputs.square().mean()

    found = located(model, loss_of)
    assert (found.parameter, found.summand) == ("weight", None)


def test_of_two_summands_that_are_inf_the_one_that_was_so_first_is_named():
    def loss_of(model, x):
        made = model(x).abs()
        early = made.mul(1e38).mul(1e3)  # early
        late = made.add(1).mul(1e38).mul(1e3)  # late
        return late.mean() + early.mean()

    found = located(Net(), loss_of)
    assert (found.line, found.summand[:6]) == (line_with("early"), "2 of 2")


def test_what_is_added_to_scores_is_not_the_bias_of_the_layer_that_made_them():
    """A bias is added to a view of a product, whose node does not keep the shape of the view."""

    def loss_of(model, x):
        rows = torch.stack([x, x]).transpose(1, 2).contiguous().transpose(1, 2)
        scores = model.head(rows)  # head
        scores = scores + torch.tensor([0.0, 1, 1, 0]) * -math.inf  # a mask that is NaN
        return scores.softmax(-1).square().mean()

    found = located(Net(), loss_of)
    assert (found.kind, found.operation) == ("input", "add")
    assert found.line == line_with("a mask that is NaN")


def test_the_way_to_an_overflow_shows_how_the_numbers_grew():
    model = nn.Linear(4, 4, bias=False).half()
    nn.init.constant_(model.weight, 2.0)

    def loss_of(model, _):
        hidden = model(torch.full((8, 4), 8.0).half())  # 64
        return ((hidden * 2.0) * hidden.exp().clamp(max=32.0) + 8.0).square().float().mean()

    hidden = 4 * 8.0 * 2.0
    sums = hidden * 2.0 * 32.0 + 8.0  # its square is beyond 65504
    found = located(model, loss_of)
    assert found.way.startswith(f"matmul {hidden:.2g} → ")
    assert found.way.endswith(f" → add {sums:.2g} → pow Inf")


@pytest.fixture
def memory_of_nans():
    """What PyTorch allocates and does not write holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_of_nans")
def test_memory_that_an_operation_does_not_write_is_no_input_of_it():
    def loss_of(model, x):
        chances = model(x).log_softmax(-1)[:, None].expand(8, 2, 4)
        lengths = torch.tensor([2, 9])  # nine labels have no alignment with eight places
        return ctc_loss(chances, torch.ones(2, 9, dtype=int), torch.full((2,), 8), lengths)

    found = located(Net(), loss_of)
    assert (found.kind, found.operation) == ("forward", "ctc_loss")
    assert found.largest_input < 100
