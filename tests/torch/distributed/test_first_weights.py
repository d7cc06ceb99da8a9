"""Under DDP, MasterWeights goes on from the first rank's float32 values, as float32 weights do."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradscaler.torch import GradScaler, MasterWeights
from tests.support.all_reduces import CountedAllReduces

STORES = ("float32", "remainder16", "stochastic")
KEYS = {"float32": "master", "remainder16": "remainder", "stochastic": "rounding"}
INF = float("inf")


def make(seed=None):
    """A model, with other weights on each rank, or with those of the same seed."""
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    model = torch.nn.Sequential(torch.nn.Linear(24, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
    model.register_parameter("gain", torch.nn.Parameter(torch.rand(())))  # gets no gradients
    model.register_parameter("empty", torch.nn.Parameter(torch.rand(0, 3)))
    return model


def owned(params, store="remainder16", dtype=torch.float16, **options):
    options = {"lr": 2.0**-9, **options}
    return MasterWeights(torch.optim.AdamW, params, dtype=dtype, store=store, **options)


def replicated(model, **options):
    return DistributedDataParallel(model, find_unused_parameters=True, **options)


def train(ddp, optimizer, dtype=torch.float16, steps=4, overflows=()):
    scaler = GradScaler(init_scale=64.0)
    for step in range(steps):
        optimizer.zero_grad()
        seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(4, 24, generator=seed).to(dtype)
        loss = ddp(inputs).float().square().mean()
        scaler.scale(loss * (INF if step in overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


def wide(model, optimizer):
    return [optimizer.wide(p) for p in model.parameters()]


def as_lists(tensors):
    return [tensor.tolist() for tensor in tensors]


def are_alike(tensors):
    """Whether each tensor is the same on all ranks."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, as_lists(tensors))
    return all(each == gathered[0] for each in gathered)


def trained(store, dtype, seed, overflows):
    """The float32 values before DDP, in it, and after a training; and the 16-bit values."""
    model = make(seed)
    before = as_lists(model.parameters())
    random_seed = dist.get_rank() if seed is None else seed
    optimizer = owned(model, store, dtype, seed=random_seed)
    ddp = replicated(model)
    first = as_lists(wide(model, optimizer))
    with CountedAllReduces() as reduced:
        train(ddp, optimizer, dtype, overflows=overflows)
    after = as_lists(wide(model, optimizer)), as_lists(model.parameters())
    return before, first, after, reduced.count


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("overflows", [(), (0, 1)])
def test_ranks_with_other_first_weights_train_as_if_all_had_the_first_rank_s(
    ranks, store, dtype, overflows
):
    answers = ranks(2).run(trained, store, dtype, None, overflows)
    (before, *first), (other, *second) = answers
    (_, *expected), _ = ranks(2).run(trained, store, dtype, 0, overflows)
    assert before != other
    assert first == second == expected
    if store == "float32" or (store, dtype) == ("remainder16", torch.bfloat16):
        assert first[0] == before
    assert first[-1] == 0


def loaded_by_one_rank(store, saved_by, loader, stop):
    """Whether the ranks are alike in DDP and after a step that moves nothing, and the keys."""
    model = make()
    optimizer = owned(model, store)
    if dist.get_rank() == loader:
        other = make(seed=5)
        saver = (
            torch.optim.AdamW(other.parameters()) if saved_by is None else owned(other, saved_by)
        )
        for _ in range(stop):
            for p in other.parameters():
                p.grad = torch.ones_like(p)
            saver.step()
        model.load_state_dict(other.state_dict())
        optimizer.load_state_dict(saver.state_dict())
    replicated(model)
    in_ddp = are_alike([*model.parameters(), *wide(model, optimizer)])
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    after = are_alike([*model.parameters(), *wide(model, optimizer)])
    keys = set(optimizer.state[model[0].weight]) & set(KEYS.values())
    return in_ddp, after, keys


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("saved_by", [None, *STORES])
@pytest.mark.parametrize(("loader", "stop"), [(0, 2), (1, 0)])
def test_a_checkpoint_that_one_rank_loads_before_ddp_makes_no_difference_between_ranks(
    ranks, store, saved_by, loader, stop
):
    answers = ranks(2).run(loaded_by_one_rank, store, saved_by, loader, stop)
    assert answers == [(True, True, {KEYS[store]})] * 2


def parts_of_a_model(is_copied):
    """Two optimizers, and a parameter that DDP ignores, in a copy or not."""
    model = make()
    model.register_parameter("own", torch.nn.Parameter(torch.rand(5)))
    parts = [*model[0].parameters(), model.own], [*model[2].parameters(), model.gain, model.empty]
    both = model, [owned(part) for part in parts]
    model, optimizers = copy.deepcopy(both) if is_copied else both
    model._ddp_params_and_buffers_to_ignore = ["own"]
    replicated(model)
    of = {
        id(p): each for each in optimizers for group in each.param_groups for p in group["params"]
    }
    values = {name: of[id(p)].wide(p) for name, p in model.named_parameters()}
    own = values.pop("own")
    return are_alike(values.values()), are_alike([own])


@pytest.mark.parametrize("is_copied", [False, True])
def test_all_optimizers_of_a_model_go_on_from_the_first_rank(ranks, is_copied):
    assert ranks(2).run(parts_of_a_model, is_copied) == [(True, False)] * 2


def wrapped_again():
    """Whether ranks are alike in a second DDP, after each has trained by itself."""
    model = make()
    optimizer = owned(model)
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.full_like(p, (-1.0) ** (dist.get_rank() + step))
        optimizer.step()
    replicated(model)
    return are_alike(wide(model, optimizer))


def test_ranks_that_trained_apart_go_on_from_the_first_rank(ranks):
    assert ranks(2).run(wrapped_again) == [True] * 2


def with_deleted_optimizers():
    """As if rank 1 still had an optimizer that was deleted, because it is part of a circle."""
    model = make()
    deleted = owned(model)
    deleted.itself = deleted
    if dist.get_rank() == 0:
        del deleted.itself
    del deleted
    optimizer = owned(model)
    replicated(model)
    return are_alike([*model.parameters(), *wide(model, optimizer)])


def test_an_optimizer_that_was_deleted_is_waited_for_by_no_rank(ranks):
    assert ranks(2).run(with_deleted_optimizers) == [True] * 2


def with_another_store():
    optimizer_of = {0: "float32", 1: "remainder16"}
    model = make()
    optimizer = owned(model, optimizer_of[dist.get_rank()])
    before = wide(model, optimizer)
    try:
        replicated(model)
    except ValueError as error:
        is_unchanged = all(map(torch.equal, before, wide(model, optimizer)))
        return str(error), is_unchanged
    return "", False


def test_other_stores_on_other_ranks_are_refused_on_all(ranks):
    for message, is_unchanged in ranks(2).run(with_another_store):
        assert "another store, on some processes" in message
        assert "construct the model and MasterWeights alike on all" in message
        assert is_unchanged


def with_a_rank_without_batches():
    """Train with DDP's join, where a rank has nothing to do."""
    model = make()
    optimizer = owned(model)
    ddp = DistributedDataParallel(torch.nn.Sequential(*model))
    with ddp.join():
        for step in range(4 * dist.get_rank()):
            optimizer.zero_grad()
            ddp(torch.ones(2, 24).half() * step).float().sum().backward()
            optimizer.step()
    return are_alike(ddp.parameters())


def test_a_rank_without_batches_is_not_waited_for_in_a_step(ranks):
    assert ranks(2).run(with_a_rank_without_batches) == [True] * 2


REFUSED = {
    "the wrapper": lambda ddp: owned(ddp),
    "its model": lambda ddp: owned(ddp.module),
    "a part of its model": lambda ddp: owned(ddp.module[0]),
    "a model around it": lambda ddp: owned(torch.nn.Sequential(ddp)),
    "its parameters": lambda ddp: owned(ddp.module.parameters()),
    "named parameters": lambda ddp: owned(ddp.module.named_parameters()),
    "a group": lambda ddp: owned([{"params": [ddp.module[2].weight]}]),
    "a group with the model": lambda ddp: owned(ddp.module[2].parameters(), model=ddp.module),
    "a group that is added": lambda ddp: owned(torch.nn.Linear(2, 2)).add_param_group(
        {"params": ddp.module.parameters()}
    ),
}


def refused_after_the_wrapper(case):
    ddp = replicated(make())
    try:
        REFUSED[case](ddp)
    except ValueError as error:
        return str(error), {str(p.dtype) for p in ddp.parameters()}
    return "", set()


@pytest.mark.parametrize("case", REFUSED)
def test_float32_parameters_that_ddp_has_wrapped_are_refused(ranks, case):
    for message, dtypes in ranks(2).run(refused_after_the_wrapper, case):
        assert "call MasterWeights with the model before it is wrapped" in message
        assert dtypes == {"torch.float32"}


def accepted_beside_a_wrapper():
    """Parameters of 16 bits in DDP; those that DDP ignores; those of a DDP that was deleted."""
    ddp = replicated(make().half())
    owned(ddp.module)
    model = make()
    model._ddp_params_and_buffers_to_ignore = ["2.weight", "2.bias"]
    ddp = replicated(model)
    owned(ddp.module[2])
    ddp = replicated(make())
    model, ddp.itself = ddp.module, ddp
    del ddp
    optimizer = owned(model)
    ddp = replicated(model)
    train(ddp, optimizer)
    return are_alike(wide(model, optimizer))


def test_parameters_whose_gradients_ddp_goes_on_averaging_are_accepted(ranks):
    assert ranks(2).run(accepted_beside_a_wrapper) == [True] * 2
