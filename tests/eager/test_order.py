"""Calls out of order: the framework's exception, the missing call by name, and nothing changed."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest

from gradscaler import CallOrderError, DynamicScale, FixedScale
from tests.support.eager import library

# The code before, the call that raises, and the call that its message asks for.
IN_MID_ITERATION = [
    ("backward(); scaler.unscale_(optimizer)", "scaler.unscale_(optimizer)", "update"),
    ("backward(); scaler.step(optimizer)", "scaler.unscale_(optimizer)", "update"),
    ("backward(); scaler.step(optimizer)", "scaler.step(optimizer)", "update"),
    (
        "backward(); scaler.unscale_(optimizer); scaler.step(optimizer)",
        "scaler.step(optimizer)",
        "update",
    ),
    (
        "backward(); scaler.unscale_(optimizer); scaler.step(optimizer)",
        "scaler.unscale_(optimizer)",
        "update",
    ),
]
WITHOUT_A_STEP = [
    ("pass", "scaler.update()", "scale"),
    ("backward()", "scaler.update()", "step"),
    ("backward(); scaler.step(optimizer); scaler.update()", "scaler.update()", "step"),
]
COPIES = [
    ("backward(); scaler.unscale_(optimizer)", "copy.deepcopy(scaler)", "update"),
    ("backward(); scaler.step(optimizer)", "pickle.dumps(scaler)", "update"),
]
OURS_ALONE = [
    ("pass", "scaler.last_step(optimizer)", "step"),
    ("backward(); scaler.unscale_(optimizer)", "scaler.last_step(optimizer)", "step"),
    ("backward(); scaler.step(optimizer)", "scaler.clip_grad_norm_(optimizer, 1.0)", "step"),
    ("backward(); scaler.step(optimizer)", "scaler.minimize(optimizer, loss)", "update"),
    ("backward(); scaler.step(optimizer)", "scaler.step(optimizer, closure)", "update"),
    (
        "backward(); scaler.clip_grad_norm_(optimizer, 1.0)",
        "scaler.step(optimizer, closure)",
        "clip_grad_norm",
    ),
]
if library.name == "paddle":  # gradients may come from elsewhere than a scaled loss
    AS_NATIVE = IN_MID_ITERATION
    OURS_ALONE += [*COPIES, ("pass", "scaler.update()", "step"), *WITHOUT_A_STEP[1:]]
    OURS_ALONE += [("backward(); scaler.minimize(optimizer, loss)", "scaler.update()", "step")]
else:
    AS_NATIVE = [
        *IN_MID_ITERATION,
        *WITHOUT_A_STEP,
        *COPIES,
        ("pass", "scaler.unscale_(optimizer)", "scale"),
        ("pass", "scaler.step(optimizer)", "scale"),
        ("pass", "scaler.update(8.0)", "scale"),
        ("pass", "scaler._check_inf_per_device(optimizer)", "scale"),
    ]
    OURS_ALONE += [
        ("pass", "scaler.clip_grad_norm_(optimizer, 1.0)", "scale"),
        ("pass", "scaler.minimize(optimizer, loss)", "scale"),
    ]


def names(scaler, gradients, fused=False):
    """The names that the calls above use, for ``exec``."""
    parameters = library.parameters()
    optimizer = library.adamw(parameters, fused=fused)
    return {
        "scaler": scaler,
        "optimizer": optimizer,
        "clear": lambda: library.clear_gradients(optimizer),
        "backward": lambda: library.backward(scaler, parameters, gradients),
        "loss": library.tensor([1.0]),
        "closure": lambda: pytest.fail("the closure was called"),
        "copy": copy,
        "pickle": pickle,
    }


@pytest.mark.parametrize(("before", "call", "missing"), AS_NATIVE)
def test_the_exception_can_be_caught_as_the_framework_s(
    before, call, missing, fused, native, finite
):
    raised = []
    for make_scaler in (native, library.scaler):
        loop = names(make_scaler(), finite, fused)
        exec(before, loop)
        with pytest.raises((RuntimeError, AssertionError)) as error:
            exec(call, loop)
        raised.append(error.value)
    assert isinstance(raised[1], type(raised[0]))


@pytest.mark.parametrize(("before", "call", "missing"), [*AS_NATIVE, *OURS_ALONE])
def test_the_message_names_the_missing_call_and_nothing_changes(
    before, call, missing, scaler, fused, finite
):
    loop = names(scaler, finite, fused)
    exec(before, loop)
    untouched = library.everything(scaler, loop["optimizer"])
    with pytest.raises(CallOrderError, match=rf"\b{missing}_?\("):
        exec(call, loop)
    assert library.everything(scaler, loop["optimizer"]) == untouched


CLIP = "scaler.clip_grad_norm_(optimizer, 1.0)"
CLIP_ANOTHER_NORM = "scaler.clip_grad_norm_(optimizer, 1.0, 1.0)"
READ_THE_SCALE = "scaler.get_scale(); scaler._scale"
NO_UPDATE = r"call update\(\) at the end of each iteration"
CLIPPED_EARLY = rf"before the latest loss was scaled.*after the last backward pass.*{NO_UPDATE}"


@pytest.mark.parametrize("between", ["pass", READ_THE_SCALE])
@pytest.mark.parametrize(
    ("calls", "last", "cause"),
    [
        (["backward()", CLIP, "backward()"], CLIP, CLIPPED_EARLY),
        (["backward()", CLIP_ANOTHER_NORM, "backward()"], CLIP_ANOTHER_NORM, CLIPPED_EARLY),
        (["backward()", CLIP, "clear()", "backward()"], CLIP, CLIPPED_EARLY),
        (["backward()", CLIP, "scaler.step(optimizer)", "clear()", "backward()"], CLIP, NO_UPDATE),
        (
            ["backward()", "scaler.unscale_(optimizer)", "backward()"],
            "scaler.unscale_(optimizer)",
            r"after the last backward pass.*with accumulation, only in .* still calls update\(\)",
        ),
    ],
    ids=["each micro-batch", "another norm", "no update", "no update after a step", "unscale_"],
)
def test_where_no_call_raised_the_message_says_what_was_called_too_early_or_not_at_all(
    calls, last, cause, between, fused, scaler, finite
):
    loop = names(scaler, finite, fused)
    for call in calls:
        exec(call, loop)
        exec(between, loop)
    before = library.stepped(loop["optimizer"])
    for _ in range(2):  # the error itself is no other cause
        with pytest.raises(CallOrderError, match=cause) as error:
            exec(last, loop)
        assert "raised" not in str(error.value)
    assert library.stepped(loop["optimizer"]) == before


@pytest.mark.parametrize("calls", ["backward()", "clear(); backward()"])
def test_what_that_message_says_to_do_leads_on(calls, fused, scaler, finite):
    loop = names(scaler, finite, fused)
    exec(f"backward(); {CLIP}; {calls}", loop)
    with pytest.raises(CallOrderError, match=r"clear the gradients, call scaler\.update"):
        exec(CLIP, loop)
    exec(f"clear(); scaler.update(); backward(); {CLIP}; scaler.step(optimizer)", loop)
    assert scaler.last_step(loop["optimizer"]).applied
    clipped = [library.numpy(p.grad).ravel() for p in library.owned(loop["optimizer"])]
    assert np.linalg.norm(np.concatenate(clipped)) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("before", "call", "rest"),
    [
        (
            "backward(); scaler.unscale_(optimizer)",
            "scaler.unscale_(optimizer)",
            "scaler.step(optimizer); scaler.update()",
        ),
        ("backward(); scaler.step(optimizer)", "scaler.unscale_(optimizer)", "scaler.update()"),
        ("backward(); scaler.step(optimizer)", "scaler.step(optimizer)", "scaler.update()"),
        (
            "backward(); scaler.unscale_(optimizer); scaler.step(optimizer)",
            "scaler.step(optimizer)",
            "scaler.update()",
        ),
        (
            "backward(); scaler.unscale_(optimizer); scaler.step(optimizer)",
            "scaler.unscale_(optimizer)",
            "scaler.update()",
        ),
        ("backward()", "scaler.update()", "scaler.step(optimizer); scaler.update()"),
        ("backward()", "scaler.last_step(optimizer)", "scaler.step(optimizer); scaler.update()"),
        (
            "backward(); scaler.unscale_(optimizer)",
            "scaler.last_step(optimizer)",
            "scaler.step(optimizer); scaler.update()",
        ),
    ],
)
def test_after_the_error_the_iteration_can_be_finished(before, call, rest, finite):
    disturbed, plain = library.scaler(), library.scaler()
    ours, expected = names(disturbed, finite), names(plain, finite)
    exec(before, ours)
    exec(before, expected)
    with pytest.raises(CallOrderError):
        exec(call, ours)
    exec(rest, ours)
    exec(rest, expected)
    assert library.everything(disturbed, ours["optimizer"]) == library.everything(
        plain, expected["optimizer"]
    )


def test_after_an_update_too_many_everything_is_as_after_one(parameters, finite):
    scaler, optimizer = library.scaler(), library.adamw(parameters)
    library.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    scaler.update()
    after_one = library.everything(scaler, optimizer)
    with pytest.raises(CallOrderError):
        scaler.update()
    assert library.everything(scaler, optimizer) == after_one


@pytest.mark.parametrize(
    "policy", [DynamicScale(1024.0), FixedScale(1024.0)], ids=["dynamic", "fixed"]
)
def test_each_call_in_order_goes_through(policy, fused, parameters, finite):
    scaler, optimizer = library.scaler(policy=policy), library.adamw(parameters, fused=fused)
    for _ in range(2):
        library.clear_gradients(optimizer)
        library.backward(scaler, parameters, finite)
        scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step(optimizer).applied
        copy.deepcopy(scaler)
        pickle.dumps(scaler)

        library.clear_gradients(optimizer)
        library.backward(scaler, parameters, finite)
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.unscale_(optimizer)
        scaler.minimize(optimizer, library.tensor([1.0]))
        assert scaler.last_step(optimizer).applied
        copy.deepcopy(scaler)
        pickle.dumps(scaler)


def test_under_a_fixed_scale_update_ends_an_iteration_that_took_no_step(parameters, finite):
    """The message of the error says so: call update() once per iteration."""
    scaler = library.scaler(policy=FixedScale(1024.0))
    optimizer = library.adamw(parameters)
    for _ in range(2):
        library.clear_gradients(optimizer)
        library.backward(scaler, parameters, finite)
        scaler.unscale_(optimizer)
        scaler.update()


def test_under_a_fixed_scale_gradients_are_not_unscaled_twice(parameters, finite):
    scaler = library.scaler(policy=FixedScale(1024.0))
    optimizer = library.adamw(parameters)
    library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    with pytest.raises(CallOrderError, match="update"):
        scaler.unscale_(optimizer)


def test_one_optimizer_s_stage_is_not_the_other_s(scaler, parameters, finite):
    first, second = (library.sgd([parameter]) for parameter in parameters)
    library.backward(scaler, parameters, finite)
    scaler.unscale_(first)
    scaler.step(first)
    scaler.unscale_(second)
    with pytest.raises(RuntimeError, match="update"):
        scaler.unscale_(second)
    scaler.step(second)
    assert scaler.last_step(second).applied


def test_an_optimizer_that_raises_leaves_the_step_to_be_taken(fused, parameters, finite):
    scaler, optimizer = library.scaler(), library.adamw(parameters, fused=fused)
    library.backward(scaler, parameters, finite)
    before = library.kept(optimizer)
    with pytest.raises(TypeError, match="unknown_argument"):
        scaler.step(optimizer, unknown_argument=1)
    assert library.kept(optimizer) == before
    assert not hasattr(optimizer, "grad_scale")
    scaler.step(optimizer)
    scaler.update()

    others = library.parameters()
    undisturbed, plain = library.scaler(), library.adamw(others, fused=fused)
    library.backward(undisturbed, others, finite)
    undisturbed.step(plain)
    undisturbed.update()
    assert library.kept(optimizer) == library.kept(plain) != before


def test_an_optimizer_freed_in_mid_iteration_leaves_no_record_to_another(
    scaler, parameters, finite
):
    """Python gives the id of a freed object to another one, such as the next optimizer here."""
    for _ in range(50):
        optimizer = library.sgd(parameters, lr=0.0)
        library.clear_gradients(optimizer)
        library.backward(scaler, parameters, finite)
        scaler.unscale_(optimizer)
        del optimizer
    scaler.update()
    assert library.finite_steps_of(scaler) == 1


def test_no_optimizer_is_kept_alive_after_the_iteration(scaler, parameters, finite):
    optimizer = library.sgd(parameters)
    library.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    scaler.update()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert not scaler._outcomes._by_id  # where an optimizer with its id would find the outcome
