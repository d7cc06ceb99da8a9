"""The code examples of TensorPlay's own documentation of its scaler run, the import changed."""

import textwrap

import pytest
import tensorplay as tp

import gradscaler.tensorplay

# Word for word. Where the second says ``torch``, a copy of PyTorch's text, it means tensorplay.
EXAMPLE_OF_THE_CLASS = """
    # Creates a GradScaler once at the beginning of training.
    scaler = GradScaler()

    for epoch in epochs:
        for input, target in data:
            optimizer.zero_grad()
            output = model(input)
            loss = loss_fn(output, target)

            # Scales loss. Calls backward() on scaled loss to create scaled gradients.
            scaler.scale(loss).backward()

            # scaler.step() first unscales gradients of the optimizer's params.
            # If gradients don't contain infs/NaNs, optimizer.step() is then called,
            # otherwise, optimizer.step() is skipped.
            scaler.step(optimizer)

            # Updates the scale for next iteration.
            scaler.update()
"""
EXAMPLE_OF_UNSCALE_ = """
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
"""


def names(randn):
    """The names that the examples take for granted."""
    tp.manual_seed(0)
    model = tp.nn.Linear(3, 1)
    inputs, targets = randn(0, (4, 3), (4, 1))
    loss_fn = tp.nn.functional.mse_loss
    return {
        "model": model,
        "optimizer": tp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loss_fn": loss_fn,
        "epochs": range(3),
        "data": [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])],
        "loss": loss_fn(model(inputs), targets),
        "max_norm": 0.1,
        "torch": tp,
    }


def run(example, given):
    exec(textwrap.dedent(example), given)
    return given


@pytest.fixture
def trained(randn, exact):
    """The parameters after an example has run with a scaler."""

    def trained(example, **given):
        return exact(list(run(example, {**names(randn), **given})["model"].parameters()))

    return trained


def test_the_example_of_the_class_trains_as_if_nothing_had_been_scaled(randn, exact, trained):
    plain = names(randn)
    for _ in plain["epochs"]:
        for inputs, targets in plain["data"]:
            plain["optimizer"].zero_grad()
            plain["loss_fn"](plain["model"](inputs), targets).backward()
            plain["optimizer"].step()
    ours = trained(EXAMPLE_OF_THE_CLASS, GradScaler=gradscaler.tensorplay.GradScaler)
    assert ours == exact(list(plain["model"].parameters()))


def test_the_example_of_the_class_trains_as_with_tensorplay(trained):
    ours = trained(EXAMPLE_OF_THE_CLASS, GradScaler=gradscaler.tensorplay.GradScaler)
    native = trained(EXAMPLE_OF_THE_CLASS, GradScaler=lambda: tp.amp.GradScaler("cpu"))
    assert ours == native


def test_the_example_of_the_class_scales(randn):
    given = {**names(randn), "GradScaler": gradscaler.tensorplay.GradScaler}
    scaler = run(EXAMPLE_OF_THE_CLASS, given)["scaler"]
    assert type(scaler) is gradscaler.tensorplay.GradScaler
    assert scaler.state_dict() == {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 6,
    }


def test_the_example_of_unscale_clips_as_with_tensorplay(trained):
    ours = trained(EXAMPLE_OF_UNSCALE_, scaler=gradscaler.tensorplay.GradScaler())
    native = trained(EXAMPLE_OF_UNSCALE_, scaler=tp.amp.GradScaler("cpu"))
    assert ours == native


def test_the_example_of_unscale_clips_the_true_gradients(randn):
    given = {**names(randn), "scaler": gradscaler.tensorplay.GradScaler()}
    model = run(EXAMPLE_OF_UNSCALE_, given)["model"]
    norm = tp.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert norm.item() == pytest.approx(0.1, rel=1e-4)
