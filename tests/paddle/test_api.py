"""The surface of paddle.amp.GradScaler where it is Paddle's alone: its names, and minimize."""

import copy
import inspect
import json
import math
import re

import numpy as np
import paddle
import pytest
from paddle.amp.grad_scaler import OptimizerState

from gradscaler import DynamicScale, FixedScale, ParameterTypeError
from gradscaler.paddle import GradScaler
from tests.support.eager import library

DOCUMENTED = {
    "enable": True,
    "init_loss_scaling": 32768.0,
    "incr_ratio": 2.0,
    "decr_ratio": 0.5,
    "incr_every_n_steps": 1000,
    "decr_every_n_nan_or_inf": 2,
    "use_dynamic_loss_scaling": True,
}


def test_parameters_have_the_names_order_and_defaults_of_the_reference_documents():
    parameters = list(inspect.signature(GradScaler).parameters.values())[: len(DOCUMENTED)]
    assert {p.name: p.default for p in parameters} == DOCUMENTED
    assert [p.name for p in parameters] == list(DOCUMENTED)
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_the_docstring_says_where_paddle_s_own_defaults_differ():
    theirs = inspect.signature(paddle.amp.GradScaler).parameters
    differing = {n: p.default for n, p in theirs.items() if p.default != DOCUMENTED[n]}
    numbers = {"init_loss_scaling": 65536.0, "incr_every_n_steps": 2000}
    assert differing == {**numbers, "decr_every_n_nan_or_inf": 1}
    (stated,) = re.findall(
        r"Releases from 2\.5 to 3\.3\.1 have\s(.*?)\.\n", GradScaler.__doc__, re.DOTALL
    )
    assert all(name in stated and str(value) in stated for name, value in differing.items())


# PyTorch's names, which Paddle's development version takes too.

TORCH_NAMES = {
    "enabled": ("enable", False),
    "init_scale": ("init_loss_scaling", 96.0),
    "growth_factor": ("incr_ratio", 3.0),
    "backoff_factor": ("decr_ratio", 0.25),
    "growth_interval": ("incr_every_n_steps", 7),
}


@pytest.mark.parametrize("names", [*([name] for name in TORCH_NAMES), [*TORCH_NAMES][1:]])
def test_a_parameter_has_pytorch_s_name_too(names):
    ours = GradScaler(**{name: TORCH_NAMES[name][1] for name in names})
    plain = GradScaler(**dict(TORCH_NAMES[name] for name in names))
    assert library.exact(ours.state_dict()) == library.exact(plain.state_dict())
    assert ours.is_enabled() == ours.is_enable() == plain.is_enable()
    assert repr(ours) == repr(plain) != repr(GradScaler())


@pytest.mark.parametrize("is_default", [False, True])
@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("name", TORCH_NAMES)
def test_both_names_of_a_parameter_are_refused(name, by_position, is_default):
    own, value = TORCH_NAMES[name]
    given = {**DOCUMENTED, own: DOCUMENTED[own] if is_default else value}
    before = list(given.values())[: list(DOCUMENTED).index(own) + 1]
    args, kwargs = (before, {}) if by_position else ([], {own: given[own]})
    message = f"{name} is another name of {own}: .*{own}={given[own]} and {name}={value}"
    with pytest.raises(ParameterTypeError, match=message):
        GradScaler(*args, **kwargs, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("init_scale", -1.0), ("growth_factor", 1.0), ("backoff_factor", 1.5), ("growth_interval", 0)],
)
def test_an_error_names_the_parameter_as_it_was_given(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must .*{value}"):
        GradScaler(**{name: value})
    if name != "init_scale":
        with pytest.raises(ValueError, match=rf"^{name} must .*{value}"):
            getattr(GradScaler(), f"set_{name}")(value)


def test_enabled_must_be_a_bool_and_a_number_may_be_the_scale():
    with pytest.raises(TypeError, match=r"^enabled must be .* got 1024.0; .*_scaling=1024.0$"):
        GradScaler(enabled=1024.0)
    with pytest.raises(TypeError, match=r"^enable must be True or False, got 'cuda'$"):
        GradScaler(enable="cuda")


# PyTorch's order, which Paddle's development version takes too.

TORCH_ORDER = ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"]


def test_pytorch_s_order_is_tensorplay_s():
    from tensorplay.amp import GradScaler as TheirScaler

    assert list(inspect.signature(TheirScaler).parameters) == ["device", *TORCH_ORDER]


def is_the_same(ours, plain):
    same_state = library.exact(ours.state_dict()) == library.exact(plain.state_dict())
    return same_state and repr(ours) == repr(plain) and ours.is_enabled() == plain.is_enabled()


@pytest.mark.parametrize("device", [[], ["cuda"]], ids=["without a device", "with a device"])
@pytest.mark.parametrize("count", range(6))
@pytest.mark.parametrize("enabled", [True, False])
def test_a_text_or_a_number_first_means_pytorch_s_order(device, count, enabled):
    values = [96.0, 3.0, 0.25, 7, enabled][:count]
    by_name = GradScaler(**dict(zip(TORCH_ORDER, values, strict=False)))
    assert is_the_same(GradScaler(*device, *values), by_name)
    split = dict(zip(TORCH_ORDER[1:], values[1:], strict=False))
    assert is_the_same(GradScaler(*device, *values[:1], **split), by_name)


def test_either_order_may_have_names_of_the_other():
    ours = GradScaler("gpu:0", 96.0, decr_every_n_nan_or_inf=3, use_dynamic_loss_scaling=False)
    plain = GradScaler(True, 96.0, 2.0, 0.5, 1000, 3, False)
    assert is_the_same(ours, plain)
    assert is_the_same(GradScaler(True, 96.0, growth_factor=3.0), GradScaler(True, 96.0, 3.0))
    assert is_the_same(GradScaler(96, enable=False), GradScaler(enable=False))
    assert GradScaler("cuda", policy=FixedScale(96.0)).get_scale() == 96.0


@pytest.mark.parametrize("device", ["cuda", "cpu", "gpu:0"])
def test_a_device_changes_nothing(device, parameters, finite):
    scaler = GradScaler(device=device, init_scale=2048.0)
    assert is_the_same(scaler, GradScaler(True, 2048.0))
    assert is_the_same(GradScaler(True, 2048.0, device=device), scaler)
    library.train(scaler, "o")
    assert scaler.get_scale() == 2048.0


@pytest.mark.parametrize("flag", [True, False, None, np.True_, np.False_])
def test_a_bool_or_none_first_means_paddle_s_order(flag, native):
    values = [flag, 96.0, 3.0, 0.25, 7, 2, True]
    ours, theirs = GradScaler(*values), native(*values)
    assert ours.is_enable() == bool(flag) == bool(theirs.is_enable())
    assert library.exact(ours.state_dict()) == library.exact(theirs.state_dict())


@pytest.mark.parametrize("first", [0, 1, 0.0, 1.0, np.float32(1.0)])
def test_a_first_0_or_1_is_refused_unless_the_rest_says_what_it_is(first):
    message = rf"enable={bool(first)} or init_scale={re.escape(repr(first))}$"
    for rest in ([], [2.0], [2.0, 2.0, 0.5, 7]):
        with pytest.raises(TypeError, match=message):
            GradScaler(first, *rest)
    plain = GradScaler(bool(first), 96.0)
    assert is_the_same(GradScaler(first, init_loss_scaling=96.0), plain)
    assert is_the_same(GradScaler(first, init_scale=96.0), plain)
    assert is_the_same(GradScaler(first, 96.0, 2.0, 0.5, 1000, 2), plain)  # longer than PyTorch's
    if first:
        assert GradScaler(first, enabled=True).get_scale() == 1.0


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (("cuda", 96.0, 2.0, 0.5, 7, True, 2), {}, "order is device, .*: got 7 values"),
        ((96.0, 2.0, 0.5, 7, True, 2), {}, "enable must be True or False, got 96.0"),
        (("cuda",), {"device": "cuda"}, "device is given by position and by name"),
        ((96.0,), {"init_scale": 96.0}, "init_scale is given by position and by name"),
        (("cuda", 96.0), {"init_loss_scaling": 96.0}, "another name of init_loss_scaling"),
        ((96.0,), {"init_loss_scaling": 96.0}, "another name of init_loss_scaling"),
        ((96.0, 2.0, 0.5, 7, 2), {}, "enabled must be True or False, got 2"),
        (("cuda", True), {}, "init_scale must be"),
        ((), {"device": 96.0}, "device must be the name of a device, got 96.0"),
        ((True, 96.0, 2.0, 0.5, 7, 2, True, 1), {}, "takes from 1 to 8 positional"),
    ],
)
def test_arguments_of_neither_order_are_refused(args, kwargs, message):
    with pytest.raises(TypeError, match=message):
        GradScaler(*args, **kwargs)


def test_pytorch_s_name_beside_a_policy_is_refused():
    with pytest.raises(ValueError, match=r"policy=.*init_scale"):
        GradScaler(init_scale=96.0, policy=DynamicScale())


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor", "growth_interval"])
def test_a_getter_and_a_setter_have_pytorch_s_name_too(name):
    own, value = TORCH_NAMES[name]
    ours, plain = GradScaler(), GradScaler()
    getattr(ours, f"set_{name}")(value)
    getattr(plain, f"set_{own}")(value)
    assert library.exact(ours.state_dict()) == library.exact(plain.state_dict())
    assert getattr(ours, f"get_{name}")() == getattr(plain, f"get_{own}")() == value


def test_get_scale_is_the_scale_in_force():
    scaler = GradScaler(init_loss_scaling=1024.0, incr_every_n_steps=1)
    library.train(scaler, "oo")
    assert scaler.get_scale() == scaler._scale.item() == 4096.0
    assert scaler.get_init_loss_scaling() == 1024.0
    assert isinstance(scaler.get_scale(), float)
    assert GradScaler(enable=False).get_scale() == 0.0  # as in Paddle's development version
    assert not hasattr(paddle.amp.GradScaler, "get_scale")  # this release cannot tell otherwise


# Private values.


def private_tensors(scaler):
    """Those that Paddle's own scaler has under the same names."""
    names = ("_scale", "_found_inf", "_temp_found_inf_value_false")
    names += tuple(f"_temp_found_inf_{dtype}" for dtype in ("fp16", "bf16", "fp32"))
    return {name: getattr(scaler, name) for name in names}


def test_no_two_private_tensors_are_one_as_in_paddle_s(native):
    """A write to one in place would also write to the other."""
    theirs = {name for name, value in vars(native()).items() if library.is_tensor(value)}
    tensors = private_tensors(GradScaler())
    assert set(tensors) == theirs
    assert len(set(map(id, tensors.values()))) == 6


def test_a_copy_s_private_tensors_are_its_own():
    original = GradScaler()
    twin = copy.deepcopy(original)
    ours, theirs = private_tensors(original), private_tensors(twin)
    assert library.exact(ours) == library.exact(theirs)
    assert not set(map(id, ours.values())) & set(map(id, theirs.values()))


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


@pytest.mark.parametrize("make", [lambda: paddle.to_tensor([96.0]), lambda: 96.0])
def test_the_scale_can_be_set_as_a_tensor_of_paddle_s_shape_or_a_number(make):
    scaler = GradScaler()
    scaler._scale = make()
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


def test_a_scaler_disabled_by_its_private_name_passes_through(scaler):
    scaler._enable = False
    loss = paddle.ones([])
    assert scaler.scale(loss) is loss
    assert not scaler.is_enable()


@pytest.mark.parametrize("enable", [False, None])
def test_a_disabled_scaler_has_paddle_s_attributes(enable, native):
    ours, theirs = GradScaler(enable), native(enable)
    for name in ("_init_loss_scaling", "_scale", "_use_dynamic_loss_scaling"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("get_init_loss_scaling", "is_use_dynamic_loss_scaling", "state_dict"):
        assert getattr(ours, name)() == getattr(theirs, name)()
    assert ours.is_enable() is False


# Scaling, getters and setters.


@pytest.mark.parametrize("var", [1.0, np.ones(1), [paddle.ones([1])], None, "loss"])
def test_what_is_not_a_tensor_is_refused(var):
    with pytest.raises(TypeError, match="var must be"):
        GradScaler().scale(var)


def test_a_scale_that_is_set_is_in_force_at_the_next_loss_and_is_given_as_paddle_s(native):
    ours, theirs = GradScaler(), native()
    for scaler in (ours, theirs):
        scaler.set_init_loss_scaling(96.0)
        assert scaler.get_init_loss_scaling() == 96.0
        assert scaler.scale(paddle.ones([1])).item() == 96.0
    ours.load_state_dict(GradScaler(init_loss_scaling=8.0).state_dict())
    assert ours.get_init_loss_scaling() == 8.0


SCALES = {
    "a scalar tensor": lambda: paddle.to_tensor(96.0),
    "a tensor of shape [1]": lambda: paddle.to_tensor([96.0]),
    "an integer tensor": lambda: paddle.to_tensor(96),
    "a float16 tensor": lambda: paddle.to_tensor(96.0, "float16"),
    "an array of shape [1]": lambda: np.array([96.0], np.float32),
    "a NumPy scalar": lambda: np.float16(96.0),
}


@pytest.mark.parametrize("kind", SCALES)
def test_a_scale_may_be_a_tensor_as_with_paddle(kind, native):
    by_setter = []
    for scaler in (GradScaler(), native()):
        scaler.set_init_loss_scaling(SCALES[kind]())
        by_setter.append(scaler)
    by_name = [GradScaler(init_scale=SCALES[kind]())]
    by_position = [make(True, SCALES[kind]()) for make in (GradScaler, native)]
    for scaler in (*by_setter, *by_name, *by_position):
        assert scaler.scale(paddle.ones([1])).item() == 96.0
    assert GradScaler(True, SCALES[kind]()).get_init_loss_scaling() == 96.0


def test_a_tensor_of_several_elements_is_no_scale(scaler):
    for call in (scaler.set_init_loss_scaling, lambda value: GradScaler(init_scale=value)):
        with pytest.raises(ValueError, match="must be one number"):
            call(paddle.to_tensor([8.0, 16.0]))
    assert scaler.get_scale() == 1024.0


@pytest.mark.parametrize("value", ["many", {}, object()])
def test_a_scale_of_a_wrong_type_raises_what_paddle_raises_and_a_type_error(value, native, scaler):
    for ours, theirs in (
        (scaler.set_init_loss_scaling, native().set_init_loss_scaling),
        (lambda value: GradScaler(True, value), lambda value: native(True, value)),
    ):
        with pytest.raises((TypeError, ValueError)) as expected:
            theirs(value)
        for kind in (expected.type, TypeError):
            with pytest.raises(kind, match="init_loss_scaling must be a number"):
                ours(value)
    assert scaler.get_scale() == 1024.0


@pytest.mark.parametrize("value", [0.0, math.inf, "96"])
def test_a_bad_scale_is_refused_by_name_and_nothing_changes(value, scaler):
    bad_state = {**scaler.state_dict(), "incr_ratio": value, "scale": 8.0}
    for call, name in (
        (lambda: scaler.set_init_loss_scaling(value), "new_init_loss_scaling"),
        (lambda: scaler.load_state_dict(bad_state), "incr_ratio"),
    ):
        with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b.*{value}"):
            call()
        assert scaler.get_init_loss_scaling() == scaler._scale.item() == 1024.0


@pytest.mark.parametrize(("name", "value"), [("incr_ratio", 1.0), ("decr_ratio", 1.5)])
def test_a_setter_raises_what_paddle_s_raises(name, value, native):
    with pytest.raises(AssertionError) as theirs:
        getattr(native(), f"set_{name}")(value)
    with pytest.raises(type(theirs.value)):
        getattr(GradScaler(), f"set_{name}")(value)


@pytest.mark.parametrize("dynamic", [True, False])
def test_it_says_whether_it_is_enabled_and_dynamic(dynamic):
    scaler = GradScaler(use_dynamic_loss_scaling=dynamic)
    assert scaler.is_enable() is True
    assert scaler.is_use_dynamic_loss_scaling() is dynamic


@pytest.mark.parametrize(
    "fixed",
    [
        GradScaler(policy=FixedScale(96.0)),
        GradScaler(init_loss_scaling=96.0, use_dynamic_loss_scaling=False),
    ],
    ids=["policy", "parameter"],
)
def test_a_fixed_scaler_s_state_makes_a_dynamic_one_fixed(fixed, native):
    expected = native(init_loss_scaling=96.0, use_dynamic_loss_scaling=False).state_dict()
    expected.update(incr_every_n_steps=1000, decr_every_n_nan_or_inf=2)  # the documents' defaults
    for scaler in (GradScaler(), native()):
        scaler.load_state_dict(fixed.state_dict())
        assert not scaler.is_use_dynamic_loss_scaling()
        assert library.exact(scaler.state_dict()) == library.exact(expected)


def test_a_parameter_beside_a_policy_is_refused():
    with pytest.raises(ValueError, match="policy="):
        GradScaler(policy=DynamicScale(), use_dynamic_loss_scaling=False)


def test_writing_into_a_state_dict_does_not_reach_the_scaler(scaler):
    scaler.state_dict()["scale"][0] = 3.0
    assert scaler.state_dict()["scale"] == [1024.0]


def test_a_state_that_went_through_json_is_loaded_as_paddle_loads_it(native):
    saved = {**native(init_loss_scaling=96.0, incr_ratio=3.0).state_dict(), "incr_count": 7}
    saved = json.loads(json.dumps({**saved, "scale": saved["scale"].tolist()}))
    assert saved["scale"] == [96.0]
    ours, theirs = GradScaler(), native()
    for scaler in (ours, theirs):
        scaler.load_state_dict(saved)
        assert scaler.scale(paddle.ones([1])).item() == 96.0
    assert library.exact(ours.state_dict()) == library.exact(theirs.state_dict())


@pytest.mark.parametrize("scale", [[], [8.0, 16.0], [[8.0]], [0.0], [math.inf], ["8"], [True]])
def test_a_list_that_is_no_scale_is_refused_by_name_and_nothing_changes(scale, scaler):
    before = scaler.state_dict()
    with pytest.raises((TypeError, ValueError), match=r"^scale must be"):
        scaler.load_state_dict({**before, "scale": scale, "incr_ratio": 3.0})
    assert library.exact(scaler.state_dict()) == library.exact(before)


def test_a_state_that_does_not_say_whether_it_is_dynamic_is_refused(scaler):
    with pytest.raises(TypeError, match="use_dynamic_loss_scaling"):
        scaler.load_state_dict({**scaler.state_dict(), "use_dynamic_loss_scaling": "yes"})
    assert scaler.is_use_dynamic_loss_scaling()


# minimize.


@pytest.fixture
def optimizer(parameters):
    return paddle.optimizer.SGD(0.1, parameters=parameters)


@pytest.mark.parametrize("enable", [True, False])
def test_minimize_returns_what_the_optimizer_s_returns(enable, optimizer, parameters, finite):
    scaler = GradScaler(enable)
    loss = library.backward(scaler, parameters, finite)
    operators, pairs = scaler.minimize(optimizer, loss)
    assert operators == []
    assert [id(parameter) for parameter, _ in pairs] == list(map(id, parameters))
    gradients = [gradient for _, gradient in pairs]
    assert library.exact(gradients) == library.exact(list(map(paddle.to_tensor, finite)))


def test_minimize_returns_the_optimizer_s_own_value_whatever_it_is(
    scaler, optimizer, parameters, finite
):
    optimizer.minimize = lambda loss: None
    assert scaler.minimize(optimizer, library.backward(scaler, parameters, finite)) is None


def test_minimize_hands_its_arguments_on(scaler, optimizer, parameters, finite):
    scaled = library.backward(scaler, parameters, finite)
    before = library.exact(parameters[1])
    _, pairs = scaler.minimize(optimizer, scaled, parameters=parameters[:1])
    assert len(pairs) == 1
    assert library.exact(parameters[1]) == before


def test_minimize_of_an_optimizer_without_gradients_finds_no_pairs(scaler, optimizer):
    assert scaler.minimize(optimizer, scaler.scale(paddle.ones([]))) == ([], [])
    assert scaler.last_step(optimizer).reason == "no_gradients"


def test_minimize_of_parameter_groups_is_refused_by_paddle_s_optimizer_itself(
    scaler, parameters, finite
):
    optimizer = paddle.optimizer.SGD(0.1, parameters=[{"params": parameters}])
    loss = library.backward(scaler, parameters, finite)
    for minimize in (optimizer.minimize, lambda loss: scaler.minimize(optimizer, loss)):
        with pytest.raises(TypeError, match="must be list of Tensor"):
            minimize(loss)


# The outcome, and the stage.


def test_the_last_step_tells_what_happened(optimizer, parameters, finite, overflowed):
    scaler = GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1)
    outcomes = []
    for gradients in (finite, overflowed, finite):
        optimizer.clear_grad()
        library.backward(scaler, parameters, gradients)
        scaler.step(optimizer)
        scaler.update()
        outcome = scaler.last_step(optimizer)
        outcomes.append((outcome.applied, outcome.found_inf, outcome.reason, outcome.scale))
    assert outcomes == [
        (True, False, "finite", 1024.0),
        (False, True, "overflow", 1024.0),
        (True, False, "finite", 512.0),
    ]


def test_after_an_iteration_without_gradients_no_overflow_is_reported(
    scaler, optimizer, parameters, overflowed
):
    """PaddleNLP reads there whether the optimizer ran."""
    library.backward(scaler, parameters, overflowed)
    for found_inf in (True, False):
        scaler.step(optimizer)
        scaler.update()
        assert scaler._cache_found_inf is found_inf
        optimizer.clear_grad(set_to_zero=False)


def test_the_optimizer_s_stage_reads_as_paddle_s_does(native, finite, overflowed):
    def stages(scaler):
        parameters = library.parameters()
        optimizer = library.sgd(parameters)
        for gradients in (finite, overflowed):
            optimizer.clear_grad()
            library.backward(scaler, parameters, gradients)
            for call in (scaler.unscale_, scaler.step, lambda _: scaler.update()):
                yield scaler._optimizer_states[id(optimizer)]["state"]
                call(optimizer)
        yield scaler._optimizer_states[id(optimizer)]["state"]

    seen = list(stages(GradScaler()))
    assert seen == list(stages(native()))
    assert set(seen) == set(OptimizerState)


def test_a_stage_that_is_set_counts(scaler, optimizer, parameters, finite):
    library.backward(scaler, parameters, finite)
    scaler._optimizer_states[id(optimizer)]["state"] = OptimizerState.STEPPED
    with pytest.raises(RuntimeError, match="update"):
        scaler.step(optimizer)


def test_a_record_holds_nothing_but_the_stage_under_paddle_s_key(scaler):
    record = scaler._optimizer_states[0]
    with pytest.raises(KeyError):
        record["stage"]
    with pytest.raises(KeyError):
        record["stage"] = OptimizerState.INIT
