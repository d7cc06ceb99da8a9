"""The files of several ranks of one run: one verdict, which names the rank at fault."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gradscaler import DynamicScale, NonfiniteGradient, ScaleState
from gradscaler.diagnose import Monitor, read_run
from tests.support import run_files
from tests.support.run_files import append, skip, start, verdict

BAD = [NonfiniteGradient("layer.weight", (4,), "float16", 1, 0, 1.0)]
LAST = 40  # step
PAGE = Path(__file__).parents[3] / "docs" / "stuck.md"


@pytest.fixture
def files(tmp_path):
    """Writes the lines of each rank to its file, behind those there; returns the paths."""

    def files(*ranks):
        paths = []
        for rank, lines in enumerate(ranks):
            paths.append(tmp_path / f"run.{rank}.jsonl")
            step = read_run(paths[-1]).num_steps if paths[-1].exists() else 0
            append(paths[-1], start(rank=rank, world_size=len(ranks), step=step), *lines)
        return paths

    return files


def sample(skips=(), scales=((1, 8.0),), last=LAST):
    return run_files.sample(last, scales[-1][1], scales, last, [*skips])


def stuck(kind, since=21, bad_since=None, until=LAST, earlier=(), loss=None):
    """The lines of a rank that skips with the others from a step on, and of its verdict."""
    bad_since = math.inf if bad_since is None else bad_since
    skips = [skip(step, 8.0, None, BAD) for step in earlier]
    skips += [
        skip(step, 8.0, loss, BAD if step >= bad_since else []) for step in range(since, until + 1)
    ]
    return [
        *skips,
        sample(each["step"] for each in skips),
        verdict(until, kind, f"It is {kind}. Do it.", "layer.weight" if bad_since else None),
    ]


def healthy(skipped=(), bad=True):
    skips = [skip(step, 8.0, None, BAD if bad else []) for step in skipped]
    return [*skips, sample(skipped)]


@pytest.mark.parametrize(
    ("at_fault", "ranks"),
    [
        # One rank's gradients are not finite, and the others skip along.
        (2, [stuck("elsewhere"), stuck("elsewhere"), stuck("floor", bad_since=21)]),
        # It is the first, and the others' gradients are not finite later.
        (1, [stuck("nan", bad_since=30), stuck("floor", bad_since=21)]),
        # All at one step, as with DDP: the most severe verdict, then the lowest rank.
        (1, [stuck("nan", bad_since=21), stuck("loss", bad_since=21)]),
        (1, [stuck(kind, bad_since=21) for kind in ("activations", "parameter", "parameter")]),
        # Those average their gradients, and one has the loss that is not finite.
        (1, [stuck("data", bad_since=21, loss=2.5), stuck("data", bad_since=21, loss=math.nan)]),
        # Overflows in the warm-up do not count, nor those that have ended.
        (1, [stuck("elsewhere", earlier=(1, 2, 3)), stuck("floor", bad_since=30)]),
        (1, [stuck("nan", bad_since=22, earlier=(1, 2)), stuck("floor", bad_since=21)]),
        (1, [stuck("nan", bad_since=21, earlier=(1, 2)), stuck("loss", bad_since=21)]),
        # A verdict that names a cause comes before one that names none.
        (1, [healthy((3,)), stuck("floor")]),
        (0, [stuck("underflow"), healthy((3,)), stuck("elsewhere")]),
        (1, [stuck("elsewhere"), stuck("normal", bad_since=21)]),
        (0, [stuck("elsewhere"), stuck("elsewhere")]),
        (1, [healthy((3,), bad=False), healthy((3,)), healthy((3,))]),
        (0, [healthy(), healthy()]),
        # A kind of a later version counts as a cause.
        (1, [stuck("normal"), stuck("sneeze")]),
    ],
)
def test_one_rank_is_at_fault_whatever_the_order_of_the_files(files, at_fault, ranks):
    paths = files(*ranks)
    own = read_run(paths[at_fault])
    for order in (paths, paths[::-1]):
        run = read_run(*order)
        assert run.starts[-1].rank == at_fault
        assert run.verdict.text.endswith(f"rank {at_fault}: {own.verdict.text}")
        assert run.samples == own.samples
        assert (next(iter(run.ranks)), len(run.ranks)) == (at_fault, len(ranks))
        if run.verdict.kind != "ranks":
            assert run.verdict.where == own.verdict.where
            assert run.verdict.kind == own.verdict.kind


def test_one_file_is_a_run_without_other_ranks(files):
    first, _ = files(healthy(), healthy())
    run = read_run(first)
    assert run.ranks == {}
    assert run.verdict.text.startswith("None of 40 steps was skipped. ")


# The verdict in one rank's own file.


@pytest.mark.parametrize(
    ("skipped", "kind", "text"),
    [
        ((3,), "normal", "while this one's were finite. "),
        (
            range(1, 31),
            "elsewhere",
            r"while this one's were finite. To see which, .*run\.\{rank\}\.jsonl",
        ),
    ],
)
def test_a_rank_that_only_skips_along_blames_no_gradient_of_its_own(files, skipped, kind, text):
    along, _ = files(healthy(skipped, bad=False), healthy(skipped))
    verdict = read_run(along).verdict
    assert (verdict.kind, verdict.where) == (kind, None)
    assert "because another rank's gradients overflowed" in verdict.text
    assert re.search(text, verdict.text)


def test_a_rank_that_overflowed_once_itself_does_not_put_all_skips_on_another(files):
    mixed, _ = files([*healthy((3,), bad=False), skip(5, 8.0, None, BAD)], healthy())
    assert "another" not in read_run(mixed).verdict.text


def test_a_process_alone_has_no_other_rank_to_blame(files):
    (path,) = files(healthy((3,), bad=False))
    assert "rank" not in read_run(path).verdict.text


# Where ranks differ.


def test_different_scales_are_a_finding_that_names_the_step_and_both(files):
    moves = [((1, 8.0), (12, 4.0), (20, 8.0)), ((1, 8.0), (12, 4.0), (17, 2.0)), ((1, 8.0),)]
    paths = files(*[[sample((), scales)] for scales in moves])
    verdict = read_run(*paths[:2]).verdict
    assert verdict.kind == "ranks"
    words = "Ranks hold different loss scales from step 17 on: 4 on rank 0, 2 on rank 1."
    assert verdict.text.startswith(words)
    assert "from step 12 on: 4 on rank 0, 8 on rank 2." in read_run(*paths).verdict.text


def test_a_step_that_one_rank_alone_skipped_is_a_finding(files):
    paths = files(healthy((3, 7)), healthy((3,)), healthy((3, 5, 7)))
    assert "Step 5 was skipped on rank 2, and not on rank 0." in read_run(*paths).verdict.text
    assert "Step 7 was skipped on rank 0, and not on rank 1." in read_run(*paths[:2]).verdict.text
    assert read_run(paths[0], paths[2]).verdict.kind == "ranks"


def test_what_only_one_file_goes_on_to_is_no_difference(files):
    ahead = [sample((), ((1, 8.0), (41, 4.0)), last=50), skip(45, 4.0, None, BAD)]
    behind = [*healthy(), skip(41, 8.0, None, BAD)]  # killed before its next sample
    assert read_run(*files(ahead, behind)).verdict.kind == "normal"


def test_steps_are_compared_from_the_latest_start_on(files):
    """When a run was killed, and continued, its ranks' files count the steps differently."""
    before = [sample(last=LAST), skip(LAST + 1, 8.0, None, BAD)]
    files(before, before[:1])

    def after(step):
        return [
            run_files.sample(step + 10, 2.0, [(step + 1, 4.0), (step + 6, 2.0)], 10, [step + 5])
        ]

    paths = files(after(LAST + 1), after(LAST))
    assert [read_run(path).starts[-1].step for path in paths] == [LAST + 1, LAST]
    assert read_run(*paths).verdict.kind == "normal"
    later = [
        run_files.sample(LAST + 13, 4.0, [(LAST + 12, 2.0), (LAST + 13, 4.0)], 2, []),
        run_files.sample(LAST + 20, 2.0, [(LAST + 11, 2.0)], 10, []),
    ]
    files(*[[line] for line in later])
    assert f"from step {LAST + 13} on: 4 on rank 0, 2 on" in read_run(*paths).verdict.text


def test_which_rank_was_first_counts_from_the_latest_start_too(files):
    files([sample(last=LAST + 5)], [sample()])

    def after(step, bad):
        nonfinite = [[] if k < bad else BAD for k in range(1, 9)]
        skips = [skip(step + k, 8.0, None, found) for k, found in enumerate(nonfinite, 1)]
        return [*skips, verdict(step + 8, "floor", "What. Why.", "w")]

    paths = files(after(LAST + 5, bad=2), after(LAST, bad=4))
    text = read_run(*paths).verdict.text
    assert text.startswith("rank 0: The file holds 2 runs")
    assert text.endswith("What. Why.")


def test_the_docs_quote_what_ranks_are_told(files, monkeypatch):
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    moves = ((1, 4.0),), ((1, 4.0), (6, 2.0))
    ranks = files(
        *[[sample(skips, scales)] for skips, scales in zip(((), (5,)), moves, strict=True)]
    )
    assert read_run(*ranks).verdict.text.partition(" rank 0: ")[0] in page
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    policy, gradients = DynamicScale(), {"w": np.float32([1.0])}
    with Monitor(SimpleNamespace(policy=policy, state=policy.init()), on_stuck="continue") as along:
        for step in range(1, 21):
            state = ScaleState(np.float32(max(1.0, 65536.0 / 2**step)), np.int32(0), np.int32(0))
            scaler = SimpleNamespace(policy=policy, state=state)
            along.record(scaler=scaler, finite=False, gradients=gradients, loss=2.5)
    assert along.verdict.kind == "elsewhere"
    assert along.verdict.text in page


# Files that do not belong together.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"framework": "jax"}, "framework is 'jax', but in .*run.0.jsonl it is 'torch'"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', but in .* it is 'float16'"),
        ({"policy": {"name": "FixedScale"}}, "policy is .*FixedScale.*, but in .*DynamicScale"),
        ({"world_size": 4}, "world_size is 4, but in .* it is 2"),
        ({"rank": 0}, r"is of rank 0, as .*run.0.jsonl is"),
    ],
)
def test_files_of_other_runs_are_refused_by_name(files, tmp_path, changes, message):
    first, _ = files(healthy(), healthy())
    other = tmp_path / "other.jsonl"
    append(other, start(**{"rank": 1, "world_size": 2, **changes}))
    with pytest.raises(ValueError, match=r"other\.jsonl: " + message):
        read_run(first, other)


def test_files_of_processes_that_trained_alone_are_refused(path):
    first = append(path, start(), *healthy())
    with pytest.raises(ValueError, match="trained alone, so it is not a rank of a run: explain"):
        read_run(first, first)


def test_a_file_without_a_rank_is_of_a_process_that_trained_alone(path):
    (first,) = read_run(append(path, start())).starts
    assert (first.rank, first.world_size) == (0, 1)
