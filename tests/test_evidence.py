"""The page of evidence: its figures are the recorded ones, and its experiments still run."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks import evidence, policies
from benchmarks import evidence_page as page

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
RARE = pytest.mark.rare("each step of these rules is compared in tests/policies and torch/weights")


@pytest.fixture
def recorded():
    return json.loads(evidence.RESULTS.read_text())


def test_the_page_is_that_of_the_recorded_results(recorded):
    assert evidence.PAGE.read_text() == page.page(recorded)


def test_the_recorded_results_are_those_of_the_settings(recorded):
    settings = evidence.Settings()
    assert {name: recorded[name] for name in settings._fields} == settings._asdict()
    for rows in recorded["results"].values():
        for columns in rows.values():
            assert {len(numbers) for numbers in columns.values()} == {settings.seeds}


def mean(numbers):
    return sum(numbers) / len(numbers)


def test_the_sentences_about_weights_and_loss_scaling_hold(recorded):
    weights, scaling = recorded["results"]["weights"], recorded["results"]["scaling"]
    exact, rounded = weights["float32, autocast"], weights["float16, rounded to nearest"]
    assert mean(rounded["fell"]) < mean(exact["fell"]) / 2
    assert abs(mean(rounded["loss"]) / mean(exact["loss"]) - 1) < 0.01
    deep, plain, small = scaling.values()
    assert all(page.fails(deep, "scale 1"))
    assert not any(page.fails(plain, "scale 1") + page.fails(small, "scale 1"))
    assert max(plain["flushed"]) < min(small["flushed"])
    assert max(small["flushed"]) < 0.1 < min(deep["flushed"])


def test_the_sentences_about_two_paths_and_overflow_hold(recorded):
    (bf16, fp16), run = (
        recorded["results"]["paths"].values(),
        recorded["results"]["overflow"]["run"],
    )
    assert mean(page.over(bf16["difference"], fp16["difference"])) == pytest.approx(2**3, rel=0.2)
    assert mean(page.over(bf16["kl"], fp16["kl"])) == pytest.approx(2**6, rel=0.2)
    assert mean(fp16["reward"]) < mean(bf16["reward"])
    assert set(bf16["skipped"]) == {0}
    assert min(fp16["skipped"]) > 0
    for first, scale in zip(run["first"], run["scale"], strict=True):
        assert scale == 2.0 ** (32 - first)


def test_the_sentences_about_bad_batches_hold(recorded):
    found = recorded["results"]["bad_batches"]

    def accuracy(policy, bad):
        return mean(found[f"{policy}, {bad}"]["accuracy"])

    fine = mean(found["fp32, none"]["accuracy"])
    for bad in ("5 % NaN", "20 % NaN"):
        assert accuracy("DynamicScale.torch()", bad) < fine - 0.02
        for policy in ("AmaxScale()", "DynamicScale.tf_keras()"):
            assert accuracy(policy, bad) > fine - 0.02
    assert accuracy("DynamicScale.torch()", "1 % NaN") > fine - 0.02
    few, many = (max(found[f"AmaxScale(), {bad}"]["scale"]) for bad in ("1 % NaN", "20 % NaN"))
    assert many < few
    for policy in evidence.POLICIES:
        assert found[f"{policy}, 5 % Inf"] == found[f"{policy}, 5 % NaN"]


@RARE
def test_a_short_run_has_all_parts_of_the_page(recorded):
    short = evidence.Settings(1, weights=3, paths=2, scaling=3, overflow=30, bad_batches=10)
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as executor:
        results = evidence.measure(short, executor)
    made, shown = results["results"], recorded["results"]
    assert {name: list(rows) for name, rows in made.items()} == {
        name: list(rows) for name, rows in shown.items()
    }
    assert page.page(json.loads(json.dumps(results))).count("\n## ") == 7


@RARE
def test_fine_tuning_without_a_master_copy_loses_more_than_half():
    rows = evidence.weights(11, evidence.Settings(weights=100))
    exact = rows["float32, autocast"]["fell"]
    assert rows['MasterWeights, "remainder16"']["fell"] == exact
    assert 2 * rows["float16, rounded to nearest"]["fell"] < exact


def test_fp16_flushes_gradients_of_the_deep_network_and_few_of_the_transformer():
    deep, plain = (
        evidence.flushed(evidence.NETWORKS[name][0](11), 1.0)
        for name in ("autoencoder", "transformer")
    )
    assert deep > 0.2 > plain


def test_each_skip_halves_the_scale_and_the_first_scale_that_fits_is_used():
    policy = evidence.DynamicScale(init_scale=2.0**32, growth_interval=50)
    run = evidence.train(policies.transformer(11), policy, 60)
    first = run.skips.index(False)
    assert first > 5
    assert run.scales[: first + 1] == [2.0 ** (32 - step) for step in range(first + 1)]


@pytest.mark.parametrize("bad", ["20 % NaN", "5 % Inf"])
@RARE
def test_bad_batches_sink_pytorch_s_scale_and_not_amax_scale_s(bad):
    settings = evidence.Settings(bad_batches=400)
    sunk, kept = (
        evidence.bad_batches(11, settings, bad, name)[f"{name}, {bad}"]["scale"]
        for name in ("DynamicScale.torch()", "AmaxScale()")
    )
    assert 2.0**6 * sunk < kept


def test_an_interval_is_student_s():
    # Of 1, 2 and 3 the standard deviation is 1, and t with 2 degrees of freedom is 4.303.
    assert page.mean([1.0, 2.0, 3.0], 3) == "2.000 ± 2.484"
    assert page.mean([None, 1.0], 3) == "-"
    assert page.mean([-1.0], 1) == "\N{MINUS SIGN}1.0"
    assert page.mean([-0.01], 1) == "0.0"


def words(text):
    """Markdown without links, emphasis and line breaks."""
    return " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("*", "").split())


README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("claim", page.README)
def test_the_readme_makes_each_claim(claim):
    assert claim in words(README)


def test_each_point_of_the_readme_is_a_claim():
    points = re.findall(r"^- \*\*\[(.+?)\]", README, re.MULTILINE)
    assert len(points) > 5
    for point in points:
        assert any(claim in point for claim in page.README), point


SHOWN = sorted(set(re.findall(r"`([^`]+)`", " ".join(page.README.values()))))


@pytest.mark.parametrize("shown", SHOWN)
def test_the_command_or_test_that_shows_a_claim_exists(shown):
    if task := re.fullmatch(r"make ([\w-]+)", shown):
        name, tasks = task[1], (ROOT / "noxfile.py").read_text()
        kind = name.partition("-")[0]
        assert re.search(rf'(@task|nox\.session)\((name=)?f?"({name}|{kind}-{{framework}})"', tasks)
        return
    path, _, test = shown.partition("::")
    assert (ROOT / path).exists()
    assert not test or f"def {test}(" in (ROOT / path).read_text()
