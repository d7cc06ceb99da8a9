"""A run file: what a monitor writes, what is read, and what is refused."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscaler import DynamicScale, NonfiniteGradient
from gradscaler.diagnose import Monitor, read_run
from tests.support import programs
from tests.support.run_files import (
    append,
    parameter,
    run_of,
    sample,
    shares,
    skip,
    start,
    text_of,
    verdict,
    watched,
)

START = start(policy={"name": "FixedScale", "scale": 8.0}, time="2026-01-01T00:00Z")
SHARES = shares(0.25, 0.125, 0.125, 0.5, 0.0, 0.0)
BINS = -20, [1, 0, 3]
SAMPLE = sample(
    step=100,
    scale=8.0,
    scales=[(1, 16.0), (57, 8.0)],
    steps=100,
    skips=[56],
    loss=2.5,
    norm=math.inf,
    shares=SHARES,
    histogram=BINS,
    parameters={"<w>": parameter(0.25, 0.125, 0.125, 0.0, BINS)},
    worst=["<w>"],
    losses=[None, 2.5],
    largest=0.5,
    backward=["float16", "float32"],
    calls={"unstepped": 3},
    missing=["v"],
    cut={"v": "round"},
)
JUDGEMENT = verdict(75, "nan", "NaN at every scale. Look for a division by zero.", "w")
HEADER = text_of(START).rstrip()
GRADIENTS = {".": np.float32([1.0, 0.5]), "!": np.float32([1.0, np.inf])}


def record(line):
    """A line as it is read from JSON."""
    return json.loads(text_of(line))


def scaler_in(state):
    """A scaler that announces no steps, as JAX's."""
    return SimpleNamespace(policy=DynamicScale(), state=state)


def monitored(path, flags, name="w", **options):
    """A file that a monitor has written in a training whose steps overflow at "!"."""
    state = DynamicScale().init()
    with Monitor(scaler_in(state), path=path, on_stuck="continue", **options) as monitor:
        for flag in flags:
            state = DynamicScale().update(state, flag == "!")
            gradients = {name: GRADIENTS[flag]}
            monitor.record(scaler=scaler_in(state), gradients=gradients, loss=1.0)
    return path


def read_lines(run):
    """The lines of a run, in JSON."""
    return [record(each) for each in (*run.starts, *run.samples, *run.skips, *run.verdicts)]


DOCUMENTED = """[
{"gradscaler": 1, "kind": "start", "framework": "torch", "dtype": "float16", "every": 100,
 "step": 0, "policy": {"name": "FixedScale", "scale": 8.0}, "time": "2026-01-01T00:00Z",
 "script": "train.py", "versions": {"Python": "3.11.7", "torch": "2.9.0"}},
{"kind": "sample", "step": 100, "scale": 8.0, "scales": [[1, 16.0], [57, 8.0]], "steps": 100,
 "skips": [56], "loss": 2.5, "norm": "inf",
 "shares": {"zero": 0.25, "flushed": 0.125, "subnormal": 0.125, "normal": 0.5, "overflow": 0.0,
            "nonfinite": 0.0},
 "histogram": [-20, [1, 0, 3]],
 "parameters": {"<w>": {"zero": 0.25, "flushed": 0.125, "subnormal": 0.125, "nonfinite": 0.0,
                        "histogram": [-20, [1, 0, 3]]}},
 "worst": ["<w>"], "losses": [null, 2.5], "largest": 0.5, "chance": null,
 "targets": {"error": 2.5, "variance": null, "targets": 3.0, "outputs": 0.5}, "classes": [7],
 "backward": ["float16", "float32"], "calls": {"unstepped": 3},
   "missing": ["v"],
   "cut": {"v": "round"}, "unmoved": null, "optimizers": null, "num_losses": 1,
 "batch": [2, 36]},
{"kind": "skip", "step": 56, "scale": 16.0, "loss": "nan",
 "nonfinite": [{"name": "w", "shape": [2, 3], "dtype": "float16", "num_inf": 1, "num_nan": 2,
                "largest_finite": "-inf"}],
 "more": 4, "batch": [1, 56]},
{"kind": "verdict", "step": 75, "verdict": "nan", "where": "w",
 "text": "NaN at every scale. Look for a division by zero.",
 "findings": []}
]"""


def test_a_documented_file_is_read(path):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in json.loads(DOCUMENTED)))
    lines = read_lines(read_run(path))
    assert lines[0] == {**json.loads(DOCUMENTED)[0], "rank": 0, "world_size": 1}
    assert lines[1:] == json.loads(DOCUMENTED)[1:]


def test_a_file_of_a_version_that_noted_no_script_is_read(path):
    older = {key: item for key, item in json.loads(DOCUMENTED)[0].items() if key != "script"}
    del older["versions"]
    path.write_text(json.dumps(older) + "\n")
    (start,) = read_run(path).starts
    assert (start.script, start.versions, start.policy) == ("", {}, older["policy"])


def test_a_monitor_notes_the_script_and_the_versions(path):
    pytest.importorskip("torch")
    script = path.with_name("train.py")
    script.write_text(
        "import sys; from gradscaler.torch import GradScaler; "
        "from gradscaler.diagnose import Monitor; Monitor(GradScaler(), path=sys.argv[1])"
    )
    assert programs.run(script.name, path.name, cwd=path.parent).returncode == 0
    (start,) = read_run(path).starts
    assert start.script == "train.py"
    assert start.versions["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(start.versions) == {"Python", "gradscaler", "torch"}


def test_a_monitor_writes_the_documented_lines_which_are_read_as_they_are(path):
    monitored(path, "..!!..!!!!", every=4, stuck_after=3)
    written = [json.loads(line) for line in path.read_text().splitlines()]
    read = read_lines(read_run(path))
    read[0] = {key: read[0][key] for key in read[0] if key not in ("rank", "world_size")}
    assert sorted(written, key=str) == sorted(read, key=str)
    assert {line["kind"]: set(line) for line in written} == {
        line["kind"]: set(line) for line in json.loads(DOCUMENTED)
    }


@pytest.mark.parametrize("name", ["NaN", "-Infinity", '"quoted"', "líne\nbreak\u2028", "\ud800"])
def test_any_name_comes_back(path, name):
    (read,) = read_run(monitored(path, "!", name)).skips
    assert read.nonfinite == (NonfiniteGradient(name, (2,), "float32", 1, 0, 1.0),)


def test_steps_skips_and_scales_are_of_all_lines():
    later = sample(200, 4.0, [(101, 8.0), (150, 4.0)], 100, [149])
    run = run_of(SAMPLE, later, skip(249, 4.0), skip(249, 4.0))
    assert run.num_steps == 249
    assert run.skipped == (56, 149, 249)
    scales = {1: 16.0, 57: 8.0, 100: 8.0, 101: 8.0, 150: 4.0, 200: 4.0, 249: 4.0}
    assert list(run.scales.items()) == list(scales.items())


def test_a_run_without_steps_has_none():
    run = run_of()
    assert (run.num_steps, run.skipped, run.scales) == (0, (), {})


def test_the_last_recorded_verdict_is_the_runs():
    found = run_of(JUDGEMENT, verdict(90, "floor", "At its smallest. Stop.")).verdict
    assert (found.kind, found.text, found.where) == ("floor", "At its smallest. Stop.", None)


@pytest.mark.parametrize(
    ("later", "is_over"),
    [
        (sample(90, 8.0, [(76, 8.0)], 15, [*range(76, 91)]), False),  # all were skipped
        (sample(90, 8.0, [(76, 8.0)], 15, [*range(77, 91)]), True),
        (sample(100, 8.0, [(76, 8.0)], 25, [*range(76, 91)]), True),
        (sample(76, 8.0, [(1, 8.0)], 76, [76]), False),  # it begins before the verdict
        (sample(77, 8.0, [(1, 8.0)], 77, [76]), True),
        (skip(77, 8.0), False),  # nothing is known of step 76
    ],
)
def test_a_verdict_holds_until_a_step_is_not_skipped(later, is_over):
    run = run_of(JUDGEMENT, later)
    assert run.verdict.kind == "nan"  # a run that was stuck is never called normal
    assert run.verdict.text.startswith("Up to step 75: ") == is_over
    assert [each.text for each in run.verdicts] == [JUDGEMENT["text"]]


def test_a_resumed_run_goes_on_from_the_last_step(path):
    monitored(append(path, START, SAMPLE, skip(107, 8.0)), "..")
    run = read_run(path)
    assert [start.step for start in run.starts] == [0, 107]
    assert run.samples[-1].step == 109


def test_a_start_that_no_step_follows_is_no_run(path, caplog):
    monitored(path, "")  # as by a monitor that was interrupted while it was made
    run = read_run(monitored(path, ".."))
    assert len(run.starts) == 2
    assert not run.verdict.text.startswith("The file holds")
    assert caplog.messages == []


def test_a_torn_last_line_is_left_out_and_cut_off_before_more_is_written(path):
    whole = append(path, START, SAMPLE).read_bytes()
    samples = read_run(path).samples
    beginning = b'{"kind": "skip", "step": 101, "sc'
    for torn in (b"{", beginning, HEADER.encode(), "\u00e9".encode()[:1]):
        path.write_bytes(whole + torn)
        assert read_run(path).samples == samples
        run = read_run(monitored(path, ".."))
        assert (len(run.starts), run.samples[:-1], run.num_steps) == (2, samples, 102)


def test_an_empty_file_can_be_written_to_and_read_by_a_path_that_is_a_string(path):
    path.touch()
    assert read_run(str(monitored(path, "."))).num_steps == 1


SCRIPT_ON_A_FULL_DISK = """
import resource, signal, sys
from types import SimpleNamespace
from gradscaler import DynamicScale
from gradscaler.diagnose import Monitor

policy = DynamicScale()
scaler = SimpleNamespace(policy=policy, state=policy.init())

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit(int(sys.argv[2]))
monitor = Monitor(scaler, path=sys.argv[1], every=1)
for step in range(5):
    monitor.record(loss=1.0)
limit(4000)
monitor.record(loss=1.0)  # a line after a gap would mislead
"""


@pytest.fixture
def on_a_full_disk(path):
    """Runs the script above with room for some bytes; returns the process and its errors."""
    pytest.importorskip("resource", reason="it is of Unix")

    def run(size):
        command = [sys.executable, "-c", SCRIPT_ON_A_FULL_DISK, path, str(size)]
        return subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)

    return run


def test_a_full_disk_ends_the_file_after_a_whole_line_with_one_warning(on_a_full_disk, path):
    result = on_a_full_disk(1300)
    assert result.returncode == 0
    assert result.stderr.count("RuntimeWarning: This process writes no more lines") == 1
    assert str(path) in result.stderr
    assert path.read_bytes().endswith(b"\n")
    assert [sample.step for sample in read_run(path).samples] == [1, 2]


def test_a_disk_without_room_for_the_first_line_is_an_error(on_a_full_disk, path):
    result = on_a_full_disk(10)
    assert result.returncode == 1
    assert f"OSError: {path}: only a part of a line" in result.stderr
    assert not path.read_bytes()


@pytest.mark.parametrize(
    "foreign", [b"hello", b"hello\n", b"\x80\x04K\x01.", b'{"step": 1}\n', b"[1]\n", b"\n"]
)
def test_a_foreign_file_is_neither_read_nor_touched(path, foreign):
    path.write_bytes(foreign)
    for call in (read_run, lambda path: monitored(path, "")):
        with pytest.raises(ValueError, match=r"run\.jsonl: line 1: "):
            call(path)
    assert path.read_bytes() == foreign


def test_a_folder_is_not_a_run(tmp_path):
    for call in (read_run, lambda path: monitored(path, "")):
        with pytest.raises(ValueError, match="is not a file"):
            call(tmp_path)


SKIP_LINE = skip(1, 2.0)
SAMPLE_LINE = record(run_of(sample(1, 2.0, [], 1, [])).samples[0])  # with each key


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "is not JSON"),
        ("nonsense", "is not JSON"),
        ("{", "is not JSON"),
        ('{"kind": "skip", "scale": NaN}', "NaN is not a number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("9" * 5000, "is not JSON"),
        ("\udcff", "is not UTF-8"),  # the byte 0xff
        ("[]", "must be a JSON object"),
        ("{}", "kind: None is not one"),
        ({"kind": ["skip"]}, "kind: .* is not one"),
        ({"kind": "sneeze"}, "kind: 'sneeze' is not one"),
        ({"gradscaler": 2, "kind": "start"}, "the format's version is 2, not 1"),
        ({"kind": "skip"}, "step is missing"),
        ({**SKIP_LINE, "step": -1}, "step: must be an integer"),
        ({**SKIP_LINE, "step": 2**63}, "step: must be an integer"),
        ({**SKIP_LINE, "step": 1.0}, "step: must be an integer"),
        ({**SKIP_LINE, "step": True}, "step: must be an integer"),
        ({**SKIP_LINE, "scale": 10**400}, "scale: must be a number, got a huge number"),
        ({**SKIP_LINE, "scale": "1"}, "scale: must be a number, got '1'"),
        ({**SKIP_LINE, "scale": None}, "scale: must be a number, got None"),
        (json.dumps(SKIP_LINE).replace("2.0", "1e999"), "scale: must be a number, got inf"),
        ({**SKIP_LINE, "step": 0}, "step: must be an integer from 1"),
        ({**SKIP_LINE, "step": 10**12}, "step: must be an integer"),
        ({**SKIP_LINE, "scale": "nan"}, "scale: must be positive and finite in float32, got 'nan'"),
        ({**SKIP_LINE, "scale": -8.0}, "scale: must be positive and finite in float32, got -8.0"),
        ({**SKIP_LINE, "scale": 5e-324}, "scale: must be positive and finite in float32"),
        ({**SKIP_LINE, "scale": 1e39}, "scale: must be positive and finite in float32"),
        ({**SAMPLE_LINE, "scales": [[1, 0]]}, "scales: must be positive and finite in float32"),
        ({**SAMPLE_LINE, "scales": [[2, 8.0]]}, "scales: must be steps that rise, from 1 to 1"),
        ({**SAMPLE_LINE, "skips": [1, 1]}, "skips: must be steps that rise, from 1 to 1"),
        ({**SAMPLE_LINE, "skips": [9]}, "skips: must be steps that rise, from 1 to 1"),
        ({**SAMPLE_LINE, "steps": 2}, "steps: must be at most the step"),
        ({**SAMPLE_LINE, "losses": [1.0, 2.0]}, "steps: must be .* as many as the losses"),
        ({**SAMPLE_LINE, "norm": -1.0}, "norm: must be a magnitude"),
        ({**SAMPLE_LINE, "largest": "inf"}, "largest: must be a finite magnitude"),
        ({**json.loads(HEADER), "dtype": "float4"}, "dtype: must be one of float16, .*'float4'"),
        ({**SKIP_LINE, "nonfinite": {}}, "nonfinite: must be an array"),
        ({**SKIP_LINE, "nonfinite": [{}]}, "nonfinite: name is missing"),
        ({**SAMPLE_LINE, "scales": [[1]]}, "scales: must be an array of 2"),
        ({**SAMPLE_LINE, "scales": [[1, "x" * 999]]}, r"scales: must be a number, got 'x+\.\.\."),
        ({**SAMPLE_LINE, "shares": {"zero": 0.5}}, "shares: flushed is missing"),
        ({**SAMPLE_LINE, "shares": {**SHARES, "zero": 2}}, "shares: zero: must be a share"),
        ({**SAMPLE_LINE, "shares": {**SHARES, "zero": "nan"}}, "must be a share"),
        ({**SAMPLE_LINE, "histogram": [0, [1] * 9999]}, "histogram: must be an array of at most"),
        ({**SAMPLE_LINE, "histogram": [10**9, []]}, "histogram: must be an integer"),
        ({**SAMPLE_LINE, "parameters": {"a\nb": 1}}, r"parameters: a\\nb: must be an object"),
        ({**SAMPLE_LINE, "worst": [1]}, "worst: must be a text, got 1"),
    ],
)
def test_an_error_is_one_line_that_gives_the_number_of_the_bad_line(path, line, message):
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_text(f"{HEADER}\n{text}\n", errors="surrogateescape")
    with pytest.raises(ValueError, match=r"run\.jsonl: line 2: .*" + message) as raised:
        read_run(path)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("depth", range(20, 1000, 20))
def test_nesting_of_any_depth_does_no_harm(path, depth):
    nested = "[" * depth + "]" * depth
    line = json.dumps({**SKIP_LINE, "step": None}).replace("null", nested, 1)
    path.write_text(f"{HEADER}\n{line}\n")
    with pytest.raises(ValueError, match=r"line 2: (step: must be an integer|is nested)"):
        read_run(path)


def test_a_run_must_begin_with_its_start(path):
    path.write_text(json.dumps({"gradscaler": 1, **SKIP_LINE}) + "\n")
    with pytest.raises(ValueError, match="line 1: kind: 'skip' is not one that belongs here"):
        read_run(path)


def test_keys_of_a_later_version_are_left_out(path):
    path.write_text(f"{HEADER}\n{json.dumps({**SKIP_LINE, 'colour': 'red'})}\n")
    assert read_run(path).skips == run_of(SKIP_LINE).skips


def test_a_place_from_an_earlier_version_is_read_with_what_is_known_today(path):
    """An input of then named the operation that computed it, and no rows."""
    place = {"module": None, "kind": "input", "type": "", "dtype": "float16", "operation": "mul"}
    counts = {"num_inf": 0, "num_nan": 3, "size": 4, "largest_finite": 1.0, "largest_input": 1.0}
    line = watched(7, {**place, **counts, "line": "t.py:3", "made_by": "div"})
    path.write_text(f"{HEADER}\n{text_of(line)}")
    (read,) = read_run(path).watched
    assert (read.located.operation, read.located.line, read.located.rows) == ("mul", "t.py:3", None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=5,
)


def test_keys_that_an_earlier_version_lacks_have_their_defaults(path):
    later = ("losses", "largest", "backward", "calls")
    line = {key: value for key, value in SAMPLE_LINE.items() if key not in later}
    path.write_text(f"{HEADER}\n{json.dumps(line)}\n")
    (read,) = read_run(path).samples
    assert (read.losses, read.largest, read.backward, read.calls) == ((), None, (), {})


@given(st.data())
def test_any_value_anywhere_is_read_or_refused(tmp_path_factory, data):
    line = dict(data.draw(st.sampled_from([SKIP_LINE, SAMPLE_LINE, json.loads(HEADER)])))
    line[data.draw(st.sampled_from(list(line)))] = data.draw(JSON)
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text(f"{HEADER}\n{json.dumps(line)}\n")
    try:
        run = read_run(path)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = None
        assert run.num_steps >= 0
        assert list(run.scales) == sorted(run.scales)
    assert refusal is None or "line 2: " in refusal


def test_parameters_are_the_same_packed_and_unpacked():
    (read,) = run_of(SAMPLE).samples
    assert list(read.parameters) == ["<w>"]
    assert len(read.parameters) == 1
    assert record(read)["parameters"] == record(SAMPLE)["parameters"]
    unpacked = replace(read, parameters=dict(read.parameters))
    assert read == unpacked
    assert repr(read) == repr(unpacked)


WRITER = """
import sys
from types import SimpleNamespace
from gradscaler import DynamicScale
from gradscaler.diagnose import Monitor

policy = DynamicScale()
monitor = Monitor(SimpleNamespace(policy=policy, state=policy.init()), path=sys.argv[1], every=1)
step = 0
while True:
    step += 1
    monitor.record(loss=1.0)
    if step == 100:
        print("ready", flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
def test_what_a_killed_process_wrote_is_there(path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    run = read_run(path)
    assert run.num_steps >= 100
    assert [sample.step for sample in run.samples] == list(range(1, run.num_steps + 1))
    assert read_run(monitored(path, "")).starts[-1].step == run.num_steps


def continued(scale, loss, before=16.0):
    """A file of two runs, the first of which ends at ``before`` and a loss of 1."""
    losses = [9.0 - 8.0 * step / 49 for step in range(50)]
    first = sample(50, before, [(1, before)], 50, [], losses[-1], losses=losses)
    second = sample(60, scale, [(51, scale)], 10, [], loss, losses=[loss] * 10)
    return run_of(start(), first, start(step=50), second).verdict


@pytest.mark.parametrize(
    ("scale", "loss", "kind"),
    [
        (2.0**16, 1.1, "restart"),
        (2.0**-16, 0.9, "restart"),
        (32.0, 1.1, "normal"),  # it may have grown
        (2.0**16, 9.0, "normal"),  # another training
    ],
)
def test_a_run_that_goes_on_at_another_scale_was_restarted_without_it(scale, loss, kind):
    found = continued(scale, loss)
    assert found.kind == kind
    assert ("scale of 16, and this one continues" in found.text) == (kind == "restart")
