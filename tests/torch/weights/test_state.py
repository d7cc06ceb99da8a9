"""A state dict, a copy and a pickle hold all that the next steps depend on."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from gradscaler.torch import GradScaler, MasterWeights

STORES = ("float32", "remainder16", "stochastic")
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "fused": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "sgd": (torch.optim.SGD, {"lr": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-3}),
}


def make(store, kind="adamw", seed=0, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    optimizer_class, given = OPTIMIZERS[kind]
    options = {**given, **options}
    return model, MasterWeights(optimizer_class, model, store=store, seed=seed, **options)


def run(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        optimizer.step()


def all_of(model, optimizer, exact):
    wide = [optimizer.wide(parameter) for parameter in model.parameters()]
    return exact([wide, model.state_dict(), optimizer.state_dict()])


def through_a_file(states):
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stop", [0, 3])
@pytest.mark.parametrize("model_first", [True, False])
def test_a_resumed_run_has_the_bits_of_one_without_a_stop(store, kind, stop, model_first, exact):
    whole = make(store, kind, seed=7)
    run(*whole, range(6))
    model, optimizer = make(store, kind, seed=7)
    run(model, optimizer, range(stop))
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    resumed = make(store, kind)  # of another seed
    parts = zip(resumed, saved, strict=True)
    for part, state in parts if model_first else reversed(list(parts)):
        part.load_state_dict(state)
    run(*resumed, range(stop, 6))
    assert all_of(*resumed, exact) == all_of(*whole, exact)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("stop", [0, 3])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_goes_on_with_the_same_bits_and_by_itself(store, stop, how, exact):
    both = make(store, seed=3)
    run(*both, range(stop))
    copied = how(both)
    before = all_of(*copied, exact)
    run(*both, range(stop, 6))
    assert all_of(*copied, exact) == before
    run(*copied, range(stop, 6))
    assert all_of(*copied, exact) == all_of(*both, exact)


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), [("float32", "remainder16"), ("remainder16", "float32")]
)
@pytest.mark.parametrize("stop", [0, 3])
def test_the_stores_that_lose_nothing_load_each_other_s_states(
    saved_by, loaded_by, stop, model_first, exact
):
    model, optimizer = make(saved_by)
    run(model, optimizer, range(stop))
    other = make(loaded_by)
    saved = [model.state_dict(), optimizer.state_dict()]
    parts = zip(other, saved, strict=True)
    for part, state in parts if model_first else reversed(list(parts)):
        part.load_state_dict(state)
    assert exact([other[1].wide(p) for p in other[0].parameters()]) == exact(
        [optimizer.wide(p) for p in model.parameters()]
    )
    whole = make(loaded_by)
    run(*whole, range(6))
    run(*other, range(stop, 6))
    assert all_of(*other, exact) == all_of(*whole, exact)


@pytest.mark.parametrize("loaded_by", STORES)
@pytest.mark.parametrize("saved_by", STORES)
def test_every_store_loads_what_every_store_saved(saved_by, loaded_by):
    model, optimizer = make(saved_by)
    run(model, optimizer, range(3))
    other = make(loaded_by)
    other[1].load_state_dict(optimizer.state_dict())
    other[0].load_state_dict(model.state_dict())
    for parameter, own in zip(other[0].parameters(), model.parameters(), strict=True):
        error = (other[1].wide(parameter) - optimizer.wide(own)).abs().max()
        assert error <= 2.0**-11
    run(*other, range(3, 4))
    run(model, optimizer, range(3, 4))
    keys = [set(state) for state in other[1].state_dict()["state"].values()]
    own = {"float32": "master", "remainder16": "remainder", "stochastic": "rounding"}[loaded_by]
    adam = {"step", "exp_avg", "exp_avg_sq"}
    assert keys == [adam | {own}] * 2 + [adam] * 2 + [adam | {own}] * 2
    for parameter, own in zip(other[0].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            other[1].wide(parameter), optimizer.wide(own), rtol=0, atol=2.0**-10
        )


def test_the_state_of_the_wrapped_class_loads_and_stays_float32():
    torch.manual_seed(0)
    native_model = nn.Linear(3, 2)
    native = torch.optim.AdamW(native_model.parameters(), lr=0.5)
    run(native_model, native, range(2))
    model = nn.Linear(3, 2)
    model.load_state_dict(native_model.state_dict())
    optimizer = MasterWeights(torch.optim.AdamW, model, lr=1e-3)
    optimizer.load_state_dict(native.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    for parameter, own in zip(model.parameters(), native_model.parameters(), strict=True):
        for key, value in native.state[own].items():
            loaded = optimizer.state[parameter][key]
            assert loaded.dtype is torch.float32
            assert torch.equal(loaded, value)


def test_a_state_of_other_groups_is_refused_and_changes_nothing(exact):
    model, optimizer = make("remainder16")
    run(model, optimizer, range(2))
    before = all_of(model, optimizer, exact)
    state = optimizer.state_dict()
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(state)
    assert all_of(model, optimizer, exact) == before


def test_hooks_see_and_change_what_is_saved_and_loaded():
    _, optimizer = make("remainder16")
    seen = []

    def saved(_, state_dict):
        seen.append(sorted(state_dict["state"][0]))
        return {**state_dict, "more": 1}

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("saved"))
    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append(state_dict))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert seen == ["saved", ["remainder"], state, "loaded"]
    assert state["more"] == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("flatten", [True, False])
def test_distributed_checkpoints_resume_with_the_same_bits(store, flatten, tmp_path, exact):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    whole = make(store, seed=7)
    run(*whole, range(6))
    model, optimizer = make(store, seed=7)
    run(model, optimizer, range(3))
    optimizer.zero_grad()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if flatten:
        states["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save(states, checkpoint_id=tmp_path)
    resumed = make(store)
    empty = {
        "model": resumed[0].state_dict(),
        "optimizer": get_optimizer_state_dict(*resumed, options=options),
    }
    dcp.load(empty, checkpoint_id=tmp_path)
    if flatten:
        resumed[0].load_state_dict(empty["model"])
        set_optimizer_state_dict(*resumed, empty["optimizer"], options=options)
    else:
        set_state_dict(
            *resumed, model_state_dict=empty["model"], optim_state_dict=empty["optimizer"]
        )
    run(*resumed, range(3, 6))
    assert all_of(*resumed, exact) == all_of(*whole, exact)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs Tensor.grad_dtype")
def test_a_copy_goes_on_with_float32_gradients(copied):
    model, _ = copied(make("remainder16", fp32_gradients=True))
    model[0](torch.ones(2, 6, dtype=torch.float16)).sum().backward()
    assert model[0].weight.grad.dtype is torch.float32


def test_a_scaler_and_a_scheduler_resume_with_it(exact):
    def parts():
        model, optimizer = make("remainder16")
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        return model, optimizer, scheduler, GradScaler(init_scale=64.0, growth_interval=2)

    def go_on(both, steps):
        model, optimizer, scheduler, scaler = both
        for step in steps:
            optimizer.zero_grad()
            inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(inputs).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()

    whole, half, resumed = parts(), parts(), parts()
    go_on(whole, range(6))
    go_on(half, range(3))
    for part, state in zip(
        resumed, through_a_file([part.state_dict() for part in half]), strict=True
    ):
        part.load_state_dict(state)
    go_on(resumed, range(3, 6))
    assert exact([part.state_dict() for part in resumed]) == exact(
        [part.state_dict() for part in whole]
    )


def test_what_a_state_holds_takes_the_bytes_that_are_said():
    for store, size in (("float32", 4), ("remainder16", 2), ("stochastic", 0)):
        model = nn.Linear(1000, 10, bias=False)
        optimizer = MasterWeights(torch.optim.AdamW, model, store=store, lr=1e-3)
        run(model, optimizer, range(1))
        (state,) = optimizer.state_dict()["state"].values()
        large = {key: value.nbytes for key, value in state.items() if value.numel() > 2}
        adam = {"exp_avg": 40_000, "exp_avg_sq": 40_000}
        own = {"float32": "master", "remainder16": "remainder"}.get(store)
        assert large == {**adam, **({own: 10_000 * size} if own else {})}
        assert model.weight.nbytes == 20_000
