"""The page in a real Chromium: it loads nothing, complains of nothing, computes what fedmerit computes."""

import re
import shutil

import pytest

from fedmerit.ledger.decisions import Terms
from fedmerit.report.comparison import compared
from fedmerit.report.page.html import facts_of, page, render_comparison
from fedmerit.report.statement import MOST_LINES, as_html
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.amounts import payouts
from fedmerit.scoring.rewards import shares
from fedmerit.settings import Heading
from pictures import ARGUMENTS, CHROMIUM
from runs import facts_as_decided, record_decision
from sample import HOSTILE, of_alpha, write_csv, write_scores
from tests.report.test_comparison import TRAININGS, reports
from tests.report.test_comparison import written as runs_in

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"),
]
WIDTHS = (360, 800, 1280)
PATIENCE = 240_000
"""Milliseconds for anything in the browser: a busy machine takes its time."""


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def written(run_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page(run_folder), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser):
    """A function that opens a page and fails the test if it says or loads anything."""
    contexts, said = [], []

    def open_(path, width=1280, scheme="light", drawn=True):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        tab = context.new_page()
        tab.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: said.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        tab.on(
            "request", lambda request: request.url != path.as_uri() and said.append(f"request: {request.url}")
        )
        tab.goto(path.as_uri())
        if drawn:  # a statement has no charts
            tab.wait_for_selector("html[data-drawn=yes]", state="attached")
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture
def shown(opened, tmp_path):

    def show(path, width=1280, language="en"):
        target = tmp_path / "page.html"
        target.write_text(page(path, language=language), encoding="utf-8")
        return opened(target, width)

    return show


def paid(tab):
    """What the table of payouts shows: name -> amount, and the foot."""
    cells = "rows => rows.map(row => [row.cells[0].textContent, row.cells[2].textContent])"
    parts = (tab.eval_on_selector_all(f"#payouts {part} tr", cells) for part in ("tbody", "tfoot"))
    return tuple(map(dict, parts))


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_runs_that_are_compared_are_drawn_at_every_width(tmp_path, opened, width, scheme):
    path = tmp_path / "comparison.html"
    found = compared(runs_in(tmp_path, *(reports(one, HOSTILE) for one in TRAININGS)))
    path.write_text(render_comparison(found), encoding="utf-8")
    tab = opened(path, width, scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    charts = tab.eval_on_selector_all(
        "[data-chart]",
        "all => all.map(each => [each.dataset.chart, each.clientWidth, "
        "each.querySelector('svg').getBoundingClientRect().width])",
    )
    assert [name for name, _, _ in charts] == ["scores", "spreads", "ranks", "settling"]
    assert all(room - 6 <= drawn <= room + 1 for _, room, drawn in charts)
    assert tab.evaluate("window.hacked") is None


def test_a_turned_phone_redraws(written, opened):
    tab = opened(written, 360)
    tab.set_viewport_size({"width": 800, "height": 360})
    tab.wait_for_function(
        "document.querySelector('[data-chart=quality] svg').getBoundingClientRect().width > 600"
    )
    assert tab.evaluate("document.documentElement.scrollWidth") <= 800


@pytest.mark.parametrize("rule", ["fair", "fenced", "impartial", "equal"])
def test_payouts_are_those_of_fedmerit_to_the_cent(run_folder, written, opened, rule):
    total = accumulate(facts_of(run_folder).source.rounds)
    divided = shares(total, rule)
    tab = opened(written)
    tab.select_option("#rule", rule)
    budgets = [
        "10000.00", "0", "0.01", "0.07", "1", "99.9", "123456789.01", "90071992547409.93", "1,234,567.89",
        "1.234.567,8", "1\u202f234\u202f567,89", "10'000", "0,5", "9" * 24 + ".99",
    ]  # fmt: skip
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


def test_equal_remainders_go_by_name_as_in_fedmerit(shown, tmp_path):
    rounds = [of_alpha([0.3, 0.9, 0.5, 0.4, 0.3], 2, names=("m2", "m3", "m4", "m0", "m1"), round=1)]
    tab = shown(write_csv(tmp_path, *rounds))
    for budget in ("2.04", "0.03", "1.01", "24.00", "10000.01"):
        tab.fill("#budget", budget)
        expected = payouts(shares(accumulate(rounds), "fenced"), budget)
        assert paid(tab)[0] == {name: f"{amount:,.2f}" for name, amount in expected.items()}


def test_the_table_of_payouts_is_there_before_any_script_runs(run_folder, written, browser):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(written.as_uri())
    facts = facts_of(run_folder)
    expected = shares(accumulate(facts.source.rounds))
    told = tab.locator("#payouts tbody td.share").all_text_contents()
    assert sorted(one.split(" (")[0] for one in told) == sorted(f"{one:.2%}" for _, one in expected.items())
    assert not re.search(r"[0-9]", "".join(tab.locator("#payouts td.amount").all_text_contents()))
    assert tab.locator("noscript").text_content()
    context.close()


@pytest.mark.parametrize(
    "text",
    ["abc", "-1", "1.234", "1e9", "1,000", "1 00", "1,00,000.00", ".5", "1.", "NaN", "1" + "0" * 24],
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


def test_nobody_sees_amounts_of_a_budget_that_nobody_named(written, opened):
    tab = opened(written, 360)
    table = tab.locator("#payouts")
    assert "€" not in table.inner_text()
    assert tab.locator("#payouts td.amount").first.is_hidden()
    assert re.fullmatch(
        r"[\d.]+% \([\d.]+\u2013[\d.]+%\)", tab.locator("#payouts td.share").first.inner_text()
    )
    tab.fill("#budget", "100")
    assert tab.locator("#payouts td.amount").first.is_visible()
    assert paid(tab)[1]["budget"] == "100.00"
    tab.fill("#budget", " ")
    assert tab.locator("#problem").text_content() == ""
    assert tab.locator("#payouts td.amount").first.is_hidden()
    tab.select_option("#rule", "impartial")
    foot = tab.locator("#payouts tfoot tr").first.inner_text().split()
    assert foot[0] == "unpaid"
    assert 0 < float(foot[1].rstrip("%")) < 100


def test_a_rule_that_allows_no_payouts_says_why(tmp_path, shown):
    tab = shown(write_scores(tmp_path, se=0.5))
    assert "This rule allows no payouts here: the positive part" in tab.locator("#problem").text_content()
    tab.select_option("#rule", "equal")
    told = tab.locator("#payouts tbody td.share").all_text_contents()
    assert {one.split(" ")[0] for one in told} == {"25.00%"}


def test_a_heading_sorts_the_standings_by_click_and_by_key(written, opened):
    tab = opened(written)
    names = lambda: tab.locator("#who .sortable tbody th").all_text_contents()  # noqa: E731
    best = names()
    tab.locator("#who .sortable thead th").nth(1).click()
    assert names() == best
    tab.locator("#who .sortable thead th").nth(1).press("Enter")
    assert names() == best[::-1]
    tab.locator("#who .sortable thead th").nth(0).click()
    assert names() == sorted(best)
    assert tab.get_attribute("#who .sortable thead th:nth-child(1)", "aria-sort") == "ascending"


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
    for _ in range(90):
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
    assert [tag for tag, _ in reached].count("A") == 7 + 2  # sections, downloads
    assert [tag for tag, _ in reached].count("SUMMARY") == tab.locator("summary:visible").count()
    assert ("INPUT", "budget") in reached
    assert ("SELECT", "rule") in reached


LONG = "Universitätsklinikum Schleswig-Holstein, Campus Lübeck, Radiolog"


@pytest.mark.parametrize("width", [360, 400, 1200])
def test_no_number_breaks_and_no_name_into_crumbs(tmp_path, shown, width):
    names = ("North", LONG, "x" * 64, "West")
    tab = shown(write_scores(tmp_path, names, companion=True), width)
    lines = """rows => rows.map(cell => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return [cell.textContent, new Set([...range.getClientRects()].map(box => Math.round(box.top))).size];
    })"""
    for budget in ("1000.00", "9" * 24 + ".99"):
        tab.fill("#budget", budget)
        cells = tab.eval_on_selector_all("#payouts td:not(.bar, .why)", lines)
        assert len(cells) >= 12
        assert [text for text, count in cells if count > 1] == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    named = dict(tab.eval_on_selector_all("#who tbody th", lines))
    assert set(named) == set(names)
    assert named["North"] == 1
    assert named[LONG] <= 5


@pytest.fixture(scope="module")
def decided(run_folder, tmp_path_factory):
    """The page of a run with a decision, as a file; and the decision."""
    folder = shutil.copytree(run_folder, tmp_path_factory.mktemp("decided") / "run")
    terms = Terms("1000.00", "expected-accuracy", rule="fenced")
    made, _ = record_decision(folder, terms, heading=Heading("Nodules", currency="EUR"))
    path = folder / "page.html"
    path.write_text(page(folder), encoding="utf-8")
    return path, made


def test_a_trial_is_marked_and_the_decision_comes_back(decided, opened):
    path, made = decided
    tab = opened(path)
    amounts = {name: f"{amount:,.2f}" for name, amount in made.paid.items()}
    assert paid(tab)[0] == amounts
    before = tab.inner_html("#payouts")
    tab.click("details.try summary")
    tab.fill("#budget", "2,000.00")
    assert tab.locator("#trial").is_visible()
    assert paid(tab)[1]["budget"] == "2,000.00"
    tried = tab.locator("#payouts tbody td.wide").all_text_contents()
    assert all(re.fullmatch(r"[\d,.]+\u2013[\d,.]+", one) for one in tried)  # as the page itself writes them
    assert all("\u2013" in one for one in re.findall(r'<td class="wide">(.*?)</td>', before) if one)
    tab.click("#back")
    assert tab.inner_html("#payouts") == before
    assert tab.locator("#trial").is_hidden()
    tab.select_option("#rule", "equal")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")  # paper shows the decision
    assert paid(tab)[0] == amounts


def test_german_amounts_are_read_and_written(tmp_path, shown):
    tab = shown(write_scores(tmp_path), language="de")
    tab.select_option("#rule", "equal")
    tab.fill("#budget", "10.000,02")
    assert sorted(paid(tab)[0].values()) == ["2.500,00", "2.500,00", "2.500,01", "2.500,01"]
    tab.fill("#budget", "10.000.02")
    assert "10.000,00" in tab.locator("#problem").text_content()


def test_a_long_table_is_folded_and_opens_by_keyboard(tmp_path, shown):
    names, alpha = tuple(f"client-{k:02d}" for k in range(40)), [0.001 * k for k in range(40)]
    tab = shown(write_csv(tmp_path, of_alpha(alpha, 0.78, names=names, round=1)), 360)
    visible = "rows => rows.filter(row => row.offsetHeight).length"
    for table in ("#payouts", "#who table"):
        rows = f"{table} tbody tr:not(.fold)"
        assert tab.eval_on_selector_all(rows, visible) == 25
        tab.focus(f"{table} .fold button")
        tab.keyboard.press("Enter")
        assert tab.eval_on_selector_all(rows, visible) == 40
        assert tab.get_attribute(f"{table} .fold button", "aria-expanded") == "true"
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read_against_its_ground(decided, opened, scheme):
    tab = opened(decided[0], scheme=scheme)
    tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    found = tab.evaluate("""() => {
        const parts = (text) => text.match(/[0-9.]+/g).map(Number);
        const linear = (part) =>
            part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
        const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
        const over = ([r, g, b, a = 1], under) => [r, g, b].map((part, k) => a * part + (1 - a) * under[k]);
        const ground = (element) => {
            const paint = parts(getComputedStyle(element).backgroundColor);
            if (element === document.body) return paint;
            return over(paint, ground(element.parentElement));
        };
        const read = [...document.body.querySelectorAll("*")].filter((each) =>
            !each.closest("svg, script") && each.offsetHeight && [...each.childNodes].some((node) =>
                node.nodeType === 3 && node.textContent.trim()));
        return read.map((each) => {
            const [one, other] = [light(parts(getComputedStyle(each).color)), light(ground(each))];
            const [low, high] = [Math.min(one, other), Math.max(one, other)];
            return [each.textContent.slice(0, 40), (high + 0.05) / (low + 0.05)];
        });
    }""")
    assert len(found) > 200
    assert [one for one in found if one[1] < 4.5] == []  # WCAG AA


def test_every_chart_has_words_and_a_table_in_its_part(decided, opened):
    tab = opened(decided[0])
    charts = tab.eval_on_selector_all(
        "[data-chart]",
        "all => all.map(one => [one.getAttribute('role'), one.getAttribute('aria-label'),"
        "one.closest('section').querySelectorAll('table').length])",
    )
    assert len(charts) > 5
    for role, label, tables in charts:
        assert role == "img"
        assert len(label) > 20
        assert tables >= 1
    unnamed = "all => all.filter(one => !one.textContent.trim() && !one.getAttribute('aria-label')).length"
    assert tab.eval_on_selector_all("a, button, summary, th[scope]", unnamed) == 0
    assert tab.locator("input, select").count() == tab.locator("label").count() == 2


def test_names_run_nothing(tmp_path, shown):
    tab = shown(write_scores(tmp_path, HOSTILE, companion=True), 360)
    tab.select_option("#rule", "equal")
    assert tab.evaluate("window.hacked") is None
    assert set(paid(tab)[0]) == set(HOSTILE)
    assert tab.locator("b, img").count() == 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    drawn = tab.locator("[data-chart=contribution]").text_content()
    assert "<script>" in drawn


PAPER = 688
"""Pixels between the margins of A4, across; 1001 down."""
NAMES = (LONG, "Donaudampfschifffahrtsgesellschaftskrankenhaus", "Harbour", "Kantonsspital Basel")


def on_paper(tab):
    tab.set_viewport_size({"width": PAPER, "height": 1001})
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")


def test_nothing_is_cut_off_on_paper(tmp_path, shown, decided, opened):
    long_names = write_scores(tmp_path, NAMES, companion=True)
    for tab in (shown(long_names, language="de"), opened(decided[0])):
        on_paper(tab)
        assert tab.evaluate("document.documentElement.scrollWidth") <= PAPER
        right = "all => Math.max(...all.map(one => one.getBoundingClientRect().right))"
        assert tab.eval_on_selector_all("table, th, td, .chart, p", right) <= PAPER + 1


def test_paper_has_no_form_no_split_table_and_settings_on_its_last_page(decided, opened):
    tab = opened(decided[0])
    on_paper(tab)
    seen = "all => all.filter(one => one.offsetHeight).length"
    assert tab.eval_on_selector_all("input, select, button, nav", seen) == 0
    style = "all => [...new Set(all.map(one => getComputedStyle(one)[{!r}]))]"
    assert tab.eval_on_selector_all("table, .small > div", style.format("breakInside")) == ["avoid"]
    assert tab.eval_on_selector_all("tfoot", style.format("display")) == ["table-row-group"]
    assert tab.eval_on_selector_all(".settings", style.format("breakBefore")) == ["page"]
    ends = (
        "[document.querySelector('.settings').getBoundingClientRect().top, document.querySelector('footer')"
    )
    top, bottom = tab.evaluate(ends + ".getBoundingClientRect().bottom]")
    assert bottom - top < 1001  # pixels between the margins of A4, down
    assert tab.evaluate("document.querySelector('main').lastElementChild.id") == "appendix"
    size = "all => [...new Set(all.map(one => parseFloat(getComputedStyle(one).fontSize)))]"
    (body,) = tab.eval_on_selector_all("body", size)
    assert max(tab.eval_on_selector_all(".quiet, figcaption, td, th", size)) <= body  # small print is small


def test_long_names_leave_room_for_the_reasons_and_short_ones_stay_whole(tmp_path, shown):
    long_names = write_scores(tmp_path, NAMES, companion=True)
    tab = shown(long_names, language="de")
    room = tab.eval_on_selector("#paid .scroll", "one => [one.scrollWidth, one.clientWidth]")
    assert room[0] <= room[1]
    tab = shown(long_names, 390, language="de")
    lines = """all => all.map(one => {
        const range = document.createRange();
        range.selectNodeContents(one);
        return [one.textContent, range.getClientRects().length];
    })"""
    assert tab.eval_on_selector_all("#payouts tbody th.short", lines) == [["Harbour", 1]]
    bars = tab.eval_on_selector_all("#payouts tbody .bar svg", "all => all.map(one => one.clientWidth)")
    assert len(bars) == 4
    assert min(bars) > 20


def test_a_statement_of_many_rounds_prints_on_two_pages(tmp_path, opened):
    from linear_federation import Federation

    run = Federation(tmp_path, 4, MOST_LINES, settings={"scoring": {"method": "settled"}}).run()
    record_decision(run.folder, Terms("1000.00", run.config.scoring.utilities[0], score="PHI"))
    facts = facts_as_decided(run.folder)
    path = tmp_path / "statement.html"
    path.write_text(as_html(facts, "client-1"), encoding="utf-8")
    tab = opened(path, 390, drawn=False)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert tab.locator("tbody tr").count() == MOST_LINES
    printed = tab.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 2
