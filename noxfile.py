"""The project's tasks: ``nox -l`` lists them, and ``nox -s NAME`` runs one.

Frameworks that agree on their dependencies share an environment under ``.venv/``, and the others
have one of their own. An environment is made on first use, and updated when its requirements
change. ``make demo`` and ``make test`` install nox and call it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import nox
from nox.command import CommandFailed

Task = TypeVar("Task", bound=Callable[[nox.Session], None])

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "venv"
nox.options.envdir = ".venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["test"]

# With this set, each of the many processes of the tests would compile all of PyTorch's modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# For each environment, the frameworks that are tested in it.
ENVIRONMENTS = {
    "torch": ["torch"],
    "paddle": ["tensorplay", "paddle"],
    "keras": ["keras", "tf_keras", "jax"],
    "mindspore": ["mindspore"],
}
ENVIRONMENT_OF = {name: where for where, names in ENVIRONMENTS.items() for name in names}
# The runs of a framework's tests, if there are several: a process of Keras has one backend.
RUNS = {"keras": ["tensorflow", "jax", "torch"], "torch": ["core", "diagnosis", "adapter"]}
LOWEST_PYTHON = os.environ.get("LOWEST_PYTHON", "3.10")

# Packages that are installed without their dependencies.
ALONE = {
    "keras": ["tf-keras==2.21.*"],  # it requires TensorFlow for GPUs; the one for CPUs is enough
    "lowest-tensorflow": ["tf-keras==2.18.*"],
    "torch": ["deepspeed==0.19.8"],  # the tests need one of its modules, which needs only torch
    "integrations": ["fastai==2.8.12", "mmengine==0.10.7"],  # requirements/integrations.txt
}

# Files of packages that no test on a CPU reads, 2.1 GB in all.
UNUSED = [
    "clang",  # beside TensorFlow, for its converter of models
    "mindspore/include",
    "mindspore/lib/plugin/ascend*",
    "mindspore/lib/plugin/gpu*",
    "tensorflow/include",
    "torch/test",
]

SOURCES = Path("src/gradscaler")
CORE = [
    *sorted(path.as_posix() for path in SOURCES.glob("*.py") if path.name != "__main__.py"),
    *(f"{SOURCES}/{name}" for name in ("policies", "_formats", "_eager", "checkpoint")),
]
TOOLS = [f"{SOURCES}/{name}" for name in ("diagnose", "demo", "_run_script", "__main__.py")]
EVERYWHERE = sorted(path.as_posix() for path in Path("tests/diagnose").glob("*/test_frameworks.py"))
TRAINERS = ["lightning", "accelerate", "transformers"]


def matching(*patterns: str) -> list[str]:
    """The paths that match patterns."""
    return sorted(path.as_posix() for pattern in patterns for path in Path().glob(pattern))


def install(session: nox.Session, name: str) -> None:
    """Install requirements/NAME.txt at the versions of its lock, if either has changed."""
    requirements, lock = Path(f"requirements/{name}.txt"), Path(f"requirements/{name}.lock")
    made_from = [requirements, lock, Path("requirements/test.txt"), Path("pyproject.toml")]
    digest = sha256(b"".join(path.read_bytes() for path in made_from if path.exists())).hexdigest()
    made = Path(session.env_dir) / "made-from.txt"
    if made.exists() and made.read_text() == digest:
        return
    constraint = ["--constraint", str(lock)] if lock.exists() else []
    # Most modules of a framework are never imported, so to compile them all takes longer.
    session.install("--quiet", "--no-compile", "-r", str(requirements), *constraint)
    if name in ALONE:
        session.install("--quiet", "--no-deps", *ALONE[name])
    for packages in Path(session.env_dir).glob("lib/python*/site-packages"):
        for each in UNUSED:
            for path in packages.glob(each):
                shutil.rmtree(path)
    made.write_text(digest)


def environment_session(name: str) -> None:
    """Define the session that makes an environment for the tasks that share it."""

    @nox.session(name=name, default=False)
    def make(session: nox.Session) -> None:
        """Make the environment of the tasks that require it."""
        install(session, name)


for each in ENVIRONMENTS:
    environment_session(each)


def task(name: str, *required: str) -> Callable[[Task], Task]:
    """A session without an environment of its own, which runs in those of the required ones."""
    return nox.session(name=name, venv_backend="none", requires=required)


def run(session: nox.Session, environment: str, *command: str, **options: Any) -> None:
    """Run a Python module or script in an environment."""
    options["env"] = {"TF_CPP_MIN_LOG_LEVEL": "2", **options.get("env", {})}
    session.run(f".venv/{environment}/bin/python", *command, external=True, **options)


# Tests run in as many processes as there are cores. A second thread in each took twice the time.
# Each begins with a part of the files, so that a slow fixture of a file is made in one process.
# In `make test`, tasks run side by side, each in one process: it finds and imports its tests once.
WORKERS = os.environ.get("GRADSCALER_WORKERS", "auto")
IN_PARALLEL = [] if WORKERS == "0" else ["-n", WORKERS, "--dist", "worksteal"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def variables_of(framework: str, part: str) -> dict[str, str]:
    """The environment variables of a run.

    Its processes share what JAX compiles, in a folder that is empty when the run begins.
    """
    folder = Path(f".venv/compiled-{framework}{part}").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "GRADSCALER_FRAMEWORK": framework,
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **({"KERAS_BACKEND": part} if framework == "keras" else {}),
        **ONE_THREAD,
    }


@task("demo", "torch")
def demo(session: nox.Session) -> None:
    """Train one network in fp32, in fp16, and in fp16 with gradscaler, and draw it."""
    run(session, "torch", "-m", "gradscaler", "demo", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, and the core's strict types."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", *CORE)


def sources_of(framework: str) -> list[str]:
    """The folders of a framework's adapter, and of code that it shares with other adapters."""
    shared = [f"{SOURCES}/_{framework}_like", f"{SOURCES}/_on_{framework}"]
    return [*matching(*shared), f"{SOURCES}/{framework}"]


def tests_of(framework: str, part: str) -> list[str]:
    """The paths of a run of a framework's tests; PyTorch's have the core and the tools."""
    if part == "core":
        return [*CORE, *matching("tests/*.py"), "tests/policies", "tests/checkpoint", "tests/eager"]
    if part == "diagnosis":
        return [*TOOLS, "tests/diagnose"]
    shared = ["tests/examples", "tests/conformance", "tests/documents"]
    tests = [*sources_of(framework), f"tests/{framework}", *shared]
    if part == "adapter":
        return tests
    if framework in ("keras", "tf_keras"):
        tests.append("tests/keras_like")
    if Path(f"tests/support/eager/on_{framework}.py").exists():
        tests.append("tests/eager")
    return [*EVERYWHERE, *tests]


def check_types(session: nox.Session, *frameworks: str) -> None:
    """Check the types of adapters that share an environment, their examples and benchmarks."""
    paths = TOOLS if "torch" in frameworks else []
    for each in frameworks:
        scripts = matching(f"examples/{each}_*.py", f"benchmarks/{each}_*.py")
        paths = [*paths, *sources_of(each), *scripts]
    # Adapters may share a folder.
    run(session, ENVIRONMENT_OF[frameworks[0]], "-m", "mypy", *dict.fromkeys(paths))


def run_tests(
    session: nox.Session, framework: str, part: str, tests: list[str] | None = None, **switches: str
) -> None:
    """Run doctests and tests with one framework; warnings are errors."""
    tests = session.posargs or tests or tests_of(framework, part)
    options = [*([] if session.posargs else IN_PARALLEL), *tests]
    variables = variables_of(framework, part) | switches
    cache = Path(f".pytest_cache/{framework}{part}")  # of its own, as tasks run side by side
    shutil.rmtree(cache, ignore_errors=True)
    command = ["-m", "pytest", "-o", f"cache_dir={cache}"]

    def run_some(*options: str) -> None:
        run(session, ENVIRONMENT_OF[framework], *command, *options, env=variables)

    try:
        run_some(*options)
    except CommandFailed:
        if session.posargs or os.environ.get("GRADSCALER_TESTS") == "all":
            raise
        # Processes and clocks make some fail by chance. Without a failed test, as after a crash,
        # none is run, which is an error, too.
        again = ["--last-failed", "--last-failed-no-failures=none"]
        run_some(*again, *options)
        session.warn("the tests above failed in the first run, and passed in the second")


def test_sessions(framework: str, environment: str) -> list[str]:
    """Define the session that tests with one framework, and those of its parts if it has several.

    Returns:
        the names of those that together do what the first does.
    """
    runs = RUNS.get(framework, [""])

    @task(f"test-{framework}", environment)
    def test(session: nox.Session) -> None:
        """Check types, and run doctests and tests with one framework; warnings are errors."""
        if framework != "tf_keras" or IN_PARALLEL:  # in `make test`, with those of Keras 3
            check_types(session, framework)
        for part in runs[:1] if session.posargs and framework == "torch" else runs:
            run_tests(session, framework, part)

    if len(runs) == 1:
        return [f"test-{framework}"]

    def define(part: str) -> str:
        @task(name := f"test-{framework}-{part}", environment)
        def test_part(session: nox.Session) -> None:
            """Run a part of a framework's doctests and tests, and check its types with the core."""
            if part == "core":  # whose tests of types read the cache that this makes
                check_types(session, framework)
            run_tests(session, framework, part)

        return name

    return [*map(define, runs)]


TESTS = {name: test_sessions(name, environment) for name, environment in ENVIRONMENT_OF.items()}


@task("types-keras", "keras")
def types_keras(session: nox.Session) -> None:
    """Check the types of the adapters for Keras 3 and Keras 2, which read the same packages."""
    check_types(session, "keras", "tf_keras")


@task("test-device", "torch")
def test_device(session: nox.Session) -> None:
    """Test PyTorch's scaler on a device that is not the CPU; g++ compiles it."""
    # Processes of their own, as it cannot be unloaded again.
    run(session, "torch", "-m", "pytest", "tests/device")
    on_device = {"GRADSCALER_DEVICE": "accel", **ONE_THREAD}
    options = session.posargs or [*IN_PARALLEL, "tests/eager"]
    run(session, "torch", "-m", "pytest", *options, env=on_device)


# The tests of the rule, the engine and the files, and those of the repository itself.
QUICK = [
    *CORE,
    *(f"tests/{name}" for name in ("policies", "checkpoint", "eager", "conformance")),
    *(f"tests/test_{name}.py" for name in ("layers", "frameworks", "import", "outcome")),
]


@task("quick", "lint", "torch")
def quick(session: nox.Session) -> None:
    """Check style and types, and run the tests that need no training (2 minutes)."""
    run(session, "torch", "-m", "mypy", *CORE, *sources_of("torch"))
    slow = "--ignore=tests/eager/test_interrupts.py"  # a quarter of the time
    options = session.posargs or [*IN_PARALLEL, slow, *QUICK]
    run(session, "torch", "-m", "pytest", *options, env=ONE_THREAD)


@nox.session(name="test-integrations")
def test_integrations(session: nox.Session) -> None:
    """Test with trainers and other packages that use PyTorch's scaler."""
    install(session, "integrations")
    session.run("mypy", *matching(*(f"examples/{trainer}_*.py" for trainer in TRAINERS)))
    options = session.posargs or [*IN_PARALLEL, "tests/integrations"]
    session.run("python", "-m", "pytest", *options, env=ONE_THREAD)


@nox.session(name="test-engines")
def test_engines(session: nox.Session) -> None:
    """DeepSpeed's and Megatron's own code with gradscaler's scalers, on the CPU."""
    install(session, "engines")
    session.run("python", "-m", "pytest", *(session.posargs or ["tests/engines"]))


@nox.session(name="test-package")
def test_package(session: nox.Session) -> None:
    """Test the sdist, and the wheel in an empty environment."""
    install(session, "package")
    session.run("python", "-m", "pytest", *(session.posargs or ["tests/package"]))


@nox.session(name="test-core")
def test_core(session: nox.Session) -> None:
    """Test the core without a framework, for each Python; test-torch-core has the same tests."""
    install(session, "package")
    core = [f"{SOURCES}/{name}" for name in ("policies", "_formats", "checkpoint")]
    tests = ["tests/policies", "tests/checkpoint/test_formats.py", *core]
    session.run("python", "-m", "pytest", *(session.posargs or tests))


@nox.session(requires=["torch"])  # which makes the reports of docs/gallery.md
def docs(session: nox.Session) -> None:
    """Build the site from scratch in site/. A warning, such as a broken link, is an error."""
    install(session, "docs")
    shutil.rmtree("site", ignore_errors=True)
    session.run("sphinx-build", "-q", "-W", "--keep-going", "-b", "html", "docs", "site")
    session.run("python", "-m", "pytest", "tests/site")


# The steps that are left for a person after `make rehearse`.
TO_DO = """\
Left for a person:
  1. Write the repository's and the site's addresses where docs/releasing.md says, once they exist.
  2. Write the day of the release in CHANGELOG.md, in place of "not released yet"; delete the
     sentences of README.md and docs/index.md that say so too; and commit this.
  3. Let the package index trust .github/workflows/release.yml, in an environment named pypi.
  4. git tag v{version} && git push origin v{version}: the workflow runs every test, and uploads.
  5. Write the sdist's address and SHA-256 ({digest})
     into conda/recipe.yaml, and send the recipe to conda-forge."""


@nox.session(default=False)
def rehearse(session: nox.Session) -> None:
    """Rehearse a release without the upload: build, check, install on each Python, the site."""
    install(session, "release")
    found = re.search('^__version__ = "(.*)"$', Path(f"{SOURCES}/__init__.py").read_text(), re.M)
    version = found[1] if found else session.error("gradscaler has no __version__")
    for place in ("CHANGELOG.md", "CITATION.cff", "conda/recipe.yaml"):
        if version not in Path(place).read_text():
            session.error(f"{place} does not name version {version}")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "--no-isolation", silent=True)
    built = sorted(map(str, Path("dist").iterdir()))
    session.run("twine", "check", "--strict", *built)
    session.run("python", "-c", RENDER_RECIPE)
    pythons = interpreters()
    for python in pythons.values():
        for path in built:
            smoke_test(session, python, path)
    session.log(f"{' and '.join(built)} work on Python {', '.join(pythons)}. The site comes next.")
    (sdist,) = Path("dist").glob("*.tar.gz")
    print(TO_DO.format(version=version, digest=sha256(sdist.read_bytes()).hexdigest()))
    session.notify("docs")


RENDER_RECIPE = """
from rattler_build import Stage0Recipe
(variant,) = Stage0Recipe.from_file("conda/recipe.yaml").render()
"""


def interpreters() -> dict[str, str]:
    """The installed Pythons, by version. A shim of a version that is not installed is left out."""
    found = {f"3.{minor}": shutil.which(f"python3.{minor}") for minor in range(10, 15)}
    return {
        version: python
        for version, python in found.items()
        if python and subprocess.run([python, "--version"], capture_output=True).returncode == 0
    }


def smoke_test(session: nox.Session, python: str, path: str) -> None:
    """Install a distribution into an empty environment, and use the parts without frameworks."""
    folder = Path(session.create_tmp()) / "empty"
    session.run(python, "-m", "venv", "--clear", str(folder), external=True)
    inside = str(folder / "bin" / "python")
    session.run(inside, "-m", "pip", "install", "--quiet", path, external=True)
    code = "import gradscaler; print(gradscaler.DynamicScale().init())"
    session.run(inside, "-W", "error", "-c", code, external=True)
    session.run(str(folder / "bin" / "gradscaler"), "doctor", external=True, silent=True)


# They begin first: one that begins last would run alone at the end.
LONGEST = ["test-mindspore", "test-torch-diagnosis", "test-jax", "test-torch-core"]
RARE = ["test-integrations", "test-engines", "test-device", "test-processors", "mutants"]


def side_by_side(session: nox.Session, *names: str, **variables: str) -> None:
    """Run as many sessions at a time as there are cores, and one more, as some wait.

    The output of each comes as a whole, at its end. If one fails, the others run, and this fails.
    """
    options = ["--keep-going", "--output-sync=target", "--no-print-directory"]
    command = ["make", f"--jobs={(os.cpu_count() or 1) + 1}", *options, *names]
    session.run(*command, external=True, env={"GRADSCALER_WORKERS": "0", **variables})


def everything(session: nox.Session, **variables: str) -> None:
    """Make the environments, and then run every framework's tests and the others."""
    side_by_side(session, *ENVIRONMENTS)  # sessions that share one must not both make it
    tests = [name for parts in TESTS.values() for name in parts if name not in LONGEST]
    others = "types-keras", "lint", "test-package", "docs"
    side_by_side(session, *LONGEST, *tests, *others, **variables)


@task("test")
def test(session: nox.Session) -> None:
    """Test every framework and every promise, and build the package and the site."""
    everything(session)


@task("test-all")
def test_all(session: nox.Session) -> None:
    """Run every case of every test, and the tasks that find what is rare (some hours)."""
    everything(session, GRADSCALER_TESTS="all")
    for name in RARE:
        session.run("make", "--no-print-directory", name, external=True)


# What makes each library use the instructions of an older processor. Keras takes TensorFlow's
# switches. Paddle's and MindSpore's own kernels have none, but they call oneDNN and MKL.
PROCESSORS = {
    "sse4": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX",  # with SSE4_2, XLA cannot convert to float16
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "OMP_NUM_THREADS": "1",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        # It asks the processor whether it has float16, which oneDNN refuses then, and aborts.
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "OMP_NUM_THREADS": "2",
    },
}
PRINT_NUMPY_S_CHOICES = """
from numpy import __version__
from importlib import import_module
core = import_module("numpy._core" if int(__version__[0]) > 1 else "numpy.core")._multiarray_umath
print(*(each for each in core.__cpu_dispatch__ if core.__cpu_features__[each]))
"""


# The tests whose numbers are computed by a framework's kernels, and compared to the bit, to another
# scaler's, or to float64. Whatever the instructions, the same Python runs in the others: those of
# texts, types, documents, files, options, the order of calls, interrupts, processes and examples,
# and those of what is watched and said, as a NaN is a NaN on each processor.
COMPUTING = {
    "torch": [
        "tests/policies",  # the rule, on tensors of each library
        "tests/diagnose/gradients",  # exponents and histograms
        "tests/diagnose/operations",  # where each operation is Inf or NaN
        "tests/torch/test_compile.py",  # Inductor generates code for the processor
        "tests/torch/weights",
        *(f"tests/torch/test_{name}.py" for name in ("dtypes", "flat", "norm", "overflow")),
    ],
    "jax": [
        "tests/jax/test_operations.py",
        "tests/jax/test_optax.py",
        "tests/jax/test_scaler.py",
        "tests/jax/test_sharded.py",  # XLA compiles its reductions
    ],
    "keras": ["tests/keras/test_fit.py", "tests/keras_like/test_rule.py"],
    "tf_keras": ["tests/keras_like/test_rule.py"],
    "paddle": [
        "tests/paddle/test_devices_and_dtypes.py",
        "tests/paddle/test_small_tensors.py",
        "tests/paddle/test_static_graph.py",
    ],
    "tensorplay": ["tests/tensorplay/test_dtypes.py"],
    "mindspore": ["tests/mindspore/test_agreement.py", "tests/mindspore/test_scaler.py"],
}
# What every framework has of these, under the names of its own folder or of one that it shares.
COMPUTING_EVERYWHERE = [
    "tests/conformance",  # the frameworks' own scalers, step by step
    "tests/*/test_against_native.py",
    "tests/*/test_amax.py",
    "tests/*/test_clip.py",
    "tests/*/test_master_weights*.py",
    "tests/*/test_mixed_gradients.py",
]


def computing_tests_of(framework: str) -> list[str]:
    """The paths of a framework's tests that an older processor's instructions may change."""
    folders = [path for part in RUNS.get(framework, [""]) for path in tests_of(framework, part)]
    everywhere = matching(*COMPUTING_EVERYWHERE)
    shared = [path for path in everywhere if {path, str(Path(path).parent)} & {*folders}]
    return [*shared, *COMPUTING[framework]]


@task("test-processors", *ENVIRONMENTS)
def test_processors(session: nox.Session) -> None:
    """Run the tests that compute by older processors' instructions, on one thread and on two."""
    for framework, environment in ENVIRONMENT_OF.items():
        python = f".venv/{environment}/bin/python"
        choices = session.run(
            python, "-c", PRINT_NUMPY_S_CHOICES, silent=True, external=True, log=False
        )
        for processor, switches in PROCESSORS.items():
            if processor == "sse4":
                switches = {**switches, "NPY_DISABLE_CPU_FEATURES": str(choices).strip()}
            for part in RUNS[framework] if framework == "keras" else [""]:
                session.log(f"{framework} {part} on {processor}")
                run_tests(session, framework, part, computing_tests_of(framework), **switches)


@task("coverage", *ENVIRONMENTS)
def coverage(session: nox.Session) -> None:
    """Run every framework's tests, and report the package's lines that none of them runs."""
    for framework, environment in ENVIRONMENT_OF.items():
        for part in RUNS.get(framework, [""]):
            command = ["coverage", "run", "-m", "pytest", *IN_PARALLEL, *tests_of(framework, part)]
            run(session, environment, "-m", *command, env=variables_of(framework, part))
    run(session, "torch", "-m", "coverage", "combine", "--quiet")
    run(session, "torch", "-m", "coverage", "report")


# These leave out tests that need newer versions than the package does, and tests of two devices,
# with which TensorFlow 2.18 crashes at random.
NEWER_JAX = "not nnx and not x32 and not x64 and not float64"
NEWER_KERAS = (
    "not ScheduleFreeAdamW and not another_inner_optimizer and not sparse_gradients_pass "
    "and not replica and not strategy and not two_devices"
)
KERAS_TESTS = [
    f"{SOURCES}/keras/optimizer.py",
    *(f"tests/{n}" for n in ("keras", "keras_like", "documents")),
]


def run_lowest(session: nox.Session, framework: str, *tests: str, backend: str = "") -> None:
    """Run tests in the session's environment, and allow a warning that old versions give."""
    variables = {"GRADSCALER_FRAMEWORK": framework, "TF_CPP_MIN_LOG_LEVEL": "2"}
    allowed = "ignore:non-integer arguments to randrange"
    command = ["python", "-m", "pytest", *IN_PARALLEL, "-W", allowed, *tests]
    session.run(*command, env=variables | ({"KERAS_BACKEND": backend} if backend else {}))


@nox.session(name="test-lowest-jax", python=LOWEST_PYTHON)
def test_lowest_jax(session: nox.Session) -> None:
    """Test with the lowest versions of JAX, optax, Keras and NumPy that pyproject.toml allows."""
    install(session, "lowest-jax")
    core = ["tests/policies", "tests/documents", "src/gradscaler/jax", "src/gradscaler/policies"]
    run_lowest(session, "jax", "-k", NEWER_JAX, "tests/jax", *core)
    run_lowest(session, "keras", "-k", NEWER_KERAS, *KERAS_TESTS, backend="jax")


@nox.session(name="test-lowest-tensorflow", python=LOWEST_PYTHON)
def test_lowest_tensorflow(session: nox.Session) -> None:
    """Test with the lowest versions of Keras 3 and Keras 2 on TensorFlow."""
    install(session, "lowest-tensorflow")
    run_lowest(session, "keras", "-k", NEWER_KERAS, *KERAS_TESTS, backend="tensorflow")
    tests = ["tests/tf_keras", "tests/keras_like", "tests/documents", "src/gradscaler/tf_keras"]
    run_lowest(session, "tf_keras", *tests)


@task("test-lowest", "test-lowest-jax", "test-lowest-tensorflow")
def test_lowest(session: nox.Session) -> None:
    """Test with the lowest versions of all of these, on the lowest Python."""


@task("conformance", *ENVIRONMENTS)
def conformance(session: nox.Session) -> None:
    """Run every scaler, ours and the frameworks' own, on the same traces, and print a table."""
    recorded = Path(".venv/conformance.jsonl")
    with recorded.open("wb") as file:
        for framework, environment in ENVIRONMENT_OF.items():
            for part in RUNS[framework] if framework == "keras" else [""]:
                command = ["-m", "tests.conformance.replay", framework]
                variables = variables_of(framework, part)
                run(session, environment, *command, env=variables, stdout=file, stderr=None)
    run(session, "torch", "-m", "tests.conformance.table", str(recorded))


@task("mutants", "torch")
def mutants(session: nox.Session) -> None:
    """Change rule, engine, weights and findings in small ways; list what no test notices."""
    run(session, "torch", "-m", "tests.support.mutants", *session.posargs, env=ONE_THREAD)


@task("pictures", "torch")
def pictures(session: nox.Session) -> None:
    """Draw the pictures of docs/ and the charts. Tests compare them with what the code draws."""
    folder = Path(".pictures")
    shutil.rmtree(folder, ignore_errors=True)
    run(session, "torch", "docs/pictures.py")
    run(session, "torch", "benchmarks/report.py")
    run(session, "torch", "examples/torch_stuck.py", "parameter", "--runs", str(folder))
    report = ["report", str(folder / "parameter.jsonl"), "-o", "docs/stuck.png"]
    run(session, "torch", "-m", "gradscaler", *report)
    run(session, "torch", "-m", "gradscaler", "demo", "--output", str(folder / "demo.png"))
    shutil.move(folder / "demo.png", "docs/demo.png")
    shutil.rmtree(folder)


@task("evidence", "torch")
def evidence(session: nox.Session) -> None:
    """Test claims of papers on small networks, and write docs/evidence.md (10 minutes)."""
    run(session, "torch", "-m", "benchmarks.evidence", *session.posargs)


@task("reports", *ENVIRONMENTS)
def reports(session: nox.Session) -> None:
    """Run the trainings of docs/reports.md, and write what is said of each. A test compares it."""
    variables = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "tensorflow", "GLOG_v": "0"}
    for framework in ("torch", "paddle", "keras", "jax", "mindspore"):
        environment = ENVIRONMENT_OF[framework]
        run(session, environment, "docs/reports.py", framework, env=variables)


@task("notebooks", "torch", "keras")
def notebooks(session: nox.Session) -> None:
    """Run the notebooks of docs/, and keep their outputs. A test compares them with today's."""
    env = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "tensorflow"}
    env |= {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}  # or it tells of both
    for path in matching("docs/notebooks/*.ipynb"):
        environment = "keras" if path.endswith("keras.ipynb") else "torch"
        run(session, environment, "-c", RUN_NOTEBOOKS, path, env=env)


# jupyter-execute would also write the time of each cell.
RUN_NOTEBOOKS = """
import sys, nbclient, nbformat
for path in sys.argv[1:]:
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, record_timing=False).execute()
    nbformat.write(notebook, path)
"""


RESULTS = Path("benchmarks/results")
# The first has a session of its own, and the pages have no table for the second.
NOT_IN_BENCH = "torch_gpu", "jax_compiled"


def run_benchmark(session: nox.Session, environment: str, name: str, *options: str) -> None:
    """Run a benchmark, and keep its results; ``-- --quick`` makes few repetitions."""
    results = RESULTS / f"{'_'.join([name, *(o for o in options if o[0] != '-')])}.json"
    command = [f"benchmarks/{name}.py", *options, *session.posargs, "--json", str(results)]
    run(session, environment, *command)


def bench_session(framework: str, environment: str) -> None:
    """Define the session that times our scaler for a framework against the framework's own."""

    @task(f"bench-{framework}", environment)
    def bench(session: nox.Session) -> None:
        """Time the scalers for one framework, ours and its own."""
        for path in matching(f"benchmarks/{framework}_*.py"):
            if (name := Path(path).stem) not in NOT_IN_BENCH:
                large = ["--large"] * (name == "torch_large")  # needs 6 GB
                run_benchmark(session, environment, name, *large)
        run_benchmark(session, environment, "imports", framework)
        if framework != "torch":  # which torch_run times
            run_benchmark(session, environment, "run_loops", framework)


for framework, environment in ENVIRONMENT_OF.items():
    bench_session(framework, environment)


@task("bench", *(f"bench-{framework}" for framework in ENVIRONMENT_OF))
def bench(session: nox.Session) -> None:
    """Time the scalers for every framework, and write the pages and charts."""
    run(session, "torch", "benchmarks/report.py")


@task("bench-gpu", "torch")
def bench_gpu(session: nox.Session) -> None:
    """Check and time the scaler on a GPU: waits, CUDA graphs, kernel launches, time."""
    run_benchmark(session, "torch", "torch_gpu")
    run(session, "torch", "benchmarks/report.py")


@nox.session(default=False, venv_backend="none")
def lock(session: nox.Session) -> None:
    """Write the versions in each environment into its lock; ``-- NAME`` writes one lock."""
    folders = {name: f"test-{name}" for name in ("package", "integrations", "engines")}
    for name in session.posargs or [*ENVIRONMENTS, "docs", *folders]:
        python = f".venv/{folders.get(name, name)}/bin/python"
        freeze = ["-m", "pip", "freeze", "--exclude-editable"]
        frozen = str(session.run(python, *freeze, silent=True, external=True)).splitlines()
        # A build for one kind of device, such as +cpu, is the user's choice.
        versions = [line.partition("+")[0] for line in frozen if "==" in line]
        Path(f"requirements/{name}.lock").write_text("\n".join(versions) + "\n")
