"""Arguments of PyTorch's scaler that Paddle's lacks: nested losses, a device, a new scale."""

import collections
import math

import pytest

from gradscaler import DynamicScale, FixedScale
from tests.support.eager import library

NATIVE = library.framework.amp.GradScaler
RULE = ["growth_factor", "backoff_factor", "growth_interval"]


@pytest.fixture
def one():
    return library.tensor(1.0)


@pytest.fixture
def zero():
    return library.tensor(0.0)


# The device.


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(library.framework.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize("device", [{}, {"device": "cpu"}, {"device": "cuda", "enabled": False}])
def test_cuda_is_not_asked_for_unless_it_is_named_and_enabled(device, recwarn):
    assert library.GradScaler(**device).is_enabled() == device.get("enabled", True)
    assert recwarn.list == []


@pytest.mark.usefixtures("without_cuda")
def test_cuda_without_cuda_warns_where_it_was_called_and_disables():
    with pytest.warns(UserWarning, match=r"CUDA is not available\.") as ours:
        scaler = library.GradScaler("cuda")
    with pytest.warns(UserWarning, match="CUDA is not available") as theirs:
        native = NATIVE("cuda")
    assert scaler.is_enabled() is native.is_enabled() is False
    assert [each.filename for each in ours] == [__file__]
    assert ours[0].category is theirs[0].category
    assert str(ours[0].message).startswith(str(theirs[0].message))


# Scaling.


def test_nested_lists_and_tuples_keep_their_structure(one, native):
    ours, theirs = (make().scale([one, (one, [one])]) for make in (library.scaler, native))
    assert library.exact(ours) == library.exact(theirs)
    assert list(map(type, ours)) == list(map(type, theirs)) == [type(one), tuple]


def test_a_namedtuple_keeps_its_type(one, zero):
    losses = collections.namedtuple("losses", "real fake")
    scaled = library.scaler(init_scale=8.0).scale(losses(one, zero))
    assert type(scaled) is losses
    assert (scaled.real.item(), scaled.fake.item()) == (8.0, 0.0)


def test_any_other_iterable_becomes_an_iterator(one, zero):
    scaled = library.scaler(init_scale=8.0).scale(loss for loss in (one, zero))
    assert next(scaled).item() == 8.0
    assert next(scaled).item() == 0.0


@pytest.mark.parametrize("outputs", [1.0, None, "loss", b"loss", {"loss": library.tensor(1.0)}])
@pytest.mark.parametrize("nested", [False, True])
def test_what_is_not_a_tensor_is_refused(outputs, nested, one):
    with pytest.raises(ValueError, match=f"Tensors, got {type(outputs).__name__}$"):
        library.scaler().scale([one, outputs] if nested else outputs)


# Getters and setters.


def test_the_scale_s_getter_gives_what_the_constructor_took():
    assert library.GradScaler("cpu", *library.other_rule.values()).get_scale() == 512.0


@pytest.mark.parametrize("name", RULE)
def test_a_fixed_scale_has_nothing_to_set(name):
    with pytest.raises(TypeError, match=rf"FixedScale\(.*has no {name} to set"):
        getattr(library.scaler(policy=FixedScale(8.0)), f"set_{name}")(3)


# A new scale.


@pytest.mark.parametrize("new_scale", [4.0, 4, library.tensor(4.0), library.tensor([4.0])])
def test_update_takes_a_new_scale_and_leaves_the_growth_tracker(new_scale, scaler, one):
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 5})
    scaler.scale(one)
    scaler.update(new_scale)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4.0, 5)


def test_a_new_scale_given_as_a_tensor_is_copied(scaler, one):
    scaler.scale(one)
    new_scale = library.tensor(4.0)
    scaler.update(new_scale)
    new_scale.fill_(5.0)
    assert scaler.get_scale() == 4.0


def test_a_new_scale_under_a_fixed_scale_is_kept():
    scaler = library.placed(policy=FixedScale(8.0))
    scaler.update(4.0)
    assert library.train(scaler, "ox") == [4.0, 4.0]


BAD_TENSORS = [library.tensor([8.0, 8.0]), *library.make_parameters(library.tensor(8.0))]


@pytest.mark.parametrize(
    ("new_scale", "error"),
    [
        *((value, ValueError) for value in (0.0, -1.0, math.inf, math.nan, 1e39, 2.0**-127)),
        *((value, TypeError) for value in ("8", True, [8.0])),
        *((library.tensor(value), ValueError) for value in (math.inf, 0.0, -1.0)),
        *((tensor, ValueError) for tensor in BAD_TENSORS),
    ],
)
def test_a_bad_new_scale_is_refused_and_changes_nothing(new_scale, error, parameters, finite):
    scaler, optimizer = (
        library.scaler(init_scale=1024.0, growth_interval=1),
        library.sgd(parameters),
    )
    library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    before = library.everything(scaler, optimizer)
    with pytest.raises(error, match="new_scale"):
        scaler.update(new_scale)
    assert library.everything(scaler, optimizer) == before
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2048.0


@pytest.mark.parametrize("new_scale", BAD_TENSORS)
def test_a_bad_new_scale_tensor_can_be_caught_as_the_framework_s_error(new_scale, native, one):
    raised = []
    for scaler in (native(), library.scaler(device="cpu")):
        scaler.scale(one)
        with pytest.raises(AssertionError) as error:
            scaler.update(new_scale)
        raised.append(type(error.value))
    assert issubclass(raised[1], raised[0])


@pytest.mark.parametrize("new_scale", [1.0, 32.0])
def test_a_new_scale_outside_the_policy_s_bounds_is_refused(new_scale):
    policy = DynamicScale(init_scale=8.0, min_scale=4.0, max_scale=16.0)
    scaler = library.placed(policy=policy)
    with pytest.raises(ValueError, match="new_scale"):
        scaler.update(new_scale)
    assert scaler.get_scale() == 8.0


# State.


def test_a_state_dict_without_hysteresis_has_the_framework_s_five_keys():
    state = library.scaler(policy=DynamicScale.keras()).state_dict()
    assert list(state) == ["scale", *RULE, "_growth_tracker"]


def test_loading_the_framework_s_state_keeps_the_bounds_and_the_hysteresis(native):
    scaler = library.scaler(policy=DynamicScale(4.0, hysteresis=2, min_scale=4.0, max_scale=16.0))
    scaler.load_state_dict(native(init_scale=8.0, growth_interval=1).state_dict())
    scales = [8.0, 4.0, 4.0, 4.0, 8.0, 16.0, 16.0, 16.0]
    assert library.train(scaler, "xxxxoooo") == scales
