"""Write docs/refused.md: what pages written by hand say is refused, by page and heading (``make docs``)."""

import re
from collections.abc import Iterator
from pathlib import Path

#: Pages that code writes, and those that are not about what a user may ask for.
LEFT_OUT = {"commands.md", "models.md", "published_runs.md", "recipe.md", "refused.md"}
LEFT_OUT |= {"new_family.md", "troubleshooting.md"}
_FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_REFUSED = re.compile(r"\brefuse[ds]?\b", re.IGNORECASE)
_NEVER = re.compile(r"\b(?:is|are) never refused\b|not refused\b")
#: Where a sentence ends: not behind "1." or in `code.like.this`.
_SENTENCE = re.compile(r"(?<=[^\d`][.)])\s+(?=[A-Z*`]|\*\*)")

HEAD = """\
# What is refused

Look here for what trilith refuses: each line is from the page and the heading that explain it. A refusal
is one line on standard error, with the place, what was expected, what was found and, where there is one, the
nearest legal value; the [exit code](environment.md#exit-codes) is 2. [What is supported](support.md) lists
what is missing altogether, [models of transformers](any_model.md) why a type is refused.
"""


def headings(text: str) -> Iterator[tuple[str, str]]:
    """Yield each heading of a page with the text below it, without code and tables that code writes."""
    text = _FENCE.sub("", re.sub(r"<!-- \w+.*?<!-- end -->", "", text, flags=re.DOTALL))
    parts = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)
    yield from zip(parts[1::2], parts[2::2], strict=True)


def refusals(heading: str, text: str) -> Iterator[str]:
    """Yield the sentences about refusals below a heading; all of its list where the heading itself is about
    them, and a cell of a table with its row's first cell.
    """
    head: list[str] = []
    for block in re.split(r"\n(?=[-*|] |\n)|\n(?=\|---)", text):
        if block.lstrip().startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", block.strip())[1:-1]]
            for column, cell in zip(head, cells, strict=False):
                if cell.strip("-") and (column == "refused" or _is_about(cell)):
                    yield cell if cell == cells[0] else f"{cells[0]}: {cell}"
            head = head or cells
            continue
        head = []
        words = " ".join(block.split()).removeprefix("- ")
        if "refused" in heading and block.lstrip().startswith("- "):
            yield words
        else:
            yield from (sentence for sentence in _SENTENCE.split(words) if _is_about(sentence))


def _is_about(text: str) -> bool:
    return bool(_REFUSED.search(_NEVER.sub("", text)))


def anchor(heading: str) -> str:
    """Return the anchor that a code host gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def reference(docs: Path) -> str:
    """Write the page, from those in ``docs``."""
    lines = [HEAD]
    for page in sorted(docs.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        listed = [
            f"- [{heading}]({page.name}#{anchor(heading)}): {sentence}"
            for heading, below in headings(text)
            for sentence in refusals(heading, below)
        ]
        if listed and page.name not in LEFT_OUT:
            lines += [f"## {title}\n", *listed, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    Path("docs/refused.md").write_text(reference(Path("docs")), encoding="utf-8")
