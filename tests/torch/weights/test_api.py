"""MasterWeights is an optimizer like any other, around any class, for any parameters."""

import copy
import inspect
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import lr_scheduler

from gradscaler import ParameterError
from gradscaler.torch import GradScaler, MasterWeights

STORES = ("float32", "remainder16", "stochastic")
ARGUMENTS = {"Muon": {"lr": 1e-3}, "Adafactor": {"lr": 1e-2}}
CLASSES = [
    each
    for _, each in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(each, torch.optim.Optimizer)
    and each not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
]


def small():
    """Matrices alone: Muon takes nothing else."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False))


def set_gradients(parameters, seed):
    torch.manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(torch.float16).to(parameter.dtype)


@pytest.mark.parametrize("optimizer_class", CLASSES)
@pytest.mark.parametrize("elements", [None, 25, 7])
def test_each_optimizer_of_pytorch_steps_as_on_float32(optimizer_class, elements):
    options = ARGUMENTS.get(optimizer_class.__name__, {"lr": 0.01})
    model, reference = small(), small()
    optimizer = MasterWeights(optimizer_class, model, chunk_elements=elements, **options)
    native = optimizer_class(reference.parameters(), **options)
    for seed in range(4):
        set_gradients(model.parameters(), seed)
        set_gradients(reference.parameters(), seed)
        optimizer.step()
        native.step()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.dtype is torch.float16
        assert torch.equal(optimizer.wide(parameter), other)


def wide_images():
    """A large parameter that stays float32, and one whose memory is in another order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(20), nn.Conv2d(20, 3, 3, bias=False))
    return model.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("store", ["float32", "remainder16"])
@pytest.mark.parametrize("is_same_order", [True, False])
def test_large_parameters_are_stepped_in_spans(monkeypatch, store, is_same_order):
    model, reference = wide_images(), wide_images()
    options = {"chunk_elements": 7, "keep_fp32": ["0"], "lr": 0.01, "weight_decay": 0.1}
    optimizer = MasterWeights(torch.optim.AdamW, model, store=store, **options)
    native = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.1)
    sizes = []
    for seed in range(4):
        for each in (model, reference):
            set_gradients(each.parameters(), seed)
            if is_same_order:
                each[1].weight.grad = each[1].weight.grad.contiguous(
                    memory_format=torch.channels_last
                )
        native.step()
        with monkeypatch.context() as patch:
            step = torch.optim.AdamW.step
            sizes.append([])

            def counting(inner, *args, step=step):
                tensors = [p for group in inner.param_groups for p in group["params"]]
                sizes[-1].append(sum(p.numel() for p in tensors))
                return step(inner, *args)

            patch.setattr(torch.optim.AdamW, "step", counting)
            optimizer.step()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(optimizer.wide(parameter), other)
        assert optimizer.state[parameter]["step"] == 4
    assert sorted(sizes[0]) == [20, 20, 540]
    in_spans = [7, 7, 6] * 2 + [7] * 77 + [1]
    assert sorted(sizes[-1]) == sorted(in_spans if is_same_order else [7, 7, 6] * 2 + [540])


def test_spans_are_rounded_at_random_each_with_its_own_numbers():
    values = []
    for elements in (100, 100, None):
        model = nn.Linear(500, 1, bias=False)
        nn.init.constant_(model.weight, 1 + 2**-12)
        optimizer = MasterWeights(
            torch.optim.Adam, model, store="stochastic", lr=0.0, chunk_elements=elements
        )
        for _ in range(2):
            with torch.no_grad():
                model.weight.fill_(1)
            optimizer.param_groups[0]["lr"] = 2.0**-12
            model.weight.grad = torch.full((1, 500), -1.0, dtype=torch.float16)
            optimizer.step()
        values.append(model.weight.detach().float().flatten())
    first, again, whole = values
    assert torch.equal(first, again)
    assert not torch.equal(first, whole)
    assert not torch.equal(first[:100], first[100:200])
    assert 0.1 < (first > 1).float().mean() < 0.4
    assert optimizer.state[model.weight]["rounding"][1] == 2


@pytest.mark.parametrize("options", [{"momentum": 0.9, "fused": True}, {"momentum": 0.9}])
def test_sgd_skips_its_first_step_and_goes_on(options):
    model, reference = small(), small()
    optimizer = MasterWeights(torch.optim.SGD, model, lr=0.1, **options)
    native = torch.optim.SGD(reference.parameters(), lr=0.1, **options)
    for scaler, each, of in (
        (GradScaler(), optimizer, model),
        (GradScaler(), native, reference),
    ):
        for step in range(3):
            scaler.scale(torch.ones(()))
            set_gradients(of.parameters(), step)
            if step == 0:
                next(of.parameters()).grad[0] = math.inf
            scaler.step(each)
            scaler.update()
            each.zero_grad()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(optimizer.wide(parameter), other)


@pytest.mark.parametrize("store", STORES)
def test_sparse_gradients_step_the_rows_that_have_some(store):
    torch.manual_seed(0)
    model = nn.Embedding(6, 3, sparse=True)
    reference = nn.Embedding(6, 3, sparse=True, _weight=model.weight.detach().clone())
    optimizer = MasterWeights(torch.optim.SparseAdam, model, store=store, lr=0.5)
    native = torch.optim.SparseAdam(reference.parameters(), lr=0.5)
    scaler = GradScaler(init_scale=1024.0)
    rows = torch.tensor([1, 4, 1])
    for each, of in ((optimizer, model), (native, reference)):
        scaler.scale(of(rows).float().sum()).backward()
        scaler.step(each)
        scaler.update()
    error = (optimizer.wide(model.weight) - reference.weight).abs().max()
    assert error <= (2.0**-10 if store == "stochastic" else 0)


def test_batch_norms_stay_wide_by_default_and_other_norms_do_not():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.GroupNorm(1, 2))
    MasterWeights(torch.optim.SGD, model, lr=0.1)
    dtypes = [{tensor.dtype for tensor in layer.state_dict().values()} for layer in model]
    assert dtypes == [{torch.float16}, {torch.float32, torch.int64}, {torch.float16}]
    assert model.eval()(torch.ones(1, 1, 2, 2).half()).dtype is torch.float16


def test_keep_fp32_names_classes_modules_and_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Sequential(nn.Linear(2, 2)))
    kept = (nn.LayerNorm, "0.bias", "2")
    MasterWeights(torch.optim.SGD, model, keep_fp32=kept, lr=0.1)
    wide = [name for name, tensor in model.state_dict().items() if tensor.dtype is torch.float32]
    assert wide == ["0.bias", "1.weight", "1.bias", "2.0.weight", "2.0.bias"]


class Rotary(nn.Module):
    """A layer whose angles are a position times frequencies in a buffer, as in LLaMA."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(0, 64, 2) / 64), persistent=False)
        self.linear = nn.Linear(64, 64)

    def forward(self, x, position):
        cos = (position * self.inv_freq).cos().repeat(2).to(x.dtype)
        return self.linear(x * cos)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_buffers_keep_their_bits_so_that_angles_of_rotary_embeddings_are_right(dtype):
    model = Rotary()
    MasterWeights(torch.optim.SGD, model, dtype=dtype, lr=0.1)
    assert model.linear.weight.dtype is dtype
    exact = 32768 * 1e4 ** -(torch.arange(0, 64, 2).double() / 64)
    assert (32768 * model.inv_freq - exact).abs().max() < 0.02
    assert model(torch.ones(64, dtype=dtype), 32768).dtype is dtype


@pytest.mark.parametrize(
    ("chosen", "narrow"),
    [
        ((), set()),
        (["0", "table"], {"0.inv_freq", "table"}),
        ([Rotary], {"0.inv_freq"}),
        ([nn.Module], {"0.inv_freq", "table", "2.running_mean"}),
    ],
)
def test_buffers_that_are_named_are_cast_unless_they_are_kept(chosen, narrow):
    model = nn.Sequential(Rotary(), nn.BatchNorm1d(2), nn.InstanceNorm1d(2))
    model[2].register_buffer("running_mean", torch.ones(2))
    model.register_buffer("table", torch.ones(3))
    kept = [nn.BatchNorm1d]
    MasterWeights(torch.optim.SGD, model, keep_fp32=kept, cast_buffers=chosen, lr=0.1)
    cast = {name for name, each in model.named_buffers() if each.dtype is torch.float16}
    assert cast == narrow
    assert model[1].num_batches_tracked.dtype is torch.int64


LAYERS = {
    "batch norm": (lambda: nn.BatchNorm2d(4), {}),
    "batch norm without parameters": (lambda: nn.BatchNorm2d(4, affine=False), {}),
    "batch norm that is cast": (
        lambda: nn.BatchNorm2d(4),
        {"keep_fp32": (), "cast_buffers": [nn.Module]},
    ),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), {}),
    "instance norm without statistics": (lambda: nn.InstanceNorm2d(4, affine=True), {}),
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Conv2d(4, 4, 1)),
        {"cast_buffers": [parametrize.ParametrizationList]},
    ),
    "pruned": (lambda: prune.random_unstructured(nn.Conv2d(4, 4, 1), "weight", 0.5), {}),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_with_buffers_takes_and_gives_16_bits(layer):
    make, options = LAYERS[layer]
    model = nn.Sequential(nn.Conv2d(2, 4, 1), make())
    MasterWeights(torch.optim.SGD, model, dtype=torch.bfloat16, lr=0.1, **options)
    for is_training in (True, False):
        outputs = model.train(is_training)(torch.randn(2, 2, 3, 3).bfloat16())
        assert outputs.dtype is torch.bfloat16
        outputs.sum().backward()


def test_kept_names_that_the_model_lacks_are_refused_and_nothing_is_cast():
    model = small()
    with pytest.raises(ParameterError, match=r"keep_fp32 names \['norm'\], and the model has no"):
        MasterWeights(torch.optim.SGD, model, keep_fp32=["0", "norm"], lr=0.1)
    assert model[0].weight.dtype is torch.float32


def test_groups_of_parameters_are_cast_and_keep_their_options():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    first, bias, *norm = model.parameters()
    start = first.detach().clone()
    groups = [
        {"params": [first], "weight_decay": 0.5},
        {"params": [bias, *norm], "lr": 0.5},
    ]
    optimizer = MasterWeights(torch.optim.SGD, groups, model=model, lr=0.25, weight_decay=0.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]
    assert [p.dtype for p in model.parameters()] == [torch.float16] * 2 + [torch.float32] * 2
    first.grad, norm[0].grad = torch.ones_like(first), torch.ones_like(norm[0])
    optimizer.step()
    assert torch.equal(optimizer.wide(first), start - 0.25 * (1 + 0.5 * start))
    assert torch.equal(norm[0], torch.full((3,), 0.5))


def test_parameters_without_their_model_are_cast_and_buffers_are_not():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    start = model[0].weight.detach().clone()
    optimizer = MasterWeights(torch.optim.SGD, model.named_parameters(), lr=0.1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert model[1].running_mean.dtype is torch.float32
    assert torch.equal(optimizer.wide(model[0].weight), start)
    assert optimizer.param_groups[0]["param_names"][0] == "0.weight"


def test_parameters_of_16_bits_are_taken_as_they_are():
    model = small().to(torch.bfloat16)
    start = model[0].weight.detach().float()
    optimizer = MasterWeights(torch.optim.SGD, model, lr=1e-4)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    assert model[0].weight.dtype is torch.bfloat16
    assert torch.equal(optimizer.wide(model[0].weight), start - 1e-4)


def test_without_a_dtype_nothing_is_cast():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    MasterWeights(torch.optim.SGD, model, dtype=None, lr=0.1)
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.float16] * 2


def test_float64_parameters_are_stepped_as_they_are():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    other = nn.Parameter(torch.ones(3))
    optimizer = MasterWeights(torch.optim.SGD, [parameter, other], lr=1e-12)
    scaler = GradScaler(init_scale=1024.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(parameter, torch.full_like(parameter, 1 - 1e-12))
    assert other.dtype is torch.float16


def as_groups(model):
    return [{"params": list(model.parameters())}]


@pytest.mark.parametrize("of", [lambda model: model, nn.Module.parameters, as_groups])
def test_a_float64_model_is_refused_unless_nothing_shall_be_cast(of):
    model = small().double()
    with pytest.raises(ParameterError, match=r"all of these are float64: call model\.float\(\)"):
        MasterWeights(torch.optim.SGD, of(model), lr=0.1)
    optimizer = MasterWeights(torch.optim.SGD, of(model), dtype=None, lr=0.1)
    start = model[0].weight.detach().clone()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    assert torch.equal(model[0].weight, start - 0.1)


@pytest.mark.parametrize("store", STORES)
def test_a_frozen_parameter_is_cast_takes_no_memory_and_may_be_thawed(store):
    model = small()
    model[0].requires_grad_(False)
    optimizer = MasterWeights(torch.optim.SGD, model, store=store, lr=2.0**-5)
    assert model[0].weight.dtype is torch.float16
    assert 0 not in optimizer.state_dict()["state"]
    model[0].requires_grad_(True)
    start = model[0].weight.detach().float()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    expected = start - 2.0**-5
    if store == "stochastic":
        assert (optimizer.wide(model[0].weight) - expected).abs().max() < 2.0**-10
    else:
        assert torch.equal(optimizer.wide(model[0].weight), expected)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_a_group_that_is_added_later_is_cast_and_stepped(optimizer_class):
    model, more = small(), nn.Linear(2, 2, bias=False)
    optimizer = MasterWeights(optimizer_class, model, lr=0.25)
    start = more.weight.detach().clone()
    optimizer.add_param_group({"params": more.parameters(), "lr": 0.5})
    assert more.weight.dtype is torch.float16
    assert torch.equal(optimizer.wide(more.weight), start)
    more.weight.grad = torch.ones_like(more.weight)
    optimizer.step()
    native = nn.Parameter(start.clone())
    native.grad = torch.ones_like(native)
    optimizer_class([native], lr=0.5).step()
    assert torch.equal(optimizer.wide(more.weight), native)


def test_a_group_that_is_refused_is_not_added():
    optimizer = MasterWeights(torch.optim.SGD, small(), lr=0.1)
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    with pytest.raises(ParameterError, match=r"call zero_grad\(\) before"):
        optimizer.add_param_group({"params": [other]})
    assert len(optimizer.param_groups) == 1
    assert other.dtype is torch.float32


def test_what_stays_wide_does_so_in_a_group_that_is_added_later():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    optimizer = MasterWeights(torch.optim.SGD, model[2].parameters(), model=model, lr=0.1)
    model, optimizer = copy.deepcopy((model, optimizer))
    optimizer.add_param_group({"params": model[1].parameters()})
    assert {parameter.dtype for parameter in model[1].parameters()} == {torch.float32}


def test_schedulers_move_the_rate_of_each_group():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = MasterWeights(torch.optim.SGD, [parameter], lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scheduler.step()
    assert torch.equal(optimizer.wide(parameter), torch.full((2,), 1 - 1 - 0.5 - 0.25))
    lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=3)


def test_what_others_set_in_the_parameters_is_not_undone():
    for store in STORES:
        model = small()
        optimizer = MasterWeights(torch.optim.SGD, model, store=store, lr=0.0)
        weight = model[0].weight
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        kept = optimizer.wide(weight)
        with torch.no_grad():
            weight[0] = 3.0
        optimizer.step()
        assert torch.equal(weight[0], torch.full((6,), 3.0).half())
        assert torch.equal(optimizer.wide(weight)[1:], kept[1:])


def test_masters_follow_a_parameter_that_others_have_set_to_the_bit():
    model = small()
    optimizer = MasterWeights(torch.optim.SGD, model, store="float32", lr=0.0)
    with torch.no_grad():
        model[0].weight[0] = 3.0
    assert optimizer.wide(model[0].weight)[0].tolist() == [3.0] * 6


def test_a_class_of_others_sees_all_parameters_at_once():
    class Counting(torch.optim.SGD):
        """Keeps numbers in its groups, as optimizers that compare parameters do."""

        def step(self, closure=None):
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
                group["seen"] = len(group["params"])
            return super().step(closure)

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    optimizer = MasterWeights(Counting, model, lr=0.1)
    for _ in range(3):
        set_gradients(model.parameters(), 0)
        optimizer.step()
    assert (optimizer.param_groups[0]["steps"], optimizer.param_groups[0]["seen"]) == (3, 10)


class WithLastGradient(torch.optim.Optimizer):
    """Steps by this gradient and the last, of which it keeps no copy, and counts its steps."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        count = self.state["count"] = self.state.get("count", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                gradient = parameter.grad
                step = gradient + state.get("last", 0) / count
                state["last"] = gradient
                parameter.sub_(group["lr"] * step)


@pytest.mark.parametrize("resumes", [False, True], ids=["goes on", "resumes"])
@pytest.mark.parametrize("store", STORES[:2])
def test_a_class_of_others_may_keep_gradients_and_state_of_no_parameter(store, resumes):
    reference, model = small(), small()
    optimizers = [
        WithLastGradient(reference.parameters(), lr=0.1),
        MasterWeights(WithLastGradient, model, store=store, lr=0.1),
    ]
    for step in range(4):
        for parameters in (reference.parameters(), model.parameters()):
            set_gradients(parameters, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if resumes:
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(optimizers[1].wide(parameter), expected, rtol=0, atol=1e-6)


class Holding(torch.optim.SGD):
    """Never looks into its groups again."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.held = [each for group in self.param_groups for each in group["params"]]


class Around(torch.optim.SGD):
    """Steps another optimizer."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.held = torch.optim.SGD(self.param_groups, lr)


@pytest.mark.parametrize("optimizer_class", [Holding, Around])
def test_a_class_that_keeps_its_parameters_elsewhere_is_refused(optimizer_class):
    model = small()
    with pytest.raises(ParameterError, match="keeps parameters in its attribute 'held'"):
        MasterWeights(optimizer_class, model, lr=0.1)
    assert model[0].weight.dtype is torch.float32


def test_channels_last_parameters_are_stepped_in_their_order_of_memory():
    torch.manual_seed(0)
    for fused in (False, True):
        for store in ("float32", "remainder16"):
            model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            reference = nn.Conv2d(3, 4, 3)
            reference.load_state_dict(model.state_dict())
            optimizer = MasterWeights(torch.optim.AdamW, model, store=store, lr=0.1, fused=fused)
            native = torch.optim.AdamW(reference.parameters(), lr=0.1, fused=fused)
            for seed in range(3):
                set_gradients(model.parameters(), seed)
                set_gradients(reference.parameters(), seed)
                optimizer.step()
                native.step()
            assert torch.equal(optimizer.wide(model.weight), reference.weight)


def test_a_model_that_is_moved_or_changed_is_stepped_where_it_is():
    model = small()
    optimizer = MasterWeights(torch.optim.SGD, model, lr=0.5)
    for _ in range(2):
        before = optimizer.wide(model[0].weight)
        model[0].weight.grad = torch.ones_like(model[0].weight)
        optimizer.step()
        assert torch.equal(optimizer.wide(model[0].weight), before - 0.5)
        model[0].weight.data = model[0].weight.data.clone()


def test_random_rounding_of_a_parameter_depends_on_no_other_parameter():
    def trained(*others, seed=0):
        parameter = nn.Parameter(torch.linspace(0.1, 1.0, 1000))
        optimizer = MasterWeights(
            torch.optim.SGD, [parameter, *others], store="stochastic", seed=seed, lr=1e-5
        )
        for each in (parameter, *others):
            each.grad = torch.ones_like(each)
        optimizer.step()
        return parameter.tolist()

    alone = trained()
    assert alone == trained(nn.Parameter(torch.ones(77)))
    assert alone != trained(seed=1)


def test_random_rounding_keeps_on_average_what_rounding_loses():
    """Ten steps of 1e-5, each 1/49 of the distance to the next float16."""
    parameter = nn.Parameter(torch.full((100_000,), 0.75))
    optimizer = MasterWeights(torch.optim.SGD, [parameter], store="stochastic", lr=1e-5)
    for _ in range(10):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    moved = 0.75 - parameter.double().mean().item()
    deviation = 2.0**-11 * math.sqrt(10 / 49 / 100_000)
    assert abs(moved - 1e-4) < 5 * deviation


def test_a_parameter_of_another_optimizer_has_no_wide_values_here():
    optimizer = MasterWeights(torch.optim.SGD, small(), lr=0.1)
    with pytest.raises(KeyError, match="not one of this optimizer's parameters"):
        optimizer.wide(nn.Parameter(torch.ones(1)))


class Counted(list):
    """A list that counts the elements that loops take from it."""

    taken = 0

    def __iter__(self):
        for each in super().__iter__():
            self.taken += 1
            yield each


@pytest.mark.parametrize("store", STORES)
def test_the_work_for_a_parameter_does_not_grow_with_their_number(store):
    def taken(count):
        parameters = [nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(count)]
        optimizer = MasterWeights(torch.optim.AdamW, parameters, store=store, lr=0.1)
        set_gradients(parameters, 0)
        group = optimizer.param_groups[0]
        group["params"] = Counted(group["params"])
        optimizer.step()
        for parameter in parameters:
            optimizer.wide(parameter)
        return group["params"].taken / count

    assert taken(200) == taken(10) < 10


def test_an_error_about_a_list_of_parameters_does_not_print_them():
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(1000)]
    with pytest.raises(TypeError, match=r"got list$"):
        MasterWeights(parameters, torch.optim.SGD)


def test_a_step_without_gradients_does_nothing(exact):
    model = small()
    optimizer = MasterWeights(torch.optim.AdamW, model, lr=0.1)
    before = exact([model.state_dict(), optimizer.state_dict()])
    assert optimizer.step() is None
    assert exact([model.state_dict(), optimizer.state_dict()]) == before


def test_step_returns_what_its_closure_returned_and_grad_is_enabled_there():
    model = small()
    optimizer = MasterWeights(torch.optim.SGD, model, lr=0.1)
    assert optimizer.step(lambda: torch.is_grad_enabled()) is True


REFUSED = {
    "a closure": (
        (torch.optim.LBFGS, [nn.Parameter(torch.ones(1))]),
        {},
        ParameterError,
        "LBFGS evaluates a closure repeatedly in each step",
    ),
    "an instance": (
        (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), small()),
        {},
        TypeError,
        "MasterWeights takes the class of an optimizer",
    ),
    "no optimizer": ((dict, small()), {}, TypeError, "takes the class of an optimizer"),
    "dtype": (
        (torch.optim.SGD, small()),
        {"dtype": torch.float64},
        ParameterError,
        "dtype must be one of",
    ),
    "store": (
        (torch.optim.SGD, small()),
        {"store": "int8"},
        ParameterError,
        r"store must be one of \['float32', 'remainder16', 'stochastic'\], got 'int8'",
    ),
    "elements": (
        (torch.optim.SGD, small()),
        {"chunk_elements": 0},
        ParameterError,
        "chunk_elements must be at least 1, got 0",
    ),
    "half an element": (
        (torch.optim.SGD, small()),
        {"chunk_elements": 1.5},
        TypeError,
        "chunk_elements must be an integer",
    ),
    "a list of stores": (
        (torch.optim.SGD, small()),
        {"store": ["float32"]},
        ParameterError,
        "store must be one of",
    ),
    "differentiable": (
        (torch.optim.SGD, small()),
        {"differentiable": True},
        ParameterError,
        "leave out differentiable",
    ),
    "names without a model": (
        (torch.optim.SGD, list(small().parameters())),
        {"keep_fp32": ["0"]},
        ParameterError,
        "give the model, too",
    ),
    "a tensor": (
        (torch.optim.SGD, nn.Parameter(torch.ones(1))),
        {},
        TypeError,
        "params must be an iterable",
    ),
    "classes without a model": (
        (torch.optim.SGD, list(small().parameters())),
        {"keep_fp32": [nn.LayerNorm]},
        ParameterError,
        "give the model, too",
    ),
    "a name without a list": (
        (torch.optim.SGD, small()),
        {"keep_fp32": "0"},
        ParameterError,
        "keep_fp32 must be a collection of names and classes",
    ),
    "a name of a buffer without a list": (
        (torch.optim.SGD, small()),
        {"cast_buffers": "0"},
        ParameterError,
        "cast_buffers must be a collection of names and classes",
    ),
    "a buffer that the model lacks": (
        (torch.optim.SGD, small()),
        {"cast_buffers": ["inv_freq"]},
        ParameterError,
        r"cast_buffers names \['inv_freq'\], and the model has no",
    ),
    "no list of names": (
        (torch.optim.SGD, small()),
        {"keep_fp32": None},
        ParameterError,
        "keep_fp32 must be a collection of names and classes .* got None",
    ),
    "names that can be read only once": (
        (torch.optim.SGD, small()),
        {"keep_fp32": iter(["0"])},
        ParameterError,
        "keep_fp32 must be a collection of names and classes",
    ),
    "a text for a bool": (
        (torch.optim.SGD, small()),
        {"fp32_gradients": "no"},
        ParameterError,
        "fp32_gradients must be True or False, got 'no'",
    ),
    "a number for a bool": (
        (torch.optim.SGD, small()),
        {"fp32_gradients": 1},
        ParameterError,
        "fp32_gradients must be True or False, got 1",
    ),
    "a seed": (
        (torch.optim.SGD, small()),
        {"store": "stochastic", "seed": None},
        ParameterError,
        "seed must be an int, got None",
    ),
    "not a model": (
        (torch.optim.SGD, small()),
        {"model": "gpt"},
        ParameterError,
        "model must be a torch.nn.Module",
    ),
    "two models": (
        (torch.optim.SGD, small()),
        {"model": small()},
        ParameterError,
        "params is a model, and model is another",
    ),
    "no parameters": ((torch.optim.SGD, []), {}, ValueError, "empty parameter list"),
    "an option that the class lacks": (
        (torch.optim.SGD, small()),
        {"betas": (0.9, 0.99)},
        TypeError,
        "betas",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_and_casts_nothing(case):
    (optimizer_class, params), options, error, message = case
    with pytest.raises(error, match=message):
        MasterWeights(optimizer_class, params, **options)
    parameters = params.parameters() if isinstance(params, nn.Module) else params
    assert {parameter.dtype for parameter in parameters} <= {torch.float32}


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([1], TypeError, "takes tensors, got int in params"),
        ([{"lr": 1.0}], ParameterError, 'with its parameters under "params"'),
        ([{"params": {nn.Parameter(torch.ones(1))}}], TypeError, "must have an order, got a set"),
    ],
)
def test_what_holds_no_parameters_in_order_is_refused(params, error, message):
    with pytest.raises(error, match=message):
        MasterWeights(torch.optim.SGD, params, lr=0.1)


def test_a_seed_may_have_64_bits():
    for seed in (-1, 2**64 - 1):
        model = small()
        optimizer = MasterWeights(torch.optim.SGD, model, store="stochastic", seed=seed, lr=0.1)
        set_gradients(model.parameters(), 0)
        optimizer.step()


def test_a_wrapped_optimizer_is_refused_as_the_class_to_wrap():
    with pytest.raises(ParameterError, match="cannot wrap itself"):
        MasterWeights(MasterWeights, small())


def test_gradients_of_parameters_to_cast_are_cast_with_the_model():
    model = small()
    set_gradients(model.parameters(), 0)
    gradient = model[0].weight.grad.clone()
    optimizer = MasterWeights(torch.optim.SGD, model, lr=1.0)
    assert torch.equal(model[0].weight.grad, gradient.half())
    before = optimizer.wide(model[0].weight)
    optimizer.step()
    assert torch.equal(optimizer.wide(model[0].weight), before - gradient)


def test_a_gradient_of_a_parameter_without_its_model_is_refused():
    model = small()
    set_gradients(model.parameters(), 0)
    with pytest.raises(ParameterError, match=r"call zero_grad\(\) before"):
        MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0)


def test_fp32_gradients_need_a_pytorch_that_has_them(no_grad_dtype):
    model = small()
    with pytest.raises(ValueError, match="fp32_gradients needs float32 gradients"):
        MasterWeights(torch.optim.SGD, model, fp32_gradients=True, lr=1.0)
    assert model[0].weight.dtype is torch.float32


def test_hooks_of_a_step_are_called_once():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    optimizer = MasterWeights(torch.optim.SGD, model, lr=0.1, chunk_elements=1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    set_gradients(model.parameters(), 0)
    optimizer.step()
    assert calls == ["before", "after"]
