"""``python -m gradscaler doctor``, with the frameworks that are here and with made-up ones."""

import os
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest

from gradscaler import _doctor, _frameworks
from gradscaler.__main__ import main
from gradscaler._frameworks import FRAMEWORKS, install_command

ROOT = Path(__file__).parents[1]
FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "torch").replace("-", "_")


@pytest.fixture
def only(monkeypatch, tmp_path):
    """Let there be one framework, TensorPlay, as a module with this code; none if it is None."""

    def only(code):
        monkeypatch.setattr(_doctor, "FRAMEWORKS", ["tensorplay"])
        monkeypatch.setattr(_doctor, "TOOLS", {})
        if code is None:
            monkeypatch.setattr(_doctor, "installed", lambda name: False)
            return
        (tmp_path / "tensorplay.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    return only


def test_every_framework_has_a_probe():
    assert set(_doctor._PROBES) == set(FRAMEWORKS)


def test_loss_scaling_works_with_the_framework_of_these_tests(monkeypatch):
    monkeypatch.setattr(_doctor, "FRAMEWORKS", [FRAMEWORK])
    monkeypatch.setattr(_doctor, "TOOLS", {})
    (found,) = _doctor.examine()
    version = import_module(FRAMEWORK).__version__
    assert (found.name, found.version, found.works) == (FRAMEWORK, version, True)
    assert "cpu" in found.says.lower()
    if FRAMEWORK == "torch":  # whose row alone names what was tried
        assert found.advice == "import gradscaler.torch  # cpu: every test runs on one"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (None, "not installed  "),
        ("raise OSError('libfast.so is missing')", "(OSError: libfast.so is missing)"),
        ("import os; os.abort()", "(killed by signal 6)"),
        ("import time; time.sleep(60)", "(no answer in 1 seconds)"),
    ],
)
def test_it_says_how_a_framework_is_and_fails_only_if_that_is_broken(
    only, monkeypatch, capsys, code, says
):
    only(code)
    monkeypatch.setattr(_doctor, "SECONDS", 1 if code and "sleep" in code else 60)
    assert main(["doctor"]) == (code is not None)
    printed = capsys.readouterr()
    assert says in printed.out
    if code is None:
        assert printed.out.endswith(f" {install_command('tensorplay')}\n")
    else:
        assert printed.out.endswith(' try: python -c "import gradscaler.tensorplay"\n')
        assert printed.err == "loss scaling does not work with tensorplay\n"


@pytest.mark.parametrize(
    ("version", "trace", "says"),
    [
        ("1.0", [0.5, 1.0, 0.5, 0.0], "works on cpu"),
        ("1.0.1+local", [0.5, 1.0, 0.5, 0.0], "works on cpu"),
        ("0.9.9", [0.5, 1.0, 0.5, 0.0], "FAILS (older than 1.0)"),
        ("1.0", [1.0, 1.0, 1.0, 0.0], "FAILS (scale and weight are [1.0, 1.0, 1.0, 0.0])"),
    ],
)
def test_it_compares_the_version_and_the_two_steps(only, monkeypatch, version, trace, says):
    only("")
    requirements = ["numpy>=1.26", "torch>=2.6; extra == 'torch'"]
    requirements += ["numpy<2; extra == 'tensorplay'", "tensorplay>=1.0; extra == 'tensorplay'"]
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    answer = f'noise\\n["{version}", ["cpu"], {trace}]'
    monkeypatch.setattr(_doctor, "PROBE", "print('" + answer + "')#{!r}")
    (found,) = _doctor.examine()
    assert says in _doctor.line(found)


def test_it_says_what_a_tool_needs(monkeypatch):
    monkeypatch.setattr(_doctor, "FRAMEWORKS", [])
    packages = ("numpy", "nothing_like_it")
    monkeypatch.setattr(_doctor, "TOOLS", {"report": (("diagnose", "demo"), packages)})
    requirements = ["rich>=13; extra == 'diagnose'", 'scikit-learn>=1; extra == "demo"', "numpy"]
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    (found,) = _doctor.examine()
    assert found.works is None
    assert found.advice == "pip install 'rich>=13' 'scikit-learn>=1'  # for nothing_like_it"


def test_a_checkout_that_is_not_installed_is_installed_with_the_extras(monkeypatch):
    def no_package(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", no_package)
    assert install_command("torch", "demo") == "pip install '.[torch,demo]'"


@pytest.mark.parametrize(
    ("system", "command"),
    [("posix", "pip install 'torch>=2.6'"), ("nt", 'pip install "torch>=2.6"')],
)
def test_a_command_is_quoted_for_the_shell_of_the_platform(monkeypatch, system, command):
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=2.6; extra == 'torch'"])
    monkeypatch.setattr(_frameworks.os, "name", system)
    assert install_command("torch") == command
    assert _frameworks.quoted(r"runs\train-1.jsonl" if system == "nt" else "runs/a.jsonl")[0] == "r"


def test_what_to_write_stands_in_one_column(monkeypatch):
    monkeypatch.setattr(_doctor, "installed", lambda package: False)
    columns = {_doctor.line(finding).index("pip install") for finding in _doctor.examine()}
    assert len(columns) == 1


def test_each_command_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = capsys.readouterr().out.partition("{")[2].partition("}")[0].split(",")
    assert {"demo", "convert", "report", "explain", "doctor"} <= set(commands)
    for command in commands:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"example: python -m gradscaler {command}" in capsys.readouterr().out


def test_the_page_on_devices_has_the_rows_that_it_prints():
    page = (ROOT / "docs" / "devices.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    assert {row[2].strip(" `") for row in rows[1:]} == set(_doctor.TRIED)
