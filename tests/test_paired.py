"""The statistics and the tables of the benchmarks."""

import importlib.util
import itertools
import json
import sys
from fractions import Fraction
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "benchmarks" / "paired.py"
spec = importlib.util.spec_from_file_location("paired", SOURCE)
paired = sys.modules["paired"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(paired)


def coverage(low, high, n):
    """How often the median lies between two ranks, by counting every case."""
    below = [sum(signs) for signs in itertools.product((0, 1), repeat=n)]
    return Fraction(sum(low <= count < high for count in below), len(below))


# The ranks are those of published tables.
@pytest.mark.parametrize(
    ("n", "low", "high"), [(6, 1, 6), (10, 2, 9), (20, 6, 15), (25, 8, 18), (50, 18, 33)]
)
def test_the_interval_of_a_median_runs_between_the_ranks_of_published_tables(n, low, high):
    assert paired.median_interval(range(1, n + 1)) == (low, high)


@pytest.mark.parametrize("n", range(6, 15))
@pytest.mark.parametrize("confidence", [0.8, 0.9, 0.95])
def test_the_interval_holds_the_median_as_often_as_it_says_and_is_the_shortest_that_does(
    n, confidence
):
    low, high = paired.median_interval(range(1, n + 1), confidence)
    assert low + high == n + 1
    assert coverage(low, high, n) >= confidence
    assert low == n // 2 or coverage(low + 1, high - 1, n) < confidence


def test_the_interval_does_not_depend_on_the_order_of_the_values():
    values = [5.0, 1.0, 4.0, 2.0, 3.0, 6.0]
    assert paired.median_interval(values) == (1.0, 6.0)
    assert values == [5.0, 1.0, 4.0, 2.0, 3.0, 6.0]


@pytest.mark.parametrize("n", range(6))
def test_too_few_values_for_an_interval_are_an_error(n):
    with pytest.raises(ValueError, match=f"^{n} values are too few for a 95% interval"):
        paired.median_interval([1.0] * n)


def test_the_ratio_is_the_median_of_ratios_not_the_ratio_of_medians():
    comparison = paired.Comparison("", ours=[1.0, 20.0, 300.0], native=[2.0, 10.0, 400.0])
    assert comparison.ratios == [0.5, 2.0, 0.75]
    assert comparison.ratio == 0.75


def test_a_load_that_slows_both_rivals_down_leaves_the_ratio_alone():
    load = [1.0, 7.0, 1.0, 3.0, 1.0, 30.0, 1.0]
    comparison = paired.Comparison("", [2 * x for x in load], [4 * x for x in load])
    assert comparison.ratio == 0.5
    assert comparison.interval == (0.5, 0.5)


def test_repetitions_without_a_partner_are_an_error():
    with pytest.raises(ValueError, match="shorter"):
        _ = paired.Comparison("", [1.0, 2.0], [1.0]).ratio


def test_rivals_alternate_in_an_order_that_turns_each_time_and_each_call_is_prepared():
    log = []
    rivals = {name: lambda name=name: log.append(name) for name in ("ours", "native")}
    paired.interleave(rivals, lambda: log.append("-"), repetitions=2, calls=2, warm_up=1)
    ours, native = ["-", "ours"] * 2, ["-", "native"] * 2
    assert log == ours + native + native + ours + ours + native


def test_each_rival_has_one_measurement_for_each_repetition_and_none_for_the_warm_up():
    seconds = paired.interleave({"a": int, "b": int, "c": int}, int, repetitions=5, warm_up=3)
    assert {name: len(measured) for name, measured in seconds.items()} == {"a": 5, "b": 5, "c": 5}


def test_the_garbage_collector_is_on_again_after_a_rival_fails():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        paired.interleave({"ours": fail}, int, repetitions=1)
    assert paired.gc.isenabled()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.5 s"), (1.0, "1 s"), (0.0123, "12.3 ms"), (4.56e-5, "45.6 µs"), (1e-9, "0.001 µs")],
)
def test_a_duration_has_three_digits_and_a_unit(seconds, text):
    assert paired.duration(seconds) == text


def test_the_table_is_aligned_markdown():
    fast = paired.Comparison("fast", [0.001] * 6, [0.002] * 6)
    slow = paired.Comparison("much slower", [3.0] * 6, [2.0] * 6)
    assert paired.table([fast, slow]).splitlines() == [
        "| workload    | ours | native | ratio |  95 % interval |",
        "| ----------- | ---: | -----: | ----: | -------------: |",
        "| fast        | 1 ms |   2 ms | 0.500 | 0.500 to 0.500 |",
        "| much slower |  3 s |    2 s | 1.500 | 1.500 to 1.500 |",
    ]


def test_the_json_file_holds_the_setting_and_every_measurement(tmp_path):
    comparison = paired.Comparison("work", [1.0] * 6, [4.0] * 6)
    paired.write_json(tmp_path / "out.json", {"threads": 2}, [comparison])
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "setting": {"threads": 2},
        "results": [
            {
                "workload": "work",
                "ratio": 0.25,
                "interval": [0.25, 0.25],
                "ours_s": [1.0] * 6,
                "native_s": [4.0] * 6,
            }
        ],
    }


def test_the_machine_is_described_in_json_values():
    described = paired.machine()
    assert described["cpus"] >= 1
    assert json.loads(json.dumps(described)) == described


def test_the_platform_has_the_version_of_the_system_and_not_the_name_of_its_build(monkeypatch):
    for name, value in (("system", "Linux"), ("release", "6.8.0-45-mine"), ("machine", "x86_64")):
        monkeypatch.setattr(paired.platform, name, lambda value=value: value)
    assert paired.machine()["platform"] == "Linux-6.8.0-x86_64"
