"""Lines of a test file, found by the comment at their end."""

from collections.abc import Callable
from pathlib import Path


def lines_marked_in(file: str) -> Callable[[str], str]:
    """A function that names the one line of a file that ends with a mark, such as "t.py:12"."""
    path = Path(file)
    lines = path.read_text(encoding="utf-8").splitlines()

    def line_with(mark: str) -> str:
        (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
        return f"{path.relative_to(Path.cwd())}:{number}"

    return line_with
