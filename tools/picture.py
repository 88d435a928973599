"""Write docs/demo.png, the picture in README.md: the table of scores in the report of outputs/demo.

`make picture` runs it after `make demo`; it needs Chromium and its driver.
"""

import sys
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By

ROOT = Path(__file__).resolve().parents[1]
REPORT, PICTURE = ROOT / "outputs" / "demo" / "report" / "index.html", ROOT / "docs" / "demo.png"
MAX_BYTES = 300_000
WIDTH, HEIGHT = 1440, 2400


def main() -> None:
    """Take the picture of the table in the section "All scores"."""
    if not REPORT.exists():
        sys.exit(f"error: {REPORT.relative_to(ROOT)} is not there; make demo writes it")
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"):
        options.add_argument(argument)
    with webdriver.Chrome(options=options) as browser:
        browser.get(REPORT.as_uri())
        heading = browser.find_element(By.XPATH, "//h2[normalize-space()='All scores']")
        heading.find_element(By.XPATH, "./ancestor::section[1]//table").screenshot(str(PICTURE))
    if PICTURE.stat().st_size > MAX_BYTES:
        sys.exit(f"error: {PICTURE.name} has {PICTURE.stat().st_size} bytes, more than {MAX_BYTES}")
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
