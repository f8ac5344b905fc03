"""The documentation as a site: complete, true where it states properties, and needing no network."""

import re
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import fedmerit as fm
from fedmerit.protocol.messages import EXCHANGES
from fedmerit.secagg.setting import STAGES
from pictures import ARGUMENTS, CHROMIUM

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` does, elsewhere."""
    pytest.importorskip("zensical", reason="the documentation needs: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "examples/tutorials", "experiments/FINDINGS.md", "zensical.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    (folder / "src").symlink_to(ROOT / "src")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "site"


def pages_of(nav):
    for entry in nav:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else pages_of(target)


def test_every_page_is_in_the_navigation_and_the_other_way_round():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    listed = list(pages_of(nav))
    assert len(listed) == len(set(listed))
    assert set(listed) == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


def test_the_site_is_built_without_a_warning_and_loads_nothing_from_outside(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    loading = re.compile(
        r"<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*?\b(?:src|data)=\"?(?:https?:)?//"
        r"|<link\b[^>]*?\bhref=\"?(?:https?:)?//"
    )
    for page in pages:
        assert not loading.search(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet
    assert not (site / "building").exists()


def test_formulas_are_drawn_and_docstrings_hold_no_markup_of_another_language(site):
    for page in (site / "scores").glob("*.html"):
        assert "<math" in page.read_text(), page
    api = (site / "api.html").read_text()
    assert api.count("<math") > 15
    assert ".. math" not in api
    assert "<blockquote" not in api  # what an example's >>> would become
    assert not re.search(r":(?:func|class|math|meth):", api)


def test_the_tutorials_are_their_scripts(site):
    for page, script in (("existing", "score_existing"), ("rehearsal", "rehearse_consortium")):
        text = re.sub(r"<[^>]+>", "", (site / f"tutorials/{page}.html").read_text())
        source = (ROOT / f"examples/tutorials/{script}.py").read_text()
        for heading in re.findall(r"^# ## (.+)$", source, flags=re.MULTILINE):
            assert heading in text
        assert "# ##" not in text
        assert "folder.mkdir(parents=True" in text


FOUND = {
    "regression": "bring-your-own.html#regression-rmse",
    "install": "install.html",
    "excel": "questions.html#we-only-have-excel",
    "quickstart": "running.html#quickstart",
    "keras": "questions.html#tensorflow-keras",
    "windows": "install.html#windows",
    "docker": "install.html#docker",
    "GPU": "install.html",
    "GDPR": "data-protection.html",
    "withdraw": "questions.html#can-a-member-withdraw",
    "appeal": "questions.html#can-a-member-appeal",
    "pandas": "json.html#in-python",
    "reversed": "questions.html#what-does-the-status-reversed",
    "dropout": "questions.html#what-about-dropouts",
    "negative": "questions.html#a-negative-contribution",
}
"""What newcomers type -> where one of the first three results leads."""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")
def test_pages_open_from_a_disk_and_the_search_works_there(site):
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        context = browser.new_context(offline=True, viewport={"width": 360, "height": 800})
        context.set_default_timeout(240_000)  # a busy machine takes its time
        tab, said = context.new_page(), []
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda sent: sent.url.startswith(("file:", "data:")) or said.append(sent.url))
        for name in ("index", "api", "tutorials/existing", "scores/ee"):
            tab.goto((site / f"{name}.html").as_uri())
            wide = "document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
            assert tab.evaluate(wide) <= 0, f"{name} is wider than a phone"
        tab.set_viewport_size({"width": 1280, "height": 900})
        tab.goto((site / "scores/ee.html").as_uri())
        tab.locator("button.md-search__button").click()
        tab.get_by_role("combobox", name="Search").fill("reversed")
        tab.get_by_text(re.compile(r"\d+ results")).wait_for()
        for word, page in FOUND.items():
            tab.get_by_role("combobox", name="Search").fill(word)
            tab.locator(f"li:nth-child(-n+3) > [role=option][href*='{page}']").first.wait_for()
        browser.close()
    assert said == []


# What the pages state, held against the code.


def games(count=40, n=4):
    """Random games whose clients 0 and 1 are alike and whose client 3 is a null player."""
    rng = np.random.default_rng(5)
    for _ in range(count):
        values = np.empty(1 << n)
        by_kind = {}
        for coalition in range(1 << n):
            kind = ((coalition & 1) + (coalition >> 1 & 1), coalition >> 2 & 1)  # 3 changes nothing
            values[coalition] = by_kind.setdefault(kind, rng.uniform(0.1, 0.9))
        yield fm.Table(values)


def of_reports(score):
    return lambda table: score(fm.Reports.from_table(table))


VALUES = {
    "LOO": of_reports(lambda r: fm.loo(r).values),
    "IOI": of_reports(lambda r: fm.ioi(r).values),
    "ALPHA": of_reports(lambda r: fm.alpha(r).values),
    "FP": of_reports(lambda r: fm.fp(r).values),
    "EE": of_reports(lambda r: fm.ee(r).values),
    "EE, raw": of_reports(lambda r: fm.ee(r).raw),
    "SURPLUS": of_reports(lambda r: fm.surplus(r).values),
    "SV": lambda table: fm.shapley(table).values,
    "MR-SV": lambda table: fm.multi_round([table]).values,
    "BANZHAF": lambda table: fm.banzhaf(table).values,
}
TABLE = re.findall(
    r"^\| \[([^\]]+)\]\((\w+\.md)\) \| (.+?) \| (yes|no) \| (yes|no) \| (yes|no) \| (yes|no|-) \|$",
    (DOCS / "scores/index.md").read_text(),
    flags=re.MULTILINE,
)


def said(holds):
    return "yes" if holds else "no"


def leaves_own_number_alone(name):
    """Whether member 0's number stays, whatever member 0 reports."""
    score = {"EE, raw": lambda r: fm.ee(r).raw}.get(name) or (lambda r: fm.SCORES[name].function(r).values)
    truth = fm.Reports(empty=0.1, grand=0.7, alone=[0.2, 0.3, 0.4], without=[0.5, 0.6, 0.3])
    lie = fm.Reports(empty=0.1, grand=0.7, alone=[0.7, 0.3, 0.4], without=[0.1, 0.6, 0.3])
    return abs(score(truth)[0] - score(lie)[0]) < 1e-12


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_the_table_of_properties_is_true(row):
    name, page, adds, alike, null, linear, alone = row
    score = VALUES[name]
    tables = list(games())
    found = [score(table) for table in tables]
    assert said(all(np.isclose(x[0], x[1]) for x in found)) == alike
    assert said(all(abs(x[3]) < 1e-9 for x in found)) == null
    both = [score(fm.Table(a.values + b.values)) for a, b in pairwise(tables)]
    sums = [a + b for a, b in pairwise(found)]
    assert said(all(np.allclose(x, y) for x, y in zip(both, sums, strict=True))) == linear
    to_gain = all(np.isclose(x.sum(), table.gain) for x, table in zip(found, tables, strict=True))
    to_grand = all(np.isclose(x.sum(), table.values[-1]) for x, table in zip(found, tables, strict=True))
    expected = "the gain" if to_gain else "v(M)" if to_grand else "nothing fixed"
    assert adds.replace("the mean gain", "the gain") == expected
    assert (said(leaves_own_number_alone(name)) if alone != "-" else "-") == alone
    assert (DOCS / "scores" / page).exists()


def test_every_score_has_a_row_or_a_page_and_every_page_its_parts():
    assert {row[0] for row in TABLE} == set(VALUES)
    assert set(fm.SCORES) - set(VALUES) == {"SOLO", "COS", "COS-MODEL", "PHI"}
    for page in (DOCS / "scores").glob("*.md"):
        if page.name != "index.md":
            for part in ("$$", "**Source.**", "**Needs.**", "**Keeps.**", "**Breaks.**", "**Misleads when**"):
                assert part in page.read_text(), f"{page.name}: {part}"


def test_the_protocol_page_names_all_stages_and_exchanges_in_order():
    page = (DOCS / "protocol.md").read_text()
    first = re.findall(r"^\| (\w+) \|", page.partition("## Integers")[0], flags=re.MULTILINE)
    exchanges = page.partition("## The exchanges")[2].partition("\n## ")[0]
    then = re.findall(r"^\| (\w+) \|", exchanges, flags=re.MULTILINE)
    assert first == ["stage", *STAGES]
    assert then == ["exchange", *EXCHANGES]


def test_every_public_name_is_in_the_reference():
    reference = (DOCS / "api.md").read_text()
    for name in set(fm.__all__) - {"FedmeritError"}:  # it is among all errors
        assert re.search(rf"^::: fedmerit\.[\w.]*\b{name}$", reference, flags=re.MULTILINE), name
