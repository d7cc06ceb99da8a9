"""The figures, as pixels: each class of gradients has one colour, which nothing tints or hides."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the figures are drawn with it")

from matplotlib.image import imread
from matplotlib.legend import Legend

from tests.support import run_files
from tests.support.reports import drawn

STEPS = 40
SHARES = run_files.shares(0.2, 0.1, 0.2, 0.3, 0.05, 0.15)
PARAMETERS = {  # which is all of one class, and the exponent of its gradients at a scale of 1
    "flushed": -30,
    "subnormal": -20,
    "normal": 0,
    "overflow": 18,
    "zero": None,
    "nonfinite": None,
}


def run_of_every_class(skipped, dtype="float16"):
    """A sample at each tenth step, in which gradients of every class occur."""
    parameters = {
        name: run_files.parameter(
            *(float(name == each) for each in ("zero", "flushed", "subnormal", "nonfinite")),
            (0, []) if exponent is None else (exponent, [10]),
        )
        for name, exponent in PARAMETERS.items()
    }
    counts = [0] * 60
    for name, share in SHARES.items():
        if PARAMETERS[name] is not None:
            counts[PARAMETERS[name] + 35] = round(1000 * share)
    samples = (
        run_files.sample(
            step,
            1.0,
            [(step - 9, 1.0)],
            10,
            [s for s in skipped if step - 9 <= s <= step],
            1.0 / step,
            1.0,
            SHARES,
            (-35, counts),
            parameters=parameters,
            worst=[*parameters][:5],
        )
        for step in range(10, STEPS + 1, 10)
    )
    start = run_files.start(dtype=dtype, every=10, policy={"name": "FixedScale"})
    return run_files.run_of(start, *samples)


def pixels_of(png):
    return np.round(255 * imread(png)[..., :3]).astype(int)


class Picture:
    """The picture of a run: its figure, and the pixels of the PNG."""

    def __init__(self, run, path):
        self.figure, self.pixels = drawn(run, path), pixels_of(path)
        self.figure.dpi = len(self.pixels) / self.figure.get_figheight()
        self.figure.draw_without_rendering()  # so that places in it are those of the pixels

    def axes(self, title):
        found = (axes for axes in self.figure.axes if axes.get_title(loc="left").startswith(title))
        return next(found)

    def at(self, axes, x, y):
        """The pixel at a place in the coordinates of the data."""
        return self._pixel(*axes.transData.transform((x, y)))

    def legend(self):
        """The pixel in the middle of each handle."""
        legend, *_ = self.figure.findobj(Legend)
        names = [text.get_text().partition(",")[0] for text in legend.get_texts()]
        boxes = [handle.get_window_extent() for handle in legend.legend_handles]
        return {
            name: self._pixel((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
            for name, box in zip(names, boxes, strict=True)
        }

    def _pixel(self, x, y):
        return tuple(self.pixels[len(self.pixels) - 1 - int(y), int(x)].tolist())


SKIPPED = {"none": (), "most": tuple(range(8, STEPS + 1)), "all": tuple(range(1, STEPS + 1))}


@pytest.mark.parametrize("skips", SKIPPED)
@pytest.mark.some(1, "one call draws a class, whichever steps were skipped")
def test_each_class_is_stacked_in_the_colour_of_the_legend(skips, tmp_path):
    picture = Picture(run_of_every_class(SKIPPED[skips]), tmp_path / "report.png")
    shares = {**SHARES, "overflow": SHARES["overflow"] + SHARES["nonfinite"]}
    axes, below = picture.axes("What float16"), 0.0
    for name, colour in picture.legend().items():
        middle = below + 50 * shares[name]
        below += 100 * shares[name]
        pixels = {picture.at(axes, step, middle) for step in range(1, STEPS + 1)}
        assert pixels == {colour}, name


# How linear sRGB looks to them: Machado, Oliveira and Fernandes 2009, at severity 1.
SEEN_BY = {
    "anybody": np.eye(3),
    "protanopes": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopes": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopes": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
)  # of sRGB, under D65


def lab(colour, matrix):
    """The CIELAB coordinates of a colour as somebody sees it."""
    encoded = np.array(colour) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(matrix @ linear, 0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """The colours of a picture's legend, as pixels."""
    path = tmp_path_factory.mktemp("picture") / "report.png"
    found = Picture(run_of_every_class(()), path).legend()
    assert set(found) == {"flushed", "subnormal", "overflow", "zero", "normal"}
    return list(found.values())


@pytest.mark.parametrize("who", SEEN_BY)
def test_no_two_colours_of_a_legend_look_alike(who, colours):
    seen = [lab(colour, np.array(SEEN_BY[who])) for colour in colours]
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 30


def test_the_colours_of_a_legend_differ_in_grey(colours):
    lightness = [lab(colour, np.eye(3))[0] for colour in colours]
    assert min(abs(one - other) for one, other in combinations(lightness, 2)) > 12


def test_the_picture_of_the_page_has_these_colours(colours):
    pixels = pixels_of(Path(__file__).parents[3] / "docs" / "stuck.png").reshape(-1, 3)
    assert set(colours) <= set(map(tuple, pixels.tolist()))
