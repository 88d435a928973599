"""The report in a real browser: what it draws, that it fits a phone, that no name runs, that nothing is asked for."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_rows import HOSTILE, SKILL, write_experiment
from selenium import webdriver

from attnbench.cli.reading_names import every_finding
from attnbench.report.findings_page import write_findings
from attnbench.report.page import write_report
from attnbench.verdict.claims import NOT_RUN, Decision

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
VIEWS = [(1440, "light"), (1440, "dark"), (390, "light"), (390, "dark")]

browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
driver_path = shutil.which("chromedriver")

# No skip of the whole module, which pytest ends with an error where no other test is asked for.
pytestmark = pytest.mark.skipif(
    browser_path is None or driver_path is None, reason=f"needs one of {', '.join(BROWSERS)}, and chromedriver"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return write_report(write_experiment(tmp_path_factory.mktemp("outputs") / "demo"))


@pytest.fixture(scope="module")
def published(root, tmp_path_factory) -> Path:
    return write_report(root / "docs" / "results" / "battery-h100", target=tmp_path_factory.mktemp("battery"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator:
    options = webdriver.ChromeOptions()
    options.binary_location = browser_path
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    yield driver
    driver.quit()


@pytest.fixture(params=VIEWS, ids=lambda view: f"{view[0]}-{view[1]}")
def view(request, browser, report):
    width, scheme = request.param
    show(browser, report, width, scheme)
    return browser


def show(browser, report: Path, width: int, scheme: str) -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    colours(browser, scheme)
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(report.as_uri())
    wait_until_drawn(browser, scheme)


def colours(browser, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def wait_until_drawn(browser, scheme: str) -> None:
    deadline = time.monotonic() + 30
    while browser.execute_script("return document.documentElement.dataset.drawn") != scheme:
        assert time.monotonic() < deadline, "the charts were not drawn within 30 seconds"
        time.sleep(0.05)


def test_every_chart_is_drawn_and_nothing_complains(view, report):
    marks = view.execute_script(
        "return [...document.querySelectorAll('[data-chart]')].map(node => "
        "[node.dataset.chart, node.querySelectorAll("
        "'svg .role-mark:is(.mark-symbol, .mark-rect, .mark-line) path').length])"
    )
    assert len(marks) == len([*report.parent.glob("figures/*.svg")]) > 5
    assert not [name for name, number in marks if number < 4]
    assert view.get_log("browser") == []


def test_nothing_scrolls_sideways(view, request):
    width, _ = request.node.callspec.params["view"]
    assert too_wide(view, width) == []


def test_a_phone_shows_each_score_of_all_variants_together(browser, report):
    cards = (
        "const shown = [...document.querySelectorAll('table.scores')].filter(node => node.offsetParent !== null);"
        "return shown.map(node => [node.className.includes('by-score'),"
        " Math.max(...[...node.querySelectorAll('tbody tr')].map(row => row.getBoundingClientRect().height))])"
    )
    show(browser, report, 390, "light")
    [(is_by_score, height)] = browser.execute_script(cards)
    assert is_by_score
    assert height < 450
    show(browser, report, 1440, "light")
    [(is_by_score, _)] = browser.execute_script(cards)
    assert not is_by_score


def too_wide(browser, width: int) -> list[str]:
    """Return the elements that reach beyond the page or scroll in a box of their own, folded ones too."""
    browser.execute_script("document.querySelectorAll('details').forEach(node => node.open = true)")
    # Not innerWidth, which grows on a phone with what does not fit.
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    return browser.execute_script(
        "const hidden = '.hidden, svg, thead[class], .many thead';"
        "const scrolls = node => ['auto', 'scroll'].includes(getComputedStyle(node).overflowX);"
        "return [...document.querySelectorAll('main *, nav *')].filter(node => !node.closest(hidden)"
        " && (node.getBoundingClientRect().right > arguments[0] + 1 || scrolls(node)))"
        ".map(node => node.outerHTML.slice(0, 80))",
        width,
    )


LONG = "long" * 60
"""Longer than a line of any page, and without a place to break."""


@pytest.fixture(scope="module")
def pages(root, tmp_path_factory) -> dict[str, Path]:
    """Pages of other kinds: of operators, of findings, of many variants, and of names that no line holds."""
    target, results = tmp_path_factory.mktemp("pages"), root / "docs" / "results"
    with pytest.MonkeyPatch.context() as patch:
        # Figures beside the pages take longest.
        patch.setattr("attnbench.report.charts.style.to_svg", lambda picture, variants: "<svg/>")
        patch.setattr("attnbench.report.charts.style.to_png", lambda svg: b"png")
        made = {
            name: write_report(results / name, target=target / name)
            for name in ("attention-h200", "frontier-h100", "small_factorial-cpu")
        }
        patch.setattr("report_rows.SKILL", {"softmax": 1.0, "linear": 0.72, LONG: 0.97})
        experiment = write_experiment(target / "made")
        for path in experiment.rglob("sample.json"):
            path.write_text(path.read_text().replace("river", LONG))
        made["long"] = write_report(experiment)
        plan = next(it for it in every_finding() if it.name == "parity")
        decision = Decision(plan=plan, word=NOT_RUN, reason=LONG)
        made["findings"] = write_findings([decision], [], target=target / "findings", command=LONG)
    return made


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("page", ["attention-h200", "frontier-h100", "small_factorial-cpu", "long", "findings"])
def test_nothing_scrolls_sideways_on_pages_of_other_kinds(browser, pages, page, width):
    show(browser, pages[page], width, "light")
    assert too_wide(browser, width) == []


@pytest.mark.parametrize("width", [1440, 390])
def test_the_published_battery_is_drawn_and_fits(browser, published, width):
    show(browser, published, width, "light")
    numbers = browser.execute_script(
        "return [...document.querySelectorAll('[data-chart]')].map(node => "
        "node.querySelectorAll('svg .role-mark path').length)"
    )
    assert len(numbers) == len([*published.parent.glob("figures/*.svg")]) > 10
    assert min(numbers) >= 4
    assert too_wide(browser, width) == []
    assert browser.get_log("browser") == []


def test_names_are_shown_and_do_not_run(view):
    assert view.execute_script("return window.executed") is None
    assert HOSTILE in view.execute_script("return document.querySelector('table.scores').textContent")
    assert view.execute_script("return document.querySelectorAll('main b').length") == 0


def test_nothing_is_asked_of_any_network(view):
    assert view.execute_script("return performance.getEntriesByType('resource').length") == 0
    messages = [json.loads(entry["message"])["message"] for entry in view.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    source = view.execute_script("return document.documentElement.outerHTML")
    assert set(re.findall(r"https?://([\w.]+)", source)) <= {"www.w3.org"}


def test_every_text_stands_out_from_its_ground(view):
    """Every text of the page has at least 4.5 to 1 against the page's colour (WCAG AA)."""
    pairs = view.execute_script(
        "const shown = [...document.querySelectorAll('main *, nav *')].filter(node => !node.closest('svg')"
        " && [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()));"
        "const grounds = '.callout, .scores .best, .example span:not(.names)';"
        "const ground = node => getComputedStyle(node.closest(grounds) ?? document.body).backgroundColor;"
        "const pairs = shown.map(node => [getComputedStyle(node).color, ground(node)]);"
        "return [...new Set(pairs.map(pair => pair.join('|')))]"
    )
    assert len(pairs) >= 3
    ratios = {pair: contrast(*pair.split("|")) for pair in pairs}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}


def contrast(text: str, ground: str) -> float:
    bright, dim = sorted((luminance(text), luminance(ground)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def luminance(colour: str) -> float:
    channels = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_charts_follow_the_colours_of_the_reader(browser, report):
    show(browser, report, 1440, "light")
    before = browser.execute_script("return document.querySelector('.role-axis-label text').getAttribute('fill')")
    colours(browser, "dark")
    wait_until_drawn(browser, "dark")
    after = browser.execute_script("return document.querySelector('.role-axis-label text').getAttribute('fill')")
    assert before != after


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_in_bars_stand_out_from_their_part(browser, report, scheme):
    show(browser, report, 1440, scheme)
    pairs = browser.execute_script(
        "const chart = document.querySelector('[data-chart*=part_share] svg');"
        "const texts = [...chart.querySelectorAll('.role-mark.mark-text text')].filter(node => node.textContent);"
        "const bars = [...chart.querySelectorAll('.role-mark.mark-rect path')];"
        "const within = (bar, text) => { const a = bar.getBoundingClientRect(), b = text.getBoundingClientRect();"
        "  const x = (b.left + b.right) / 2, y = (b.top + b.bottom) / 2;"
        "  return a.left <= x && x <= a.right && a.top <= y && y <= a.bottom };"
        "return texts.map(text => [text.getAttribute('fill'),"
        "  bars.find(bar => within(bar, text)).getAttribute('fill')])"
    )
    assert len(pairs) > 8
    assert {
        pair: contrast(*map(channels, pair)) for pair in map(tuple, pairs) if contrast(*map(channels, pair)) < 4.5
    } == {}


def channels(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[index : index + 2], 16)) for index in (1, 3, 5))})"


def test_a_point_tells_its_numbers_and_a_hostile_name_stays_text(browser, report):
    show(browser, report, 1440, "light")
    names = "[...document.querySelectorAll('[data-chart^=copy] svg .mark-symbol.role-mark path')]"
    point = browser.execute_script(
        f"return {names}.find(node => (node.getAttribute('aria-label') || '').includes('executed'))"
    )
    webdriver.ActionChains(browser).scroll_to_element(point).move_to_element(point).perform()
    tooltip = browser.execute_script("return document.querySelector('#vg-tooltip-element').textContent")
    assert HOSTILE in tooltip
    assert "lowest and highest seed" in tooltip
    assert browser.execute_script("return window.executed") is None


def test_a_click_on_the_legend_picks_a_variant_out(browser, report):
    show(browser, report, 1440, "light")
    label = browser.find_element("css selector", "[data-chart] svg .role-legend-label text")
    webdriver.ActionChains(browser).scroll_to_element(label).click(label).perform()
    colours = browser.execute_script(
        "const chart = document.querySelector('.role-legend-label').closest('[data-chart]');"
        "const points = [...chart.querySelectorAll('.mark-symbol.role-mark path')];"
        "const is_faint = node => Number(node.getAttribute('opacity') ?? 1) < 0.3;"
        "return [false, true].map(wanted => [...new Set(points.filter(node => is_faint(node) === wanted)"
        ".map(node => node.getAttribute('fill')))])"
    )
    # Crosses stay as they are.
    assert [bool(colours[0]), len(colours[1])] == [True, len(SKILL) - 1]


def test_a_click_on_a_header_sorts_the_scores(browser, report):
    show(browser, report, 1440, "light")
    column = browser.find_element("xpath", "//table[contains(@class, 'scores')]//th[contains(., 'perplexity')]")
    index = browser.execute_script("return [...arguments[0].parentNode.children].indexOf(arguments[0])", column)

    def shown() -> list[float]:
        texts = browser.execute_script(
            "return [...document.querySelectorAll('table.by-variant tbody tr')].map("
            "row => row.children[arguments[0]].querySelector('.value').textContent)",
            index,
        )
        return [float(text.split()[0]) for text in texts]

    # The best first, which is the least.
    column.click()
    assert shown() == sorted(shown())
    column.click()
    assert shown() == sorted(shown(), reverse=True)
    assert column.get_attribute("aria-sort") == "descending"


def test_a_click_on_a_name_picks_the_variant_out_everywhere(browser, report):
    show(browser, report, 1440, "light")
    browser.find_element("css selector", "button.pick[data-variant=linear]").click()
    faint = "return [...document.querySelectorAll('table.scores tr.faint')].length"
    assert browser.execute_script(faint) == len(SKILL) - 1
    browser.find_element("css selector", "button.pick[data-variant=linear]").click()
    assert browser.execute_script(faint) == 0


@pytest.mark.parametrize(("name", "begins"), [("Markdown", "| variant |"), ("LaTeX", "\\begin{tabular}{l")])
def test_the_scores_are_copied_as_text(browser, report, name, begins):
    show(browser, report, 1440, "light")
    browser.execute_script(
        "document.addEventListener('copy', () => { window.copied = document.activeElement.value }, { once: true })"
    )
    browser.find_element("css selector", f"button[data-copy={name}]").click()
    copied = browser.execute_script("return window.copied")
    assert copied.startswith(begins)
    assert "gated" in copied
