"""Write docs/demo.png, the picture in README.md: the first screen of the report of outputs/demo.

`make picture` runs it after `make demo`; it needs Chromium and its driver.
"""

import sys
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).resolve().parents[1]
REPORT, PICTURE = ROOT / "outputs" / "demo" / "report" / "index.html", ROOT / "docs" / "demo.png"
MAX_BYTES = 300_000
SECONDS = 60
"""Longest time to draw the charts."""
WIDTH, HEIGHT = 1440, 1650


def main() -> None:
    """Take the picture of what a reader sees first, once the charts are drawn."""
    if not REPORT.exists():
        sys.exit(f"error: {REPORT.relative_to(ROOT)} is not there; make demo writes it")
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"):
        options.add_argument(argument)
    with webdriver.Chrome(options=options) as browser:
        browser.get(REPORT.as_uri())
        drawn = "return document.documentElement.dataset.drawn"
        WebDriverWait(browser, SECONDS).until(lambda it: it.execute_script(drawn))
        browser.save_screenshot(str(PICTURE))
    if PICTURE.stat().st_size > MAX_BYTES:
        sys.exit(f"error: {PICTURE.name} has {PICTURE.stat().st_size} bytes, more than {MAX_BYTES}")
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
