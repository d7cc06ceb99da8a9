"""docs/retries.md: its code runs, in order, and does what the page says."""

import copy
import re
from pathlib import Path

import pytest
import torch

from gradscaler.torch import GradScaler

DOCUMENT = (Path(__file__).parents[2] / "docs" / "retries.md").read_text()
LOOP, CLOSURE = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


def run(code, **names):
    exec(compile(code, "docs/retries.md", "exec"), names)
    return names


def test_the_loop_and_the_closure_run_as_they_are_written(own_random_numbers_and_one_thread):
    names = run(LOOP)
    assert len(names["scaler"].history) == len(names["data"])
    assert names["scaler"].get_scale() < 2.0**24
    run(CLOSURE, **names)
    assert names["scaler"].last_step(names["optimizer"]).applied


def test_the_loop_ends_as_if_the_scale_had_been_right(own_random_numbers_and_one_thread):
    names = run(LOOP)
    right = names["scaler"].get_scale()
    others = run(LOOP.replace("2.0**24", repr(right)))
    assert others["scaler"].get_scale() == right
    for mine, theirs in zip(
        names["model"].state_dict().values(), others["model"].state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_without_attempts_batches_are_lost(own_random_numbers_and_one_thread):
    """So the loop of the page is one that needs them."""
    plain = re.sub(r"for _ in scaler\.attempts\(.*\):", "if True:", LOOP).split("assert")[0]
    reasons = [step.reason for step in run(plain)["scaler"].history]
    assert reasons.count("overflow") > 2


def test_closure_and_loop_take_the_same_step(own_random_numbers_and_one_thread):
    names, ends = run(LOOP), []
    inputs, targets = (tensor[:1] for tensor in names["data"][0])
    names["model"].eval()  # no dropout, and no statistics
    step = LOOP[LOOP.index("for inputs") : LOOP.index("assert")]
    for code in (CLOSURE, step.replace("scaler.clip_grad_norm_(optimizer, 1.0)", "")):
        copied = copy.deepcopy({name: names[name] for name in ("model", "optimizer", "scaler")})
        run(code, torch=torch, inputs=inputs, targets=targets, data=[(inputs, targets)], **copied)
        assert copied["scaler"].last_step(copied["optimizer"]).applied
        ends.append([parameter.tolist() for parameter in copied["model"].parameters()])
    assert ends[0] == ends[1]


class UnscalesByItself(torch.optim.SGD):
    """Asks the scaler that it is handed for the scale."""

    _step_supports_amp_scaling = True

    def step(self, *, grad_scaler):
        scale = grad_scaler._get_scale_async()
        found_inf = sum(grad_scaler._check_inf_per_device(self).values())
        if not found_inf:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad /= scale
            super().step()


def test_an_optimizer_that_is_handed_the_scaler_finds_the_scale_of_its_gradients():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = UnscalesByItself([parameter], lr=1.0), GradScaler(init_scale=1024.0)
    for attempt in scaler.attempts(optimizer):
        (scaler.scale(parameter.sum() * 0.5) * (float("inf") if attempt < 2 else 1.0)).backward()
    with pytest.warns(FutureWarning, match="grad_scaler="):
        scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.5, 0.5]
    assert scaler.last_step(optimizer).scale == scaler.get_scale() == 256.0
