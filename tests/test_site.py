"""The site: navigation, words, first lines, links to what is outside of docs, the reference of Python names.

``make site`` builds it and looks at the result (tests/support/built_site.py).
"""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest
import python_reference
import yaml
from support.pages import ROOT, Page, broken_links, pages

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
#: Pages that code writes; of the keys of a recipe it writes the tables.
GENERATED = {f"docs/{name}.md" for name in ("commands", "models", "published_runs", "recipe")}
#: The most words of README and the pages written by hand.
MOST_WORDS = 27_000


def navigation(entry):
    """Yield the pages of the navigation, in order."""
    if isinstance(entry, str):
        yield entry
    for part in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else []:
        yield from navigation(part)


def by_hand():
    return [page for page in pages() if page.path not in GENERATED | {"CONTRIBUTING.md"}]


def test_every_page_is_in_the_navigation_once():
    listed = [page for page in navigation(CONFIG["nav"]) if not page.startswith("repository/")]
    here = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(here | {"index.md"})


def test_the_kinds_of_pages_are_the_usual_ones():
    kinds = [name for part in CONFIG["nav"] for name in part]
    assert kinds == ["Start", "Tutorials", "How to", "Reference", "Explanation", "Project"]


def test_pages_by_hand_have_few_words():
    """Tables that code writes into a page do not count."""
    texts = [re.sub(r"<!-- \w+.*?<!-- end -->", "", page.text, flags=re.DOTALL) for page in by_hand()]
    assert sum(len(text.split()) for text in texts) <= MOST_WORDS


@pytest.mark.parametrize("page", [page for page in by_hand() if page.path != "README.md"], ids=str)
def test_the_first_line_says_when_to_use_a_page(page):
    _, first = page.text.split("\n\n")[:2]
    assert re.match(r"(Use|Read|Look|Start|Follow)\b", first)


def test_nothing_on_a_page_shows_raw_on_a_code_host():
    """Only plain Markdown, with one blank line before a list, as the site's parser needs it."""
    for page in pages():
        text = re.sub(r"^ *```.*?^ *```", "", page.text, flags=re.DOTALL | re.MULTILINE)
        assert not re.findall(
            r"^(?:!!!|\?\?\?|:::|=== \")|\{:? ?[.#][\w-]+ ?\}|\[TOC\]", text, re.MULTILINE
        ), page
        assert not re.findall(r"^(?!\s|[-|#>*<\d]).*\S\n[-*] ", text, re.MULTILINE), page


def test_nothing_is_fetched_from_elsewhere():
    assert CONFIG["theme"]["font"] is False and "offline" in CONFIG["plugins"]
    assert not CONFIG["use_directory_urls"]  # plain file names work from a folder
    (worker,) = CONFIG["extra"]["polyfills"]  # the plugin's own would be fetched
    assert (ROOT / "docs" / worker).is_file() and "iframe-worker" in worker
    assert "mermaid" not in "".join(page.text for page in pages())  # its script would be fetched


@pytest.mark.parametrize("path", ["CHANGELOG.md", "SECURITY.md", "AGENTS.md"])
def test_other_pages_that_the_site_shows_have_no_broken_link(path):
    assert broken_links(Page.read(path)) == []


@pytest.mark.parametrize("room", python_reference.rooms())
def test_every_public_name_is_on_its_page_with_what_it_says(room):
    text = (ROOT / "docs" / "python" / f"{room}.md").read_text(encoding="utf-8")
    names = set(re.findall(r"^## `(\w+)`$", text, re.MULTILINE))
    assert all(hasattr(import_module(f"trilith.{room}"), name) for name in names)
    assert text == python_reference.finished(python_reference.page(room)), "make docs"
    empty = re.findall(r"^\| \[`(\w+)`\]\(\S+\) \|  ?\|$", text, re.MULTILINE)
    assert not empty and "| ```" not in text, "neither a docstring nor a comment #: above it"


def test_the_reference_imports_nothing_that_it_describes():
    tree = ast.parse(Path(python_reference.__file__).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.split(".")[0] in ("torch", "trilith", "transformers")]


def test_code_of_others_is_in_the_notices():
    notices = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")
    files = [path for folder in ("docs", "examples") for path in (ROOT / folder).iterdir() if path.is_file()]
    copied = {
        str(path.relative_to(ROOT)): holder
        for path in files
        for holder in re.findall(rb"Copyright \(c\) [\d-]+ \w+ \w+", path.read_bytes())
    }
    assert copied.keys() == {"docs/iframe-worker.js", "examples/nanogpt.py"}
    for name, holder in copied.items():
        assert f"`{name}`" in notices and holder.decode() in notices
    assert "The above copyright notice and this permission notice shall be included" in notices


#: What a stranger asks, and the page and the words that answer it.
QUESTIONS = {
    "how do I train on 8 GPUs": ("docs/layouts.md", "## Train on 8 GPUs"),
    "what is my checkpoint's format": ("docs/checkpoints.md", "safetensors files and one `manifest.json`"),
    "how do I bring a Megatron checkpoint": ("docs/converting.md", "trilith convert iter_0001000"),
    "why did my run exit with 75": ("docs/environment.md", "| 75 | the run was asked to stop"),
    "what does zbv do": ("docs/pipeline.md", "**`zbv`** (zero bubble, V)"),
    "which models": ("docs/models.md", "| `llama` |"),
    "was this tested on GPUs": ("docs/performance.md", "several GPUs, several real hosts"),
    "how good is my model on my texts": ("docs/evaluation.md", "trilith evaluate run held-out"),
    "how do I make my own MoE parallel": ("docs/experts.md", "## Make your own MoE parallel"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_strangers_question_has_its_answer(question):
    path, words = QUESTIONS[question]
    assert words in Page.read(path).text
    assert path.removeprefix("docs/") in list(navigation(CONFIG["nav"]))
