"""Takes the screenshots of the docs from the page of a coordinator, with Debian's Chromium and the extra ``browser``.

    python docs/screenshots.py http://127.0.0.1:7480/ RUN

RUN is a Run of 30 Rounds with six devices that train on the digits. Look at the pictures before you commit them.
"""

import shutil
import sys
from pathlib import Path
from typing import Final

from playwright.sync_api import sync_playwright

ASSETS: Final = Path(__file__).parent / "assets"
PICTURES: Final = {
    "page-run.png": {"viewport": {"width": 1100, "height": 760}, "color_scheme": "light"},
    "page-phone.png": {"viewport": {"width": 390, "height": 760}, "color_scheme": "dark"},
}
"""The options of the browser for each file."""


def main(url: str, run: str) -> None:
    """Write the pictures."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, options in PICTURES.items():
            page = browser.new_page(**options)
            page.goto(f"{url}runs/{run}")
            # The stream of events is open, and the charts are drawn.
            page.wait_for_selector("#link[data-state=on]")
            page.wait_for_selector(".uplot canvas")
            page.wait_for_timeout(500)
            page.screenshot(path=ASSETS / name)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
