"""The page ``docs/evidence.md``, made from the results of ``evidence.py``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from textwrap import fill
from typing import Any

from scipy.stats import t

MICIKEVICIUS = "[Micikevicius et al., 2018](https://arxiv.org/abs/1710.03740)"
QI = "[Qi et al., 2025](https://arxiv.org/abs/2510.26788)"
POWER = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

# Words of the README, and what shows that they are true. `make NAME` is a task; a path names the
# tests in a file or folder, or one test after "::".
README = {
    "change one import and keep your loop": "`tests/torch/test_against_native.py` makes the same "
    "calls of both scalers, and `tests/documents/test_blocks.py` runs each block of the start "
    "pages 40 times",
    "fp16 flushes small gradients to zero": "`make demo`; "
    "[who needs loss scaling](#who-needs-loss-scaling)",
    "skips each step that overflowed, and moves the scale": "`make conformance`; "
    "[overflow and recovery](#overflow-and-recovery)",
    "works on the device your loss is on, CPU included": "`tests/torch/test_api.py::"
    "test_without_a_device_it_works_where_the_first_loss_is`; `tests/device` compiles a second "
    "device. No GPU was tried",
    "still skips a step that is not finite": "`tests/eager/test_policies.py::"
    "test_under_a_fixed_scale_an_overflow_still_skips_its_step`",
    "It says why the scale keeps falling": "`examples/torch_stuck.py`; "
    "`tests/diagnose/monitor/test_stuck_example.py`",
    "what people reported": "`make reports`; `tests/documents/test_reports.py`",
    "a report for each kind of failure": "`tests/site/test_site.py::"
    "test_the_gallery_has_a_report_on_a_training_for_each_kind_of_finding`",
    "It also finds failures that skip no step": "`tests/diagnose/test_trainings.py`",
    "It reports each step": "`tests/eager/test_outcomes.py`",
    "repeats a batch": "`tests/torch/test_retries.py`, `tests/eager/test_attempts.py`",
    "It clips in one pass over the gradients": "`tests/torch/test_clip.py::test_clipping_reads_the_"
    "gradients_once_and_step_multiplies_them_once_or_not_at_all`",
    "of the time that PyTorch's scaler adds": "`make bench-torch`: the row “GPT-2 small, scaling "
    "and clipping, added to fused AdamW” of [the measurements](benchmarks/torch.md)",
    "Weights in 16 bits keep small updates": "`tests/torch/weights/test_equal_bits.py`; "
    "`tests/jax/test_master_weights.py`; [the master copy](#a-master-copy-of-the-weights)",
    "All processes decide together": "`tests/torch/distributed`, `tests/jax/test_sharded.py`, "
    "`tests/paddle/distributed`",
    "in at most one all-reduce a step": "`tests/torch/distributed/test_fsdp.py::"
    "test_a_step_costs_one_all_reduce_and_a_norm_one_more`, "
    "`tests/torch/distributed/test_tensor_parallel.py::test_one_all_reduce_decides`",
    "One rule, to the bit": "`make conformance`; `tests/conformance/test_conformance.py`",
    "checkpoints that move": "`tests/checkpoint/test_files.py`, `tests/checkpoint/test_formats.py`",
    "a policy for data with bad batches": "[bad batches](#bad-batches), with its limit; "
    "`tests/policies/test_amax.py`",
    "It works in trainers": "`make test-integrations`",
    "DeepSpeed and Megatron": "`make test-engines`",
}


def mean(numbers: Sequence[float], decimals: int, factor: float = 1.0) -> str:
    """The mean and its 95 % confidence interval by Student's t."""
    if None in numbers:
        return "-"
    scaled = [factor * number for number in numbers]
    middle = round(statistics.fmean(scaled), decimals) + 0.0  # no -0.0
    text = f"{middle:.{decimals}f}".replace("-", "\N{MINUS SIGN}")
    if len(scaled) == 1:
        return text
    half = t.ppf(0.975, len(scaled) - 1) * statistics.stdev(scaled) / len(scaled) ** 0.5
    return f"{text} ± {half:.{decimals}f}"


def span(numbers: Iterable[float], form: Callable[[float], str] = "{:.0f}".format) -> str:
    """The smallest and the largest."""
    low, high = form(min(numbers := list(numbers))), form(max(numbers))
    return low if low == high else f"{low} to {high}"


def power(scale: float) -> str:
    """A scale as a power of two."""
    return "2" + f"{scale.hex().partition('p')[2]}".lstrip("+").translate(POWER)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 1) -> str:
    """A table in Markdown, in which the columns from ``numbers`` on are aligned to the right."""
    marks = ["---"] * numbers + ["--:"] * (len(headings) - numbers)
    return "\n".join(f"| {' | '.join(line)} |" for line in [headings, marks, *rows])


def seeds_where(holds: Iterable[bool]) -> str:
    """In how many of the seeds a claim holds."""
    seeds = list(holds)
    if all(seeds):
        return f"yes, in each of {len(seeds)} seeds"
    if any(seeds):
        return f"not shown, only in {sum(seeds)} of {len(seeds)} seeds"
    return f"no, in no seed of {len(seeds)}"


def minus(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """The difference of each seed."""
    return [one - other for one, other in zip(first, second, strict=True)]


def over(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """The ratio of each seed."""
    return [one / other for one, other in zip(first, second, strict=True)]


def page(results: dict[str, Any]) -> str:
    """The whole page."""
    found = results["results"]
    blocks = [
        "# Evidence",
        """
        This page tests claims of papers about fp16 on small networks. It also says how to check
        each claim of the README. `make evidence` trains everything again and writes this page
        ([results of each seed](../benchmarks/evidence.json)).
        """,
        f"""
        Every training runs on the CPU, with PyTorch {results["torch"]} and the seeds 0 to
        {results["seeds"] - 1}. "±" is the 95 % confidence interval of the mean by Student's t.
        "a to b" is the smallest and the largest of the seeds. Small networks cannot repeat the
        numbers of a paper. So only orderings and mechanisms are compared: which run is better, and
        why.
        """,
        "## Claims of papers",
        claims(found),
        """
        The last column counts the seeds in which the claim holds. A network fails if its loss ends
        above twice that of fp32, and trains as in fp32 if its loss ends within 5 % of it.
        """,
        *weights(found["weights"], results),
        *scaling(found["scaling"], results),
        *paths(found["paths"], results),
        *overflow(found["overflow"]["run"], results),
        *bad_batches(found["bad_batches"], results),
        "## The claims of the README",
        """
        `make NAME` runs a task. A path names tests, which `.venv/torch/bin/python -m pytest PATH`
        runs after `make torch`, or a script. [Contributing](contributing.md) has the command for
        tests with other frameworks.
        """,
        table(
            ("The README says", "Shown by"),
            ((f"“{words}”", shown) for words, shown in README.items()),
            numbers=2,
        ),
    ]
    return "\n\n".join(prose(block) if block[0] == "\n" else block for block in blocks) + "\n"


def prose(text: str) -> str:
    """A paragraph in lines of 100 characters."""
    text = " ".join(text.split())
    return fill(text, 100, break_long_words=False, break_on_hyphens=False)


def fails(row: dict[str, list[float]], column: str) -> list[bool]:
    """The seeds in which a training ends above twice fp32's loss."""
    return [ratio > 2 for ratio in over(row[column], row["fp32"])]


def claims(found: dict[str, Any]) -> str:
    """The table of what papers say, and in how many seeds it holds."""
    wide, rounded = (
        found["weights"][way] for way in ("float32, autocast", "float16, rounded to nearest")
    )
    deep, plain, small = found["scaling"].values()
    bf16, fp16 = found["paths"]["bfloat16"], found["paths"]["float16"]
    recovered = found["overflow"]["run"]

    def not_(seeds: list[bool]) -> list[bool]:
        return [not seed for seed in seeds]

    rows = [
        (
            "Without a float32 master copy, fp16 weights learn less",
            f"{MICIKEVICIUS}, figure 2a",
            "fine-tuning: " + seeds_where(r < 1 for r in over(rounded["fell"], wide["fell"])),
        ),
        (
            "The same, at an ordinary learning rate",
            "the same",
            seeds_where(ratio > 1 for ratio in over(rounded["loss"], wide["loss"])),
        ),
        (
            "Some networks fail in fp16 without loss scaling",
            "the same, table 2",
            "autoencoder: " + seeds_where(fails(deep, "scale 1")),
        ),
        (
            "With loss scaling they train as in fp32",
            "the same, table 2",
            "autoencoder: "
            + seeds_where(abs(r - 1) < 0.05 for r in over(deep["gradscaler"], deep["fp32"])),
        ),
        (
            "Image classifiers need no loss scaling",
            "the same, table 1",
            "transformer of digits: " + seeds_where(not_(fails(plain, "scale 1"))),
        ),
        (
            "A loss that is 2⁷ times smaller makes loss scaling necessary",
            "expected from the range of fp16",
            "the same transformer: " + seeds_where(fails(small, "scale 1")),
        ),
        (
            "After an overflow, it is enough to skip the step and go on",
            f"{MICIKEVICIUS}, section 3.2",
            seeds_where(not_(fails(recovered, "fp16"))),
        ),
        (
            "Sampling and training differ less in fp16 than in bf16",
            QI,
            seeds_where(ratio > 1 for ratio in over(bf16["kl"], fp16["kl"])),
        ),
        (
            "So the policy learns better in fp16",
            QI,
            seeds_where(gain > 0 for gain in minus(fp16["reward"], bf16["reward"])),
        ),
    ]
    return table(("Claim", "Source", "Here"), rows, numbers=3)


def weights(found: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """The section on master weights."""
    rows = [
        (way, mean(row["loss"], 4), mean(row["fell"], 4), f"{row['size'][0]:.0f}")
        for way, row in found.items()
    ]
    return [
        "## A master copy of the weights",
        f"""
        A network learns handwritten digits for {results["weights"]} steps at a learning rate of
        1e-3. The network that was trained in float32 is then fine-tuned for as many steps at 1e-5.
        "-" is NaN. [`examples/torch_half_weights.py`](../examples/torch_half_weights.py) has each
        way, and [Weights in 16 bits](weights.md) explains them.
        """,
        table(("Parameters", "Loss", "Fine-tuning lowers it by", "Bytes per parameter"), rows),
        """
        The mechanism is the paper's: an update below half the distance of two fp16 numbers is
        rounded away. Half of the weights start between 2⁻⁴ and 2⁻³ in size. There fp16 numbers are
        2⁻¹⁴ apart, so an update below 2⁻¹⁵, about 3e-5, is lost. Adam's updates are about as large
        as the learning rate. So rounding loses most of fine-tuning at 1e-5, and nothing that can be
        seen at 1e-3. The paper's example is a large speech model, which loses 80 % of its accuracy
        at the rate it trains with. A network this small does not show that.
        """,
    ]


def scaling(found: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """The section on networks with and without loss scaling."""
    rows = [
        (
            name,
            mean(row["flushed"], 1, 100) + " %",
            *(mean(row[column], 4) for column in ("fp32", "scale 1", "gradscaler")),
        )
        for name, row in found.items()
    ]
    return [
        "## Who needs loss scaling",
        f"""
        Three trainings of {results["scaling"]} steps, each from the same weights and with the same
        batches in fp32, in fp16 at scale 1, and in fp16 with `GradScaler()`. The autoencoder has
        eight sigmoid layers. The transformer reads handwritten digits row by row. "Flushed" is the
        share of the first gradients that fp16 turns into 0 at scale 1. The loss is the mean of the
        last {results["scaling"] // 20} steps.
        """,
        table(("Training", "Flushed", "fp32", "fp16, scale 1", "fp16, gradscaler"), rows),
        """
        Each sigmoid makes gradients smaller, until fp16 flushes them. A loss 2⁷ times smaller
        flushes few gradients of the transformer, and Adam's steps do not depend on the size of
        those that are left. So a small loss does not prove that a network needs loss scaling. Look
        at its gradients, with [`exponents`](features.md#what-a-format-does-to-gradients).
        """,
    ]


def paths(found: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """The section on bf16 and fp16 in reinforcement learning."""
    bf16, fp16 = found["bfloat16"], found["float16"]
    rows = [
        (
            name,
            mean(row["difference"], 3, 1e3),
            mean(row["kl"], 3, 1e6),
            mean(row["reward"], 3),
            span(row["skipped"]),
        )
        for name, row in (("bf16", bf16), ("fp16", fp16))
    ]
    return [
        "## fp16 and bf16 between two forward paths",
        f"""
        A tiny policy learns by reinforcement learning for {results["paths"]} steps. It samples by
        one forward path and trains by another, which adds in another order. The difference is that
        of the log-probabilities of sampled tokens. The KL divergence is per token. All are means
        over all steps. [`examples/torch_rl.py`](../examples/torch_rl.py) trains it, and
        [this page](rl.md) explains it.
        """,
        table(
            ("", "Difference, 10⁻³", "KL, 10⁻⁶", "Reward", "Skipped steps"),
            rows,
        ),
        f"""
        The difference in bf16 is {mean(over(bf16["difference"], fp16["difference"]), 1)} times that
        in fp16, and the KL divergence {mean(over(bf16["kl"], fp16["kl"]), 0)} times. That is the
        mechanism of the paper: fp16 has three bits more, so it rounds 2³ times finer, and the
        divergence grows with the square. The reward in fp16 less that in bf16 is
        {mean(minus(fp16["reward"], bf16["reward"]), 3)}. Here fp16 does not learn better, because
        the task is easy and its answers are short. fp16 even loses the steps that it skips, because
        this short run lets the scale grow after every 10 finite steps.
        """,
    ]


def overflow(found: dict[str, list[float]], results: dict[str, Any]) -> list[str]:
    """The section on a scale that starts too large."""
    steps = results["overflow"]
    lost = [(a + b) / steps for a, b in zip(found["first"], found["later"], strict=True)]
    rows = [
        ("First scale", power(2.0**32)),
        ("Steps skipped before the first that is applied", span(found["first"])),
        ("Scale of the first applied step", span(found["scale"], power)),
        ("Steps skipped afterwards", span(found["later"])),
        ("Longest streak of these", span(found["longest"])),
        ("Scale of the last step", span(found["last"], power)),
        ("Share of steps that are skipped", mean(lost, 1, 100) + " %"),
        ("Loss in fp32", mean(found["fp32"], 3)),
        ("Loss in fp16", mean(found["fp16"], 3)),
        ("Loss in fp16 less that in fp32", mean(minus(found["fp16"], found["fp32"]), 3)),
    ]
    return [
        "## Overflow and recovery",
        f"""
        The transformer learns digits for {steps} steps. The scale starts at 2³², far too large, and
        doubles after 50 finite steps in a row instead of 2,000, so that it overflows again and
        again. The loss is the mean of the last {steps // 20} steps.
        """,
        table(("", "Result"), rows),
        f"""
        Each overflow halves the scale, so the number of skips at the start is the number of
        halvings from 2³² to the first scale that fits. Later, the longest streak has
        {span(found["longest"])} skips. A skipped batch is lost, unless
        [the step is repeated](retries.md).
        """,
    ]


def bad_batches(found: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """The section on NaN and Inf in batches."""
    reference = found["fp32, none"]["accuracy"]
    rows = [name.split(", ") for name in found if name != "fp32, none"]
    names, kinds = (list(dict.fromkeys(column)) for column in zip(*rows, strict=True))

    def cells(policy: str, column: str) -> list[list[float]]:
        return [found[f"{policy}, {kind}"][column] for kind in kinds]

    def gain(kind: str) -> list[float]:
        one, other = (found[f"{policy}, {kind}"] for policy in ("AmaxScale()", names[0]))
        return minus(one["accuracy"], other["accuracy"])

    low = span(found["AmaxScale(), 20 % NaN"]["scale"], power)
    same = all(
        found[f"{policy}, 5 % Inf"] == found[f"{policy}, 5 % NaN"] for policy in names
    )  # a scaler sees that a step is not finite, not why
    return [
        "## Bad batches",
        f"""
        An MLP learns digits for {results["bad_batches"]:,} steps with SGD, while a share of the
        batches holds one NaN or Inf. No scale can save such a batch, so a policy should skip it and
        keep the scale. The first table has the test accuracy in %. It is, in fp32 without bad
        batches, {mean(reference, 1, 100)}.
        """,
        table(
            ("Policy", *kinds),
            ((f"`{each}`", *(mean(c, 1, 100) for c in cells(each, "accuracy"))) for each in names),
        ),
        "The scale of the last step:",
        table(
            ("Policy", *kinds),
            ((f"`{each}`", *(span(c, power) for c in cells(each, "scale"))) for each in names),
        ),
        f"""
        Most rules take a bad batch for an overflow, and halve the scale. Without a floor it sinks.
        At 5 % it sinks until gradients are flushed, and the network stops learning. Paddle's rule
        halves it only after two bad batches in a row, so its scale sinks that far only at 20 %.
        With `AmaxScale()` the accuracy is higher than with PyTorch's rule by
        {mean(gain("5 % NaN"), 1, 100)} points at 5 % and {mean(gain("20 % NaN"), 1, 100)} at 20 %.
        At 1 % the difference is {mean(gain("1 % NaN"), 1, 100)} points: the scale sinks, but not
        far enough in so few steps. `AmaxScale()` has a limit. At 20 % its scale sinks as well, to
        {low} here, and it sinks further if every batch is bad. A floor of 1 is enough here, because
        this network learns at scale 1.
        {"With Inf in place of NaN, every figure is the same." if same else ""}
        [Which policy, and when](policies.md) compares the rules of other libraries.
        """,
    ]
