"""The verdict on what other tools print, from lines made up in each tool's form."""

import random
import re
from math import isnan

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradscaler.__main__ import main
from gradscaler.diagnose import _logs
from gradscaler.diagnose._logs.lines import PATTERNS
from tests.support.chosen import examples
from tests.support.reports import printed

pytest.importorskip("rich", reason="the terminal is written to with it")

NAN = float("nan")
SETTLING = [2.0**power for power in range(15, 9, -1)]  # the scales after six skips in a row
SINKING = [2.0**power for power in range(15, -12, -1)]
FALLING = [4.0, 3.5, 3.1, 2.8, 2.6, 2.5, 2.4, 2.35, 2.3, 2.28, 2.27, 2.26]
RISING = [2.5, 2.9, 4.4, 7.0, 9.5, 10.2, 10.3, 10.4]


class DeepSpeed:
    """With Trainer, which prints the losses."""

    def skip(self, scale):
        return (
            f"[2024-08-15 21:12:21,408] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] "
            f"OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {2 * scale:.0f}, reducing to "
            f"{scale:.0f}"
        )

    def record(self, step, loss, scale):
        return f"  1%|▏| {step}/9000 [00:32<1:07,  6.9it/s]{{'loss': {loss}, 'epoch': 0.{step}}}"


class Apex:
    def skip(self, scale):
        return f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}"

    def record(self, step, loss, scale):
        return f"step {step}/9000, loss: {loss}, 0.7 s"


class Fairseq:
    def skip(self, scale):
        return (
            "2021-03-08 12:33:12 | INFO | fairseq.trainer | NOTE: gradient overflow detected, "
            f"ignoring gradient, setting loss scale to: {scale}"
        )

    def record(self, step, loss, scale):
        return (
            f'2021-03-08 12:32:33 | INFO | train_inner | {{"epoch": 1, "loss": "{loss}", "ppl": '
            f'"9.1", "num_updates": "{step}", "gnorm": "1.7", "loss_scale": "{scale:g}"}}'
        )


class Megatron:
    """It prints no skip, but their number since the line before."""

    def skip(self, scale):
        return None

    def record(self, step, loss, scale, skipped=0):
        lost = "" if isnan(loss) else f"lm loss: {loss:.6E} | "
        return (
            f" [2025-10-21 16:18:53] iteration {step:8d}/   20000 | consumed samples: 32 | elapsed "
            f"time per iteration (ms): 6.0 | learning rate: 2.5E-06 | {lost}loss scale: {scale} | "
            f"grad norm: 1.5 | number of skipped iterations: {skipped:3d} | number of nan "
            "iterations:   0 |"
        )


class Trainer:
    """It prints 0.0 for NaN, and no skip."""

    def skip(self, scale):
        return None

    def record(self, step, loss, scale):
        loss, norm = (0.0, NAN) if isnan(loss) else (loss, 1.5)
        return str({"loss": loss, "grad_norm": norm, "learning_rate": 1e-5, "epoch": step / 99})


class NewTrainer(Trainer):
    """From version 5 on, all numbers are texts."""

    def record(self, step, loss, scale):
        loss, norm = (0.0, NAN) if isnan(loss) else (loss, 1.5)
        return str({"loss": f"{loss:.4g}", "grad_norm": f"{norm:.4g}", "epoch": f"{step / 99:g}"})


class Lightning:
    def skip(self, scale):
        return None

    def record(self, step, loss, scale):
        shown = "nan.0" if isnan(loss) else f"{loss:.3f}"
        return f"Epoch 0:  1%|▏| {step}/900 [00:01<00:01, 35.5it/s, v_num=0, train_loss={shown}]\r"


class Rich(Lightning):
    def record(self, step, loss, scale):
        return (
            f"Epoch 0/9 ━━━━ {step}/900 0:00:01 • 0:00:00 85.41it/s v_num: 0.000 train_loss: {loss}"
        )


class Keras:
    def skip(self, scale):
        return None

    def record(self, step, loss, scale):
        bar = f"\x1b[1m{step:3d}/900\x1b[0m \x1b[32m━━\x1b[0m\x1b[37m━━\x1b[0m \x1b[1m10s\x1b[0m"
        return f"{bar} 20ms/step - accuracy: 0.1234 - loss: {loss:.4f}\x08\x08\r"


class Keras2(Keras):
    def record(self, step, loss, scale):
        return f"{step}/900 [======>.......] - ETA: 1s 20ms/step - loss: {loss:.4f} - acc: 0.1"


class NanoGPT(Keras):
    def record(self, step, loss, scale):
        return f"iter {step}: loss {loss:.4f}, time 135.20ms, mfu 17.51%"


class MindSpore(Keras):
    def record(self, step, loss, scale):
        return f"epoch: 1 step: {step}, loss is {loss}"


class PaddleNLP(Keras):
    def record(self, step, loss, scale):
        return (
            f"[2023-04-01 12:00:00,012] [    INFO] - loss: {loss}, learning_rate: 1e-05, "
            f"global_step: {step}, interval_runtime: 0.5, interval_steps_per_second: 20.0"
        )


class PaddleNLPLoop(Keras):  # of its examples
    def record(self, step, loss, scale):
        return f"global step {step}, epoch: 1, batch: {step - 1}, loss: {loss}, speed: 1.02 step/s"


class Paddle(Keras):
    def record(self, step, loss, scale):
        return f"step {step}/900 - loss: {loss:.4f} - acc: 0.5 - 20ms/step\r"


class Ultralytics(Keras):
    def record(self, step, loss, scale):
        heads = "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size"
        parts = f"{loss / 4:.4g}      {loss / 2:.4g}      {loss / 4:.4g}"
        row = (
            f"      {step}/900      0.51G      {parts}         23        640: 100%|██| 4/4 [00:01]"
        )
        return f"{heads}\n{row}"


SKIPPING = DeepSpeed, Apex, Fairseq
OF_OTHERS = MindSpore, PaddleNLP, PaddleNLPLoop, Paddle, Ultralytics
SILENT = Trainer, NewTrainer, Lightning, Rich, Keras, Keras2, NanoGPT, *OF_OTHERS
ALL = *SKIPPING, Megatron, *SILENT


@pytest.fixture
def judged(tmp_path):
    """Judges lines as a log."""

    def judge(*lines, encoding="utf-8"):
        path = tmp_path / "train.log"
        path.write_text("".join(f"{line}\n" for line in lines if line), encoding=encoding)
        log = _logs.read_log(path)
        return None if log is None else _logs.verdict_on(log)

    return judge


def trained(tool, losses, scale=1024.0, first=1):
    """The lines of steps that were applied."""
    return [tool.record(10 * (first + i), loss, scale) for i, loss in enumerate(losses)]


@pytest.mark.parametrize("tool", ALL)
def test_a_training_that_goes_well_is_normal(judged, tool):
    assert judged(*trained(tool(), FALLING * 3)).kind == "normal"


@pytest.mark.parametrize("tool", SKIPPING)
def test_a_scale_that_settles_is_no_problem(judged, tool):
    verdict = judged(*map(tool().skip, SETTLING), *trained(tool(), FALLING))
    assert verdict.kind == "normal"
    assert "6 steps were skipped while the loss scale settled" in verdict.text


@pytest.mark.parametrize("tool", SKIPPING)
def test_steps_before_the_first_skip_settle_no_scale(judged, tool):
    before, after = trained(tool(), FALLING, 2.0**16), trained(tool(), FALLING, first=20)
    verdict = judged(*before, *map(tool().skip, SETTLING), *after)
    assert verdict.kind == "normal"
    assert "6 steps were skipped while the loss scale settled" in verdict.text


@pytest.mark.parametrize("tool", SKIPPING)
def test_skips_alone_that_have_not_reached_the_smallest_scale_are_normal(judged, tool):
    assert judged(*map(tool().skip, SETTLING)).kind == "normal"


@pytest.mark.parametrize("tool", SKIPPING)
def test_a_skip_after_each_growth_is_no_problem(judged, tool):
    tries = [[*trained(tool(), FALLING, first=200 * i), tool().skip(1024.0)] for i in range(30)]
    verdict = judged(*map(tool().skip, SETTLING), *(line for lines in tries for line in lines))
    assert verdict.kind == "normal"
    assert "30 later, now and then" in verdict.text


@pytest.mark.parametrize("tool", [Apex, Fairseq])
def test_a_scale_that_only_sinks_below_one_is_at_the_floor(judged, tool):
    verdict = judged(*map(tool().skip, SINKING))
    assert verdict.kind == "floor"
    assert "python -m gradscaler run, which names the operation" in verdict.text


@pytest.mark.parametrize("tool", SKIPPING)
def test_a_loss_that_rises_before_the_skips_diverges(judged, tool):
    lines = [*trained(tool(), FALLING), *trained(tool(), RISING, first=20)]
    assert judged(*lines, *map(tool().skip, SINKING)).kind == "divergence"


@pytest.mark.parametrize("tool", ALL)
def test_a_loss_that_rises_before_it_is_nan_diverges(judged, tool):
    losses = [*FALLING, *RISING, NAN, NAN, NAN]
    verdict = judged(*trained(tool(), losses))
    assert verdict.kind == "divergence"
    assert "The loss rose from 2.28 to 10.2" in verdict.text


@pytest.mark.parametrize("tool", ALL)
def test_a_nan_that_no_skip_belongs_to_was_applied(judged, tool):
    lines = trained(tool(), [*FALLING, NAN, NAN, NAN])
    verdict = judged(*lines)
    assert verdict.kind == "loss"
    assert f"line {13 * len(lines[0].splitlines())} " in verdict.text
    assert "python -m gradscaler run, which names the " in verdict.text
    assert verdict.findings[0].is_certain


@pytest.mark.parametrize("tool", [Apex, Fairseq])
def test_a_nan_whose_steps_are_skipped_is_in_the_loss(judged, tool):
    lines = trained(tool(), FALLING)
    for i, scale in enumerate(SINKING):
        lines += [tool().skip(scale), tool().record(200 + i, NAN, scale)]
    assert [finding.kind for finding in judged(*lines).findings] == ["loss"]


@pytest.mark.parametrize("tool", ALL)
def test_a_nan_now_and_then_is_bad_data(judged, tool):
    assert (
        judged(
            *trained(tool(), [*FALLING, NAN] * 4, first=1), *trained(tool(), FALLING, first=99)
        ).kind
        == "data"
    )


def test_a_scale_that_sinks_by_single_skips_is_bad_data(judged):
    tool, lines = Apex(), []
    for i, scale in enumerate([2.0**15, *SINKING[:12]]):
        lines += [tool.skip(scale), *trained(tool, FALLING, first=200 * i)]
    assert judged(*lines).kind == "data"


ERRORS = {
    "floor": [
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore.",
        "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is ...",
    ],
    "loss": [
        "RuntimeError: Rank 255, node n1, device 7, iteration 2: Unexpected result nan "
        "(message='found NaN in local forward loss calculation')",
        "AssertionError: Rank 3: found NaN in local forward loss calculation. Device: 3",
        "Batch 17: Invalid loss, terminating training",
        "ValueError: The loss returned in `training_step` is nan.",
        "Monitored metric train_loss = nan is not finite. Previous best value was 0.5.",
    ],
    "nan": ["Unexpected result nan (message='found NaN in local grad norm for bucket #0 in ...')"],
    "activations": ["| WARNING | NaN detected in output of encoder.layers.3.fc1, shape: [8, 9]"],
}


@pytest.mark.parametrize(
    ("kind", "error"), [(kind, error) for kind, errors in ERRORS.items() for error in errors]
)
@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "[1,3]<stderr>:", "3: "])
def test_the_error_that_ended_a_run_is_explained_on_any_rank(judged, kind, error, prefix):
    lines = [f"[rank0]: {line}" for line in trained(Megatron(), FALLING)]
    assert judged(*lines, f"{prefix}{error}").kind == kind


def test_deepspeed_at_its_smallest_scale_is_at_the_floor_with_or_without_its_error(judged):
    stuck = [DeepSpeed().skip(1.0).replace("scale: 2,", "scale: 1,")] * 30
    assert judged(*map(DeepSpeed().skip, SINKING[:16]), *stuck).kind == "floor"


def test_megatron_iterations_that_are_all_skipped_hide_no_nan(judged):
    tool = Megatron()
    lines = [tool.record(10 * i, NAN, 2.0 ** (16 - i), skipped=10) for i in range(1, 4)]
    assert judged(*lines, *trained(tool, FALLING, first=4)).kind == "normal"


def test_the_nan_iterations_of_megatron_are_losses_that_were_not_finite(judged):
    tool = Megatron()
    lines = [tool.record(10 * i, loss, 1.0, skipped=1) for i, loss in enumerate(FALLING, 1)]
    verdict = judged(
        *(line.replace("nan iterations:   0", "nan iterations:   1") for line in lines)
    )
    assert verdict.kind == "data"
    assert "12 losses were NaN or Inf, with finite ones between them" in verdict.text


@pytest.mark.parametrize(
    ("lines", "is_named_at_once"),
    [
        (trained(NanoGPT(), [2.0, NAN]), True),
        (["jax/_src/xla_bridge.py: no GPU", *trained(NanoGPT(), [2.0, NAN])], True),
        (["tensorflow/core: oneDNN", *trained(NanoGPT(), [2.0, NAN])], False),
        *((trained(tool(), [2.0, NAN]), False) for tool in (Keras, MindSpore, Paddle, PaddleNLP)),
    ],
)
def test_the_command_is_that_of_the_training_s_framework(judged, lines, is_named_at_once):
    text = judged(*lines).text
    assert "with python -m gradscaler run, which names the " in text
    assert ("with --watch STEP, which names the operation" in text) != is_named_at_once


def test_no_pattern_takes_the_square_of_a_line_s_length():
    for *_, text in PATTERNS:
        kept = re.sub(r"\(\?=\(.*?\)\)\\1", "", re.sub(r"\(\?!.*?\)\)?", "", text))
        kept = re.sub(r"\(\?:\.\*.*?\)\)\?", "", kept)  # is tried where all before it fits
        assert len(re.findall(r"\.\*", kept)) <= 1, text


def test_megatron_skips_without_end_are_at_the_floor(judged):
    tool = Megatron()
    lines = [tool.record(10 * (13 + i), NAN, 1.0, skipped=10) for i in range(5)]
    assert judged(*trained(tool, FALLING), *lines).kind == "floor"


def test_a_loss_of_zero_that_was_small_before_hides_no_nan(judged):
    lines = [
        f"{{'loss': {loss}, 'grad_norm': 0.0}}" for loss in [0.004, 0.002, *[0.001] * 6, 0.0, 0.0]
    ]
    assert judged(*lines).kind == "normal"


def test_the_summary_at_the_end_of_trainer_is_no_loss(judged):
    summary = (
        "{'train_runtime': 19.9, 'train_steps_per_second': 5.7, 'train_loss': 0.7, 'epoch': 4}"
    )
    assert judged(*trained(Trainer(), [*FALLING, NAN, NAN]), summary).kind == "loss"
    assert judged(*trained(Trainer(), [*FALLING, NAN, NAN]), f"9it/s]{summary}").kind == "loss"


def test_a_skip_that_only_lowers_deepspeeds_hysteresis_keeps_the_scale(tmp_path):
    line = (
        DeepSpeed()
        .skip(1024.0)
        .replace("reducing to 1024", "but hysteresis is 2. Reducing hysteresis to 1")
    )
    (path := tmp_path / "train.log").write_text(line)
    assert _logs.read_log(path).scales == (2048.0,)


@pytest.mark.parametrize("norm", ["", ", 'grad_norm': 0.0", ", 'grad_norm': nan"])
def test_a_loss_that_drops_to_zero_at_once_is_a_nan_that_trainer_hides(judged, norm):
    verdict = judged(*trained(Trainer(), FALLING), *[f"{{'loss': 0.0{norm}, 'epoch': 1.0}}"] * 3)
    assert verdict.kind == "loss"
    assert "logging_nan_inf_filter" in verdict.text


def test_a_finite_loss_with_a_norm_of_nan_now_and_then_is_a_skip(judged):
    lines = trained(Trainer(), FALLING)
    lines[0] = "{'loss': 4.0, 'grad_norm': nan, 'learning_rate': 0.0, 'epoch': 0.01}"
    verdict = judged(*lines)
    assert verdict.kind == "normal"
    assert "1 step was skipped" in verdict.text


def test_the_losses_of_a_validation_are_not_those_of_the_training(judged):
    lines = [f"step {i}: val loss nan, loss 2.5" for i in range(20)]
    verdict = judged(*lines)
    assert "an evaluation is NaN or Inf in line 1, and the training's losses are" in verdict.text
    valid = '| INFO | valid | epoch 1 | valid on "valid" subset | loss nan | num_updates 40'
    assert judged(*trained(Fairseq(), FALLING), *[valid] * 9).kind == "normal"


PREFIXES = {
    "torchrun": "[rank{}]:",
    "elastic": "[default{}]:",
    "mpirun": "[1,{}]<stdout>:",
    "srun": "{}: ",
    "none": "",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_a_skip_that_each_rank_prints_counts_once(judged, prefix):
    skips = [
        f"{prefix.format(rank)}{Apex().skip(scale)}" for scale in SETTLING for rank in range(8)
    ]
    verdict = judged(*skips, *(f"{prefix.format(0)}{line}" for line in trained(Apex(), FALLING)))
    assert verdict.kind == "normal"
    assert "6 steps were skipped" in verdict.text


def test_colours_inside_a_value_do_not_hide_it(judged):
    lines = [f"\x1b[36mstep {i}\x1b[0m \x1b[1mloss\x1b[0m: \x1b[31mnan\x1b[0m" for i in range(9)]
    assert judged(*trained(NanoGPT(), FALLING), *lines).kind == "loss"


def test_a_printed_tensor_is_a_loss(judged):
    lines = [f"loss = tensor({loss}, device='cuda:0')" for loss in [*FALLING, *[NAN] * 3]]
    assert judged(*lines).kind == "loss"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_a_log_is_read_in_any_encoding(judged, encoding):
    lines = [f"iter {i}: loss {loss}, größer" for i, loss in enumerate([*FALLING, *[NAN] * 3])]
    assert judged(*lines, encoding=encoding).kind == "loss"


def test_the_command_chooses_by_the_file(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("\n".join([*map(Apex().skip, SETTLING), *trained(Apex(), FALLING)]))
    text = " ".join(printed("explain", path, width=200).split())
    assert "Nothing unusual" in text
    assert "A skipped step changes no weight" in text
    assert "Skipped steps: 6" in text


@pytest.mark.parametrize(
    "content", [b"hello\n", b"\x00\xff" * 99, b"In step 3 the loss 2 times\n", b"[1, 2]"]
)
def test_a_text_that_is_no_log_is_one_line_of_error(tmp_path, capsys, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    assert main(["explain", str(path)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{path}: " in err
    assert all(tool in err for tool in ("DeepSpeed", "apex", "fairseq", "Megatron-LM", "Keras"))


def test_two_logs_are_refused_with_what_the_command_takes(tmp_path, capsys):
    paths = [tmp_path / "a.log", tmp_path / "b.log"]
    for path in paths:
        path.write_text("iter 1: loss 2.5, time 1.0ms\n")
    assert main(["explain", *map(str, paths)]) == 1
    assert "explain each log by itself" in capsys.readouterr().err


def test_the_memory_does_not_grow_with_the_log(tmp_path):
    import tracemalloc

    path, peaks = tmp_path / "train.log", []
    line = Lightning().record(1, 2.5, 1.0)  # ends with a carriage return
    for size in (500, 5_000):
        path.write_text(line * size + "x" * 100 * size, newline="")
        tracemalloc.start()
        assert _logs.read_log(path) is not None
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


WORDS = [
    "loss",
    "loss: ",
    "nan",
    "1/9",
    " - ",
    "it/s",
    "skipped iterations: ",
    "{'",
    "': ",
    "9" * 400,
]
PIECES = st.sampled_from(
    [
        *WORDS,
        *(
            line
            for tool in (*SKIPPING, *SILENT)
            for line in (tool().skip(2.0), tool().record(7, NAN, 1.0))
            if line
        ),
        *(Megatron().record(7, loss, 2.0, skipped) for loss in (NAN, 1.0) for skipped in (0, 3)),
        *(error for errors in ERRORS.values() for error in errors),
    ]
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.text(max_size=9) | PIECES | st.floats().map(str), max_size=40).map("".join))
@example("loss: 1e999 step 1\n" * 9)
@example("step=999999999999999999999999, skipped=0, lr=[1]\nstep 9 loss 1\n")
@example("[deepspeed] OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated.")
def test_no_text_is_too_strange(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "strange.log"
    path.write_text(text, encoding="utf-8", errors="replace")
    log = _logs.read_log(path)
    assert log is None or _logs.content_of_log(log).text


def test_half_of_a_log_of_any_kind_is_judged(judged):
    """A verdict needs no particular beginning or end."""
    chance = random.Random(0)
    for tool in ALL:
        lines = [*map(tool().skip, SETTLING), *trained(tool(), [*FALLING, NAN, *RISING])]
        start, end = sorted(chance.sample(range(len(lines) + 1), 2))
        verdict = judged(*lines[start:end])
        assert verdict is None or verdict.text
