"""The report as a browser shows it."""

import re
import shutil
import subprocess

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the report is drawn with it")

from matplotlib.image import imread

from gradscaler.diagnose import report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
HOSTILE = "<script>document.title = 'taken over'</script>"

pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium or Chrome is on PATH")


@pytest.fixture(scope="module")
def page(tmp_path_factory, made_up_run):
    path = tmp_path_factory.mktemp("report") / "report.html"
    verdict = ("nan", f"The gradient of {HOSTILE} is NaN. Look there.", HOSTILE)
    report.write(made_up_run(names=[HOSTILE, "$x_{", "w" * 300], stuck=37, verdict=verdict), path)
    return path


def browse(page, *arguments):
    """The browser's output, after a check that it logs no complaint."""
    options = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --enable-logging=stderr"
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [BROWSER, *options.split(), profile, *arguments, page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in result.stderr
    return result.stdout


def test_the_page_holds_the_verdict_the_figures_and_the_tables(page):
    dom = browse(page, "--dump-dom")
    assert "<title>A gradient is NaN or Inf - gradscaler</title>" in dom
    assert re.findall("<h2>([^<]*)</h2>", dom) == [
        "Over time",
        "Skipped steps",
        "What it means",
    ]
    assert len(re.findall('<svg role="img" aria-label="[^"]+"', dom)) == 1
    assert dom.count("<tr>") == 1 + 2
    assert "<script" not in dom


@pytest.mark.parametrize(("theme", "paper"), [("1", 1.0), ("0", 18 / 255)], ids=["light", "dark"])
@pytest.mark.parametrize("width", [500, 1200])
def test_the_page_fills_the_window_and_no_more(page, width, theme, paper):
    picture = page.parent / f"{width}.png"
    theme = f"--blink-settings=preferredColorScheme={theme}"
    browse(page, theme, f"--screenshot={picture}", f"--window-size={width},900")
    pixels = imread(picture)[..., :3]
    assert pixels.shape == (900, width, 3)
    inked = (abs(pixels - paper) > 0.1).any(axis=2)  # the figures are on the page's own paper
    assert 0.02 < inked.mean() < 0.6
    assert np.flatnonzero(inked.any(axis=0))[-1] < width - 8  # nothing is cut off on the right


def test_a_console_error_would_be_noticed(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<script>console.error('oh')</script>")
    with pytest.raises(AssertionError, match="CONSOLE"):
        browse(page, "--dump-dom")
