"""Takes the pictures of docs/walkthrough.md again, from the report of a run with fault B060 planted.

    pytest parity/ --inject B060 --report red        # about a minute; a second run finds the reference in the cache
    python docs/pictures.py red

Needs playwright and pillow (extra dev) and a Chromium of the system: $BROWSER_BINARY, chromium or google-chrome.
Every picture is one part of the page, cut to its first HEIGHT pixels, in at most 64 colours. Tests: parity/unit/test_docs.py.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path

from PIL import Image

HERE = Path(__file__).resolve().parent / "pictures"
WIDTH, COLOURS = 1280, 64
HIDDEN = "nav { display: none !important }"  # it floats over whatever is below
# name -> (selector of a part of the report, largest height)
PARTS = {"first-screen": ("header", 500), "heat-map": ("#map", 1150), "gate": ("#failures article, #failures .card", 560)}


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, or 2 for bad input."""
    report = Path(arguments[0] if arguments else "red") / "report.html"
    browser_at = os.environ.get("BROWSER_BINARY") or shutil.which("chromium") or shutil.which("google-chrome")
    if not report.is_file() or browser_at is None:
        print(f"error: {report} is no file; next: pytest parity/ --inject B060 --report red" if browser_at else "error: no chromium; next: set BROWSER_BINARY", file=sys.stderr)
        return 2
    from playwright.sync_api import sync_playwright

    HERE.mkdir(exist_ok=True)
    with sync_playwright() as play, play.chromium.launch(executable_path=browser_at, args=["--no-sandbox"]) as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(report.resolve().as_uri())
        page.add_style_tag(content=HIDDEN)
        for name, (selector, height) in PARTS.items():
            shot = Image.open(io.BytesIO(page.locator(selector).first.screenshot()))
            small = shot.crop((0, 0, shot.width, min(height, shot.height))).convert("RGB").quantize(COLOURS)
            small.save(HERE / f"{name}.png", optimize=True)
            print(f"{name}.png: {(HERE / f'{name}.png').stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
