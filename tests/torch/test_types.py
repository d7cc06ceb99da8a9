"""What a type checker says of a user's code."""

CODE = """
import torch
from gradscaler import StepOutcome
from gradscaler.torch import GradScaler

parameter = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([parameter])
loss: torch.Tensor = parameter.sum()
scaler = GradScaler(init_scale=1024.0)
a: torch.Tensor = scaler.scale(loss)
b: list[torch.Tensor] = scaler.scale([loss])
c: tuple[torch.Tensor, ...] = scaler.scale((loss, loss))
d: torch.Tensor = scaler.clip_grad_norm_(optimizer, 1.0)
e: StepOutcome = scaler.last_step(optimizer)
f: float | None = scaler.step(optimizer)
scaler.update(2.0)
scaler.step(5)  # arg-type
scaler.unscale_(loss)  # arg-type
scaler.clip_grad_norm_(optimizer)  # call-arg
scaler.clip_grad_norm_(5, 1.0)  # arg-type
scaler.last_step("adam")  # arg-type
scaler.scale(loss).no_such_method()  # attr-defined
scaler.step(optimizer).no_such_method()  # union-attr
scaler.scale(5)  # call-overload
scaler.update("large")  # arg-type
GradScaler(1024.0)  # arg-type
"""


def test_every_wrong_call_is_an_error_and_no_right_one(check_types):
    check_types(CODE)
