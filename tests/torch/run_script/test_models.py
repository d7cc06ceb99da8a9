"""The models that are found in memory, and their names."""

import copy
import weakref

import pytest
import torch
from torch import nn

# What the launcher finds is not public.
from gradscaler._run_script.models import models_of


def sgd(*modules):
    parameters = [p for module in modules for p in module.parameters()]
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_model_is_found_whole_by_an_optimizer_of_a_part_of_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    teacher = copy.deepcopy(model)
    assert models_of([sgd(model[1])]) is model
    assert models_of([sgd(teacher)]) is teacher


def named(model):
    return dict(model.named_parameters())


def test_tensors_in_no_module_make_a_model():
    image = torch.ones(2, requires_grad=True)
    unnamed = [torch.ones(2, requires_grad=True)]
    model = models_of([torch.optim.SGD([*unnamed, image], lr=0.1)])
    assert named(model).keys() == {"image", "tensor_0"}
    assert next(model.parameters()) is image


class Clip:
    def __init__(self):
        self.logit_scale = nn.Parameter(torch.ones(()))


def test_tensors_beside_a_model_belong_to_it_under_their_variables_names():
    net, clip, bias = nn.Linear(2, 2), Clip(), nn.Parameter(torch.ones(2))
    groups = [{"params": net.parameters()}, {"params": [clip.logit_scale]}]
    model = models_of([torch.optim.SGD(groups, lr=0.1), torch.optim.SGD([bias], lr=0.1)])
    of_net = {"weight": net.weight, "bias": net.bias}
    assert named(model) == {**of_net, "bias_": bias, "logit_scale": clip.logit_scale}
    assert [module for _, module in model.named_modules()] == [net]
    net.eval()
    assert not model.training


def ids(model):
    return {id(p) for p in model.parameters()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_16_bits_is_found_by_an_optimizer_of_its_copies(dtype):
    net, other = (nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 2)).to(dtype) for _ in range(2))
    copies = [p.detach().float().requires_grad_() for p in net.parameters()]
    model = models_of([torch.optim.SGD(copies, lr=0.1)])
    assert [module for _, module in model.named_modules()] == list(net.modules())
    assert ids(model) == ids(net) | set(map(id, copies))
    with torch.no_grad():
        copies[0].add_(1)  # of a model that is not there any more
    for optimizer in (torch.optim.SGD(copies, lr=0.1), torch.optim.SGD(copies[1:], lr=0.1)):
        assert ids(models_of([optimizer])).isdisjoint(ids(net) | ids(other))


def test_several_models_keep_their_names_beside_tensors():
    netG, netD, penalty = nn.Linear(2, 2), nn.Linear(2, 1), nn.Parameter(torch.ones(2))  # noqa: N806
    model = models_of([sgd(netG), sgd(netD), torch.optim.SGD([penalty], lr=0.1)])
    assert {"netG.weight", "netD.bias", "penalty"} < named(model).keys()


def test_several_models_have_the_names_of_local_variables():
    netG, netD = nn.Linear(2, 2), nn.Linear(2, 1)  # noqa: N806 # as in the example of PyTorch
    assert models_of([sgd(netG), sgd(netD)]) == {"netG": netG, "netD": netD}


class Proxy:
    """An object whose attributes and class cannot be asked for, such as a lazy import."""

    def __getattribute__(self, name):
        raise RuntimeError(name)


def test_objects_of_the_script_are_not_asked_for_anything():
    proxy = Proxy()
    one, two = nn.Linear(2, 2), nn.Linear(2, 1)
    assert models_of([sgd(one), sgd(two)]) == {"one": one, "two": two}
    del proxy


class Trainer:
    def __init__(self):
        self.actor, self.heads = nn.Linear(2, 2), [nn.Linear(2, 1)]

    def found(self):
        return models_of([sgd(self.actor, *self.heads)])


def test_several_models_have_the_names_of_attributes_else_of_classes():
    trainer = Trainer()
    assert trainer.found() == {"actor": trainer.actor, "Linear": trainer.heads[0]}


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap", [compiled, nn.DataParallel, lambda model: nn.DataParallel(compiled(model))]
)
def test_wrappers_are_looked_through(wrap):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    one, two = wrap(first), wrap(second)
    optimizers = [sgd(one), sgd(two)]
    del first, second
    models = models_of(optimizers)
    assert list(models) == ["one", "two"]
    assert [type(each) for each in models.values()] == [nn.Linear, nn.Linear]


def test_a_sharded_model_is_no_wrapper():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.only = nn.Linear(2, 2)

    model = Own()
    model.__class__ = type("FSDPOwn", (Own,), {"__module__": "torch.distributed.fsdp._fully_shard"})
    assert models_of([sgd(model)]) is model


def test_looking_for_names_keeps_no_graph_alive():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    loss = two(one(torch.ones(2))).sum()
    models_of([sgd(one), sgd(two)])
    seen = weakref.ref(loss)
    del loss
    assert seen() is None


def test_a_model_is_found_by_what_an_optimizer_was_made_with_if_an_engine_has_flattened_it():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = sgd(model)
    first = list(model.parameters())
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in first]))
    optimizer.param_groups[0]["params"] = [flat]
    found = models_of([optimizer], [first])
    assert named(found).keys() == {"weight", "bias", "flat"}
    assert [name for name, module in found.named_modules() if module is model] == [""]
    assert models_of([sgd(other)], [first]) is other
