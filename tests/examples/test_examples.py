"""The training scripts: each learns, resumes as if it had not stopped, and needs its scaler."""

import contextlib
import importlib
import importlib.util
import io
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import programs

# Keras' script differs by the backend in its own loop alone, as tests/keras/test_loops.py does. In
# float16 on a CPU, JAX takes a tenth of TensorFlow's time.
pytestmark = [pytest.mark.one_backend("jax")]

FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "torch")
SCRIPT = Path(__file__).parents[2] / "examples" / f"{FRAMEWORK}_digits.py"
framework = importlib.import_module(FRAMEWORK)

SUFFIX = {
    "torch": ".pt",
    "tensorplay": ".pt",
    "paddle": ".pdckpt",
    "jax": ".msgpack",
    "keras": ".keras",
    "tf_keras": ".keras",
    "mindspore": ".ckpt",
}[FRAMEWORK]
EAGER = FRAMEWORK in ("torch", "tensorplay", "paddle")
BY_STEPS = EAGER or FRAMEWORK == "jax"  # the other scripts count epochs, of three steps each
if BY_STEPS:
    COLUMNS = ["step", "loss", "accuracy", "scale", "skipped"]
    LONG, WHOLE, HALF = 200, 60, 31
    WAYS, UNSCALED = [()], ("--no-scaling",)
else:
    COLUMNS = ["epoch", "loss", "accuracy", "scale", "steps"]
    LONG, WHOLE, HALF = 70, 4, 2
    WAYS, UNSCALED = [(), ("--loop",)], ("--scale", 1)
END = f"--{COLUMNS[0]}s"
FIRST_ROW = 10
each_way = pytest.mark.parametrize("way", WAYS, ids=str)
a_way = pytest.mark.some(1, "both print one table, which make test-all compares")

if EAGER:
    from tests.support.eager import library

    GROWING = "GradScaler", library.spelling["growth_interval"]
elif FRAMEWORK == "jax":
    GROWING = "DynamicScale", "growth_interval"
elif FRAMEWORK != "mindspore":
    from tests.support.keras_like import numpy

if "torch" in (FRAMEWORK, os.environ.get("KERAS_BACKEND")):
    pytestmark.append(pytest.mark.usefixtures("own_random_numbers_and_one_thread"))


def content(path):
    """A checkpoint to the bit, without the addresses of Paddle's random generators."""
    if EAGER:
        return re.sub(r"0x\w+", "address", str(library.exact(framework.load(str(path)))))
    if FRAMEWORK == "jax":
        return path.read_bytes()
    if FRAMEWORK == "mindspore":
        values = framework.load_checkpoint(str(path))
        return {name: value.asnumpy().tobytes() for name, value in values.items()}
    model = framework.models.load_model(path)
    optimizer = model.optimizer
    scale = [optimizer.loss_scale, optimizer.dynamic_counter]
    return [numpy(value).tobytes() for value in [*model.variables, *optimizer.variables, *scale]]


def as_in_a_process_of_its_own():
    """In this context, a run neither finds nor leaves its framework's names and dtype policy."""
    stack = contextlib.ExitStack()
    if FRAMEWORK == "paddle":
        stack.enter_context(framework.utils.unique_name.guard())
    elif FRAMEWORK.endswith("keras"):
        framework.backend.clear_session()
        stack.callback(framework.mixed_precision.set_global_policy, "float32")
    return stack


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules[SCRIPT.stem] = module  # where MindSpore looks up the code that it compiles
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(script):
    """Run the script up to a step or an epoch; the rows that it prints."""

    def run(end, *arguments):
        with as_in_a_process_of_its_own(), contextlib.redirect_stdout(io.StringIO()) as printed:
            script.main([str(argument) for argument in (END, end, *arguments)])
        header, *rows = printed.getvalue().splitlines()
        assert header.split() == COLUMNS
        values = ([float(value.rstrip("%")) for value in row.split()] for row in rows)
        return [dict(zip(COLUMNS, row, strict=True)) for row in values]

    return run


@pytest.fixture
def soon_growing(script, monkeypatch):
    """The scale of a script that counts steps grows so soon that it skips steps all along."""
    if BY_STEPS:
        name, interval = GROWING
        make = getattr(script, name)
        monkeypatch.setattr(
            script, name, lambda *args, **given: make(*args, **{**given, interval: 2})
        )


def rare_in_keras_2(test):
    """Leave out a test whose script differs from that of Keras 3 in the names alone."""
    is_other = FRAMEWORK == "tf_keras"
    return pytest.mark.rare("Keras 3's script learns, too")(test) if is_other else test


@each_way
@a_way
@rare_in_keras_2
def test_it_learns_only_with_loss_scaling(run, way):
    scaled = run(LONG, *way)[-1]
    assert scaled["accuracy"] > 80.0
    unscaled = run(LONG, *UNSCALED, *way)
    assert (unscaled[-1][COLUMNS[0]], unscaled[-1]["scale"]) == (LONG, 1.0)
    assert unscaled[-1].get("skipped", 0) == 0
    assert unscaled[-1]["accuracy"] < 20.0  # chance is 10
    if FRAMEWORK == "mindspore":
        assert 200 < scaled["steps"] < 210  # it skips some


@pytest.mark.skipif(len(WAYS) == 1, reason="of scripts that train in two ways")
@pytest.mark.rare("each way is compared with itself")
def test_both_ways_print_one_table(run):
    for end, options in ((LONG, ()), (FIRST_ROW, UNSCALED)):
        one, other = (run(end, *options, *way) for way in WAYS)
        assert one == other


@each_way
@a_way
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(run, soon_growing, tmp_path, way):
    whole, half, resumed = (tmp_path / f"{name}{SUFFIX}" for name in ("whole", "half", "resumed"))
    end = run(WHOLE, "--checkpoint", whole, *way)[-1]
    middle = run(HALF, "--checkpoint", half, *way)[-1]
    assert run(WHOLE, "--resume", half, "--checkpoint", resumed, *way)[-1] == end
    assert content(resumed) == content(whole) != content(half)
    assert not BY_STEPS or 0 < middle["skipped"] < end["skipped"]


@pytest.mark.skipif(not EAGER, reason="of the eager frameworks")
def test_a_schedule_counts_the_steps_that_were_not_skipped(run, soon_growing, tmp_path):
    path = tmp_path / f"run{SUFFIX}"
    skipped = run(60, "--checkpoint", path)[-1]["skipped"]
    checkpoint = framework.load(str(path))
    schedule = checkpoint.get("scheduler") or checkpoint["optimizer"]["LR_Scheduler"]
    assert schedule["last_epoch"] == 60 - skipped < 60


@pytest.mark.skipif(FRAMEWORK != "keras", reason="of Keras 3: Keras 2 counts skipped steps")
def test_skipped_steps_do_not_make_a_resumed_run_longer(run, tmp_path):
    path = tmp_path / f"run{SUFFIX}"
    assert run(2, "--scale", 2.0**127, "--checkpoint", path)[-1]["steps"] == 0
    assert run(2, "--resume", path) == []  # it was trained already


def test_a_run_killed_in_a_save_goes_on_from_the_one_before(
    run, tmp_path, killed_in_its_second_save
):
    path, first, whole = (tmp_path / f"{name}{SUFFIX}" for name in ("run", "first", "whole"))
    command = ("--save-every", 2, "--checkpoint", path, "--resume")
    killed_in_its_second_save(SCRIPT, END, 6, *command)
    run(2, "--checkpoint", first)
    assert content(path) == content(first)
    as_a_script(6, *command, cwd=tmp_path)
    run(6, "--checkpoint", whole)
    assert content(path) == content(whole)
    assert set(tmp_path.iterdir()) == {path, first, whole}


def as_a_script(end, *arguments, cwd):
    """Run the script in a process of its own, which prints no warning."""
    strict = FRAMEWORK not in ("paddle", "keras", "tf_keras")  # whose imports may warn
    result = programs.run(SCRIPT, END, end, *arguments, cwd=cwd, is_strict=strict)
    assert result.returncode == 0, result.stderr
    assert not strict or "Error" not in result.stderr
    assert not strict or FRAMEWORK == "mindspore" or result.stderr == ""
    assert result.stdout.splitlines()[-1].split()[0] == str(end)


@pytest.fixture(scope="module")
def checkpoint(run, tmp_path_factory):
    """The bytes of a checkpoint after one step or epoch."""
    path = tmp_path_factory.mktemp("checkpoint") / f"whole{SUFFIX}"
    run(1, "--checkpoint", path)
    return path.read_bytes()


def remove_the_scaler(path):
    checkpoint = framework.load(str(path))
    del checkpoint["scaler"]
    framework.save(checkpoint, str(path))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("no checkpoint"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:999]),
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        *([remove_the_scaler] if EAGER else []),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(run, checkpoint, tmp_path, damage):
    path = tmp_path / f"broken{SUFFIX}"
    path.write_bytes(checkpoint)
    damage(path)
    for resume in (["--resume", path], ["--checkpoint", path, "--resume"]):
        with pytest.raises(
            SystemExit, match=f"{re.escape(path.name)} is (missing, )?damaged, or no"
        ):
            run(2, *resume)


def test_a_missing_checkpoint_is_refused_by_name(run, tmp_path):
    path = tmp_path / f"none{SUFFIX}"
    with pytest.raises(SystemExit, match=f"{re.escape(path.name)}(: .*No such file| is missing)"):
        run(2, "--resume", path)


REFUSED = [
    (["--checkpoint", f"none/out{SUFFIX}"], "there is no folder none"),
    (["--checkpoint", f"folder{SUFFIX}"], f"folder{re.escape(SUFFIX)} is a folder"),
    (["--save-every", "0", "--checkpoint", f"out{SUFFIX}"], "at least 1, got 0"),
    (["--resume"], "name a FILE, or a --checkpoint"),
]
if FRAMEWORK == "tensorplay" or not BY_STEPS:
    REFUSED.append((["--checkpoint", "out.no"], f"ends in {SUFFIX}"))
if not BY_STEPS:
    REFUSED.append((["--scale", "0"], "at least 1 and less than"))


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_a_command_that_cannot_work_is_refused_before_training(
    script, arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path(f"folder{SUFFIX}").mkdir()
    with pytest.raises(SystemExit):
        script.main(arguments)
    printed = capsys.readouterr()
    assert re.search(message, printed.err)
    assert printed.out == ""
