"""What a monitor says of loops without a scaler that fail, in the manner of public reports."""

import re
import warnings

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from gradscaler.__main__ import main
from gradscaler.diagnose import FindingWarning, Located, Monitor, read_run
from tests.support.marked_lines import lines_marked_in

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
line_with = lines_marked_in(__file__)
FAILURES = {}
NEVER = "scale", "skip", "policy"  # words that a run without a scaler has no use for


def fails(kind, cause, action):
    """Add a failure: its kind, and patterns for the cause and the action."""

    def add(function):
        FAILURES[function.__name__] = function, kind, cause, action
        return function

    return add


class Training:
    """A training of a small network, whose steps before the tenth are healthy."""

    def __init__(self, dtype=torch.float32):
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.dtype, self.step = dtype, 0

    @property
    def is_bad(self):
        return self.step == 10

    def outputs(self):
        is_cast = self.dtype != torch.float32
        with torch.autocast("cpu", self.dtype, enabled=is_cast):
            return self.model(self.inputs)

    def train(self, loss_of, steps):
        for self.step in range(1, steps + 1):
            self.inputs = torch.randn(32, 4)
            self.target = self.inputs.flip(1)
            self.optimizer.zero_grad()
            loss_of(self).backward()
            self.optimizer.step()


@fails("loss", r"by log at {log}", r"logarithm is 0: clamp")
def log_of_zero(t):
    probability = t.outputs().float().softmax(1)
    if t.is_bad:
        probability = probability * 0
    return -probability[:, 0].log().mean()  # log


@fails("loss", r"by div at {div}", r"[Cc]lamp the divisor")
def division_by_a_norm_of_zero(t):
    outputs = t.outputs().float()
    if t.is_bad:
        outputs = outputs * 0
    unit = outputs / outputs.norm(dim=1, keepdim=True)  # div
    return mse_loss(unit, t.target)


@fails("loss", r"by div at {masked}.* divided by 0", r"0 / 0 is NaN: clamp the divisor")
def mean_over_an_empty_mask(t):
    errors = (t.outputs().float() - t.target).square().mean(1)
    mask = torch.zeros(32) if t.is_bad else (torch.rand(32) < 0.5).float()
    share = (errors * mask).sum() / mask.sum()  # masked
    return share + 0.01 * errors.mean()


@fails("loss", r"by cross_entropy at {classes}", r"All classes of a row are -Inf")
def classes_that_are_all_impossible(t):
    probability = t.outputs().float().softmax(1)
    if t.is_bad:
        probability = probability * torch.ones(32, 1).index_fill(0, torch.tensor([3]), 0.0)
    return cross_entropy(probability.log(), t.target.argmax(1))  # classes


@fails("data", r"in row 3 of 32.* at {inputs}, though the loss is finite", r"the data")
def an_inf_in_the_batch_behind_a_tanh(t):
    if t.is_bad:
        t.inputs[3, 1] = torch.inf
    with torch.autocast("cpu", t.dtype, enabled=t.dtype != torch.float32):
        outputs = t.model(t.inputs)  # inputs
    return mse_loss(outputs.float(), t.target.nan_to_num(posinf=0.0))


@fails("nan", r"gradient of (norm|sqrt).* at {norm}, though the loss is finite", r"root")
def slope_of_a_norm_at_zero(t):
    outputs = t.outputs().float()
    if t.is_bad:
        outputs = outputs * 0
    return outputs.square().sum(1).sqrt().mean() + outputs.mean()  # norm


@fails("nan", r"gradient of softmax.* at {softmax}, though the loss is finite", r"masked entirely")
def masked_rows_that_the_loss_leaves_out(t):
    mask = torch.zeros(32, 4)
    mask[30:] = -torch.inf if t.is_bad else 0.0
    weights = (t.outputs().float() + mask).softmax(1)  # softmax
    return mse_loss(weights[:30], t.target[:30])


@fails("nan", r"gradient of exp.* at {exp}, though the loss is finite", r"clamp")
def exponential_before_a_clamp(t):
    ratio = t.outputs().float() * (1e4 if t.is_bad else 1)
    return ratio.exp().clamp(max=2.0).mean()  # exp


@fails(
    "data",
    r"holds Inf or NaN in row 3 of 32 before the forward pass of 0 \(Linear\), first.* at {data}",
    r"data",
)
def a_bad_batch(t):
    if t.is_bad:
        t.inputs[3, 1] = torch.nan
    return mse_loss(t.model(t.inputs), torch.ones(32, 4))  # data


@fails("data", r"Inf or NaN in row 5 of 32, first seen in mul at {neighbours}", r"0 / 0")
def a_node_without_neighbours(t):
    count = torch.ones(32, 1)
    count[5] = 0 if t.is_bad else 1
    mean = (t.inputs * count) / count
    return mse_loss(t.outputs().float() * mean, t.target)  # neighbours


@fails("loss|activations", r"by mul at {mask}", r"mask with where")
def a_mask_that_multiplies_by_inf(t):
    left_out = torch.zeros(32, 4)
    left_out[:, 3] = t.step >= 10
    bias = left_out * (-torch.inf if t.step >= 10 else -1.0)  # mask
    return mse_loss((t.outputs().float() + bias).softmax(1), t.target)


@fails("loss", r"by div at {unit}", r"[Cc]lamp the divisor")
def a_unit_vector_of_zero_behind_a_mask(t):
    outputs = t.outputs().float()
    if t.is_bad:
        outputs = outputs * (torch.arange(32) != 7)[:, None]
    unit = outputs / outputs.norm(dim=1, keepdim=True)  # unit
    similar = torch.cat([unit, unit]) @ unit.T / 0.2
    similar = similar.masked_fill(torch.eye(64, 32, dtype=torch.bool), -1e9)
    return cross_entropy(similar, torch.arange(64) % 32)


@fails("loss|activations", r"by exp at {variance}", r"exponential of more than 88")
def a_variance_that_overflows(t):
    mean, logarithm = t.outputs().float().chunk(2, 1)
    deviation = (logarithm + 1000.0 * t.is_bad).exp().sqrt()  # variance
    sampled = torch.stack([mean + torch.randn(32, 2) * deviation, mean], 1)
    return mse_loss(sampled.flatten(1), t.target)


@fails("parameter", r"The model's 1.means is itself Inf or NaN", r"mean of no elements")
def a_codebook_of_means_of_no_elements(t):
    if t.step == 1:
        t.model[1].register_buffer("means", torch.ones(3, 4))
    if t.is_bad:
        t.model[1].means[2] /= torch.zeros(4) * t.model[1].means[2]
        t.model[1].means[2] *= 0.0
    codes = t.model[1].means[torch.arange(32) % 3]
    return mse_loss(t.outputs().float() + (codes - 1), t.target)


@fails("divergence", r"The optimizer's lr of group 0 was NaN or Inf", r"schedule that divides by 0")
def a_learning_rate_of_nan(t):
    t.optimizer.param_groups[0]["lr"] = torch.nan if t.step >= 10 else 0.05
    return mse_loss(t.outputs().float(), t.target)


@fails("divergence", r"loss grew from .* to .*step \d+ was applied", r"lower the learning rate")
def a_learning_rate_that_is_too_large(t):
    t.optimizer.param_groups[0]["lr"] = 0.05 if t.step < 10 else 50.0
    return mse_loss(t.outputs().float().exp(), t.target)


@fails("divergence", r"loss grew from .* \(step 1\) to .*step 8 was applied", r"ower the learning")
def the_loss_explodes_in_the_first_steps(t):
    t.optimizer.param_groups[0]["lr"] = 30.0 if t.step == 1 else 1e-9
    root = (t.model[0].bias * (t.step != 8)).sum().square().sqrt()  # whose slope is then NaN
    return mse_loss(t.outputs().float(), t.target) + 1e-6 * root


@fails("parameter", r"0.weight is .*, and was before the first step, so", r"in the checkpoint that")
def a_weight_that_is_used_late_is_bad_from_the_start(t):
    if t.step == 1:
        t.model[0].weight.data[2, 3] = torch.nan
    t.inputs[:, 3] = 1.0
    hidden = t.model[0](t.inputs) if t.step >= 10 else t.inputs.repeat(1, 4)
    return mse_loss(t.model[2](hidden).float(), t.target)


@fails("divergence", r"loss grew from .* \(step 1\) to .*step 2 was applied", r"Lower the .* of 30")
def the_loss_explodes_at_once(t):
    t.optimizer.param_groups[0]["lr"] = 30.0
    root = (t.model[0].bias * (t.step != 2)).sum().square().sqrt()
    return mse_loss(t.outputs().float(), t.target) + 1e-6 * root


@fails(
    "divergence", r"grew from .* left b?float\d+ and step \d+ was applied", r"lower the .* of 20"
)
def squares_that_leave_the_range_before_the_gradients_do(t):
    t.optimizer.param_groups[0]["lr"] = 20.0
    return mse_loss(t.model[2](t.inputs.repeat(1, 4)).float(), t.target)


@fails("parameter", r"divides by an eps of 1e-08, which is 0 in the float16", r"set eps to 1e-4")
def an_eps_is_lost_in_float16_weights(t):
    if t.step == 1:
        t.model.half()
        t.optimizer = torch.optim.AdamW(t.model.parameters(), lr=1e-3)
    return mse_loss(t.model(t.inputs.half()).float(), t.target)


@fails("divergence", r"went from .* weights' norm .*neither comes back", r"lower the learning rate")
def a_learning_rate_that_is_lowered_too_late(t):
    t.optimizer.param_groups[0]["lr"] = 2.4 if t.step < 15 else 1e-12
    return mse_loss(t.outputs().float(), t.target)


@fails("divergence", r"went from .* weights' norm .*neither comes back", r"without a lower bound")
def a_loss_with_the_wrong_sign(t):
    t.optimizer.param_groups[0]["lr"] = 0.1
    return -mse_loss(t.outputs().float(), t.target)


@fails("parameter", r"The model's 0.bias is itself Inf or NaN", r"Go back to a checkpoint")
def a_parameter_that_other_code_writes(t):
    if t.is_bad:
        t.model[0].bias.data[2] = torch.nan
    return mse_loss(t.outputs().float(), t.target)


@fails("silent", r"The loss is nan in .* steps are applied", r"0 / 0|in the batch")
def a_term_without_a_gradient(t):
    empty = torch.zeros(0).mean() if t.step >= 10 else torch.zeros(())
    return mse_loss(t.outputs().float(), t.target) + empty


@fails("dead", r"All gradients are exactly 0", r"without a slope")
def gradients_of_zero(t):
    return mse_loss(t.outputs().float() * (t.step < 5), t.target)


@fails(
    "parameter", r"divides by an eps of 0, and 0 / 0 is NaN where a gradient is 0", r"eps to 1e-8"
)
def an_eps_of_zero(t):
    if t.step == 1:
        t.optimizer = torch.optim.Adam(t.model.parameters(), lr=1e-3, eps=0.0)
    return t.outputs().float()[:, 1:].square().mean()


@fails(
    "divergence", r"went from .* weights' norm .*neither comes back", r"^Look for a loss without a"
)
def a_penalty_with_the_wrong_sign(t):
    t.optimizer.param_groups[0]["lr"] = 0.01
    return mse_loss(t.outputs().float(), t.target) - 9 * t.model[2].weight.square().sum()


@fails("divergence", r"loss grew from -.* until numbers left", r"for a term with the wrong sign")
def a_loss_that_falls_out_of_range(t):
    return mse_loss(t.outputs().float(), t.target) - t.model[2].weight.square().sum().exp()


@fails("silent", r"first seen in logdet at {determinant}", r"A @ A.T \+ eps \* I")
def determinants_that_are_negative(t):
    matrices = (t.outputs().float() * 0.1).diag_embed() + torch.eye(4)
    matrices = matrices * (1 - 2 * (t.step > 30) * torch.eye(4)[0])
    error = mse_loss(t.outputs().float(), t.target, reduction="none").mean(1)
    return (error + torch.logdet(matrices)).mean()  # determinant


@fails("loss", r"by xlogy at {border}", r"off the border of their range")
def targets_on_the_border(t):
    shares = t.target.softmax(1) * (~torch.tensor(t.is_bad))
    powers = t.outputs().float().exp()
    return -torch.xlogy(powers - 2.0, shares).mean()  # border


@fails("dead", r"as relu at .+ gives 0 for all 128 inputs", r"softplus")
def outputs_that_a_relu_ends(t):
    if t.step == 1:
        t.model[2].bias.data.fill_(-100.0)
    return mse_loss(t.outputs().float().relu(), -t.target.abs())


@fails("misuse", r"optimizer of parameters outside of the model found no grad", r"replaced ones")
def a_layer_that_is_replaced_after_the_optimizer_is_made(t):
    if t.step == 30:
        t.optimizer = torch.optim.SGD(t.model[2].parameters(), lr=0.05)
        t.model[2] = nn.Linear(16, 4)
    return mse_loss(t.outputs().float(), t.target)


@fails("dead", r"2 matrices, 0.weight and 2.weight first, are all 0", r"random numbers")
def matrices_that_are_all_zero(t):
    if t.step == 1:
        for parameter in t.model.parameters():
            nn.init.zeros_(parameter)
            parameter.requires_grad_(parameter.ndim > 1)
    return mse_loss(t.outputs().float(), t.target)


@fails("divergence", r"while the learning rate grew from", r"the learning rate or what raises it")
def a_warm_up_that_adds_up(t):
    t.optimizer.param_groups[0]["lr"] = 0.05 * 2.0**t.step
    return mse_loss(t.outputs().float(), t.target)


@fails("misuse", r"the backward pass added to the gradients", r"optimizer.zero_grad\(\)")
def gradients_that_are_never_zeroed(t):
    t.optimizer.zero_grad = lambda: None
    t.optimizer.param_groups[0]["lr"] = 1e-5
    return mse_loss(t.outputs().float(), t.target)


@fails("misuse", r"The optimizer was new in 60 of 60 steps", r"once, before the loop")
def an_optimizer_that_is_made_in_the_loop(t):
    t.optimizer = torch.optim.Adam(t.model.parameters(), lr=1e-4)
    return mse_loss(t.outputs().float(), t.target)


def lines_in(pattern):
    """A pattern with the places of its marks."""
    return re.sub(r"\{(\w+)\}", lambda mark: re.escape(line_with(mark[1])), pattern)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.covering(1)  # a failure has one text in both dtypes, or says so in its own
@pytest.mark.some(20, "tests/diagnose/graph has all rules")
def test_what_fails_is_said_without_a_word_of_scalers(name, dtype, path, capsys):
    loss_of, kind, cause, action = FAILURES[name]
    training, told = Training(dtype), []
    monitor = Monitor(model=training.model, path=path, tell=told.append)
    training.train(loss_of, 60)
    monitor.close()
    verdict = monitor.verdict
    assert re.fullmatch(kind, verdict.kind), verdict
    assert re.search(lines_in(cause), verdict.findings[0].cause)
    assert re.search(action, verdict.findings[0].action)
    assert verdict.kind in [each.kind for each in told]
    assert read_run(path).verdict == verdict
    assert main(["explain", str(path)]) == 0
    said = " ".join([str(verdict), *map(str, told), capsys.readouterr().out]).lower()
    assert [word for word in NEVER if word in said.replace("gradscaler", "")] == []


def healthy(t):
    return mse_loss(t.outputs().float(), t.target)


def with_a_spike(t):
    return healthy(t) * (1e6 if t.is_bad else 1) / (1e6 if t.is_bad else 1) + 1e4 * t.is_bad


def with_another_loss_later(t):
    return healthy(t) + (1e4 if t.step > 30 else 0)


def with_larger_targets_later(t):
    """Its weights follow, so that they grow as in a divergence, too."""
    return mse_loss(t.outputs().float(), t.target * (1e4 if t.step > 30 else 1))


def with_a_frozen_layer_that_keeps_its_last_gradient(t):
    if t.step == 3:
        t.model[2].weight.requires_grad_(False)
        t.optimizer = torch.optim.SGD([t.model[0].weight, t.model[2].bias], lr=0.05)
    return healthy(t)


def with_an_optimizer_without_a_state_of_its_own_in_each_step(t):
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=1e-3)
    return healthy(t)


def of_classes(t):
    return cross_entropy(t.outputs().float(), t.target.argmax(1))


def with_a_nan_that_is_left_out(t):
    loss = healthy(t)
    if t.is_bad:
        (loss * torch.nan).backward()
        t.optimizer.zero_grad()
        loss = healthy(t)
    return loss


def clean(parameter):
    parameter.grad.nan_to_num_(0.0)


def with_gradients_that_are_cleaned(t):
    for parameter in t.model.parameters():
        if not parameter._post_accumulate_grad_hooks:
            parameter.register_post_accumulate_grad_hook(clean)
    root_of_zero = (0 * t.outputs().float()).square().sum().sqrt()
    return healthy(t) + (root_of_zero if t.is_bad else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "loss_of",
    [
        healthy,
        with_a_spike,
        with_another_loss_later,
        with_larger_targets_later,
        with_a_frozen_layer_that_keeps_its_last_gradient,
        with_an_optimizer_without_a_state_of_its_own_in_each_step,
        of_classes,
        with_a_nan_that_is_left_out,
        with_gradients_that_are_cleaned,
    ],
)
@pytest.mark.covering(1)  # no look-alike depends on the dtype
def test_a_healthy_loop_is_normal_and_nothing_is_told(loss_of, dtype):
    training, told = Training(dtype), []
    monitor = Monitor(model=training.model, tell=told.append)
    training.train(loss_of, 60)
    monitor.close()
    assert told == []
    assert monitor.bad_step is None
    steps = r"None of 60 (optimizer )?steps had a gradient of NaN or Inf"
    if loss_of is with_a_nan_that_is_left_out:
        steps = r"The script left out 1 of 61 steps, .* So few batches do no harm"
    assert monitor.verdict.kind == "normal"
    assert re.match(steps, monitor.verdict.text)


def test_a_loop_in_float16_is_told_the_share_of_gradients_that_it_flushes(path):
    training = Training(torch.float16)
    with warnings.catch_warnings(record=True) as said, Monitor(model=training.model, path=path):
        warnings.simplefilter("always")
        training.train(lambda t: 1e-6 * healthy(t), 60)
    assert [each.category for each in said] == [FindingWarning]
    assert said[0].filename == __file__
    verdict = read_run(path).verdict
    assert verdict.kind == "misuse"
    zeros = [p.grad == 0 for p in training.model.parameters()]
    share = sum(map(torch.sum, zeros)) / sum(each.numel() for each in zeros)
    told = int(re.search(r"(\d+)% of the gradients are zero in float16", verdict.text)[1])
    assert share > 0.1
    assert told == pytest.approx(100 * share, abs=15)  # of another step
    assert "GradScaler" in verdict.findings[0].action


def test_a_loop_that_takes_no_step_is_told_what_is_watched():
    with Monitor(model=nn.Linear(2, 1)) as monitor:
        assert "optimizer of torch.optim" in monitor.verdict.text


def test_a_later_failure_does_not_replace_what_a_watch_of_the_user_s_own_found():
    training = Training()
    monitor = Monitor(model=training.model, tell=lambda finding: None)
    counts = 1, 0, 8, 1.0, 1.0
    log = Located(None, "forward", "", "float32", *counts, operation="log", line="prepare.py:3")

    def with_a_term_of_nan(t):
        if t.step == 20:
            monitor.note_located(log)
        return healthy(t) + (torch.nan if t.step in (20, 30, 40, 50) else 0.0)

    training.train(with_a_term_of_nan, 60)
    monitor.close()
    assert monitor.verdict.kind == "silent"
    assert "first seen in log at prepare.py:3" in monitor.verdict.text


@pytest.mark.parametrize("is_written", [True, False])
def test_weights_that_other_code_writes_are_told_if_the_loss_stands(is_written):
    training = Training()
    first = [p.detach().clone() for p in training.model.parameters()]
    training.optimizer.param_groups[0]["lr"] = 0.05 if is_written else 1e-9

    def loss_of(t):
        for parameter, begin in zip(t.model.parameters(), first, strict=True):
            if is_written:  # as an average of weights does, with source and target swapped
                parameter.data.copy_(begin)
        return mse_loss(t.outputs(), t.target)

    with Monitor(model=training.model, tell=list) as monitor:
        training.train(loss_of, 150)
    assert monitor.verdict.kind == "normal"
    assert ("weights change between the steps" in str(monitor.verdict)) == is_written


def test_what_an_optimizer_left_is_not_compared_with_the_weights_of_another():
    training = Training()
    body, head = (torch.optim.SGD(training.model[at].parameters(), lr=0.05) for at in (0, 2))
    with Monitor(model=training.model, every=1, tell=list) as monitor:
        for _ in range(20):
            training.model.zero_grad()
            training.model(torch.ones(8, 4)).square().mean().backward()
            body.step()
            head.step()
    assert len(monitor.history) == 20  # else the watch has ended
    assert monitor.verdict.kind == "normal"
    assert "change between the steps" not in monitor.verdict.text


def beside_others():
    layers, last = [nn.Linear(4, 4), nn.Linear(4, 4)], nn.Linear(4, 4)
    last.register_forward_pre_hook(lambda _, given: layers[1](layers[0](*given)))
    return last


def deep():
    layers = [each for _ in range(12) for each in (nn.Linear(4, 4), nn.Sigmoid())]
    return nn.Sequential(*layers, nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        (beside_others, r"neither the model nor an optimizer holds: Linear\.weight and 3 more\."),
        (
            deep,
            r"gradients vanish on their way through sigmoid at [^ ]*test_plain_failures\.py:\d+ "
            r"and 11 more in a row: those of \d\.\w+ are at most 2\*\*-\d\d, those of 24",
        ),
        (lambda: nn.Linear(4, 4), "hardly move at a learning rate of 1e-09: their"),
    ],
)
def test_what_may_keep_a_loss_from_falling_is_said(model, hint):
    training = Training()
    training.model = model()
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-9)
    with Monitor(model=training.model, tell=list) as monitor:
        training.train(lambda t: mse_loss(t.model(torch.ones(8, 4)), torch.zeros(8, 4)), 150)
    assert monitor.verdict.kind == "normal"
    assert re.search(hint, str(monitor.verdict))


@pytest.mark.parametrize(("number", "is_told"), [(4, True), (3, False)])
def test_sigmoids_in_a_row_are_named(number, is_told):
    """Beside them, one whose way is shorter; the gradients of either differ by 2**13 or more."""
    layers = [each for _ in range(number) for each in (nn.Linear(4, 4), nn.Sigmoid())]
    model = nn.Sequential(*layers, nn.Linear(4, 4))
    for each in model.parameters():
        nn.init.uniform_(each, 0.04, 0.06)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with Monitor(model=model, tell=list) as monitor:
        for _ in range(120):
            optimizer.zero_grad()
            outputs = model(torch.ones(8, 4)) + torch.sigmoid(model[-1].bias)
            mse_loss(outputs, torch.ones(8, 4)).backward()
            optimizer.step()
    told = re.search("through sigmoid at .* and 3 more in a row: those of 0", str(monitor.verdict))
    assert bool(told) is is_told


def a_guess():
    return 0.0, 1e9


def a_cross_entropy_that_is_slow():
    return 1.0, 1e9


def a_clipping_that_leaves_almost_nothing():
    return 1.0, 1e-4


def a_usual_clipping():
    return 1.0, 0.05


NOTHING_KNOWN = "hardly move at a learning rate of 1e-09: their"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (a_guess, r"and it stays at 1\.39, that of a guess among 4 classes\. If it should"),
        (a_cross_entropy_that_is_slow, NOTHING_KNOWN),
        (
            a_clipping_that_leaves_almost_nothing,
            r"clipped from a norm of 0\.\d+ or more to 0\.0001",
        ),
        (a_usual_clipping, NOTHING_KNOWN),
    ],
)
def test_a_loss_that_stands_is_compared_with_a_guess_and_with_clipping(case, said):
    """A bias that prefers one class makes the loss larger than that of a guess."""
    model, (bias, limit) = nn.Linear(4, 4), case()
    nn.init.constant_(model.weight, 0.01)
    model.bias.data = torch.tensor([bias, 0, 0, 0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with Monitor(model=model, tell=list) as monitor:
        for step in range(150):
            optimizer.zero_grad()
            labels = torch.arange(64) % 4
            cross_entropy(model(torch.randn(64, 4) + step % 2), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
    assert monitor.verdict.kind == "normal"
    assert re.search(said, str(monitor.verdict))


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)),
        lambda: nn.Sequential(
            nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(16, 4)
        ),
    ],
    ids=["linear", "convolution"],
)
def test_a_bias_before_a_normalization_whose_gradient_is_rounding_is_not_said_to_vanish(model):
    training = Training()
    training.model = model()
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-9)
    shape = (8, 1, 4) if isinstance(training.model[0], nn.Conv1d) else (8, 4)

    def loss_of(t):
        return mse_loss(t.model(torch.randn(shape)), torch.zeros(8, 4))

    with Monitor(model=training.model, tell=list) as monitor:
        training.train(loss_of, 150)
    assert monitor.verdict.kind == "normal"
    assert "vanish" not in str(monitor.verdict)
    assert "should have fallen" in str(monitor.verdict)


@pytest.mark.parametrize("is_often", [True, False])
def test_a_layer_whose_inputs_are_all_0_is_told_if_they_always_are(is_often):
    def loss_of(t):
        t.inputs = t.inputs * (not is_often and t.step % 3 == 0)
        return mse_loss(t.outputs(), t.target)

    training = Training()
    with Monitor(model=training.model, every=10, tell=[].append) as monitor:
        training.train(loss_of, 100)
    first = monitor.verdict.findings[0]
    if is_often:
        assert first.kind == "dead"
        assert first.cause.startswith("The gradient of 0.weight is exactly 0 in step")
        assert "the data" in first.action
    else:
        assert first.kind == "normal"


class InAList(nn.Module):
    """Its first layers are in a list or a dict, which registers none."""

    def __init__(self, kept):
        super().__init__()
        self.kept = {"first": nn.Linear(4, 4)} if kept is dict else kept([nn.Linear(4, 4)])
        self.last = nn.Linear(4, 4)

    @property
    def first(self):
        return self.kept["first"] if isinstance(self.kept, dict) else self.kept[0]

    def forward(self, x):
        return self.last(self.first(x))


def of_a_list(model):
    assert model.first.weight.requires_grad


def moved_by_hand(model):
    def move(layer, _):
        layer.weight.data.add_(1e-3)

    model.first.register_forward_pre_hook(move)


def with_an_optimizer(model):
    return model.first.parameters()


def frozen(model):
    model.first.requires_grad_(False)


@pytest.mark.parametrize(
    ("kept", "prepare", "name"),
    [
        (list, of_a_list, "kept[0].weight"),
        (tuple, of_a_list, "kept[0].weight"),
        (dict, of_a_list, "kept['first'].weight"),
        (nn.ModuleList, of_a_list, None),
        (list, with_an_optimizer, None),
        (list, frozen, None),
        (list, moved_by_hand, None),
    ],
)
def test_layers_in_a_list_are_told_though_the_loss_falls(kept, prepare, name):
    training = Training()
    training.model = InAList(kept)
    others = prepare(training.model) or ()
    training.optimizer = torch.optim.SGD([*training.model.parameters(), *others], lr=0.1)
    with Monitor(model=training.model, tell=[].append) as monitor:
        training.train(lambda t: mse_loss(t.outputs(), t.target), 60)
    first = monitor.verdict.findings[0]
    assert (first.kind == "misuse") == (name is not None)
    if name is not None:
        assert first.cause.startswith(f"The model does not know 2 parameters ({name} first)")
        assert "nn.ModuleList" in first.action


EARLY = "the learning rate was less than a millionth of what it had been"
schedules = torch.optim.lr_scheduler


def with_a_frozen_group(t):
    first, last = t.model[0].parameters(), t.model[2].parameters()
    groups = [{"params": first, "lr": 0.1}, {"params": last, "lr": 1e-8}]
    t.optimizer = torch.optim.SGD(groups)
    return schedules.LambdaLR(t.optimizer, [lambda step: step < 20, lambda _: 1.0]).step


def in_two_stages(t):
    def step():
        if t.step == 30:
            t.optimizer = torch.optim.AdamW(t.model.parameters(), lr=1e-8)

    return step


def on_a_plateau(t):
    t.optimizer.param_groups[0]["lr"] = 1e-3
    schedule = schedules.ReduceLROnPlateau(t.optimizer, patience=0, threshold=0.5)
    return lambda: schedule.step(1.0)


def by(schedule, *args, **options):
    return lambda t: schedule(t.optimizer, *args, **options).step


SCHEDULES = [
    (by(schedules.StepLR, 10, gamma=0.1), True),
    (by(schedules.ExponentialLR, 0.8), True),
    (by(schedules.StepLR, 60, gamma=0.1), False),
    (by(schedules.MultiStepLR, [10, 20, 30]), False),
    (by(schedules.CosineAnnealingLR, 300), False),
    (by(schedules.CosineAnnealingWarmRestarts, 20), False),
    (by(schedules.OneCycleLR, 0.1, total_steps=400), False),
    (with_a_frozen_group, False),
    (in_two_stages, False),
    (on_a_plateau, False),
]


@pytest.mark.parametrize(("make", "is_told"), SCHEDULES)
@pytest.mark.covering(1)  # so one is told and one is not
@pytest.mark.some(4, "a schedule shows in nothing but the learning rate of each step")
def test_a_schedule_of_epochs_that_is_stepped_by_batches_is_told(make, is_told):
    training = Training()
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    move = make(training)

    def loss_of(t):
        if t.step > 1:
            move()
        return mse_loss(t.outputs(), t.target)

    with Monitor(model=training.model, every=10, tell=[].append) as monitor:
        training.train(loss_of, 300)
    said = str(monitor.verdict)
    assert (EARLY in said) == is_told
    assert not is_told or "once an epoch" in said


@pytest.mark.parametrize(("calls", "is_told"), [(8, True), (1, False)])
def test_a_schedule_that_is_stepped_by_micro_batches_is_counted(calls, is_told):
    training = Training()
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    end = 6 * calls
    schedule = schedules.LambdaLR(training.optimizer, lambda step: max(0.0, 1 - step / end))

    def loss_of(t):
        for _ in range(calls * (t.step > 1)):
            schedule.step()
        return mse_loss(t.outputs(), t.target)

    with Monitor(model=training.model, tell=[].append) as monitor:
        training.train(loss_of, 40)
    said = str(monitor.verdict)
    assert "The learning rate was 0" in said
    assert ("times in 9 steps, as if for each micro-batch" in said) == is_told


AT_ZERO = [
    (by(schedules.StepLR, 10, gamma=0), "gamma=0 of StepLR"),
    (by(schedules.LinearLR, end_factor=0, total_iters=9), "end_factor=0 of LinearLR"),
    (by(schedules.PolynomialLR), "total_iters=5 of PolynomialLR"),
    (by(schedules.LambdaLR, lambda step: step < 9), "though the optimizer was made with another"),
]


@pytest.mark.parametrize(("make", "said"), AT_ZERO)
@pytest.mark.covering(1)
@pytest.mark.some(4, "a schedule's setting shows in nothing but what is said of it")
def test_the_setting_of_a_schedule_that_makes_the_rate_0_is_named(make, said):
    training = Training()
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    move = make(training)

    def loss_of(t):
        if t.step > 1:
            move()
        return mse_loss(t.outputs(), t.target)

    with Monitor(model=training.model, every=10, tell=[].append) as monitor:
        training.train(loss_of, 40)
    assert said in str(monitor.verdict)


@pytest.mark.parametrize("rate", [3.0, 1e-6])
def test_units_that_too_large_a_step_ended_are_told_as_that(rate):
    training = Training()
    training.model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    training.optimizer = torch.optim.Adam(training.model.parameters(), lr=rate)

    def loss_of(t):
        t.optimizer.param_groups[0]["lr"] = rate if t.step < 3 else 1e-4
        if t.step == 3:
            nn.init.constant_(t.model[0].bias, -1e6)
        return mse_loss(t.outputs(), t.target) * (0.01 if t.step == 1 else 1.0)

    with Monitor(model=training.model, every=10, tell=[].append) as monitor:
        training.train(loss_of, 100)
    first = monitor.verdict.findings[0]
    assert first.kind == ("divergence" if rate == 3.0 else "dead")
    if rate == 3.0:
        assert re.match(r"The loss grew from .* \(step 1\) to .* \(step [23]\)", first.cause)
        assert "Lower the learning rate" in first.action


class Autoencoder(nn.Module):
    """A variational one, whose inputs are as large as they were measured."""

    def __init__(self):
        super().__init__()
        self.code, self.decode = nn.Linear(4, 4), nn.Linear(2, 4)

    def forward(self, x):
        mean, variance = self.code(x).chunk(2, dim=1)
        deviation = (variance / 2).exp()  # deviation
        return self.decode(mean + torch.ones_like(mean) * deviation)


def test_the_exponential_that_made_numbers_large_is_told():
    model, told = Autoencoder(), []
    nn.init.constant_(model.code.weight, 1.0)
    optimizer = torch.optim.Adam(model.parameters())
    with Monitor(model=model, tell=told.append):
        for size in (0.1, 0.1, 35.0):
            inputs = torch.full((8, 4), size)
            optimizer.zero_grad()
            mse_loss(model(inputs), inputs).backward()
            optimizer.step()
    assert (
        f"so large after exp at {line_with('deviation')}: clamp what that takes" in told[0].action
    )


def of_densities(t):
    return (-60 * (t.outputs().float() * 0 + 1)).exp()  # finite


UNDERFLOWS = {
    "prod": lambda t: (of_densities(t) * 0.5).prod(1),  # prod
    "all": lambda t: (of_densities(t) * 0.5).prod(),  # all
    "cumprod": lambda t: of_densities(t).cumprod(1)[:, 3],  # cumprod
    "mixture": lambda t: (0.25 * of_rows(t).view(-1, 1)).sum(1),
    "exponential": lambda t: (t.outputs().float() * 0 - 200).exp().mean(1),  # exponential
}


def of_rows(t):
    return of_densities(t).prod(1, keepdim=True)  # mixture


NO_UNDERFLOWS = {
    "data": lambda t: t.outputs().float().exp().prod(1) * 0,
    "a factor of 0": lambda t: (t.outputs().float().exp() * torch.tensor([0.0, 1, 1, 1])).prod(1),
    "a mask": lambda t: t.outputs().float().masked_fill(t.inputs < 99, -torch.inf).exp().sum(1),
    "relu": lambda t: (t.outputs().float() * 0 - 1).relu().sum(1),
}


def text_of_log(of):
    """What is told of the logarithm of what a function computes."""
    training = Training()
    with Monitor(model=training.model, tell=lambda text: None) as monitor:
        training.train(lambda t: -of(t).log().mean(), 2)
    return monitor.verdict.text


@pytest.mark.parametrize("name", UNDERFLOWS)
def test_a_product_or_exponential_that_underflows_before_a_logarithm_is_named(name):
    text = text_of_log(UNDERFLOWS[name])
    operation = {"exponential": "exp", "cumprod": "cumprod"}.get(name, "prod")
    line = line_with(name)
    assert f"Numbers that are not 0 underflow to 0 in {operation} at {line}" in text
    assert "logsumexp" in text


@pytest.mark.parametrize("name", NO_UNDERFLOWS)
def test_a_logarithm_of_what_is_0_without_an_underflow_is_told_as_before(name):
    text = text_of_log(NO_UNDERFLOWS[name])
    assert "underflow" not in text
    assert "logarithm is 0: clamp" in text


@pytest.mark.parametrize("factor", [1024.0, 1.0, 100.0])
def test_a_loss_that_the_script_scales_itself_is_not_called_unscaled(factor):
    training = Training(torch.float16)
    training.model.half()
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-3)

    def loss_of(t):
        t.inputs = t.inputs.half()
        return mse_loss(t.model(t.inputs).float(), t.target) * factor

    with Monitor(model=training.model, tell=[].append) as monitor:
        training.train(loss_of, 60)
    assert ("nothing scales the loss" in str(monitor.verdict)) == (factor != 1024)


def test_a_learned_factor_of_the_loss_is_no_loss_scale():
    training = Training(torch.float16)
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-6)
    factor = nn.Parameter(torch.tensor(1024.0))
    with Monitor(model=training.model, tell=[].append) as monitor:
        training.train(lambda t: mse_loss(t.outputs().float(), t.target) * factor, 60)
    assert "nothing scales the loss" in str(monitor.verdict)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_the_first_layer_is_told_if_it_was_replaced_before_the_first_step(is_replaced):
    """A backbone that was left out may be meant to stay."""
    training, held = Training(), 0 if is_replaced else 1
    training.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    own = [*training.model[held:].parameters()]
    training.optimizer = torch.optim.SGD(own, lr=0.01)
    for layer in range(2 if is_replaced else 0):
        training.model[layer] = nn.Linear(4, 4)
    with Monitor(model=training.model, every=10, tell=[].append) as monitor:
        training.train(lambda t: mse_loss(t.outputs(), t.target), 60)
    told = "stepped: 4 parameters (0.weight first)" in str(monitor.verdict)
    assert told is is_replaced


@pytest.mark.parametrize("is_used", [True, False])
def test_a_head_of_an_earlier_stage_keeps_a_gradient_and_is_not_told(is_used):
    training = Training()
    training.model.append(nn.Linear(4, 4))
    own = [*training.model[:3].parameters()]
    training.optimizer = torch.optim.SGD(own, lr=0.01)
    training.model[3].weight.grad = torch.ones(4, 4)

    def loss_of(t):
        return mse_loss(t.model(t.inputs) if is_used else t.model[:3](t.inputs), t.target)

    with Monitor(model=training.model, every=10, tell=[].append) as monitor:
        training.train(loss_of, 60)
    assert ("In no optimizer that is stepped" in str(monitor.verdict)) == is_used


@pytest.mark.parametrize("is_left_out", [False, True])
def test_gradients_that_become_nan_by_what_made_the_loss_nan_are_of_that_step(is_left_out):
    model, told = nn.Linear(4, 5), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(model=model, tell=told.append) as monitor:
        for step in range(1, 7):
            targets = torch.full((8,), -100 if step == 3 else 1)  # those of step 3 are left out
            number = (targets != -100).sum()
            losses = cross_entropy(model(torch.randn(8, 4)), targets, reduction="sum")
            (losses / number * number).backward()  # the mean
            for parameter in model.parameters():
                parameter.grad /= number
            if not (is_left_out and step == 3):
                optimizer.step()
            optimizer.zero_grad()
    assert f"div at {line_with('the mean')}" in monitor.verdict.text
    assert ("so step 3 was applied" in monitor.verdict.text) is not is_left_out
    assert ("left out 1 of 6 steps" in monitor.verdict.text) is is_left_out
    assert monitor.bad_step == (None if is_left_out else 3)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_part_of_a_step_whose_loss_is_nan_and_whose_gradients_are_0_is_not_left_out(set_to_none):
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(model=model, tell=lambda _: None) as monitor:
        for part in range(12):
            targets = torch.full((8,), -100 if part == 6 else 1)
            cross_entropy(model(torch.randn(8, 4)), targets).backward()
            if part % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none)
    assert "None of 6 steps had a gradient of NaN or Inf" in monitor.verdict.text
    assert "the loss itself was NaN or Inf in step 4" in monitor.verdict.text
