"""A type checker's errors in a user's code."""

from tests.support.eager import library

BASE = """
import {name}
from gradscaler import StepOutcome
from gradscaler.{name} import GradScaler


def use(optimizer: {name}.{optim}.Optimizer, loss: {name}.Tensor) -> None:
    scaler = GradScaler()
    scaled: {name}.Tensor = scaler.scale(loss)
    norm: {name}.Tensor = scaler.clip_grad_norm_(optimizer, 1.0)
    outcome: StepOutcome = scaler.last_step(optimizer)
    scaler.step(optimizer)
    scaler.step(5)  # arg-type
    scaler.unscale_(5)  # arg-type
    scaler.clip_grad_norm_(5, 1.0)  # arg-type
    scaler.clip_grad_norm_(optimizer)  # call-arg
"""
TORCH_LIKE = """
    several: list[{name}.Tensor] = scaler.scale([loss])
    fixed: tuple[{name}.Tensor, ...] = scaler.scale((loss, loss))
    scaler.unscale_(loss)  # arg-type
    scaler.update(2.0)
    scaler.update("large")  # arg-type
    scaler.last_step("adam")  # arg-type
    scaler.scale(5)  # call-overload
    GradScaler(init_scale=1024.0)
    GradScaler(1024.0)  # arg-type
"""
ALONE = {
    "torch": """
    result: float | None = scaler.step(optimizer)
    scaler.scale(loss).no_such_method()  # attr-defined
    scaler.step(optimizer).no_such_method()  # union-attr
""",
    "paddle": """
    scaler.minimize(optimizer, scaled)
    scaler.minimize(5)  # arg-type
    scaler.scale(5)  # arg-type
    GradScaler(True, 1024.0, 2.0, 0.5, 1000, 2, True)
    GradScaler("cuda", 1024.0, 2.0, 0.5, 2000, True)
    GradScaler(1024.0, 2.0, 0.5, 2000, True)
    GradScaler(device="cuda", init_scale="large")  # arg-type
""",
    "tensorplay": "",
}


def test_wrong_calls_are_errors_and_right_ones_are_not(check_types):
    code = BASE + (TORCH_LIKE if library.name != "paddle" else "") + ALONE[library.name]
    optim = "optimizer" if library.name == "paddle" else "optim"
    check_types(code.format(name=library.name, optim=optim))
