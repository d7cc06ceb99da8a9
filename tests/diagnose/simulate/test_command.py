"""A recorded run, and the command that replays policies on it."""

import json
import math
import re
import struct

import numpy as np
import pytest

pytest.importorskip("torch", reason="the run is torch's")

import torch

from gradscaler import AmaxScale, DynamicScale
from gradscaler.__main__ import main
from gradscaler.diagnose import Monitor, read_run
from gradscaler.diagnose.simulate import Trace, replay

# The command shows a policy's replay, which may be the same for two policies.
from gradscaler.diagnose.simulate._command import policy_of
from gradscaler.torch import GradScaler
from tests.support.reports import figures_saved, printed
from tests.support.run_files import append, sample, skip, start

STEPS = 40


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A run of one weight whose gradients are known: NaN at step 10, a spike at step 20."""
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = GradScaler("cpu", 2.0**14, growth_interval=15)
    with Monitor(scaler, every=1, path=path, on_stuck="continue"):
        for step in range(1, STEPS + 1):
            factor = {10: math.nan, 20: 2.0**10}.get(step, 1.0)
            loss = factor * (weight * torch.tensor([1.0, 0.5, 2.0**-10, 0.0])).sum()
            scaler.scale(loss).backward()
            weight.grad = weight.grad.half().float()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return path


def test_a_run_file_gives_its_own_gradients(record):
    trace = Trace.of_run(read_run(record))
    assert trace.num_steps == STEPS
    assert (trace.largest == 1.0).all()
    assert np.flatnonzero(trace.is_bad).tolist() == [9]
    assert trace.extreme[19] == 65520 / 2.0**13  # the scale of that step
    assert trace.counts.sum(axis=1).tolist() == [3.0] * STEPS


def test_the_run_s_own_policy_does_in_the_replay_what_it_did(record):
    run = read_run(record)
    found = replay(DynamicScale(2.0**14, growth_interval=15), Trace.of_run(run))
    assert (np.flatnonzero(found.skipped) + 1).tolist() == list(run.skipped)
    assert run.scales.items() <= dict(enumerate(found.scales.tolist(), 1)).items()


def test_steps_between_samples_count_as_the_latest_before_them(tmp_path, record):
    lines = record.read_text().splitlines()
    kept = [text for text in lines if json.loads(text).get("step") not in range(12, 19)]
    thinned = tmp_path / "thinned.jsonl"
    thinned.write_text("\n".join(kept) + "\n")
    assert (Trace.of_run(read_run(thinned)).largest == 1.0).all()


def test_the_command_says_how_many_steps_have_their_gradients_on_record(tmp_path, record, capsys):
    assert main(["simulate", str(record)]) == 0
    assert capsys.readouterr().err == ""
    lines = record.read_text().splitlines()
    kept = [text for text in lines if json.loads(text).get("step") not in range(12, 19)]
    thinned = tmp_path / "thinned.jsonl"
    thinned.write_text("\n".join(kept) + "\n")
    assert main(["simulate", str(thinned)]) == 0
    assert f"only {STEPS - 7} of {STEPS} steps have recorded gradients" in capsys.readouterr().err


def test_a_run_without_histograms_or_in_another_format_is_refused(tmp_path, record, capsys):
    lines = record.read_text().splitlines()
    bare = tmp_path / "bare.jsonl"
    bare.write_text(lines[0] + "\n")
    assert main(["simulate", str(bare)]) == 1
    assert "holds no histograms" in capsys.readouterr().err
    bare.write_text(lines[0].replace("float16", "bfloat16") + "\n" + lines[1] + "\n")
    assert main(["simulate", str(bare)]) == 1
    assert "only a run in float16 can be replayed" in capsys.readouterr().err


def test_a_run_that_is_too_long_to_replay_is_refused(tmp_path, record, capsys):
    long = tmp_path / "long.jsonl"
    late = {"kind": "skip", "step": 4_000_001, "scale": 8.0}
    long.write_text(record.read_text() + json.dumps(late) + "\n")
    assert main(["simulate", str(long)]) == 1
    assert "has 4,000,001 steps, and at most 4,000,000 can be replayed" in capsys.readouterr().err


def test_exponents_that_no_scale_reaches_count_at_the_end_of_those_that_one_does(tmp_path, record):
    lines = record.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "sample")
    sample = json.loads(lines[place])
    sample["histogram"] = [-1100, [1] * 2200]
    wide = tmp_path / "wide.jsonl"
    wide.write_text("\n".join([*lines[:place], json.dumps(sample), *lines[place + 1 :]]) + "\n")
    trace = Trace.of_run(read_run(wide))
    assert trace.first == -160
    assert trace.counts.shape == (STEPS, 301)
    assert trace.counts[0].sum() == 2200


def test_the_command_prints_a_row_for_each_policy_and_draws_a_picture(record, tmp_path, capsys):
    picture = tmp_path / "picture.png"
    policies = ["--policy", "paddle", "--policy", "AmaxScale(margin=10)"]
    assert main(["simulate", str(record), *policies, "-o", str(picture)]) == 0
    printed = capsys.readouterr().out
    for name in ("the run itself", "paddle", "AmaxScale(margin=10)"):
        assert f"\n{name}" in printed
    counts = "Bad batches, non-finite at any scale: 1. Spikes of large gradients: 0."
    assert f"Steps: {STEPS}. {counts}" in " ".join(printed.replace("│", " ").split())
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", data[16:24])) > 800


def test_the_page_has_the_table_and_a_picture_of_another_kind_is_refused(record, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["simulate", str(record), "--policy", "paddle", "-o", str(page)]) == 0
    assert capsys.readouterr().err == f"wrote {page}\n"
    text = page.read_text(encoding="utf-8")
    assert '<td class="name">paddle</td>' in text
    assert text.count("<svg") == 1
    assert main(["simulate", str(record), "-o", str(tmp_path / "picture.pdf")]) == 1
    assert "must end in .html or .png" in capsys.readouterr().err


def replayed(path, sizes, bad):
    """Write the file of a run whose steps have one gradient of these sizes, or a bad batch."""
    lines = [
        skip(step, 1.0, math.nan)
        if step in bad
        else sample(step, 1.0, [], 1, [], histogram=(round(math.log2(size)), [1]), largest=size)
        for step, size in enumerate(sizes, 1)
    ]
    return append(path, start(every=1), *lines)


def test_a_stretch_of_bad_batches_is_a_spike_only_if_a_finite_step_is_too(tmp_path):
    sizes = np.ones(60)
    sizes[[30, 51]] = 2.0**9
    path = replayed(tmp_path / "run.jsonl", sizes, bad=(11, 12, 51))  # in two stretches
    words = " ".join(printed("simulate", path, width=300).split())
    assert "Bad batches, non-finite at any scale: 3. Spikes of large gradients: 2." in words


def test_the_picture_holds_the_steps_at_which_the_scale_moves(tmp_path):
    path = replayed(tmp_path / "run.jsonl", np.ones(100), bad=(41,))
    policy = "DynamicScale(256.0)"
    picture = str(tmp_path / "picture.png")
    with figures_saved() as figures:
        assert main(["simulate", str(path), "--policy", policy, "-o", picture]) == 0
    ((_, scales), (_, skips)) = (
        axes.lines
        for axes in figures[0].axes
        if axes.get_title(loc="left") in ("Loss scale", "Skipped steps so far")
    )
    assert scales.get_xdata().tolist() == [0.5, 40.5, 41.5, 99.5, 100.5]  # between steps
    assert scales.get_ydata().tolist() == [8.0, 8.0, 7.0, 7.0, 7.0]
    assert skips.get_xdata().tolist() == [0.5, 40.5, 100.5]
    assert skips.get_ydata().tolist() == [0, 1, 1]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_table_has_all_its_columns_in_a_terminal_of_any_width(
    record, capsys, monkeypatch, width
):
    monkeypatch.setenv("COLUMNS", str(width))
    long = "DynamicScale(growth_tiers=((1.0, 100), (8.0, 400)))"
    assert main(["simulate", str(record), "--policy", "FixedScale(1024.0)", "--policy", long]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("FixedScale(1024.0)"))
    assert len(row.split()) == 8
    assert row.endswith(" 1,024")
    assert len(row) <= max(80, width)
    assert [line for line in lines if line.startswith("policy ")]


# Policies as text.


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("torch", DynamicScale()),
        (" paddle() ", DynamicScale.paddle()),
        ("DynamicScale.paddle()", DynamicScale.paddle()),
        ("DynamicScale.megatron(hysteresis=3)", DynamicScale.megatron(hysteresis=3)),
        ("AmaxScale(margin=10)", AmaxScale(margin=10)),
        ("DynamicScale(16, growth_factor=1.5)", DynamicScale(16, growth_factor=1.5)),
        ("DynamicScale(growth_tiers=((1.0, 9),))", DynamicScale(growth_tiers=((1.0, 9),))),
        ("megatron(hysteresis=3)", DynamicScale.megatron(hysteresis=3)),
    ],
)
def test_a_policy_is_read_from_its_text(text, policy):
    assert policy_of(text) == policy


def test_every_name_that_an_error_lists_is_a_policy_s(capsys):
    text = error_of("adam", capsys)
    names = re.search(r"write one of (.*?), or one of them", text)[1].split(", ")
    assert len(names) > 5
    for name in names:
        assert policy_of(f"{name}(8.0)" if name == "FixedScale" else name).init().scale > 0


def error_of(policy, capsys):
    """The error of a call with a wrong policy, which is refused before the run is read."""
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", "run.jsonl", "--policy", policy])
    assert exit_.value.code == 2
    return " ".join(capsys.readouterr().err.partition("error: ")[2].split())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "__import__('os')",
        "torch.amp",
        "DynamicScale.init",
        "DynamicScale._checks",
        "AmaxScale.paddle()",
        "DynamicScale.AmaxScale()",
        "DynamicScale.DynamicScale.torch",
        "_checks",
        "AmaxScale(__import__('os'))",
        "AmaxScale(margin=margin)",
        "AmaxScale(*[1])",
        "torch(2**10**10)",
        "lambda: 0",
        "torch(" * 90 + ")" * 90,
    ],
)
def test_what_is_no_policy_is_refused_and_not_run(text, capsys):
    message = error_of(text, capsys)
    assert message.startswith("argument --policy: ")
    assert " is not a policy: write one of torch," in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("AmaxScale(2**4)", "'AmaxScale(2**4)' is not a policy: write one of torch, "),
        ("AmaxScale(2**4)", "with numbers as parameters, such as AmaxScale(margin=10)"),
        ("AmaxScale(margin=1)", "AmaxScale(margin=1): margin must be at least 3, got 1"),
        ("torch(nothing=1)", "unexpected keyword argument 'nothing'"),
        ("AmaxScale(**{'margin': 9})", "AmaxScale(**{'margin': 9}): keywords must be strings"),
    ],
)
def test_what_is_wrong_with_a_policy_is_said_in_words(text, message, capsys):
    assert message in error_of(text, capsys)
