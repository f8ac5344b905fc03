"""The page in a real Chromium: it loads nothing, complains of nothing, computes what fedmerit computes."""

import re
import shutil
from importlib import resources

import pytest
from sample import HOSTILE, write_scores

from fedmerit.report.page.html import facts_of, page
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.files import as_csv, document
from fedmerit.scoring.rewards import payouts, shares
from fedmerit.scoring.types import Reports

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"),
]
WIDTHS = (360, 800, 1280)


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def written(run_folder, tmp_path_factory):
    """The page of a run, as a file."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page(run_folder), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser):
    """A function that opens a page and fails the test if it says or loads anything."""
    contexts, said = [], []

    def open_(path, width=1280, scheme="light"):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: said.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        tab.on(
            "request", lambda request: request.url != path.as_uri() and said.append(f"request: {request.url}")
        )
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-drawn=yes]", state="attached")
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert said == []


def paid(tab):
    """What the table of payouts shows: name -> amount, and the foot."""
    rows = tab.eval_on_selector_all(
        "#payouts tbody tr", "rows => rows.map(row => [row.cells[0].textContent, row.cells[2].textContent])"
    )
    foot = tab.eval_on_selector_all(
        "#payouts tfoot tr", "rows => rows.map(row => [row.cells[0].textContent, row.cells[2].textContent])"
    )
    return dict(rows), dict(foot)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_draws_at_every_width_and_scrolls_only_down(written, opened, width, scheme):
    tab = opened(written, width, scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    charts = tab.eval_on_selector_all(
        "[data-chart]",
        "all => all.map(each => [each.clientWidth, each.querySelector('svg').getBoundingClientRect()])",
    )
    assert len(charts) == 4 + 5  # contribution, ranks, quality, sums, and one for each member
    for room, box in charts:
        assert box["height"] > 60
        assert room - 6 <= box["width"] <= room + 1


def test_a_turned_phone_redraws(written, opened):
    tab = opened(written, 360)
    tab.set_viewport_size({"width": 800, "height": 360})
    tab.wait_for_function(
        "document.querySelector('[data-chart=quality] svg').getBoundingClientRect().width > 600", timeout=5000
    )
    assert tab.evaluate("document.documentElement.scrollWidth") <= 800


@pytest.mark.parametrize("rule", ["fair", "shrunk", "fenced", "impartial", "equal"])
def test_payouts_are_those_of_fedmerit_to_the_cent(run_folder, written, opened, rule):
    total = accumulate(facts_of(run_folder).source.rounds)
    divided = shares(total, rule)
    tab = opened(written)
    tab.select_option("#rule", rule)
    budgets = [
        "10000.00",
        "0",
        "0.01",
        "0.07",
        "1",
        "99.9",
        "123456789.01",
        "90071992547409.93",
        "1,234,567.89",
        "1.234.567,8",
        "1\u202f234\u202f567,89",
        "10'000",
        "0,5",
        "9" * 24 + ".99",
    ]
    for budget in budgets:
        tab.fill("#budget", budget)
        expected = payouts(divided, budget)
        amounts, foot = paid(tab)
        assert amounts == {name: f"{amount:,.2f}" for name, amount in expected.items()}
        assert foot == {"unpaid": f"{expected.unpaid:,.2f}", "budget": f"{expected.budget:,.2f}"}
        assert list(amounts) == [
            name for name, _ in sorted(expected.items(), key=lambda one: (-one[1], one[0]))
        ]
        assert tab.evaluate("document.documentElement.scrollWidth") <= 1280


def test_equal_remainders_go_by_name_as_in_fedmerit(opened, tmp_path):
    alpha = [0.3, 0.9, 0.5, 0.4, 0.3]
    names = ("m2", "m3", "m4", "m0", "m1")
    rounds = [Reports(empty=0, grand=2, alone=alpha, without=[2 - x for x in alpha], clients=names, round=1)]
    source, target = tmp_path / "reports.csv", tmp_path / "page.html"
    source.write_text(as_csv(document(rounds)))
    target.write_text(page(source), encoding="utf-8")
    tab = opened(target)
    for budget in ("2.04", "0.03", "1.01", "24.00", "10000.01"):
        tab.fill("#budget", budget)
        expected = payouts(shares(accumulate(rounds), "shrunk"), budget)
        assert paid(tab)[0] == {name: f"{amount:,.2f}" for name, amount in expected.items()}


def test_the_table_of_payouts_is_there_before_any_script_runs(run_folder, written, browser):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(written.as_uri())
    expected = payouts(shares(accumulate(facts_of(run_folder).source.rounds), "shrunk"), "10000.00")
    amounts = tab.locator("#payouts tbody td:nth-child(3)").all_text_contents()
    assert sorted(amounts) == sorted(f"{amount:,.2f}" for amount in expected.values())
    assert tab.locator("noscript").text_content()
    context.close()


@pytest.mark.parametrize(
    "text",
    ["", "abc", "-1", "1.234", "1e9", "1,000", "1 00", "1,00,000.00", ".5", "1.", "NaN", "1" + "0" * 24],
)
def test_what_is_no_budget_is_refused_in_words(written, opened, text):
    tab = opened(written)
    tab.fill("#budget", text)
    assert tab.locator("#problem").text_content()
    assert tab.locator("#payouts").is_hidden()
    assert tab.get_attribute("#budget", "aria-invalid") == "true"
    tab.fill("#budget", "100")
    assert tab.locator("#problem").text_content() == ""
    assert tab.locator("#payouts").is_visible()


def test_a_rule_that_allows_no_payouts_says_why(tmp_path, opened):
    path = tmp_path / "page.html"
    path.write_text(page(write_scores(tmp_path, se=0.5)), encoding="utf-8")
    tab = opened(path)
    assert "This rule allows no payouts here: the positive part" in tab.locator("#problem").text_content()
    tab.select_option("#rule", "equal")
    assert set(paid(tab)[0].values()) == {"2,500.00"}


def test_dark_mode_reaches_the_charts_and_paper_stays_white(written, opened):
    tab = opened(written, scheme="dark")
    fill = "getComputedStyle(document.querySelector('[data-chart=contribution] .mark-rect path')).fill"
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(fill), tab.evaluate(ground)
    tab.emulate_media(color_scheme="light")
    light = tab.evaluate(fill), tab.evaluate(ground)
    assert light == ("rgb(31, 92, 153)", "rgb(255, 255, 255)")
    assert dark == ("rgb(127, 180, 234)", "rgb(22, 22, 24)")
    tab.emulate_media(color_scheme="dark", media="print")
    assert (tab.evaluate(fill), tab.evaluate(ground)) == light


def test_printing_opens_every_table_and_draws_for_paper(written, opened):
    tab = opened(written)
    closed = tab.locator("details:not([open])").count()
    assert closed > 0
    wide = "document.querySelector('[data-chart=quality] svg').getBoundingClientRect().width"
    assert tab.evaluate(wide) > 900
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate(wide) < 700  # drawn anew for paper, not shrunk
    assert tab.locator("details:not([open])").count() == 0
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.locator("details:not([open])").count() == closed
    assert tab.evaluate(wide) > 900
    assert tab.pdf(format="A4").startswith(b"%PDF")


def test_everything_is_reached_by_keyboard_and_shows_it(written, opened):
    tab = opened(written)
    reached = []
    for _ in range(60):
        tab.keyboard.press("Tab")
        found = tab.evaluate(
            "() => { const a = document.activeElement, s = getComputedStyle(a);"
            "return [a.tagName, a.id, s.outlineStyle, parseFloat(s.outlineWidth)] }"
        )
        if found[0] == "BODY":
            break
        assert found[2] != "none", found
        assert found[3] >= 2, found
        reached.append((found[0], found[1]))
    assert [tag for tag, _ in reached].count("A") == 5
    assert [tag for tag, _ in reached].count("SUMMARY") == tab.locator("summary").count()
    assert ("INPUT", "budget") in reached
    assert ("SELECT", "rule") in reached


LONG = "Universitätsklinikum Schleswig-Holstein, Campus Lübeck, Radiolog"


@pytest.mark.parametrize("width", [360, 400, 1200])
def test_no_number_breaks_and_no_name_into_crumbs(tmp_path, opened, width):
    path = tmp_path / "page.html"
    names = ("North", LONG, "x" * 64, "West")
    path.write_text(page(write_scores(tmp_path, names, companion=True)), encoding="utf-8")
    tab = opened(path, width)
    lines = """rows => rows.map(cell => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return [cell.textContent, new Set([...range.getClientRects()].map(box => Math.round(box.top))).size];
    })"""
    for budget in ("1000.00", "9" * 24 + ".99"):
        tab.fill("#budget", budget)
        cells = tab.eval_on_selector_all("#payouts td:not(.bar)", lines)
        assert len(cells) >= 12
        assert [text for text, count in cells if count > 1] == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    named = dict(tab.eval_on_selector_all("#who tbody th", lines))
    assert set(named) == set(names)
    assert named["North"] == 1
    assert named[LONG] <= 5


def test_names_run_nothing(tmp_path, opened):
    path = tmp_path / "page.html"
    path.write_text(page(write_scores(tmp_path, HOSTILE, companion=True)), encoding="utf-8")
    tab = opened(path, 360)
    tab.select_option("#rule", "equal")
    assert tab.evaluate("window.hacked") is None
    assert set(paid(tab)[0]) == set(HOSTILE)
    assert tab.locator("b, img").count() == 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    drawn = tab.locator("[data-chart=contribution]").text_content()
    assert "<script>" in drawn


def test_colours_can_be_told_from_their_ground():
    style = resources.files("fedmerit.report.page").joinpath("page.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"(--[a-z]+): (#[0-9a-f]{6})", block)) for block in style.split("@media screen", 1)
    )

    def luminance(colour):
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one, other):
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for theme in (light, dark):
        for name in ("--ink", "--soft", "--accent", "--below"):  # WCAG AA: text
            assert contrast(theme[name], theme["--paper"]) >= 4.5, name
        assert contrast(theme["--mute"], theme["--paper"]) >= 3  # and what is drawn


def test_figures_have_the_colours_of_the_light_page():
    from fedmerit.report.page.charts import LIGHT

    style = resources.files("fedmerit.report.page").joinpath("page.css").read_text(encoding="utf-8")
    assert (
        LIGHT.items()
        <= dict(re.findall(r"(--[a-z]+): (#[0-9a-f]{6})", style.split("@media screen", 1)[0])).items()
    )
