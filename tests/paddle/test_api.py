"""The surface of paddle.amp.GradScaler where it is Paddle's alone: its names, and minimize."""

import copy
import inspect
import math
import re

import numpy as np
import paddle
import pytest
from libraries import library
from paddle.amp.grad_scaler import OptimizerState

from gradscaler import DynamicScale, FixedScale
from gradscaler.paddle import GradScaler

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
    (stated,) = re.findall(r"Release 3\.3\.1 itself has (.*?)\.\n", GradScaler.__doc__, re.DOTALL)
    assert all(name in stated and str(value) in stated for name, value in differing.items())


# Private values.


def private_tensors(scaler):
    """Those that Paddle's own scaler has under the same names."""
    names = ("_scale", "_found_inf", "_temp_found_inf_value_false")
    names += tuple(f"_temp_found_inf_{dtype}" for dtype in ("fp16", "bf16", "fp32"))
    return {name: getattr(scaler, name) for name in names}


def test_no_two_private_tensors_are_one_as_in_paddle_s(native):
    """What writes to one in place would write to the other."""
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


def test_a_scaler_disabled_by_its_private_name_passes_through(scaler):
    scaler._enable = False
    loss = paddle.ones([])
    assert scaler.scale(loss) is loss
    assert not scaler.is_enable()


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
