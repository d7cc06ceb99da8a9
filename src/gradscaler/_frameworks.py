"""The one list of frameworks, for the package, its tests and the Makefile.

    python -I src/gradscaler/_frameworks.py     # prints the list as assignments for make

docs/contributing.md names the files that belong to each.
"""

from __future__ import annotations

from typing import NamedTuple


class Framework(NamedTuple):
    """What there is to know about a framework outside its adapter.

    Attributes:
        environment: where its tests run: ``.venv/ENVIRONMENT``, from
            ``requirements/ENVIRONMENT.txt``. Frameworks that agree on their dependencies share one.
        formats: the names of its checkpoint formats.
        runs: an environment variable for each run of its tests; one run without any by default.
    """

    environment: str
    formats: tuple[str, ...]
    runs: tuple[str, ...] = ()


KERAS_BACKENDS = ("KERAS_BACKEND=tensorflow", "KERAS_BACKEND=jax", "KERAS_BACKEND=torch")

FRAMEWORKS = {
    "torch": Framework("torch", ("torch",)),
    "tensorplay": Framework("paddle", ("tensorplay",)),
    "paddle": Framework("paddle", ("paddle",)),
    "keras": Framework("keras", ("keras",), KERAS_BACKENDS),
    "tf_keras": Framework("keras", ("tf_keras",)),
    "mindspore": Framework("mindspore", ("mindspore",)),
    "jax": Framework("keras", ("jmp", "flax")),
}
"""By the names of their packages, which are those of their adapters."""


if __name__ == "__main__":
    for package, framework in FRAMEWORKS.items():
        extra = package.replace("_", "-")  # names of distributions and of make's targets
        print(f"FRAMEWORKS+={extra}", f"{extra}_ENVIRONMENT+={framework.environment}")
        print(*(f"{extra}_RUNS+={run}" for run in framework.runs))
