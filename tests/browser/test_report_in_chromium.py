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

from attnbench.report.page import write_report

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


def test_the_page_fits_and_what_is_wider_scrolls_in_its_own_box(view, request):
    # Not innerWidth, which grows on a phone with what does not fit.
    width, _ = request.node.callspec.params["view"]
    # Opened, so that the tables inside count too.
    view.execute_script("document.querySelectorAll('details').forEach(node => node.open = true)")
    assert view.execute_script("return document.documentElement.scrollWidth") <= width
    wide = view.execute_script(
        "return [...document.querySelectorAll('main *')].filter(node => !node.closest('.scroll > *, .hidden, svg')"
        " && node.getBoundingClientRect().right > arguments[0] + 1).map(node => node.outerHTML.slice(0, 80))",
        width,
    )
    assert wide == []


@pytest.mark.parametrize("width", [1440, 390])
def test_the_published_battery_is_drawn_and_fits(browser, published, width):
    show(browser, published, width, "light")
    numbers = browser.execute_script(
        "return [...document.querySelectorAll('[data-chart]')].map(node => "
        "node.querySelectorAll('svg .role-mark path').length)"
    )
    assert len(numbers) == len([*published.parent.glob("figures/*.svg")]) > 10
    assert min(numbers) >= 4
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.get_log("browser") == []


def test_names_are_shown_and_do_not_run(view):
    assert view.execute_script("return window.executed") is None
    assert HOSTILE in view.execute_script("return document.querySelector('table.summary').textContent")
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
        "const ground = node => getComputedStyle(node.closest('.callout') ?? document.body).backgroundColor;"
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
    names = "[...document.querySelectorAll('[data-chart] svg .mark-symbol.role-mark path')]"
    point = browser.execute_script(
        f"return {names}.find(node => (node.getAttribute('aria-label') || '').includes('executed'))"
    )
    webdriver.ActionChains(browser).scroll_to_element(point).move_to_element(point).perform()
    tooltip = browser.execute_script("return document.querySelector('#vg-tooltip-element').textContent")
    assert HOSTILE in tooltip
    assert "95 % interval" in tooltip
    assert browser.execute_script("return window.executed") is None


def test_a_click_on_the_legend_picks_a_variant_out(browser, report):
    show(browser, report, 1440, "light")
    label = browser.find_element("css selector", "[data-chart] svg .role-legend-label text")
    webdriver.ActionChains(browser).scroll_to_element(label).click(label).perform()
    faint = browser.execute_script(
        "return [...document.querySelector('[data-chart] svg').querySelectorAll('.mark-symbol.role-mark path')]"
        ".filter(node => Number(node.getAttribute('opacity') ?? 1) < 0.5).length"
    )
    # The first chart has a point a variant.
    assert faint == len(SKILL) - 1
