"""The wheel and the sdist: built from the sources, and the wheel used in an empty environment.

``make test-package`` runs this in an environment with the build tools. Installing NumPy beside
the wheel needs a package index.
"""

import email
import re
import shlex
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import tomllib

from gradscaler._frameworks import FRAMEWORKS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def python(built, tmp_path_factory):
    """Run Python with nothing but the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder / "venv", with_pip=True)
    scripts = folder / "venv" / "bin"
    install = [scripts / "python", "-m", "pip", "install", "--quiet", built[1]]
    subprocess.run(install, check=True, capture_output=True)

    def python(*arguments, script="python"):
        command = [scripts / script, *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)

    return python


@pytest.fixture(scope="module")
def metadata(built):
    with zipfile.ZipFile(built[1]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_string(wheel.read(name).decode())


def files(folder):
    """The files of a folder that belong in a distribution: no caches, and no built reference."""
    found = (ROOT / folder).rglob("*")
    built = ROOT / "docs" / "reference"  # maybe meanwhile, by the task that builds the site
    return {
        path.relative_to(ROOT / folder).as_posix()
        for path in found
        if path.is_file() and "__pycache__" not in path.parts and built not in path.parents
    }


def test_the_wheel_holds_the_package_with_its_types_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())
    assert held == files("src")
    assert "gradscaler/py.typed" in held


def test_the_sdist_holds_what_tests_and_documents_need(built):
    with tarfile.open(built[0]) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    for folder in ("src", "tests", "docs", "examples", "benchmarks", "requirements"):
        assert {f"{folder}/{name}" for name in files(folder)} - held == set()
    assert {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "noxfile.py"} <= held


def test_the_metadata_say_under_which_terms_and_for_what(metadata):
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    trove = pytest.importorskip("trove_classifiers")
    classifiers = set(metadata.get_all("Classifier"))
    assert classifiers <= trove.classifiers
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)}
    assert versions <= classifiers
    assert metadata["Keywords"]


def test_a_citation_names_this_version(metadata):
    assert metadata["Author"] == "The gradscaler developers"
    assert f"\nversion: {metadata['Version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_description_links_to_no_file_that_the_index_does_not_have(metadata):
    description = metadata.get_payload()
    assert re.search(r"pip install '.*\[torch\]'", description)
    assert "[All processes decide together](docs" in (ROOT / "README.md").read_text()
    assert "**All processes decide together** under" in description
    assert [target for target in re.findall(r"\]\(([^)]*)", description) if ":" not in target] == []


def test_it_imports_with_numpy_alone(python):
    names = "import gradscaler as g; print(g.DynamicScale(init_scale=4.0).init().scale)"
    assert python("-W", "error", "-c", names).stdout == "4.0\n"
    listed = python("-m", "pip", "list", "--format", "freeze").stdout.split()
    names = {line.partition("==")[0] for line in listed} - {"pip", "setuptools"}
    assert names == {"gradscaler", "numpy"}


def command_for(*extras):
    """The command that installs what pyproject.toml lists for extras; a wheel sorts its lists."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_extras = (sorted(listed["optional-dependencies"][extra]) for extra in extras)
    return "pip install " + shlex.join(each for listed in of_extras for each in listed)


@pytest.mark.parametrize("adapter", FRAMEWORKS)
def test_an_adapter_without_its_framework_says_what_to_install(python, adapter):
    extra = adapter.replace("_", "-")
    for code in (f"import gradscaler.{adapter}", f"import gradscaler; gradscaler.{adapter}"):
        caught = f"try:\n    {code}\nexcept ModuleNotFoundError as error:\n"
        result = python("-c", f"{caught}    print(error.name, error, sep='|')")
        said = f"gradscaler.{adapter} needs {adapter}: {command_for(extra)}"
        assert result.stdout == f"{adapter}|{said}\n", result.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["demo"], command_for("torch", "demo")),
        (["watch", "run.jsonl"], command_for("diagnose")),
    ],
)
def test_a_command_without_its_extra_says_what_to_install(python, command, says):
    result = python(*command, script="gradscaler")
    assert (result.returncode, result.stdout) == (1, "")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_log_is_explained_without_an_extra(python, tmp_path):
    log = tmp_path / "train.log"
    log.write_text("".join(f"iter {step}: loss {2 - step / 100}\n" for step in range(20)))
    result = python("explain", str(log), script="gradscaler")
    assert (result.returncode, result.stderr) == (0, "")
    assert "Nothing unusual" in result.stdout


def test_the_script_is_the_module(python):
    script, module = python("doctor", script="gradscaler"), python("-m", "gradscaler", "doctor")
    assert script.stdout == module.stdout
    assert script.returncode == module.returncode == 0
    assert script.stdout.count("not installed") == len(FRAMEWORKS) + 2


def test_it_converts_a_state(python, tmp_path):
    source, target = tmp_path / "jmp.json", tmp_path / "torch.json"
    source.write_text(
        '{"loss_scale": 8.0, "counter": 3, "period": 100, "factor": 2, "min_loss_scale": 1.0}'
    )
    result = python("convert", str(source), str(target), "--to", "torch", script="gradscaler")
    assert result.returncode == 0, result.stderr
    assert '"scale": 8.0' in target.read_text()
