"""The surface of paddle.amp.GradScaler: signature, getters and setters, state, copies, policies."""

import copy
import inspect
import math
import pickle
import re

import numpy as np
import paddle
import pytest
from paddle.amp.grad_scaler import OptimizerState

from gradscaler import DynamicScale, FixedScale
from gradscaler.paddle import GradScaler

KEYS = [
    "scale",
    "incr_ratio",
    "decr_ratio",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "incr_count",
    "decr_count",
    "use_dynamic_loss_scaling",
]
DOCUMENTED = {
    "enable": True,
    "init_loss_scaling": 32768.0,
    "incr_ratio": 2.0,
    "decr_ratio": 0.5,
    "incr_every_n_steps": 1000,
    "decr_every_n_nan_or_inf": 2,
    "use_dynamic_loss_scaling": True,
}
OTHER_RULE = {
    "init_loss_scaling": 512.0,
    "incr_ratio": 4.0,
    "decr_ratio": 0.25,
    "incr_every_n_steps": 3,
    "decr_every_n_nan_or_inf": 5,
}
PUBLIC = [name for name in vars(paddle.amp.GradScaler) if not name.startswith("_")]
PRIVATE_VALUES = [
    "_enable",
    "_use_dynamic_loss_scaling",
    "_init_loss_scaling",
    "_scale",
    "_incr_ratio",
    "_decr_ratio",
    "_incr_every_n_steps",
    "_decr_every_n_nan_or_inf",
    "_incr_count",
    "_decr_count",
    "_found_inf",
    "_temp_found_inf_value_false",
    "_temp_found_inf_fp16",
    "_temp_found_inf_bf16",
    "_temp_found_inf_fp32",
    "_cache_found_inf",
    "_optimizer_states",
]


def moved(kind=GradScaler, **options):
    """A scaler that is not in its first state any more."""
    scaler = kind(**{**OTHER_RULE, **options})
    scaler.load_state_dict(
        {
            **scaler.state_dict(),
            "scale": np.array([96.0], np.float32),
            "incr_count": 2,
            "decr_count": 4,
        }
    )
    return scaler


# The class.


def test_it_is_a_paddle_grad_scaler():
    assert isinstance(GradScaler(), paddle.amp.GradScaler)


def test_parameters_have_the_names_order_and_defaults_of_the_reference_documents():
    parameters = list(inspect.signature(GradScaler).parameters.values())[: len(DOCUMENTED)]
    assert {p.name: p.default for p in parameters} == DOCUMENTED
    assert [p.name for p in parameters] == list(DOCUMENTED)
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_the_docstring_tells_where_paddle_s_own_defaults_differ():
    theirs = inspect.signature(paddle.amp.GradScaler).parameters
    differing = {n: p.default for n, p in theirs.items() if p.default != DOCUMENTED[n]}
    numbers = {"init_loss_scaling": 65536.0, "incr_every_n_steps": 2000}
    assert differing == {**numbers, "decr_every_n_nan_or_inf": 1}
    told = re.search(r"Release 3\.3\.1 itself has (.*?)\.\n", GradScaler.__doc__, re.DOTALL).group(
        1
    )
    assert all(name in told and str(value) in told for name, value in differing.items())


def test_what_paddle_does_not_have_is_keyword_only():
    added = [p for n, p in inspect.signature(GradScaler).parameters.items() if n not in DOCUMENTED]
    assert {p.kind for p in added} == {inspect.Parameter.KEYWORD_ONLY}
    assert "policy" in [p.name for p in added]


@pytest.mark.parametrize("name", PUBLIC)
def test_each_method_is_called_as_paddle_s(name):
    """Paddle's own arguments bind in Paddle's own order; any of ours come after, optional."""
    ours = list(inspect.signature(getattr(GradScaler, name)).parameters.values())
    theirs = list(inspect.signature(getattr(paddle.amp.GradScaler, name)).parameters.values())
    assert [p.name for p in ours][: len(theirs)] == [p.name for p in theirs]
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    added = ours[len(theirs) :]
    assert all(p.default is not p.empty or p.kind in variadic for p in added)


def test_every_attribute_of_paddle_s_instances_is_there(native):
    scaler = GradScaler()
    assert [name for name in dir(native()) if not hasattr(scaler, name)] == []


def test_the_private_values_told_here_are_all_that_paddle_s_instances_hold(native):
    assert set(vars(native())) - {"_update"} == set(PRIVATE_VALUES)


@pytest.mark.parametrize("name", PRIVATE_VALUES)
def test_a_new_scaler_s_private_values_are_paddle_s(name, native, exact):
    ours, theirs = GradScaler(**OTHER_RULE), native(**OTHER_RULE)
    assert exact(getattr(ours, name)) == exact(getattr(theirs, name)) or (
        dict(getattr(ours, name)) == dict(getattr(theirs, name)) == {}
    )


def test_no_two_private_tensors_are_one_as_in_paddle_s():
    """What writes to one in place would write to the other."""
    scaler = GradScaler()
    tensors = [getattr(scaler, name) for name in PRIVATE_VALUES]
    tensors = [tensor for tensor in tensors if isinstance(tensor, paddle.Tensor)]
    assert len({id(tensor) for tensor in tensors}) == len(tensors) == 6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_enable", False),
        ("_use_dynamic_loss_scaling", False),
        ("_incr_ratio", 3.0),
        ("_decr_ratio", 0.125),
        ("_incr_every_n_steps", 11),
        ("_decr_every_n_nan_or_inf", 12),
        ("_incr_count", 7),
        ("_decr_count", 3),
        ("_cache_found_inf", True),
    ],
)
def test_a_private_value_can_be_set(name, value):
    scaler = GradScaler()
    setattr(scaler, name, value)
    assert getattr(scaler, name) == value


def test_the_scale_can_be_set_as_a_tensor_of_paddle_s_shape():
    scaler = GradScaler()
    scaler._scale = paddle.to_tensor([96.0])
    assert scaler.state_dict()["scale"] == [96.0]
    assert scaler.scale(paddle.ones([1])).item() == 96.0


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.set_value(paddle.to_tensor([3.0])),
        lambda tensor: paddle.assign(paddle.to_tensor([3.0]), tensor),
        lambda tensor: tensor.scale_(0.5),
    ],
    ids=["set_value", "assign", "scale_"],
)
def test_what_is_written_into_one_scaler_s_scale_does_not_reach_another(write):
    scaler, bystander = (GradScaler(init_loss_scaling=2.0**11) for _ in range(2))
    write(scaler._scale)
    assert bystander._scale.item() == 2.0**11
    assert bystander.scale(paddle.ones([1])).item() == 2.0**11


@pytest.mark.parametrize(
    ("name", "value"), [("incr_ratio", 1.0), ("incr_ratio", 0.5), ("decr_ratio", 1.0)]
)
def test_a_bad_ratio_raises_what_paddle_raises(name, value, native):
    with pytest.raises(AssertionError) as theirs:
        native(**{name: value})
    with pytest.raises(type(theirs.value), match=str(value)) as ours:
        GradScaler(**{name: value})
    assert isinstance(ours.value, ValueError)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("init_loss_scaling", 0.0, ValueError),
        ("init_loss_scaling", -1.0, ValueError),
        ("init_loss_scaling", math.inf, ValueError),
        ("init_loss_scaling", math.nan, ValueError),
        ("init_loss_scaling", "1024", TypeError),
        ("incr_ratio", 0.5, ValueError),
        ("incr_ratio", math.nan, ValueError),
        ("decr_ratio", 1.0, ValueError),
        ("decr_ratio", 0.0, ValueError),
        ("incr_every_n_steps", 0, ValueError),
        ("incr_every_n_steps", 2.5, TypeError),
        ("decr_every_n_nan_or_inf", 0, ValueError),
        ("decr_every_n_nan_or_inf", True, TypeError),
        ("max_retries", -1, ValueError),
    ],
)
def test_a_bad_parameter_is_named_as_paddle_names_it_with_its_value(name, value, error):
    with pytest.raises(error, match=rf"\b{name}\b.*{value}"):
        GradScaler(**{name: value})


# Scaling.


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [[], [1], [3], [0]])
def test_a_scaled_tensor_is_paddle_s_to_the_bit(dtype, shape, native, exact):
    output = paddle.full(shape, 0.1, dtype)
    ours, theirs = GradScaler(**OTHER_RULE).scale(output), native(**OTHER_RULE).scale(output)
    assert exact(ours) == exact(theirs)


@pytest.mark.parametrize("var", [1.0, np.ones(1), [paddle.ones([1])], None, "loss"])
def test_what_is_no_tensor_is_refused(var):
    with pytest.raises(TypeError, match="var must be"):
        GradScaler().scale(var)


def test_the_scaled_loss_can_be_differentiated():
    weight = paddle.to_tensor([3.0], stop_gradient=False)
    GradScaler(init_loss_scaling=1024.0).scale(weight * weight).backward()
    assert weight.grad.item() == 6.0 * 1024.0


# Getters and setters.

ACCESSORS = {
    "init_loss_scaling": 96.0,
    "incr_ratio": 3.0,
    "decr_ratio": 0.125,
    "incr_every_n_steps": 11,
    "decr_every_n_nan_or_inf": 12,
}


@pytest.mark.parametrize("name", ACCESSORS)
def test_a_getter_gives_what_the_constructor_took(name):
    assert getattr(GradScaler(**OTHER_RULE), f"get_{name}")() == OTHER_RULE[name]


@pytest.mark.parametrize("name", ACCESSORS)
def test_a_setter_sets_what_paddle_s_sets(name, native, exact):
    scalers = GradScaler(**OTHER_RULE), native(**OTHER_RULE)
    for scaler in scalers:
        getattr(scaler, f"set_{name}")(ACCESSORS[name])
        assert getattr(scaler, f"get_{name}")() == ACCESSORS[name]
    assert exact(scalers[0].state_dict()) == exact(scalers[1].state_dict())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_loss_scaling", 0.0),
        ("init_loss_scaling", math.inf),
        ("init_loss_scaling", "96"),
        ("incr_ratio", 1.0),
        ("incr_ratio", math.inf),
        ("decr_ratio", 1.0),
        ("decr_ratio", -0.5),
        ("incr_every_n_steps", 0),
        ("incr_every_n_steps", 1.5),
        ("decr_every_n_nan_or_inf", 0),
        ("decr_every_n_nan_or_inf", None),
    ],
)
def test_a_setter_refuses_a_bad_value_by_name_and_changes_nothing(name, value, exact):
    scaler = moved()
    before = exact(scaler.state_dict())
    with pytest.raises((ValueError, TypeError), match=rf"\b(new_)?{name}\b.*{value}"):
        getattr(scaler, f"set_{name}")(value)
    assert exact(scaler.state_dict()) == before


@pytest.mark.parametrize(("name", "value"), [("incr_ratio", 1.0), ("decr_ratio", 1.5)])
def test_a_setter_raises_what_paddle_s_raises(name, value, native):
    with pytest.raises(AssertionError) as theirs:
        getattr(native(), f"set_{name}")(value)
    with pytest.raises(type(theirs.value)):
        getattr(GradScaler(), f"set_{name}")(value)


def test_a_scale_that_is_set_is_in_force_at_the_next_loss():
    scaler = GradScaler()
    scaler.set_init_loss_scaling(96.0)
    assert scaler.scale(paddle.ones([1])).item() == 96.0


@pytest.mark.parametrize("dynamic", [True, False])
def test_it_says_whether_it_is_enabled_and_dynamic(dynamic):
    scaler = GradScaler(use_dynamic_loss_scaling=dynamic)
    assert scaler.is_enable() is True
    assert scaler.is_use_dynamic_loss_scaling() is dynamic


# State.


@pytest.mark.parametrize("make", [GradScaler, moved], ids=["new", "moved"])
def test_the_state_dict_has_paddle_s_keys_types_and_values(make, native, exact):
    ours = make(GradScaler, **OTHER_RULE) if make is moved else make(**OTHER_RULE)
    theirs = make(native, **OTHER_RULE) if make is moved else native(**OTHER_RULE)
    mine, native_state = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(native_state) == KEYS
    assert [type(value) for value in mine.values()] == [
        type(value) for value in native_state.values()
    ]
    assert exact(mine) == exact(native_state)


def test_state_dicts_load_both_ways(native, exact):
    ours, theirs = GradScaler(), native()
    ours.load_state_dict(moved(native).state_dict())
    theirs.load_state_dict(moved().state_dict())
    assert exact(ours.state_dict()) == exact(theirs.state_dict()) == exact(moved().state_dict())
    assert ours.get_init_loss_scaling() == theirs.get_init_loss_scaling() == 96.0


def test_a_state_dict_goes_through_paddle_save(tmp_path, exact):
    path = str(tmp_path / "scaler.pdscaler")
    paddle.save(moved().state_dict(), path)
    scaler = GradScaler()
    scaler.load_state_dict(paddle.load(path))
    assert exact(scaler.state_dict()) == exact(moved().state_dict())


def test_a_scale_saved_as_a_tensor_is_taken():
    scaler = GradScaler()
    scaler.load_state_dict({**scaler.state_dict(), "scale": paddle.to_tensor([96.0])})
    assert scaler.state_dict()["scale"] == [96.0]


def test_the_state_dict_does_not_change_with_the_scaler():
    scaler = GradScaler(**OTHER_RULE)
    state = scaler.state_dict()
    scaler.set_init_loss_scaling(96.0)
    assert state["scale"] == [512.0]


def test_writing_into_a_state_dict_does_not_reach_the_scaler():
    scaler = GradScaler(**OTHER_RULE)
    scaler.state_dict()["scale"][0] = 3.0
    assert scaler.state_dict()["scale"] == [512.0]


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named_and_nothing_changes(key, exact):
    scaler, state = moved(), GradScaler().state_dict()
    before = exact(scaler.state_dict())
    del state[key]
    with pytest.raises(KeyError, match=rf"\b{key}\b"):
        scaler.load_state_dict(state)
    assert exact(scaler.state_dict()) == before


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("scale", np.array([math.inf], np.float32), ValueError),
        ("scale", np.array([math.nan], np.float32), ValueError),
        ("scale", np.array([0.0], np.float32), ValueError),
        ("scale", np.array([-1.0], np.float32), ValueError),
        ("scale", "96", TypeError),
        ("scale", None, TypeError),
        ("incr_ratio", 0.5, ValueError),
        ("incr_ratio", "2", TypeError),
        ("decr_ratio", 2.0, ValueError),
        ("incr_every_n_steps", 0, ValueError),
        ("incr_every_n_steps", 2.5, TypeError),
        ("decr_every_n_nan_or_inf", -1, ValueError),
        ("incr_count", -1, ValueError),
        ("incr_count", 1.5, TypeError),
        ("decr_count", None, TypeError),
        ("use_dynamic_loss_scaling", "yes", TypeError),
    ],
)
def test_a_bad_value_is_refused_by_its_key_and_nothing_changes(key, value, error, exact):
    scaler = moved()
    before = exact(scaler.state_dict()), scaler.get_init_loss_scaling()
    with pytest.raises(error, match=rf"\b{key}\b"):
        scaler.load_state_dict({**GradScaler().state_dict(), key: value})
    assert (exact(scaler.state_dict()), scaler.get_init_loss_scaling()) == before


@pytest.mark.parametrize("size", [0, 2])
def test_a_scale_of_another_size_than_one_is_refused_by_its_key_and_nothing_changes(size, exact):
    scaler = moved()
    before = exact(scaler.state_dict())
    with pytest.raises(ValueError, match=r"\bscale\b"):
        scaler.load_state_dict({**GradScaler().state_dict(), "scale": np.ones(size, np.float32)})
    assert exact(scaler.state_dict()) == before


def test_an_empty_state_dict_is_paddle_s_error(native, exact):
    scaler = moved()
    before = exact(scaler.state_dict())
    with pytest.raises(RuntimeError, match="disabled"):
        native().load_state_dict({})
    with pytest.raises(RuntimeError, match="disabled"):
        scaler.load_state_dict({})
    assert exact(scaler.state_dict()) == before


def test_what_is_no_dict_is_refused():
    with pytest.raises(TypeError, match="state_dict"):
        GradScaler().load_state_dict([1024.0])


def test_a_fixed_scaler_s_state_makes_a_dynamic_one_fixed(native):
    for kind in (GradScaler, native):
        scaler = kind()
        scaler.load_state_dict(GradScaler(use_dynamic_loss_scaling=False).state_dict())
        assert not scaler.is_use_dynamic_loss_scaling()


# Copies.


def through_pickle(scaler):
    return pickle.loads(pickle.dumps(scaler))


def train(scaler, parameters, backward, gradients, *, steps=3):
    optimizer = paddle.optimizer.Adam(0.1, parameters=parameters)
    for _ in range(steps):
        optimizer.clear_grad()
        backward(scaler, parameters, gradients)
        scaler.step(optimizer)
        scaler.update()
    return optimizer


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, through_pickle])
@pytest.mark.parametrize("used", [False, True])
def test_a_copy_goes_on_as_the_original(duplicate, used, make, backward, finite, exact):
    original = moved()
    if used:
        train(original, make([2, 3], [4]), backward, finite)
    twin = duplicate(original)
    states = []
    for scaler in (original, twin):
        parameters = make([2, 3], [4])
        train(scaler, parameters, backward, finite)
        states.append(exact([scaler.state_dict(), parameters, scaler._found_inf]))
    assert states[0] == states[1]
    assert isinstance(twin, GradScaler)


def test_a_deep_copy_moves_by_itself():
    original = moved()
    copy.deepcopy(original).set_init_loss_scaling(3.0)
    assert original.state_dict()["scale"] == [96.0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_copy_in_mid_iteration_is_refused(duplicate, scaler, backward, parameters, finite):
    optimizer = paddle.optimizer.SGD(parameters=parameters)
    backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="update"):
        duplicate(scaler)


def test_a_copy_s_private_tensors_are_its_own(exact):
    original = GradScaler()
    twin = copy.deepcopy(original)
    for name in PRIVATE_VALUES:
        mine = getattr(original, name)
        if isinstance(mine, paddle.Tensor) and name != "_scale":
            assert getattr(twin, name) is not mine
            assert exact(getattr(twin, name)) == exact(mine)


# Disabled.


def test_disabled_a_loss_is_returned_as_it_is():
    loss = paddle.ones([])
    assert GradScaler(enable=False).scale(loss) is loss


@pytest.mark.parametrize("minimize", [False, True], ids=["step", "minimize"])
def test_disabled_every_call_passes_through(minimize, make, backward, overflowed, stepped):
    """The overflow too: it is the optimizer's own affair then."""
    scaler = GradScaler(enable=False)
    parameters, plain_parameters = make([2, 3], [4]), make([2, 3], [4])
    optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
    plain = paddle.optimizer.SGD(0.1, parameters=plain_parameters)
    loss = backward(scaler, parameters, overflowed)
    plain_loss = backward(scaler, plain_parameters, overflowed)
    scaler.unscale_(optimizer)
    if minimize:
        operators, pairs = scaler.minimize(optimizer, loss)
        assert (operators, len(pairs)) == ([], 2)
        plain.minimize(plain_loss)
    else:
        scaler.step(optimizer)
        scaler.update()
        plain.step()
    assert stepped(optimizer) == stepped(plain)


def test_disabled_it_says_what_paddle_s_says(native):
    ours, theirs = GradScaler(enable=False), native(enable=False)
    for name in ("is_enable", "is_use_dynamic_loss_scaling", "get_init_loss_scaling", "state_dict"):
        assert getattr(ours, name)() == getattr(theirs, name)()


def test_disabled_loading_a_state_does_nothing():
    scaler = GradScaler(enable=False)
    scaler.load_state_dict({})
    scaler.load_state_dict(moved().state_dict())
    assert scaler.state_dict() == {}


@pytest.mark.parametrize("minimize", [False, True], ids=["step", "minimize"])
def test_disabled_the_last_step_is_on_record(minimize, backward, parameters, finite):
    scaler = GradScaler(enable=False)
    optimizer = paddle.optimizer.SGD(parameters=parameters)
    loss = backward(scaler, parameters, finite)
    if minimize:
        scaler.minimize(optimizer, loss)
    else:
        scaler.step(optimizer)
    assert scaler.last_step(optimizer).reason == "disabled"
    assert scaler.last_step(optimizer).applied


def test_a_scaler_disabled_by_its_private_name_passes_through(scaler):
    scaler._enable = False
    loss = paddle.ones([])
    assert scaler.scale(loss) is loss
    assert not scaler.is_enable()


# minimize.


def test_minimize_returns_what_the_optimizer_s_returns(scaler, backward, parameters, finite, exact):
    optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
    operators, pairs = scaler.minimize(optimizer, backward(scaler, parameters, finite))
    assert operators == []
    assert [parameter is owned for (parameter, _), owned in zip(pairs, parameters, strict=True)]
    assert exact([gradient for _, gradient in pairs]) == exact(
        [paddle.to_tensor(gradient) for gradient in finite]
    )


def test_minimize_returns_the_optimizer_s_own_value_whatever_it_is(
    scaler, backward, parameters, finite
):
    optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
    optimizer.minimize = lambda loss: None
    assert scaler.minimize(optimizer, backward(scaler, parameters, finite)) is None


def test_minimize_hands_its_arguments_on(scaler, backward, parameters, finite, exact):
    optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
    scaled = backward(scaler, parameters, finite)
    before = exact(parameters[1])
    _, pairs = scaler.minimize(optimizer, scaled, parameters=parameters[:1])
    assert len(pairs) == 1
    assert exact(parameters[1]) == before


def test_minimize_is_a_step_and_an_update(make, backward, finite, stepped, exact):
    results = []
    for minimize in (False, True):
        scaler = GradScaler(incr_every_n_steps=1)
        parameters = make([2, 3], [4])
        optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
        scaled = backward(scaler, parameters, finite)
        if minimize:
            scaler.minimize(optimizer, scaled)
        else:
            scaler.step(optimizer)
            scaler.update()
        results.append((stepped(optimizer), exact(scaler.state_dict())))
    assert results[0] == results[1]


def test_minimize_of_an_optimizer_without_gradients_finds_no_pairs(scaler, parameters):
    optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
    scaled = scaler.scale(paddle.ones([]))
    assert scaler.minimize(optimizer, scaled) == ([], [])
    assert scaler.last_step(optimizer).reason == "no_gradients"


def test_minimize_of_parameter_groups_is_refused_by_paddle_s_optimizer_itself(
    scaler, backward, parameters, finite
):
    optimizer = paddle.optimizer.SGD(0.1, parameters=[{"params": parameters}])
    loss = backward(scaler, parameters, finite)
    with pytest.raises(TypeError, match="must be list of Tensor"):
        optimizer.minimize(loss)
    with pytest.raises(TypeError, match="must be list of Tensor"):
        scaler.minimize(optimizer, loss)


# The outcome.


def test_the_last_step_tells_what_happened(backward, parameters, finite, overflowed):
    scaler = GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1)
    optimizer = paddle.optimizer.SGD(parameters=parameters)
    told = []
    for gradients in (finite, overflowed, finite):
        optimizer.clear_grad()
        backward(scaler, parameters, gradients)
        scaler.step(optimizer)
        scaler.update()
        outcome = scaler.last_step(optimizer)
        told.append((outcome.applied, outcome.found_inf, outcome.reason, outcome.scale))
    assert told == [
        (True, False, "finite", 1024.0),
        (False, True, "overflow", 1024.0),
        (True, False, "finite", 512.0),
    ]


def test_after_an_iteration_without_gradients_no_overflow_is_reported(
    backward, parameters, overflowed
):
    """PaddleNLP reads there whether the optimizer ran."""
    scaler = GradScaler()
    optimizer = paddle.optimizer.SGD(parameters=parameters)
    backward(scaler, parameters, overflowed)
    scaler.step(optimizer)
    scaler.update()
    assert scaler._cache_found_inf is True
    optimizer.clear_grad(set_to_zero=False)
    scaler.step(optimizer)
    scaler.update()
    assert scaler._cache_found_inf is False


def test_the_optimizer_s_stage_reads_as_paddle_s_does(
    native, make, backward, finite, overflowed, exact
):
    seen = []
    for kind in (GradScaler, native):
        scaler, parameters = kind(), make([2, 3], [4])
        optimizer = paddle.optimizer.SGD(parameters=parameters)
        stages = []
        for gradients in (finite, overflowed):
            for call in (
                lambda o=optimizer: o.clear_grad(),
                lambda s=scaler, p=parameters, g=gradients: backward(s, p, g),
                lambda s=scaler, o=optimizer: s.unscale_(o),
                lambda s=scaler, o=optimizer: s.step(o),
                lambda s=scaler: s.update(),
            ):
                call()
                stages.append(scaler._optimizer_states[id(optimizer)]["state"])
        seen.append(stages)
    assert seen[0] == seen[1]
    assert set(seen[0]) == set(OptimizerState)


def test_a_stage_that_is_set_counts(scaler, backward, parameters, finite):
    optimizer = paddle.optimizer.SGD(parameters=parameters)
    backward(scaler, parameters, finite)
    scaler._optimizer_states[id(optimizer)]["state"] = OptimizerState.STEPPED
    with pytest.raises(RuntimeError, match="update"):
        scaler.step(optimizer)


def test_a_record_holds_nothing_but_the_stage_under_paddle_s_key(scaler):
    record = scaler._optimizer_states[0]
    with pytest.raises(KeyError):
        record["stage"]
    with pytest.raises(KeyError):
        record["stage"] = OptimizerState.INIT


# Policies.


def test_a_policy_stands_in_for_the_parameters(exact):
    policy = DynamicScale.paddle(*OTHER_RULE.values())
    assert exact(GradScaler(policy=policy).state_dict()) == exact(
        GradScaler(**OTHER_RULE).state_dict()
    )


def test_a_fixed_policy_is_a_fixed_scale(exact):
    scaler = GradScaler(policy=FixedScale(96.0))
    assert not scaler.is_use_dynamic_loss_scaling()
    assert exact(scaler.state_dict()) == exact(
        GradScaler(init_loss_scaling=96.0, use_dynamic_loss_scaling=False).state_dict()
    )


def test_a_policy_s_floor_holds(backward, parameters, overflowed):
    scaler = GradScaler(policy=DynamicScale(init_scale=8.0, min_scale=4.0))
    optimizer = paddle.optimizer.SGD(parameters=parameters)
    for _ in range(3):
        optimizer.clear_grad()
        backward(scaler, parameters, overflowed)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.state_dict()["scale"] == [4.0]


def test_a_policy_s_hysteresis_is_kept_through_a_state_dict(
    make, backward, finite, overflowed, exact
):
    """Only growth resets it: an overflow, a finite step and an overflow back off."""
    policy = DynamicScale(init_scale=8.0, hysteresis=2, hysteresis_reset="growth")
    scaler = GradScaler(policy=policy)
    parameters = make([2, 3], [4])
    optimizer = paddle.optimizer.SGD(parameters=parameters)
    for gradients in (overflowed, finite, overflowed):
        optimizer.clear_grad()
        backward(scaler, parameters, gradients)
        scaler.step(optimizer)
        scaler.update()
        restored = GradScaler(policy=policy)
        restored.load_state_dict(scaler.state_dict())
        scaler = restored
    assert scaler.state_dict()["scale"] == [4.0]


@pytest.mark.parametrize("parameter", [*OTHER_RULE.items(), ("use_dynamic_loss_scaling", False)])
def test_a_policy_beside_a_parameter_is_refused(parameter):
    with pytest.raises(ValueError, match="policy="):
        GradScaler(policy=DynamicScale(), **dict([parameter]))


def test_a_policy_that_is_none_of_ours_is_refused():
    with pytest.raises(TypeError, match="policy"):
        GradScaler(policy=object())


def test_a_scale_given_as_enable_is_refused_by_its_right_name():
    with pytest.raises(TypeError, match=r"init_loss_scaling=1024\.0"):
        GradScaler(1024.0)


def test_the_repr_shows_scale_counts_and_policy():
    assert repr(GradScaler()).startswith("GradScaler(scale=32768.0, finite_steps=0, ")
