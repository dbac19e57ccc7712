"""The built site, as ``make site`` leaves it in build/site: links, what it would fetch, a look in Chromium.

Every link of every page leads to a file and a heading; nothing is loaded from elsewhere; no Markdown is left
in the text. In Chromium, where there is one: a phone and a wide screen, light and dark, from the folder
without a server, nothing wider than the screen, no complaint, and a search that finds. Screenshots are left
in the folder that is printed.
"""

import base64
import re
import shutil
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from browser import SCREENS, opened

SITE = Path(__file__).resolve().parents[1] / "build" / "site"
#: Pages that are looked at: the home page, a tutorial, wide tables, pictures, and names.
SHOWN = ["index", "nanogpt", "layouts", "commands", "python/layers", "performance"]
LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Parsed(HTMLParser):
    """Hold a page's links, its ids, what it loads, and its text outside of code."""

    def __init__(self, path):
        super().__init__()
        self.links, self.ids, self.loads, self.text, self._code = [], set(), [], [], 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids |= {values["id"]} if "id" in values else set()
        self._code += tag in ("code", "pre", "script", "style")
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if (
            tag in LOADING
            and values.get(LOADING[tag])
            and values.get("rel") not in ("canonical", "prev", "next")
        ):
            self.loads.append(values[LOADING[tag]])

    def handle_endtag(self, tag):
        self._code -= tag in ("code", "pre", "script", "style")

    def handle_data(self, data):
        if not self._code:
            self.text.append(data)


def faults_of_files():
    """Yield a line for each broken link, each thing loaded from elsewhere, and each rest of Markdown."""
    pages = {path: Parsed(path) for path in SITE.rglob("*.html") if path.name != "404.html"}
    for path, page in pages.items():
        name = path.relative_to(SITE)
        for link in [*page.links, *page.loads]:
            file, _, anchor = link.partition("#")
            if re.match(r"(https?:)?//", link):
                if link in page.loads:
                    yield f"{name}: loads {link}"
                continue
            if re.match(r"(mailto|data|javascript):", link):
                continue
            target = (path.parent / unquote(file)).resolve() if file else path
            if not target.is_file():
                yield f"{name}: {link} leads to no file"
            elif anchor and target in pages and unquote(anchor) not in pages[target].ids:
                yield f"{name}: {link} leads to no heading"
        for rest in re.findall(r"```|\*\*[A-Za-z]|\]\([^)]+\)|\|---", "".join(page.text)):
            yield f"{name}: {rest} is shown raw"
    for path in [*SITE.rglob("*.css"), *SITE.rglob("*.js")]:
        for url in re.findall(
            r"(?:url\(|@import |importScripts\()[\"']?(https?://[^\"')]+)", path.read_text("utf-8")
        ):
            yield f"{path.relative_to(SITE)}: loads {url}"


LOOK = """(() => {
  const wrong = [], width = document.documentElement.clientWidth
  if (document.documentElement.scrollWidth > width + 1) wrong.push("wider than the screen")
  for (const image of document.images) if (!image.naturalWidth) wrong.push("no picture: " + image.src)
  return wrong
})()"""
SEARCH = """new Promise(done => {
  const field = document.querySelector("input[data-md-component=search-query]")
  document.querySelector("#__search").click()  // the index is loaded when the search is opened
  field.focus(); field.value = "zbv"; field.dispatchEvent(new Event("keyup", {bubbles: true}))
  field.dispatchEvent(new Event("input", {bubbles: true}))
  let left = 40
  const look = () => {
    const items = document.querySelectorAll(".md-search-result__item a")
    if (items.length || !left--) done([...items].slice(0, 3).map(item => item.getAttribute("href")))
    else setTimeout(look, 250)
  }
  look()
})"""


def look(name, screen, scheme, picture):
    """Return what is wrong with a page on a screen, and what a search finds there."""
    with opened((SITE / f"{name}.html").as_uri(), screen, scheme) as browser:
        wrong = browser.evaluate(LOOK)
        shot = browser.call("Page.captureScreenshot")
        picture.write_bytes(base64.b64decode(shot["data"]))
        color = browser.evaluate("getComputedStyle(document.body).getPropertyValue('--md-default-bg-color')")
        if (color.strip() in ("#fff", "white", "hsla(0, 0%, 100%, 1)")) != (scheme == "light"):
            wrong.append(f"{scheme} is {color}")
        if not browser.evaluate(SEARCH, awaitPromise=True):
            wrong.append("a search finds nothing")
        own = "file:", "data:", "blob:"
        wrong += browser.complaints(lambda url: url.startswith(own), ("Runtime.exceptionThrown",))
    return wrong


def main():
    wrong = sorted(set(faults_of_files()))
    print("\n".join(wrong[:40]) or f"{len(list(SITE.rglob('*.html')))} pages: links and files ok")
    if not any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")):
        print("not looked at: no Chromium here (apt-get install chromium)")
        return 1 if wrong else 0
    folder = Path(tempfile.mkdtemp(prefix="trilith-site-"))
    for name in SHOWN:
        for screen in SCREENS:
            for scheme in ("light", "dark") if name == "index" else ("light",):
                picture = folder / f"{name.replace('/', '-')}-{screen}-{scheme}.png"
                faults = look(name, screen, scheme, picture)
                print(f"{name} {screen} {scheme}: {'; '.join(map(str, faults[:5])) or 'ok'}")
                wrong += faults
    print(f"screenshots: {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
