"""Screenshots of every page of build/site, as a phone and a desk see it. Fails where something is wider than the page.

    make screenshots    # or: python -m tools.screenshots --out FOLDER, after `make docs`

What scrolls by itself, such as code and wide tables, may be wider. Needs chromium, and the package playwright.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

WIDTHS = (390, 1440)

# The path of each element of the text that reaches beyond the page and has no ancestor that scrolls.
WIDER = """() => {
  const width = document.documentElement.clientWidth
  const scrolls = e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX)
  const name = e => e.tagName.toLowerCase() + (e.id ? "#" + e.id : [...e.classList].map(c => "." + c).join(""))
  const found = []
  for (const e of document.querySelectorAll(".md-content *")) {
    const box = e.getBoundingClientRect()
    if (!box.width || (box.right <= width + 1 && box.left >= -1)) continue
    const above = []
    for (let p = e.parentElement; p; p = p.parentElement) above.push(p)
    if (!above.some(scrolls)) found.push(`${name(above[0])} > ${name(e)}, to ${Math.round(box.right)} of ${width}`)
  }
  if (document.documentElement.scrollWidth > width) found.push(`page, to ${document.documentElement.scrollWidth}`)
  return found
}"""


def main(argv: Sequence[str] | None = None) -> int:
    """1 where a page has an element that is wider."""
    parser = argparse.ArgumentParser(prog="python -m tools.screenshots", description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, default=Path("build/site"), help="what mkdocs built (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/screenshots"), help="folder (default %(default)s)")
    parser.add_argument("--dark", action="store_true", help="as who prefers dark pages")
    options = parser.parse_args(argv)
    pages = sorted(page for page in options.site.rglob("*.html") if page.name != "404.html")
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not pages:
        parser.error(f"--site: expected pages of mkdocs, got none in {options.site}")
    if browser_path is None:
        parser.error("expected chromium on PATH, got none (apt-get install chromium)")

    from playwright.sync_api import sync_playwright

    count = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for width in WIDTHS:
            scheme = "dark" if options.dark else "light"
            tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            for page in pages:
                name = page.relative_to(options.site).with_suffix("")
                tab.goto(page.resolve().as_uri())
                wider = tab.evaluate(WIDER)
                for element in wider:
                    print(f"{name} at {width}: {element}")
                count += len(wider)
                tab.screenshot(path=options.out / str(width) / f"{name}.png", full_page=True)
        browser.close()
    print(f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} pixels in {options.out}: {count} elements are wider")
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main())
