"""The site of ``make docs``: the reference is whole, and no link in it is broken."""

import ast
import html
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from sphinx.util.inventory import InventoryFile

from tests.support.run_files import HEADLINES

ROOT = Path(__file__).parents[2]
SITE = ROOT / "site"
SOURCE = ROOT / "src"
PACKAGES = [
    path
    for path in sorted((SOURCE / "gradscaler").rglob("__init__.py"))
    if not any(part.startswith("_") for part in path.relative_to(SOURCE).parts[:-1])
    and "__all__" in path.read_text()
    and path.parent.name != "policies"  # its names are gradscaler's
]

CODE = re.compile(r'<div class="highlight-(?:python|diff) .*?<pre>(.*?)</pre>', re.DOTALL)


def module_name(path):
    return ".".join(path.relative_to(SOURCE).parts[:-1])


def exported(path):
    """The names in ``__all__``, without an import of the module, which may need a framework."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


@pytest.fixture(scope="module")
def objects():
    """The names that the reference describes, from the file that other sites read them from."""
    data = InventoryFile.loads((SITE / "objects.inv").read_bytes(), uri="")
    return {name for kind, names in data.data.items() if kind.startswith("py:") for name in names}


class Links(html.parser.HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links |= {given[name] for name in ("href", "src") if given.get(name)}


@pytest.fixture(scope="module")
def pages():
    found = [path for path in SITE.rglob("*.html") if "_static" not in path.parts]
    return {path.resolve(): Links(path.read_text()) for path in found}


@pytest.mark.parametrize("path", PACKAGES, ids=module_name)
def test_every_public_name_is_described(objects, path):
    module = module_name(path)
    page = SITE / "reference" / Path(*module.split(".")) / "index.html"
    text = re.sub(r"<[^>]+>", "", page.read_text())
    for name in exported(path):
        theirs = f"{name} is" in text or f"{name} and" in text or "own base classes" in text
        theirs = theirs or re.search(rf"\b{name}\b[^.]*\sare those of\b", text)
        last = {each.rpartition(".")[2] for each in objects if each.startswith(f"{module}.")}
        assert name in last or theirs, f"{module}.{name}"


def test_the_reference_shows_nothing_private(objects):
    private = [name for name in objects if re.search(r"\._(?!_)", name)]
    assert private == []


@pytest.mark.parametrize(
    ("module", "first", "base"),
    [
        ("torch", "GradScaler", "torch.amp.GradScaler"),
        ("jax", "GradScaler", None),
        ("keras", "LossScaleOptimizer", "keras.optimizers.LossScaleOptimizer"),
        ("tf_keras", "LossScaleOptimizer", "BaseLossScaleOptimizer"),
        ("paddle", "GradScaler", "paddle.amp.GradScaler"),
        ("tensorplay", "GradScaler", None),  # has no documentation of its classes to link
    ],
)
def test_a_reference_page_begins_with_the_scaler_and_links_its_base(module, first, base):
    page = (SITE / "reference" / "gradscaler" / module / "index.html").read_text()
    described = re.findall(r'<dt class="sig sig-object py" id="([^"]+)"', page)
    assert described[0] == f"gradscaler.{module}.{first}"
    links = re.findall(r'<p>Bases: (?:.*?)<a class="reference external" href="https:.*', page)
    assert base is None or base in re.sub(r"<[^>]+>", "", links[0])


def test_no_base_is_private():
    for page in (SITE / "reference").rglob("*.html"):
        for bases in re.findall(r"<p>Bases: (.*)", page.read_text()):
            assert not re.search(r"(^|[. ])_[a-z]", re.sub(r"<[^>]+>", "", bases)), page


def search_index():
    data = (SITE / "searchindex.js").read_text()
    return json.loads(data.removeprefix("Search.setIndex(").removesuffix(")"))


def pages_of_stems():
    """The names of the pages that hold each stem of a word."""
    index, found = search_index(), {}
    for terms in (index["terms"], index["titleterms"]):
        for stem, pages in terms.items():
            numbers = pages if isinstance(pages, list) else [pages]
            found.setdefault(stem, set()).update(index["docnames"][each] for each in numbers)
    return found


@pytest.mark.parametrize(
    "query", [["gan"], ["gradient", "accumul"], ["clip"], ["resum"], ["ema"]], ids=" ".join
)
def test_search_finds_the_recipe(query):
    found = pages_of_stems()
    assert "cookbook" in set.intersection(*(found[stem] for stem in query))


@pytest.mark.parametrize("query", ["GAN", "gradient accumulation", "SAM"])
def test_search_finds_the_section_of_the_recipe(query):
    """The page of results lists a section if its title is at most twice as long as the query."""
    titles = search_index()["alltitles"]
    assert any(query.lower() in t.lower() and len(t) <= 2 * len(query) for t in titles)


def test_every_picture_has_a_text_for_readers_who_cannot_see_it():
    for page in SITE.rglob("*.html"):
        for picture in re.findall(r"<img [^>]+>", page.read_text()):
            assert re.search(r'alt="[^"]+(?<!\.png)"', picture), f"{page}: {picture}"


def test_types_are_shown(objects):
    page = (SITE / "reference/gradscaler/torch/index.html").read_text()
    signature = re.sub(r"<[^>]+>", "", page)
    assert re.search(r"scale\(outputs:\s", signature) or re.search(r"scale\(.*: ", signature)


def test_every_link_leads_to_a_file_and_an_anchor_of_the_site(pages):
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            missing = not target.exists()
            if not missing and parts.fragment and target in pages:
                missing = unquote(parts.fragment) not in pages[target].anchors
            if missing:
                broken.append(f"{path.relative_to(SITE.resolve())}: {link}")
    assert broken == []


def test_every_page_is_built():
    for page in (ROOT / "docs").rglob("*.md"):
        built = (SITE / page.relative_to(ROOT / "docs")).with_suffix(".html")
        assert built.exists(), page


@pytest.mark.parametrize("kind", HEADLINES)
def test_the_gallery_has_a_report_on_a_training_for_each_kind_of_finding(pages, kind):
    gallery, report = SITE / "gallery.html", SITE / "gallery" / f"{kind}.html"
    assert f"gallery/{kind}.html" in pages[gallery.resolve()].links
    shown = html.unescape(report.read_text())
    assert f"<h1>{HEADLINES[kind][1]}</h1>" in shown
    assert "Script: docs/gallery.py. Started: " in shown


def test_the_library_s_code_is_shown_by_the_reference_and_not_downloaded():
    ours = {path.name for path in SOURCE.rglob("*.py")}
    assert [path.name for path in (SITE / "_downloads").rglob("*.py") if path.name in ours] == []


def test_code_fits_into_80_columns():
    wide = []
    for path in SITE.rglob("*.html"):
        if path.relative_to(SITE).parts[0] not in ("_static", "reference"):
            for code in CODE.findall(path.read_text()):
                text = html.unescape(re.sub(r"<[^>]+>", "", code))
                most = 100 if path.name == "reports.html" else 80  # scripts, and lines beside them
                wide += [(path.name, line) for line in text.splitlines() if len(line) > most]
    assert wide == []


def test_no_power_is_taken_for_bold_text():
    for page in (ROOT / "docs").rglob("*.md"):
        built = (SITE / page.relative_to(ROOT / "docs")).with_suffix(".html")
        assert re.findall(r"\d<strong>.{,30}", built.read_text()) == [], page


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
MEASURE = """<pre></pre><script>
const wider = (selector) => (page) =>
  [...page.querySelectorAll(selector)].some((box) => box.scrollWidth > box.clientWidth);
const breaksInsideWords = (selector) => (page) => {
  const texts = [...page.querySelectorAll(selector)].flatMap((code) => [...code.childNodes]);
  return texts.some((text) =>
    [...(text.nodeValue ?? "").matchAll(/[A-Za-z]+/g)].some((word) => {
      const range = page.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      return range.getClientRects().length > 1;
    }));
};
const inRows = (selector) => (page) =>
  [...page.querySelectorAll(selector)].some((set) =>
    new Set([...set.querySelectorAll(":scope > label")].map((tab) => tab.offsetTop)).size > 1);
(async () => {
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.style.width = "WIDTHpx";
    frame.src = page;
    document.body.append(frame);
    await new Promise((loaded) => { frame.onload = loaded; });
    if ((FAULT)(frame.contentDocument)) document.querySelector("pre").append(`${page}\\n`);
    frame.remove();
  }
  document.title = "measured";
})();
</script>"""
WIDER_THAN_THEIR_PLACE = [
    (390, 'wider(".content")'),  # on a phone, tables, code and wide pictures scroll by themselves
    (1400, 'wider(".content, article .table-wrapper")'),
]


def pages_with(fault, width, pages, folder):
    """The pages that show a fault in a browser of this width."""
    measure = folder / "measure.html"
    places = json.dumps([path.as_uri() for path in pages])
    script = MEASURE.replace("WIDTH", str(width)).replace("FAULT", fault)
    measure.write_text(script.replace("PAGES", places))
    options = "--headless=new --no-sandbox --disable-gpu --allow-file-access-from-files"
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [BROWSER, *options.split(), profile, "--virtual-time-budget=300000", "--dump-dom"]
    result = subprocess.run(
        [*command, measure.as_uri()], capture_output=True, text=True, timeout=300, check=True
    )
    assert "<title>measured</title>" in result.stdout
    return re.findall(r"<pre>(.*?)</pre>", result.stdout, re.DOTALL)[0].splitlines()


@pytest.mark.skipif(not BROWSER, reason="no Chromium or Chrome is on PATH")
@pytest.mark.parametrize(("width", "fault"), WIDER_THAN_THEIR_PLACE, ids=["phone", "wide window"])
def test_nothing_is_wider_than_its_place(width, fault, pages, tmp_path):
    assert pages_with(fault, width, pages, tmp_path) == []


@pytest.mark.skipif(not BROWSER, reason="no Chromium or Chrome is on PATH")
@pytest.mark.parametrize("width", [390, 1400])
def test_no_name_in_a_table_breaks_inside_a_word(width, pages, tmp_path):
    fault = 'breaksInsideWords("article :is(td, th) code .pre")'
    assert pages_with(fault, width, pages, tmp_path) == []


@pytest.mark.skipif(not BROWSER, reason="no Chromium or Chrome is on PATH")
def test_the_tabs_of_all_frameworks_stay_in_one_row_on_a_phone(tmp_path):
    tabbed = [path for path in SITE.glob("*.html") if "sd-tab-set" in path.read_text()]
    assert len(tabbed) >= 2
    assert pages_with('inRows(".sd-tab-set")', 390, tabbed, tmp_path) == []
