"""The pages of benchmarks are made from the results that lie beside them."""

import re
import statistics
import sys
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import report

    yield report
    for name in ("report", "paired"):
        sys.modules.pop(name, None)


def test_the_pages_are_those_of_the_results(report):
    results = report.read_results()
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == report.first_page(results)
    for framework in report.NAMES:
        page = ROOT / "docs" / "benchmarks" / f"{framework}.md"
        assert page.read_text() == report.framework_page(results, framework)


def test_every_measurement_is_on_a_page_and_every_slower_one_on_the_first(report):
    results = report.read_results()
    first = report.first_page(results)
    pages = {name: report.framework_page(results, name) for name in report.NAMES}
    for name, (_, comparisons) in results.items():
        for each in comparisons:
            framework = report.framework_of(name)
            row = f"| {report.readable(each.workload)} "
            _, _, section = pages[framework].partition(f"\n## {report.section_of(name)}\n")
            assert row in section.partition("\n## ")[0]
            slower = sorted(each.ratios)[len(each.ratios) // 4] > 1 and each.interval[0] > 1
            if slower and not name.startswith("imports_") and name not in report.OTHER_WEIGHTS:
                assert f"| {report.NAMES[framework]}: {row[2:]}" in first


def test_the_first_table_has_ten_rows_and_the_figure_a_dozen_of_every_framework(report):
    rows = report.headline(report.read_results())
    assert len(rows) == 12
    assert sum(row.in_table for row, _ in rows) == 10
    assert {report.framework_of(row.benchmark) for row, _ in rows if row.in_table} == set(
        report.NAMES
    )


def test_make_bench_makes_again_what_the_pages_show(report):
    folder = ROOT / "benchmarks"
    scripts = {p.stem for name in report.NAMES for p in folder.glob(f"{name}_*.py")}
    shown = {name.partition(".")[0] for name in report.read_results()}
    made = {name for name in shown if not re.match("imports_|run_loops_|torch_gpu", name)}
    left_out = {"torch_gpu", "jax_compiled"}  # by noxfile.py
    assert scripts - left_out == made
    for name in made:
        assert "paired.parse(" in (folder / f"{name}.py").read_text()


def test_two_benchmarks_of_a_page_have_two_headings(report):
    for framework in report.NAMES:
        page = report.framework_page(report.read_results(), framework)
        headings = re.findall(r"^## .*$", page, re.MULTILINE)
        assert len(set(headings)) == len(headings)


def test_the_profile_quotes_the_constructors_that_were_measured(report):
    page = " ".join((ROOT / "docs" / "profile.md").read_text().split())
    results = report.read_results()

    def microseconds(framework):
        construct = results[f"imports_{framework}"][1][1]
        assert construct.workload.endswith("construct a scaler")
        medians = (1e6 * statistics.median(each) for each in (construct.ours, construct.native))
        return tuple(f"{each:.0f}" if each > 1 else f"{each:.1f}" for each in medians)

    for framework, name in (("mindspore", "MindSpore"), ("jax", "JAX")):
        assert "{} to {} for {}".format(*microseconds(framework), name) in page
    assert "{} µs to {} for PyTorch".format(*microseconds("torch")) in page
    ours, native = microseconds("paddle")
    assert f"Paddle's takes longer, {native} µs to {ours}." in page


def test_two_workloads_of_a_section_have_two_names(report):
    for _, comparisons in report.read_results().values():
        names = [report.readable(each.workload) for each in comparisons]
        assert len(set(names)) == len(names)


def test_the_page_on_weights_has_the_time_and_memory_of_each_way(report):
    page = (ROOT / "docs" / "weights.md").read_text()
    measured = report.weights_table()
    assert measured in page
    assert report.with_table(page.replace(measured, measured[:-40]), measured) == page
    stores = ['"float32"', '"remainder16"', '"stochastic"']
    ways = ["float32, autocast", "bfloat16, PyTorch's AdamW"]
    rows = [row.split("|")[1].strip() for row in measured.splitlines()[2:]]
    assert rows == [*ways, *(f"MasterWeights, {store}" for store in stores)]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (
            "compile MLP, batch of 16: GradScaler to flax",
            "MLP, batch of 16, compilation: GradScaler against flax",
        ),
        (
            "one layer of 16: loss_scaled to unscaled",
            "one layer of 16: loss_scaled against no scaling",
        ),
        ("2,000 of 64x64, IdleOptimizer", "2,000 tensors of 64x64, idle optimizer"),
        ("tensorflow, graph: one layer of 16", "TensorFlow, graph: one layer of 16"),
        ("tf_keras: import", "import"),
    ],
)
def test_a_workload_is_in_the_words_of_a_reader(report, written, shown):
    assert report.readable(written) == shown


def test_the_site_lists_the_pages_in_the_order_of_the_frameworks(report):
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    listed = [f"{name} <benchmarks/{framework}>" for framework, name in report.NAMES.items()]
    assert "\n".join(listed) in page


@pytest.mark.rare("the pages, which are compared above, have the numbers that the charts draw")
def test_the_charts_are_those_of_the_results(report):
    charts = report.charts(report.read_results())
    folders = ROOT / "benchmarks", ROOT / "docs" / "benchmarks"
    shown = {path for folder in folders for path in folder.glob("*.png")}
    assert set(charts) == shown - {ROOT / "benchmarks" / "policies.png"}
    for path, figure in charts.items():
        texts = [
            Image.open(file).text["Description"] for file in (path, BytesIO(report.png_of(figure)))
        ]
        assert texts[0] == texts[1], f"{path} is not of today: make pictures"


def test_a_chart_has_each_ratio_in_the_panel_of_its_section(report):
    results = report.read_results()
    charts = report.charts(results)
    for framework in report.NAMES:
        figure = charts[report.PAGES / f"{framework}.png"]
        texts = {
            " ".join(axes.get_title("left").split()): [text.get_text() for text in axes.texts]
            for axes in figure.axes
        }
        for name, (_, comparisons) in results.items():
            if report.framework_of(name) == framework and not name.startswith("imports_"):
                for each in comparisons:
                    title, shown = report.placed(
                        report.section_of(name), report.readable(each.workload)
                    )
                    assert texts[title][texts[title].index(shown) + 1] == f"{each.ratio:.2f}"


@pytest.mark.parametrize(
    ("section", "workload", "panel"),
    [
        ("A step", "a, compilation: b", ("A step, compilation", "a: b")),
        ("A step", "a", ("A step", "a")),
        ("With a monitor", "a, with a monitor", ("With a monitor", "a")),
    ],
)
def test_workloads_of_a_kind_have_a_panel_that_names_it(report, section, workload, panel):
    assert report.placed(section, workload) == panel


def test_the_method_names_the_colours_of_the_figures(report):
    from matplotlib.colors import rgb_to_hsv, to_rgb

    assert "blue is faster, orange is slower" in " ".join(report.METHOD.split())
    assert rgb_to_hsv(to_rgb(report.ORANGE))[0] == pytest.approx(26 / 360, abs=0.01)  # orange


def test_the_first_page_says_that_every_import_is_slower(report):
    results = report.read_results()
    assert all(each.interval[0] > 1 for each in report._imports(results))
    assert "Every import is slower, too" in report.first_page(results)
