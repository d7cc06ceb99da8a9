"""A scaled loss whose backward pass adds to gradients that are unscaled already."""

import gc
import weakref

import numpy as np
import pytest

from gradscaler import CallOrderError
from tests.support.eager import library

UNSCALE = "scaler.unscale_(optimizer)"
CLIP = "scaler.clip_grad_norm_(optimizer, 1.0)"
CLIP_ANOTHER_NORM = "scaler.clip_grad_norm_(optimizer, 1.0, 1.0)"
SAYS = r"after unscale_\(\) or clip_grad_norm_\(\).*after the last backward pass.*clear.*update\(\)"


def loss_of(parameters, gradients):
    """A loss whose gradients are these."""
    return sum(
        (p * library.tensor(g, p.dtype)).sum() for p, g in zip(parameters, gradients, strict=True)
    )


def grad(loss, parameters):
    """The gradients of a loss, which are not put into the parameters."""
    framework = library.framework
    return (framework if library.name == "paddle" else framework.autograd).grad(loss, parameters)


@pytest.fixture(params=[UNSCALE, CLIP, CLIP_ANOTHER_NORM], ids=["unscale", "clip", "clip by 1"])
def mixed(request, scaler, parameters, finite, fused):
    """An optimizer whose gradients are unscaled in one part, and scaled in the other."""
    optimizer = library.adamw(parameters, fused=fused)
    library.backward(scaler, parameters, finite)
    exec(request.param, {"scaler": scaler, "optimizer": optimizer})
    library.backward(scaler, parameters, finite)
    return optimizer


def test_the_step_is_refused_and_nothing_changes(mixed, scaler):
    before = library.everything(scaler, mixed)
    for _ in range(2):
        with pytest.raises(CallOrderError, match=SAYS):
            scaler.step(mixed)
    assert library.everything(scaler, mixed) == before


def test_what_the_message_says_to_do_leads_on(mixed, scaler, parameters, finite):
    with pytest.raises(CallOrderError):
        scaler.step(mixed)
    library.clear_gradients(mixed)
    scaler.update()
    library.backward(scaler, parameters, finite)
    scaler.step(mixed)
    scaler.update()
    gradients = [library.numpy(parameter.grad) for parameter in parameters]
    if scaler.last_step(mixed).applied and not hasattr(mixed, "_step_supports_amp_scaling"):
        assert library.exact(gradients) == library.exact([g.astype(float) for g in finite])
    assert scaler.last_step(mixed).applied


def test_clipping_is_refused_too(scaler, parameters, finite):
    optimizer = library.sgd(parameters)
    library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    library.backward(scaler, parameters, finite)
    with pytest.raises(CallOrderError, match=SAYS):
        scaler.clip_grad_norm_(optimizer, 1.0)


def test_a_loss_that_was_scaled_before_counts_if_its_backward_pass_comes_after(
    scaler, parameters, finite
):
    optimizer = library.sgd(parameters)
    first, second = (scaler.scale(loss_of(parameters, finite)) for _ in range(2))
    first.backward()
    scaler.unscale_(optimizer)
    second.backward()
    with pytest.raises(CallOrderError, match=SAYS):
        scaler.step(optimizer)


def test_a_gradient_that_was_none_counts(scaler, parameters, finite):
    optimizer = library.sgd(parameters)
    library.backward(scaler, parameters, [finite[0], None])
    scaler.unscale_(optimizer)
    library.backward(scaler, parameters, [None, finite[1]])
    with pytest.raises(CallOrderError, match=SAYS):
        scaler.step(optimizer)


def test_a_discriminator_s_gradients_that_the_generator_s_loss_reaches_are_refused(
    scaler, parameters, finite
):
    of_one, of_other = (library.sgd([parameter]) for parameter in parameters)
    library.backward(scaler, parameters[:1], finite[:1])
    scaler.unscale_(of_one)
    library.backward(scaler, parameters, finite)
    scaler.step(of_other)
    with pytest.raises(CallOrderError, match=SAYS):
        scaler.step(of_one)


# What is alike, and allowed. Each returns the gradients that the first parameter shall have.


def another_optimizer(scaler, optimizer, parameters, gradients):
    """A loss of other parameters; then the user clips, as GANs do."""
    library.backward(scaler, parameters[1:], gradients[1:])
    scaler.unscale_(library.sgd(parameters[1:]))
    library.framework.nn.utils.clip_grad_norm_(parameters[:1], 1e-2)


def an_unscaled_loss(scaler, optimizer, parameters, gradients):
    """A penalty in the units of the unscaled gradients."""
    scaler.scale(loss_of(parameters[1:], gradients[1:]))
    loss_of(parameters[:1], gradients[:1]).backward()
    return 2 * gradients[0]


def gradients_apart(scaler, optimizer, parameters, gradients):
    """The gradients of a scaled loss, for a penalty, which are not put into the parameters."""
    grad(scaler.scale(loss_of(parameters, gradients)), parameters)
    return gradients[0]


def another_scaled_loss_without_a_pass(scaler, optimizer, parameters, gradients):
    """As for a log; then the user changes the gradients."""
    scaler.scale(loss_of(parameters, gradients))
    library.set_gradients(parameters[:1], [0.5 * gradients[0]])
    return 0.5 * gradients[0]


def a_pass_of_another_loss_that_was_kept(scaler, optimizer, parameters, gradients):
    kept = scaler.scale(loss_of(parameters[1:], gradients[1:]))
    kept.backward()
    return gradients[0]


@pytest.mark.parametrize(
    "between",
    [
        another_optimizer,
        an_unscaled_loss,
        gradients_apart,
        another_scaled_loss_without_a_pass,
        a_pass_of_another_loss_that_was_kept,
    ],
)
def test_what_adds_no_scaled_gradient_is_allowed(between, scaler, parameters, finite):
    optimizer = library.sgd(parameters[:1])
    kept = library.backward(scaler, parameters[:1], finite[:1])
    scaler.unscale_(optimizer)
    expected = between(scaler, optimizer, parameters, finite)
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).applied
    if expected is not None:
        np.testing.assert_array_equal(library.numpy(parameters[0].grad), expected)
    del kept


def test_a_loss_after_the_step_is_the_next_iteration_s(scaler, parameters, finite):
    optimizer = library.sgd(parameters)
    library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    library.backward(scaler, parameters, finite)  # a generator's, say
    scaler.update()
    library.clear_gradients(optimizer)
    library.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).applied


def test_no_loss_that_is_kept_keeps_an_optimizer_alive(scaler, parameters, finite):
    optimizer = library.sgd(parameters)
    kept = library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    del kept


def test_parameters_keep_no_hook(scaler, parameters, finite):
    optimizer = library.sgd(parameters)
    library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    library.backward(scaler, parameters, finite)
    with pytest.raises(CallOrderError):
        scaler.step(optimizer)
    library.clear_gradients(optimizer)
    scaler.update()
    library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    loss_of(parameters, finite).backward()
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).applied
