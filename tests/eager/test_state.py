"""State dicts, which the framework's own scaler reads and writes too; copies and pickles."""

import copy
import pickle

import pytest

from gradscaler import DynamicScale, FixedScale
from tests.support.eager import library

LOAD = {} if library.name == "paddle" else {"weights_only": True}
COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
}
each_copy = pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)


def new(make_scaler):
    return make_scaler(**library.other_rule)


def used(make_scaler):
    scaler = new(make_scaler)
    library.train(scaler, "xoo")
    return scaler


def overflowed(make_scaler):
    scaler = new(make_scaler)
    library.train(scaler, "oox")
    return scaler


ages = pytest.mark.parametrize("age", [new, used, overflowed])


@pytest.fixture
def state():
    """The state of a scaler that will grow from 8 to 32 at the next finite step."""
    state = library.scaler(init_scale=8.0, growth_factor=4.0, growth_interval=3).state_dict()
    return {**state, library.state_keys["finite_steps"]: 2}


# State dicts.


@ages
def test_the_state_dict_has_the_framework_s_keys_types_and_values(age, native):
    ours, theirs = (age(make_scaler).state_dict() for make_scaler in (library.scaler, native))
    assert list(ours) == list(theirs)
    assert list(map(type, ours.values())) == list(map(type, theirs.values()))
    assert library.exact(ours) == library.exact(theirs)


@ages
@pytest.mark.parametrize("target", [new, used])
def test_state_dicts_load_both_ways(age, target, native):
    saved = age(library.scaler).state_dict()
    ours, theirs = (target(make_scaler) for make_scaler in (library.scaler, native))
    ours.load_state_dict(age(native).state_dict())
    theirs.load_state_dict(saved)
    for scaler in (ours, theirs):
        assert library.exact(scaler.state_dict()) == library.exact(saved)
    assert library.train(ours) == library.train(theirs)


@ages
def test_a_loaded_state_is_in_force_at_the_next_loss_and_step(age, state):
    scaler = age(library.scaler)
    scaler.load_state_dict(state)
    assert library.numpy(scaler.scale(library.tensor(1.0))) == 8.0
    assert library.train(scaler, "o") == [32.0]


def test_a_state_dict_goes_through_the_framework_s_files(tmp_path):
    path = str(tmp_path / "scaler.pt")
    state = used(library.scaler).state_dict()
    library.framework.save(state, path)
    scaler = library.scaler()
    scaler.load_state_dict(library.framework.load(path, **LOAD))
    assert library.exact(scaler.state_dict()) == library.exact(state)


@ages
def test_values_may_be_tensors_of_one_element_or_numpy_numbers(age, state):
    wrapped = {
        key: value if isinstance(value, bool) else library.tensor(value, None)
        for key, value in state.items()
    }
    numbers = {
        key: value.numpy()[()] if library.is_tensor(value) else value
        for key, value in wrapped.items()
    }
    for values in (wrapped, numbers):
        scaler = age(library.scaler)
        scaler.load_state_dict(values)
        assert library.exact(scaler.state_dict()) == library.exact(state)


def test_unknown_keys_do_no_harm(scaler, state):
    scaler.load_state_dict({**state, "of the future": 1})
    assert library.exact(scaler.state_dict()) == library.exact(state)


def test_the_state_dict_does_not_change_with_the_scaler(scaler):
    state = scaler.state_dict()
    before = library.exact(state)
    library.train(scaler, "ox")
    assert library.exact(state) == before != library.exact(scaler.state_dict())


def test_the_empty_state_of_a_disabled_scaler_is_the_framework_s_error(scaler, native):
    empty = library.scaler(enabled=False).state_dict()
    before = library.everything(scaler)
    with pytest.raises(RuntimeError, match="disabled") as theirs:
        native().load_state_dict(empty)
    with pytest.raises(type(theirs.value), match="disabled"):
        scaler.load_state_dict(empty)
    with pytest.raises(RuntimeError, match="leave out load_state_dict"):
        scaler.load_state_dict(empty)
    assert library.everything(scaler) == before


@pytest.mark.parametrize("state", [{}, {"any": "thing"}, library.scaler().state_dict()])
def test_disabled_loading_a_state_does_nothing(state):
    scaler = library.scaler(enabled=False)
    scaler.load_state_dict(state)
    assert scaler.state_dict() == {}
    assert repr(scaler) == "<GradScaler disabled>"


# Copies.


@ages
@each_copy
def test_a_copy_goes_on_as_the_original(age, duplicate):
    original = age(library.scaler)
    twin = duplicate(original)
    assert type(twin) is library.GradScaler
    assert library.exact(twin.state_dict()) == library.exact(original.state_dict())
    assert library.train(twin, "oxxoooo") == library.train(original, "oxxoooo")
    assert library.exact(twin.state_dict()) == library.exact(original.state_dict())


@each_copy
def test_a_copy_moves_by_itself(duplicate):
    original = used(library.scaler)
    before = library.everything(original)
    assert library.train(duplicate(original), "xxxxx")[-1] != library.scale_of(original)
    assert library.everything(original) == before


@each_copy
def test_a_copy_can_be_asked_what_its_own_steps_did(duplicate, parameters, finite):
    scaler = duplicate(used(library.scaler))
    optimizer = library.sgd(parameters)
    library.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).applied


@each_copy
def test_disabled_copies_are_disabled(duplicate):
    assert repr(duplicate(library.scaler(enabled=False))) == "<GradScaler disabled>"


# Fields that a policy adds to a state.


def through_a_state_dict(scaler):
    loaded = library.scaler(policy=DynamicScale(hysteresis=3))
    loaded.load_state_dict(scaler.state_dict())
    return loaded


@pytest.mark.parametrize("through", [through_a_state_dict, *COPIES.values()])
def test_hysteresis_survives_a_checkpoint(through):
    scaler = library.scaler(policy=DynamicScale(init_scale=8.0, hysteresis=3))
    library.train(scaler, "xx")
    assert library.train(through(scaler), "x") == [4.0]


def test_a_hysteresis_that_only_growth_resets_is_kept_through_a_state_dict():
    policy = DynamicScale(init_scale=8.0, hysteresis=2, hysteresis_reset="growth")
    scaler = library.scaler(policy=policy)
    for letter in "xox":
        library.train(scaler, letter)
        loaded = library.scaler(policy=policy)
        loaded.load_state_dict(scaler.state_dict())
        scaler = loaded
    assert library.scale_of(scaler) == 4.0


def test_a_state_dict_with_hysteresis_loads_into_the_framework_s(native):
    scaler, theirs = library.scaler(policy=DynamicScale(init_scale=8.0, hysteresis=3)), native()
    library.train(scaler, "ox")
    theirs.load_state_dict(scaler.state_dict())
    assert library.scale_of(theirs) == 8.0


def test_a_fixed_scale_survives_a_state_dict(native):
    saved = library.scaler(policy=FixedScale(8.0)).state_dict()
    for scaler in (library.scaler(policy=FixedScale(1.0)), library.scaler(), native()):
        scaler.load_state_dict(saved)
        assert library.train(scaler, "oxo") == [8.0] * 3
