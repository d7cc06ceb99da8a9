"""``python -m gradscaler report``: the page and the picture, of ordinary and of strange runs."""

import html
import math
import re
import struct
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from gradscaler.diagnose import Located
from gradscaler.outcome import NonfiniteGradient
from tests.support import run_files
from tests.support.run_files import HEADLINES, run_of

pytest.importorskip("matplotlib", reason="the report is drawn with it")

from gradscaler.__main__ import main
from gradscaler._frameworks import install_command
from gradscaler.diagnose import report

# A kind without a headline in the tests would not be noticed.
from gradscaler.diagnose._record.kinds import KINDS
from tests.support.reports import drawn, explained, line_of

HOSTILE = ["<script>alert(1)</script>", "$x_{", r"$\bad{$ & <b>", "name\n\x00\u202e", "w" * 300]
VERDICT = ("nan", "The gradient of encoder.0.weight is NaN. Look there.", "encoder.0.weight")


class Page(HTMLParser):
    """The parts of a page that these tests need, as a browser reads them."""

    def __init__(self, text):
        super().__init__()
        self.source, self.tags, self.attributes, self.texts = text, [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, text):
        self.texts.append(text.strip())

    @property
    def facts(self):
        """The summary in one line."""
        return next(text for text in self.texts if ". Policy: " in text)

    def values(self, *names):
        """The values of all attributes of these names."""
        return [value for name, value in self.attributes if name in names]


@pytest.fixture
def page_of(tmp_path):
    def page_of(run):
        path = tmp_path / "report.html"
        report.write(run, path)
        return Page(path.read_text(encoding="utf-8"))

    return page_of


def size_of_png(data):
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


def test_the_command_writes_a_page_from_a_file(tmp_path, save, made_up_run, capsys):
    source, target = save(made_up_run(stuck=37, verdict=VERDICT)), tmp_path / "report.html"
    assert main(["report", source, "-o", str(target)]) == 0
    page = Page(target.read_text(encoding="utf-8"))
    assert {HEADLINES["nan"][1], VERDICT[1]} <= set(page.texts)
    assert page.facts.startswith(f"Look at: {VERDICT[2]}. Steps: 1,037. Skipped: 45 (4.3%). ")
    assert capsys.readouterr() == ("", f"wrote {target}\n")


def test_the_command_writes_a_picture_from_a_file(tmp_path, save, made_up_run):
    target = tmp_path / "report.PNG"
    assert main(["report", save(made_up_run()), "--output", str(target)]) == 0
    width, height = size_of_png(target.read_bytes())
    assert width > 1000
    assert height > 1000


def test_the_page_of_several_ranks_is_that_of_the_rank_at_fault_with_a_row_each(
    tmp_path, save_ranks
):
    target = tmp_path / "report.html"
    paths = save_ranks(at_fault=1)
    assert main(["report", *paths, "-o", str(target)]) == 0
    page = Page(target.read_text(encoding="utf-8"))
    assert page.tags.count("h1") == 1
    assert {HEADLINES["floor"][1], "rank 1: What happened. What to try."} <= set(page.texts)
    assert {"Rank", "elsewhere", "Own skips"} <= set(page.texts)
    assert "Rank: 1 (of 4)." in page.facts
    assert main(["report", *paths, "-o", str(target.with_suffix(".png"))]) == 0


def test_of_several_files_the_bad_one_is_named(tmp_path, save_ranks, capsys):
    paths = save_ranks(at_fault=1)
    missing, target = str(tmp_path / "missing.jsonl"), str(tmp_path / "report.html")
    for command in (["explain"], ["report", "-o", target]):
        assert main([*command, *paths, missing]) == 1
        assert capsys.readouterr().err == f"{missing}: No such file or directory\n"
        assert main([*command, *paths, paths[0]]) == 1
        assert "is of rank 0, as" in capsys.readouterr().err


def test_the_headlines_are_those_of_all_kinds():
    shown = {name: (kind.level, kind.headline) for name, kind in KINDS.items()}
    assert [*shown.items()] == [*HEADLINES.items()]


@pytest.mark.parametrize("kind", HEADLINES)
@pytest.mark.some(6, "their words are compared above")
def test_each_verdict_comes_first(page_of, made_up_run, kind):
    level, headline = HEADLINES[kind]
    skips = 0 if kind == "normal" else 3  # those of a made-up run have a loss of NaN
    page = page_of(made_up_run(samples=1, stuck=skips, verdict=(kind, "What. Why.", None)))
    texts = [text for text in page.texts if text]
    start = texts.index(headline, 1)
    assert texts[start + 1] == "What. Why."
    assert f'<header class="{level}">' in page.source
    assert page.tags.count("h1") == 1


def found(run, line=None):
    """The run, with a verdict that has a finding."""
    cause, action = "What happened at a line.", "Do <this>."
    finding = {"kind": "loss", "cause": cause, "action": action, "line": line}
    text = f"{cause} {action} Also: something."
    verdict = {**run_files.verdict(run.num_steps, "loss", text), "findings": [finding]}
    return replace(run, verdicts=run_of(verdict).verdicts)


def test_the_page_begins_with_the_action_on_a_line_of_its_own(page_of, made_up_run):
    page = page_of(found(made_up_run(samples=1, stuck=3)))
    texts = [text for text in page.texts if text]
    start = texts.index(HEADLINES["loss"][1], 1)
    assert texts[start + 1 : start + 3] == [
        "Do <this>.",
        "What happened at a line. Also: something.",
    ]
    assert '<p class="action">Do &lt;this&gt;.</p>' in page.source


SCRIPT = "first = 1\nsecond = 2\nif third := 'a < b':\n\tfourth = '\x1b'\nfifth = 5\nsixth = 6\n"


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (1, ["1  first = 1", "2  second = 2", "3  if third := 'a < b':"]),
        (4, [f"{n}  {text.expandtabs(4)}" for n, text in enumerate(SCRIPT.splitlines(), 1)][1:]),
        (7, []),
    ],
)
def test_the_user_s_line_is_shown_with_two_around_it(
    page_of, made_up_run, tmp_path, monkeypatch, number, shown
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    page = page_of(found(made_up_run(samples=1, stuck=3), f"train.py:{number}"))
    lines = re.findall(r"<(?:mark|span)>(.*?)</", page.source)
    assert [html.unescape(line) for line in lines] == [
        line.replace("\x1b", "\N{REPLACEMENT CHARACTER}") for line in shown
    ]
    assert page.tags.count("mark") == bool(shown)
    title = f"train.py:{number} (the file was changed after the run began)"
    assert (title in page.texts) == bool(shown)


@pytest.mark.parametrize("name", ["secret.txt", "gone.py", "folder.py", "secret.txt\x00.py", ""])
def test_a_run_file_makes_no_other_file_be_shown(page_of, made_up_run, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.txt").write_text("secret\n")
    (tmp_path / "folder.py").mkdir()
    assert "<pre>" not in page_of(found(made_up_run(samples=1, stuck=3), f"{name}:1")).source


def test_the_facts_name_the_run_the_script_the_time_and_the_versions(tmp_path, save, made_up_run):
    run, target = made_up_run(samples=1), tmp_path / "report.html"
    versions = {"Python": "3.11.7", "torch": "2.9.0"}
    start = replace(run.starts[0], script="train.py", versions=versions)
    source = save(replace(run, starts=(start,)))
    assert main(["report", source, "-o", str(target)]) == 0
    assert (
        "Run: run.jsonl. Script: train.py. Started: 2026-01-01T00:00:00Z. With: Python 3.11.7, "
        "torch 2.9.0."
    ) in Page(target.read_text(encoding="utf-8")).texts


def test_numbers_that_are_never_finite_have_no_panel_and_a_fixed_scale_no_made_up_axis(tmp_path):
    losses = [run_files.sample(step, 8.0, [(step, 8.0)], 1, [], math.nan) for step in (1, 2)]
    figure = drawn(run_of(*losses), tmp_path / "report.png")
    axes = {each.get_title(loc="left"): each for each in figure.axes}
    assert "Loss" not in axes
    figure.draw_without_rendering()
    labels = [label.get_text() for label in axes["Loss scale"].get_yticklabels()]
    assert len(set(labels)) == len(labels)


def test_the_page_needs_nothing_else(page_of, made_up_run):
    page = page_of(made_up_run(names=HOSTILE))
    links = re.findall(r"https?://[^\s\"']*", page.source)
    assert [link for link in links if "w3.org" not in link] == []
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    sources = page.values("href", "src", "xlink:href")
    assert all(source.startswith(("#", "data:")) for source in sources)


def test_no_id_is_used_twice(page_of, made_up_run):
    ids = page_of(made_up_run()).values("id")
    assert ids
    assert len(ids) == len(set(ids))


def test_each_finding_links_to_what_it_means_in_the_page(page_of, made_up_run):
    run = found(made_up_run(samples=1, stuck=3))
    (verdict,) = run.verdicts
    others = [replace(verdict.findings[0], kind=kind) for kind in ("data", "from_a_later_version")]
    run = replace(run, verdicts=(replace(verdict, findings=(*verdict.findings, *others)),))
    page = page_of(run)
    links = [each for each in page.values("href") if each.startswith("#")]
    assert links == ["#loss", "#data"]
    assert {each[1:] for each in links} <= set(page.values("id"))
    assert KINDS["data"].meaning in page.texts


def test_a_page_is_the_same_each_time(page_of, made_up_run):
    assert page_of(made_up_run()).source == page_of(made_up_run()).source


def test_every_name_is_escaped(page_of, made_up_run):
    kind, text, where = "floor", "<img src=x onerror=alert(1)> & so on.", "<svg onload=alert(1)>"
    page = page_of(made_up_run(names=HOSTILE, stuck=2, verdict=(kind, text, where)))
    assert text in page.texts
    assert where in page.facts
    assert f"{HOSTILE[0]}: 12 Inf, 1 NaN of 64x64 (float16); 7 more" in page.texts
    assert {"$x_{", r"$\bad{$ & <b>"} <= set(page.texts)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "img" not in page.tags
    assert not {"\x00", "\u202e"} & set(page.source)


def test_an_unknown_verdict_and_policy_are_escaped_too(page_of, made_up_run):
    run = made_up_run(samples=1, verdict=("<b>new</b>", "Text.", None))
    policy = {"name": "<i>x</i>"}
    run = replace(run, starts=(replace(run.starts[0], policy=policy),))
    page = page_of(run)
    assert "<b>new</b>" in page.texts
    assert "<i>x</i>" in page.facts
    assert not {"b", "i"} & set(page.tags)


def test_the_tables_hold_the_numbers(page_of, made_up_run):
    page = page_of(made_up_run(stuck=12, verdict=VERDICT))
    held = "encoder.0.weight: 12 Inf, 1 NaN of 64x64 (float16)"
    assert {f"{held}; 8 more", "1,001 → 1,012", "12", "NaN", "Skipped steps"} <= set(page.texts)
    assert {held, "98 → 999", "8", "1.5"} <= set(page.texts)
    assert page.tags.count("tr") == 3  # skips that are alike have one row


def test_of_several_runs_in_a_file_the_figure_shows_all_and_the_rest_the_latest(
    page_of, made_up_run
):
    run = made_up_run(stuck=12, verdict=VERDICT)
    page = page_of(replace(run, starts=(*run.starts, replace(run.starts[0], step=900))))
    assert "Steps: 112, from 901 on. Skipped: 14 (12.5%)." in page.facts
    assert "998 → 999" in page.texts
    assert {"98 → 999", "1,012"}.isdisjoint(page.texts)
    assert any(text.startswith("The file holds 2 runs") for text in page.texts)
    assert "200" in page.texts  # on the axis of steps


def test_where_the_first_inf_was_made_comes_first(page_of, made_up_run):
    located = Located(
        None, "forward", "", "float16", 12, 0, 64, 1.0, 2.0, None, "log", "train.py:3"
    )
    seen = run_of(*(run_files.watched(step, located) for step in (7, 1_012))).watched
    run = replace(made_up_run(stuck=12, verdict=VERDICT), watched=seen)
    texts = page_of(run).texts
    order = VERDICT[1], str(located), "7 → 1,012", "Over time", "Skipped steps"
    assert [text for text in texts if text in order] == list(order)


def test_of_the_parameter_that_decided_a_verdict_the_shares_are_shown(page_of, made_up_run):
    name = "encoder.5.weight"
    facts = page_of(made_up_run(verdict=("underflow", "What. Why.", name))).facts
    found = made_up_run().samples[-1].parameters[name]
    shares = f"{found.flushed:.1%} flushed, {found.subnormal:.1%} subnormal, {found.zero:.1%} zero"
    assert f"{name} at step 1,000: {shares}. " in facts
    others = page_of(made_up_run(stuck=3, verdict=("nan", "What. Why.", name))).facts
    assert "subnormal" not in others


def test_which_scale_fits_is_shown_only_where_a_scale_may_help(page_of, made_up_run):
    title = "Which loss scale fits"
    verdict = ("underflow", "What. Why.", None)
    assert title in page_of(made_up_run(verdict=verdict)).texts
    assert title not in page_of(made_up_run()).texts
    assert title not in page_of(made_up_run(stuck=3, verdict=VERDICT)).texts


def test_the_picture_grows_with_the_names_it_shows(path, made_up_run):
    heights, picture = [], path.with_suffix(".png")
    for parameters in (3, 30, 300):
        verdict = ("underflow", "What. Why.", None)
        report.write(made_up_run(samples=2, parameters=parameters, verdict=verdict), picture)
        heights.append(size_of_png(picture.read_bytes())[1])
    assert heights[0] <= heights[1] <= heights[2] < 3000


@pytest.mark.covering(1)  # both are drawn from the same figure
@pytest.mark.parametrize("samples", [0, 1, 2000])  # test_bounds.py draws more
@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_any_number_of_samples_can_be_drawn(tmp_path, made_up_run, samples, suffix):
    path = tmp_path / f"report{suffix}"
    report.write(made_up_run(samples=samples, parameters=2), path)
    assert 1000 < path.stat().st_size < 1_000_000


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_whatever_a_run_file_may_hold_can_be_drawn(tmp_path, suffix):
    largest, count, last = 1.7976931348623157e308, 2**63 - 1, 10**11
    seen = {"shares": run_files.shares(*[1.0] * 6), "histogram": (-1100, [count] * 2200)}
    nonfinite = NonfiniteGradient("", (count,) * 8, "", count, count, math.nan)
    parameters = {"": run_files.parameter(0.0, 0.0, 0.0, 0.0, (1100, []))}
    sample, scales = run_files.sample, [(1, 1.0), (2, 2.0**127)]
    start = run_files.start(framework="", every=0, policy={}, time="")
    lines = (
        sample(last - 3, 2.0**-149, scales, last - 3, [], largest, 0.0),
        sample(last, 2.0**127, [], 3, [last - 1, last], -largest, math.inf, **seen),
        sample(5, 1.0, [], 0, [], 0.0, 0.0, **seen, parameters=parameters, worst=["", "gone"]),
        run_files.skip(last, 1.0, math.nan, [nonfinite], count),
        run_files.skip(1, 1.0),
        run_files.verdict(0, "range", "", ""),
    )
    report.write(run_of(start, start, *lines), tmp_path / f"report{suffix}")


def test_letters_that_the_font_lacks_do_not_warn(page_of, made_up_run, tmp_path):
    run = made_up_run(samples=1, names=["名前"])
    report.write(run, tmp_path / "report.png")
    assert "名前" in page_of(run).source


def test_drawing_leaves_the_settings_of_matplotlib_alone(tmp_path, made_up_run):
    import matplotlib

    before = dict(matplotlib.rcParams)
    report.write(made_up_run(samples=1), tmp_path / "report.html")
    assert dict(matplotlib.rcParams) == before


def test_a_report_does_not_load_pyplot(save, made_up_run, path):
    code = (
        "import sys; from gradscaler.__main__ import main; main(sys.argv[1:]); print(*sys.modules)"
    )
    arguments = ["report", save(made_up_run(samples=1)), "-o", str(path.with_suffix(".png"))]
    command = [sys.executable, "-c", code, *arguments]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "matplotlib.figure" in loaded
    assert "matplotlib.pyplot" not in loaded


FILES = {
    "missing": (None, "No such file or directory"),
    "empty": ("", "line 1"),
    "foreign": ('{"name": "x"}\n', "line 1: is not the first line of a gradscaler run"),
    "text": ("hello\n", "line"),
    "control": ('\x1b[31m{"\x07\n', "line"),
}


@pytest.mark.parametrize(("content", "complaint"), FILES.values(), ids=FILES)
@pytest.mark.parametrize("command", ["report", "explain"])
def test_a_bad_file_is_one_line_with_exit_status_1(path, capsys, content, complaint, command):
    target = path.with_name("report.html")
    target.write_text("kept")
    if content is not None:
        path.write_text(content)
    output = ["-o", str(target)] if command == "report" else []
    assert main([command, str(path), *output]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err[:-1].isprintable()
    assert f"{path}: " in err
    assert complaint in err
    assert target.read_text() == "kept"


@pytest.mark.parametrize(
    ("dtype", "name", "complaint"),
    [
        ("float16", "report.pdf", "report.pdf: the name must end in .html or .png"),
        ("float16", "none/report.html", "none/report.html: No such file or directory"),
        ("float4", "report.html", "'float4'"),
    ],
)
def test_what_cannot_be_drawn_is_one_line_with_exit_status_1(
    path, capsys, save, made_up_run, dtype, name, complaint
):
    run = made_up_run(samples=1)
    source = save(replace(run, starts=(replace(run.starts[0], dtype=dtype),)))
    target = path.parent / name
    assert main(["report", source, "-o", str(target)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert complaint in err
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_drawing_leaves_the_old_report(tmp_path, made_up_run, monkeypatch):
    target = tmp_path / "report.html"
    target.write_text("kept")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        report.write(made_up_run(samples=1), target)
    assert target.read_text() == "kept"


def test_without_matplotlib_the_command_says_what_to_install(
    tmp_path, capsys, save, made_up_run, monkeypatch
):
    source = save(made_up_run(samples=1))
    for name in ("_page", "_picture", "_figures"):
        monkeypatch.delitem(sys.modules, f"gradscaler.diagnose.report.{name}")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", source, "-o", str(tmp_path / "report.html")]) == 1
    assert install_command("diagnose") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (65536.0, "65,536"),
        (4194304.0, "4,194,304"),
        (2.0**40, "2⁴⁰"),
        (2.0**-24, "2⁻²⁴"),
        (0.5, "0.5"),
        (1.0, "1"),
        (0.0, "0"),
        (2.34567, "2.346"),
        (1e-312, "1e-312"),
        (math.inf, "Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "NaN"),
    ],
)
def test_numbers_are_short(value, text):
    run = run_of(run_files.skip(1, 1.0, value))
    assert line_of(explained(run), "loss  ").split()[-1] == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0%"), (1e-9, "<0.1%"), (0.001, "0.1%"), (0.1234, "12.3%"), (1.0, "100.0%")],
)
def test_only_zero_is_shown_as_0_percent(share, text):
    shares = [run_files.shares(value, 0.0, 0.0, 0.0, 0.0, 0.0) for value in (0.5, share)]
    samples = [
        run_files.sample(step, 1.0, [], 1, [], None, None, each, (0, []))
        for step, each in enumerate(shares, 1)
    ]
    assert line_of(explained(run_of(*samples)), "zero  ").split()[2:] == ["50.0%", "→", text]
