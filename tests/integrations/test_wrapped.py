"""Trainers hand their users a wrapper, and step the optimizer in it: either is known to the scaler.

Each test starts from scaled gradients of an optimizer that the package has wrapped.
"""

import pytest
import torch

from gradscaler import CallOrderError
from gradscaler.torch import GradScaler

# The packages warn of each other, of their own code, and of the CPU.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def scaler():
    return GradScaler(init_scale=1024.0)


@pytest.fixture(params=["accelerate", "fabric", "lightning"])
def stepping(request, task, scaler, accelerator):
    """Call a given function with the wrapper before a step, where the package's users would.

    The gradients have a norm of 10 or more, and the learning rate is 1.
    """
    it = task(torch.optim.SGD, lr=1.0)
    inputs = it.inputs[0]
    package = request.param

    def loss_of(model):
        return 100 * model(inputs).float().square().mean()

    def on_accelerate(calls):
        trainer = accelerator(scaler)
        model, optimizer = trainer.prepare(it.model, it.optimizer)
        trainer.backward(loss_of(model))
        calls(optimizer)

    def on_fabric(calls):
        from lightning.fabric import Fabric
        from lightning.fabric.plugins import MixedPrecision

        fabric = Fabric(accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        model, optimizer = fabric.setup(it.model, it.optimizer)
        fabric.backward(loss_of(model))
        calls(optimizer)

    def on_lightning(calls):
        import lightning
        from lightning.pytorch.plugins import MixedPrecision

        class Module(lightning.LightningModule):
            automatic_optimization = False

            def __init__(self):
                super().__init__()
                self.model = it.model

            def training_step(self, batch):
                self.manual_backward(loss_of(self.model))
                calls(self.optimizers())

            def configure_optimizers(self):
                return it.optimizer

        lightning.Trainer(
            accelerator="cpu",
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
            max_epochs=1,
            limit_train_batches=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Module(), torch.utils.data.DataLoader(it.samples, 4))

    before = [parameter.detach().clone() for parameter in it.model.parameters()]

    def run(calls):
        {"accelerate": on_accelerate, "fabric": on_fabric, "lightning": on_lightning}[package](
            calls
        )
        moves = [a.detach() - b for a, b in zip(it.model.parameters(), before, strict=True)]
        return float(torch.cat([move.flatten() for move in moves]).norm())

    run.optimizer = it.optimizer
    return run


def test_without_a_clip_the_step_is_as_long_as_the_gradients(stepping):
    assert stepping(lambda wrapped: wrapped.step()) > 10


def test_clipping_the_wrapper_clips_what_the_package_steps(stepping, scaler):
    def calls(wrapped):
        assert wrapped is not stepping.optimizer
        assert scaler.clip_grad_norm_(wrapped, 0.001) > 10
        wrapped.step()
        assert scaler.last_step(wrapped).applied
        assert scaler.last_step(wrapped) is scaler.last_step(stepping.optimizer)

    assert stepping(calls) == pytest.approx(0.001, rel=1e-3)


def test_unscaling_the_wrapper_unscales_once(stepping, scaler):
    def calls(wrapped):
        scaler.unscale_(wrapped)
        with pytest.raises(CallOrderError, match="already been called"):
            scaler.unscale_(stepping.optimizer)
        gradients = [p.grad.flatten() for g in wrapped.param_groups for p in g["params"]]
        norm = torch.cat(gradients).norm()
        scaler.step(stepping.optimizer)
        lengths.append(float(norm))

    lengths = []
    assert stepping(calls) == pytest.approx(lengths[0], rel=1e-4)


def test_an_overflow_is_reported_for_both(stepping, scaler):
    def calls(wrapped):
        wrapped.param_groups[0]["params"][0].grad[0] = float("inf")
        wrapped.step()
        assert not scaler.last_step(wrapped).applied
        assert not scaler.last_step(stepping.optimizer).applied

    assert stepping(calls) == 0
    assert scaler.get_scale() == 512.0


def test_a_step_may_be_left_out_after_a_clip(stepping, scaler):
    def calls(wrapped):
        scaler.clip_grad_norm_(wrapped, 0.001)
        scaler.update()

    assert stepping(calls) == 0


def test_a_clip_that_a_step_of_the_optimizer_itself_ignores_is_an_error(stepping, scaler):
    def calls(wrapped):
        scaler.clip_grad_norm_(wrapped, 0.001)
        stepping.optimizer.step()
        with pytest.raises(CallOrderError, match=r"scaler\.step\(optimizer\)"):
            scaler.update()

    assert stepping(calls) > 10 * 1024  # neither clipped nor unscaled


def test_last_step_is_right_where_accelerate_does_not_see_the_skip(task, scaler, accelerator):
    for settings, seen in ({"fused": False}, True), ({"fused": True}, False):
        it = task(torch.optim.SGD, lr=1.0, **settings)
        model, optimizer = accelerator(scaler).prepare(it.model, it.optimizer)
        before = model[0].weight.detach().clone()
        scaler.scale(model(it.inputs[0]).sum() * float("inf")).backward()
        optimizer.step()
        assert torch.equal(model[0].weight, before)
        assert optimizer.step_was_skipped == seen
        assert not scaler.last_step(optimizer).applied
