import copy
import math

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

from torch.utils.checkpoint import checkpoint  # noqa: E402 # there is no torch, else

from gradscaler.diagnose import locate  # noqa: E402
from gradscaler.diagnose.gradients.module_hooks import Located, ModuleHooks  # noqa: E402
from gradscaler.torch import GradScaler  # noqa: E402

INF = float("inf")


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


class Calls(nn.Module):
    """A model of a given forward method, and of modules by name."""

    def __init__(self, forward, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = forward

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape or (2, 4), dtype=dtype, requires_grad=True)


def located(model, *inputs, backward=True):
    inputs = inputs or (ones(),)

    def closure():
        loss = model(*inputs).sum()
        if backward:
            loss.backward()

    return locate(model, closure)


def named(found):
    return found and (found.kind, found.module)


def test_nothing_is_located_in_a_healthy_model():
    assert located(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))) is None


def test_the_first_module_to_overflow_is_located_and_counted():
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 3, bias=False).half(), nn.ReLU(), nn.ReLU())
    with torch.no_grad():
        model[1].weight.fill_(1.0)
        model[1].weight[1] = 4.0
    inputs = torch.full((2, 4), 8192.0, dtype=torch.float16)
    found = located(model, inputs)
    assert found == Located("1", "forward", "Linear", "float16", 2, 0, 6, 32768.0, 8192.0)
    assert str(found) == "forward of 1 (Linear, float16): 2 inf of 6; largest input 8192"


def test_nan_is_counted_beside_inf():
    model = Calls(
        lambda self, x: self.bad(x),
        bad=Calls(lambda self, x: x * torch.tensor([1.0, INF, math.nan, 2.0])),
    )
    assert (
        str(located(model)) == "forward of bad (Calls, float32): 2 inf, 2 nan of 8; largest input 1"
    )


def test_the_innermost_module_is_named():
    model = nn.Sequential(nn.Sequential(nn.Sequential(Times(), Times(INF))))
    assert named(located(model)) == ("forward", "0.0.1")


def test_a_container_that_overflows_by_itself_is_named():
    block = Calls(lambda self, x: self.after(self.before(x) * 1e39), before=Times(), after=Times())
    assert named(located(nn.Sequential(Times(), block))) == ("forward", "1")


def test_the_model_itself_can_be_it():
    found = located(Calls(lambda self, x: x * INF))
    assert named(found) == ("forward", "")
    assert str(found).startswith("forward of the model (Calls, float32): 8 inf of 8")


def test_a_parameter_that_is_not_finite_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].bias[0] = math.nan
    found = located(model)
    assert (*named(found), found.parameter) == ("forward", "1", "bias")
    assert str(found).endswith("; its bias is not finite")


def test_an_input_is_judged_before_it_is_changed_in_place():
    model = nn.Sequential(Times(), InPlace(), InPlace())
    found = located(model)
    assert (*named(found), found.largest_input) == ("forward", "2", pytest.approx(1e30))


def test_in_place_activations_train_as_ever():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), Times(1, INF))
    assert named(located(model)) == ("backward", "3")


def test_an_input_in_a_keyword_argument_counts():
    inner = Calls(lambda self, *, x: x * 1.0)
    model = Calls(lambda self, x: self.inner(x=x * INF), inner=inner)
    assert named(located(model)) == ("forward", "")


@pytest.mark.parametrize(
    "wrap", [lambda x: (None, [x]), lambda x: {"a": 3, "b": {"c": x}}], ids=["sequences", "mapping"]
)
def test_outputs_in_structures_are_looked_into(wrap):
    bad = Calls(lambda self, x: wrap(x * INF))
    model = Calls(lambda self, x: (self.bad(x), x)[1], bad=bad)
    assert named(located(model)) == ("forward", "bad")


def test_an_output_in_a_dataclass_is_looked_into():
    bad = Calls(lambda self, x: Located(x * INF, *[None] * 8))
    model = Calls(lambda self, x: (self.bad(x), x)[1], bad=bad)
    assert named(located(model)) == ("forward", "bad")


def test_outputs_that_are_no_tensors_are_let_be():
    model = Calls(lambda self, x: (self.shape(x), x)[1], shape=Calls(lambda self, x: "text"))
    assert located(model) is None


def test_a_mask_of_minus_infinities_does_not_hide_an_overflow():
    attention = nn.MultiheadAttention(4, 1, batch_first=True)
    with torch.no_grad():
        attention.in_proj_weight.fill_(1e30)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    model = Calls(lambda self, x: self.layer(x, x, x, attn_mask=mask)[0], layer=attention)
    assert named(located(model, ones(2, 3, 4))) == ("forward", "layer")


def test_a_mask_of_minus_infinities_is_no_finding_in_a_healthy_model():
    layer = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    model = Calls(lambda self, x: self.layer(x, mask), layer=layer)
    assert located(model, ones(2, 3, 4)) is None


def test_a_module_called_twice_is_located_by_its_second_call():
    model = Calls(lambda self, x: self.twice(self.twice(x)), twice=Times(1e25))
    found = located(model)
    assert (*named(found), found.largest_input) == ("forward", "twice", pytest.approx(1e25))


def test_what_autocast_makes_is_judged():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.fill_(1e5)

    def closure():
        with torch.autocast("cpu", torch.float16):
            model(ones())

    found = locate(model, closure)
    assert (*named(found), found.dtype) == ("forward", "1", "float16")


def test_complex_and_empty_outputs_are_judged():
    model = nn.Sequential(Calls(lambda self, x: torch.complex(x, x)), Times(INF))
    assert named(located(model, backward=False)) == ("forward", "1")
    assert located(nn.Sequential(Times()), ones(0, 3)) is None


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # and still in use
def test_a_scripted_module_is_part_of_what_it_is_in():
    scripted = torch.jit.script(nn.Linear(4, 4))
    with torch.no_grad():
        scripted.bias[0] = INF
    assert named(located(nn.Sequential(nn.Sequential(scripted, nn.ReLU())))) == ("forward", "0")


def test_a_sparse_input_is_judged():
    sparse = torch.eye(4).to_sparse().requires_grad_()
    model = Calls(lambda self, x: self.times(torch.sparse.mm(x, ones(4, 4))), times=Times(INF))
    assert named(located(model, sparse)) == ("forward", "times")


# Backward.


def test_the_first_module_to_overflow_in_the_backward_pass_is_located():
    model = nn.Sequential(Times(1, INF), Times(), Times(1, INF), Times())
    found = located(model)
    assert found == Located(
        "2", "backward", "Times", "float32", 8, 0, 8, pytest.approx(math.nan, nan_ok=True), 1.0
    )
    assert str(found) == "backward of 2 (Times, float32): 8 inf of 8; largest gradient 1"


def test_a_forward_overflow_comes_before_a_backward_one():
    assert named(located(nn.Sequential(Times(INF), Times(1, INF)))) == ("forward", "0")


def test_without_a_backward_pass_only_the_forward_pass_is_judged():
    assert located(nn.Sequential(Times(1, INF)), backward=False) is None


def test_of_nested_modules_the_innermost_is_named_backward():
    model = nn.Sequential(nn.Sequential(Times(), nn.Sequential(Times(1, INF))), Times())
    assert named(located(model)) == ("backward", "0.1.0")


def test_a_container_whose_own_operation_overflows_backward_is_named():
    block = Calls(lambda self, x: _Times.apply(self.inner(x), 1, INF), inner=Times())
    assert named(located(nn.Sequential(Times(), block, Times()))) == ("backward", "1")


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_uses_of_one_tensor_the_one_that_overflows_is_named(order):
    def forward(self, x):
        x = x * 1.0
        return sum([branch(x) for branch in [self.fine, self.bad][::order]])

    assert named(located(Calls(forward, fine=Times(), bad=Times(1, INF)))) == ("backward", "bad")


def test_a_module_that_hands_its_input_on_is_not_blamed_for_what_follows():
    model = nn.Sequential(Times(), nn.Identity(), Times(1, INF), nn.Identity(), nn.Identity())
    assert named(located(model)) == ("backward", "2")


def test_a_module_that_hands_its_input_on_beside_another_output_is_not_blamed_either():
    def forward(self, x):
        same, double = self.both(x)
        return _Times.apply(same, 1, INF) + double

    model = Calls(forward, both=Calls(lambda self, x: (x, x * 2)))
    assert named(located(model)) == ("backward", "")


def test_a_weight_whose_gradient_overflows_in_float16_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False)).half()
    inputs = torch.full((64, 4), 1024.0, dtype=torch.float16)

    def closure():
        hidden = model[0](inputs) * 0 + 1024
        (model[1](hidden) * 8.0).sum(dtype=torch.float32).backward()

    with torch.no_grad():
        model[1].weight.fill_(2.0**-8)
    found = locate(model, closure)
    assert (*named(found), found.parameter) == ("backward", "1", "weight")
    assert str(found) == (
        "backward of 1 (Linear, float16), gradient of weight: 8 inf of 8; largest gradient 8"
    )


def test_a_shared_parameter_is_blamed_on_no_module_that_was_given_a_bad_gradient():
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    model = Calls(
        lambda self, x: self.one(x) + self.bad(self.other(x)),
        one=one,
        other=other,
        bad=Times(1, INF),
    )
    assert named(located(model, torch.ones(2, 4))) == ("backward", "bad")


def test_an_overflow_in_scaling_the_loss_is_no_modules():
    model = nn.Linear(4, 1)
    scaler = GradScaler(init_scale=2.0**120)

    def closure():
        scaler.scale(model(ones()).sum() * 1e10).backward()

    assert locate(model, closure) is None


def test_a_scale_that_is_too_large_is_located_where_it_overflows():
    model = nn.Sequential(nn.Linear(4, 4), Times(1, 1e10), nn.Linear(4, 1))
    scaler = GradScaler(init_scale=2.0**120)
    found = locate(model, lambda: scaler.scale(model(ones()).sum()).backward())
    assert named(found) == ("backward", "1")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("factors", "expected"), [((INF, 1), "forward"), ((1, INF), "backward"), ((1, 1), None)]
)
def test_checkpointed_modules_are_judged(reentrant, factors, expected):
    block = nn.Sequential(nn.Linear(4, 4), Times(*factors), nn.Linear(4, 4))
    model = Calls(lambda self, x: checkpoint(self.block, x, use_reentrant=reentrant), block=block)
    assert named(located(model)) == (expected and (expected, "block.1"))


# What is left behind.


def everything(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    return state, gradients, torch.get_rng_state()


def same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one is other is None


def assert_as_before(model, before):
    after = everything(model)
    assert all(same(before[0][name], after[0][name]) for name in before[0])
    assert all(map(same, before[1], after[1]))
    assert same(before[2], after[2])
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def noisy():
    """A model with buffers, random numbers and gradients."""
    layers = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4), Times()
    model = nn.Sequential(*layers)
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
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), layer)
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


def test_what_is_no_module_is_refused_before_the_closure_runs():
    with pytest.raises(TypeError, match="model must be a Module of PyTorch or TensorPlay, got int"):
        locate(3, pytest.fail)


# Watching.


def test_watching_locates_in_a_training_that_runs_anyway():
    model = nn.Sequential(Times(), Times(INF))
    watch = ModuleHooks(model)
    model(ones())
    assert watch.located is None
    watch.start()
    model(ones())
    watch.stop()
    assert named(watch.located) == ("forward", "1")


def test_watching_again_forgets_what_was_located():
    model = nn.Sequential(Times())
    watch = ModuleHooks(model)
    with watch:
        model(torch.full((1,), 1.0) * 2)
        model[0].factors = INF, 1
        model(ones())
    assert watch.located
    model[0].factors = 1, 1
    with watch:
        model(ones())
    assert watch.located is None


def test_watching_hands_every_tensor_on_as_it_is():
    seen = []
    model = nn.Sequential(Calls(lambda self, x: (seen.append(x), x)[1]))
    inputs = ones()
    with ModuleHooks(model):
        outputs = model(inputs)
    assert seen[0] is inputs
    assert outputs is inputs


def test_watching_leaves_no_hooks():
    model = noisy()
    watch = ModuleHooks(model)
    watch.start()
    watch.start()
    model(torch.randn(3, 4))
    watch.stop()
    assert_as_before(model, everything(model))


def test_a_copy_of_a_watched_model_can_be_made_afterwards():
    model = noisy()
    located(model, torch.randn(3, 4))
    copy.deepcopy(model)


@pytest.mark.parametrize("module", [nn.LazyLinear(4), nn.LazyBatchNorm1d()])
def test_a_lazy_module_must_have_been_called_before(module):
    inputs = torch.full((8, 3), 3e38)
    with pytest.raises(ValueError, match="lazy modules: call it once before"):
        locate(module, lambda: module(inputs))
    module(inputs / 3e38)
    assert locate(module, lambda: module(inputs / 3e38)) is None
