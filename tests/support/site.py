"""Hooks of mkdocs.yml: the home page is README.md, and what pages link to outside of docs is on the site too.

So every fact stands in one file, links work on a code host and on the site, and the site needs no network.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)


def site_path(path: str) -> str:
    """Return where a file of the repository is on the site."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" + ("" if path.endswith(".md") else ".md")


def repository_path(path: str) -> str:
    """Return the file of the repository that a page of the site shows."""
    if path == "index.md":
        return "README.md"
    return path.removeprefix("repository/") if path.startswith("repository/") else f"docs/{path}"


def targets(path: str, text: str) -> Iterator[str]:
    """Yield the files of the repository to which a page links."""
    for part in _FENCE.split(text)[::2]:
        for _, link, _ in _LINK.findall(part):
            if "://" not in link and not link.startswith("mailto:"):
                yield posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def with_site_links(path: str, text: str) -> str:
    """Return a page's Markdown with each link to a file as a link to that file's place on the site."""
    here = posixpath.dirname(site_path(path)) or "."

    def moved(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        return before + posixpath.relpath(site_path(target), here) + after

    parts = _FENCE.split(text)
    parts[::2] = [_LINK.sub(moved, part) for part in parts[::2]]
    return "".join(parts)


def names_in(path: str) -> list[str]:
    """Return the files that a folder's page lists: recipes and pages, where it has some, without code."""
    names = sorted(child.name for child in (ROOT / path).iterdir())
    texts = [name for name in names if name.endswith((".toml", ".md", ".json"))]
    return texts or [name for name in names if name.endswith(".py") and name != "__init__.py"]


def shown(path: str) -> str:
    """Return a file outside of docs as Markdown: a page as it is, other text as code, a folder as a list."""
    file = ROOT / path
    if file.is_dir():
        folder = posixpath.basename(path)
        return f"# {path}\n\n" + "".join(f"- [{name}]({folder}/{name})\n" for name in names_in(path))
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    language = {".py": "python", ".toml": "toml", ".json": "json"}.get(file.suffix, "text")
    return f"# {PurePosixPath(path).name}\n\n````{language}\n{text}````\n"


def repository_pages() -> list[str]:
    """Return the files outside of docs that the site shows: what pages link to, directly or over others."""
    texts = {f"docs/{path.relative_to(ROOT / 'docs')}": path for path in (ROOT / "docs").rglob("*.md")}
    queue, seen = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *texts], list[str]()
    while queue:
        path = queue.pop()
        if path in seen or not (ROOT / path).exists():
            continue
        seen.append(path)
        if (ROOT / path).is_dir():
            queue += [f"{path.rstrip('/')}/{name}" for name in names_in(path)]
        elif path.endswith(".md"):
            queue += targets(path, (ROOT / path).read_text(encoding="utf-8"))
    return sorted(path for path in seen if path == "README.md" or not path.startswith("docs/"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md and what pages link to."""
    from mkdocs.structure.files import File, InclusionLevel

    for path in repository_pages():
        page = File.generated(config, site_path(path), content=shown(path))
        page.inclusion = InclusionLevel.INCLUDED if path == "README.md" else InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


#: What a search shows last: names of code, and tables that other pages explain.
LAST_IN_SEARCH = ("python/", "published_runs.md", "any_model.md")


def on_page_markdown(markdown: str, page: Page, config: Any, files: Any) -> str:
    """Move the links of a page; leave what is not documentation out of the search."""
    if page.file.src_uri.startswith("repository/"):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith(LAST_IN_SEARCH):
        page.meta["search"] = {"boost": 0.2}
    return with_site_links(repository_path(page.file.src_uri), markdown)
