"""What a type checker says of a user's code."""

CODE = """
import tensorplay
from gradscaler import StepOutcome
from gradscaler.tensorplay import GradScaler

parameter = tensorplay.nn.Parameter(tensorplay.zeros(3))  # no-untyped-call
optimizer = tensorplay.optim.SGD([parameter])
loss: tensorplay.Tensor = parameter.sum()
scaler = GradScaler(init_scale=1024.0)
a: tensorplay.Tensor = scaler.scale(loss)
b: list[tensorplay.Tensor] = scaler.scale([loss])
c: tuple[tensorplay.Tensor, ...] = scaler.scale((loss, loss))
d: tensorplay.Tensor = scaler.clip_grad_norm_(optimizer, 1.0)
e: StepOutcome = scaler.last_step(optimizer)
scaler.step(optimizer)
scaler.update(2.0)
scaler.step(5)  # arg-type
scaler.unscale_(loss)  # arg-type
scaler.clip_grad_norm_(optimizer)  # call-arg
scaler.clip_grad_norm_(5, 1.0)  # arg-type
scaler.last_step("adam")  # arg-type
scaler.scale(5)  # call-overload
scaler.update("large")  # arg-type
GradScaler(1024.0)  # arg-type
"""


def test_every_wrong_call_is_an_error_and_no_right_one(check_types):
    check_types(CODE)
