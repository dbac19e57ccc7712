"""Read the pages of the documentation, and find what they name that does not exist: links, commands, keys."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import trilith
import typer.main
from commands_page import every_command
from recipe_page import SECTIONS
from trilith.cli.app import make_app
from trilith.cli.shared.options import FORMER_COMMANDS

ROOT = Path(trilith.__path__[0]).resolve()
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """Hold a page of Markdown, by its path below the root."""

    path: str
    text: str

    @classmethod
    def read(cls, path: str) -> Page:
        """Return a page of this checkout."""
        return cls(path, (ROOT / path).read_text(encoding="utf-8"))

    def __str__(self) -> str:
        return self.path

    def blocks(self, language: str) -> list[str]:
        """Return the fenced blocks in a language, at least one."""
        found = [code for name, code in _FENCE.findall(self.text) if name == language]
        assert found, f"{self.path} has no block of {language}"
        return found

    def has(self, language: str) -> bool:
        """Return whether a fenced block is in this language."""
        return any(name == language for name, _ in _FENCE.findall(self.text))

    def quoted(self) -> list[str]:
        """Return the inline code, each in one line."""
        return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", _FENCE.sub("", self.text))]

    def commands(self) -> list[list[str]]:
        """Return the words after ``trilith`` of each line of a fenced block that begins so, in order."""
        code = "".join(block for _, block in _FENCE.findall(self.text))
        return [shlex.split(line, comments=True) for line in re.findall(r"^ *trilith (.*)$", code, re.M)]

    def started_by_others(self) -> list[list[str]]:
        """Return the words after ``trilith`` of lines in which srun or torchrun starts it."""
        code = "".join(block for _, block in _FENCE.findall(self.text))
        lines = re.findall(r"^ *(?:srun|torchrun) .* trilith (\w.*)$", code, re.M)
        return [shlex.split(line, comments=True) for line in lines]

    def run_python(self) -> dict[str, Any]:
        """Run all blocks of Python as one program; return its names."""
        names: dict[str, Any] = {"__name__": "__main__"}
        for code in self.blocks("python"):
            exec(compile(code, self.path, "exec"), names)
        return names

    def rows(self, heading: str) -> list[list[str]]:
        """Return the cells of the table below a heading, without the table's head."""
        part = self.text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        lines = [line for line in part.splitlines() if line.startswith("| ")][1:]
        assert lines, f"{self.path} has no table below {heading}"
        return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def pages() -> list[Page]:
    """Return every page."""
    docs = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
    return [Page.read(path) for path in ("README.md", "CONTRIBUTING.md", *docs)]


def _anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Page) -> list[str]:
    """Find links to files, or to headings in them, that are not there."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", page.text)):
        name, _, anchor = link.partition("#")
        target = ROOT / page.path if not name else (ROOT / page.path).parent / name
        if re.match(r"https?:", link):
            continue
        if not target.exists() or (anchor and anchor not in _anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


@cache
def _commands() -> dict[str, Any]:
    return dict(every_command(typer.main.get_command(make_app())))


_FORMER = [[name] for name in FORMER_COMMANDS]


def refused_commands(page: Page) -> list[str]:
    """Find command lines, in blocks and in the text, that the command does not accept.

    In the text capitals stand for the reader's own words, and a command may stand without its arguments. A
    command of an earlier version is not accepted, nor is its bare name in the text.
    """
    quoted = [code for code in page.quoted() if re.match(r"trilith (?!.*\b[A-Z]+\b)", code)]
    commands = [*page.commands(), *page.started_by_others()]
    commands += [
        shlex.split(line, comments=True) for line in re.findall(r"&& trilith (.*)$", page.text, re.M)
    ]
    lines = [(words, False) for words in commands if "[OPTIONS]" not in words]
    lines += [(shlex.split(code)[1:], True) for code in quoted]
    refused = [f"{code}: a former name" for code in page.quoted() if code.split()[:1] in _FORMER]
    for words, named in lines:
        names = [" ".join(words[:n]) for n in range(1, len(words) + 1)]
        name = max((name for name in names if name in _commands()), key=len, default=names[0])
        if name in ("--help", "--version"):
            continue
        try:
            _commands()[name].make_context(name, words[len(name.split()) :])
        except Exception as error:
            if not (named and type(error).__name__ == "MissingParameter"):
                refused.append(f"trilith {' '.join(words)}: {error!r}")
    return refused


#: Pages on which ``name = value`` is also an argument of Python or a key of another program.
_OTHER_NAMES = {
    "CONTRIBUTING.md",
    *(
        f"docs/{name}.md"
        for name in ("checkpoints", "converting", "fine_tuning", "gpu", "nanogpt", "your_model")
    ),
}


def _keys() -> dict[str | None, set[str]]:
    """Return the keys of each section of a recipe, the top's under an empty name, and its own sections."""
    sections = re.findall(
        r"^## `?([^`\n]+)`?\n\n<!-- (\w+) -->", Page.read("docs/recipe.md").text, re.MULTILINE
    )
    return {
        "" if title == "The top" else title.strip("[]"): {
            field.alias or name for name, field in SECTIONS[model].model_fields.items()
        }
        for title, model in sections
    }


def _stated(raw: dict[str, Any], section: str = "") -> Iterator[tuple[str | None, str]]:
    """Yield the section and the name of each key of a block, sections as keys of what they stand in too."""
    for key, value in raw.items():
        yield section, key
        for table in value if isinstance(value, list) else [value]:
            if isinstance(table, dict) and (inside := f"{section}.{key}".strip(".")) in _keys():
                yield from _stated(table, inside)


def unknown_keys(page: Page) -> list[str]:
    """Find keys that no recipe has: in blocks of TOML, in commands, and in the text ``section.key`` or
    ``key = value``.
    """
    known, stated = _keys(), list[tuple[str | None, str]]()
    for block in page.blocks("toml") if page.has("toml") else []:
        raw = tomllib.loads(block)
        stated += [] if "rule" in raw else [*_stated(raw)]  # rules of foreign names are no recipe
    quoted = [shlex.split(code)[1:] for code in page.quoted() if code.startswith("trilith train ")]
    for words in [*page.commands(), *page.started_by_others(), *quoted]:
        keys = re.findall(r"^([a-z_.]+)=", "\n".join(words), re.M) if words[0] in ("train", "launch") else []
        stated += [(section, name) for section, _, name in (key.rpartition(".") for key in keys)]
    stated = [key for key in stated if key != ("section", "key")]  # which stand for the reader's own
    for code in page.quoted():
        match = re.fullmatch(r"(?:([a-z_]+)\.)?([a-z_0-9]+)( ?= ?[^=]+)?", code)
        if match is None or match[2] in ("toml", "json"):
            continue
        if match[1] in known or (match[3] and not match[1] and page.path not in _OTHER_NAMES):
            stated.append((match[1], match[2]))
    known[None] = set().union(*known.values())  # a key that is named without its section
    return [f"{section}.{key}" for section, key in stated if key not in known.get(section, ())]


def missing_files(page: Page) -> list[str]:
    """Find paths of files in this checkout, and of tests in them, that are not there."""
    rooms = "|".join(sorted(path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()))
    folders = f"{rooms}|docs|tests|examples|benchmarks"
    named = rf"(?<![\w/.])((?:{folders})/[a-z0-9_/]+\.(?:py|md|toml|txt))(?:::(\w+))?"
    missing = []
    for file, test in re.findall(named, page.text):
        path = ROOT / file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not text or (test and f"def {test}(" not in text and f"\n{test} = " not in text):
            missing.append(f"{file}::{test}" if test else file)
    return missing


#: Programs in blocks whose words nothing here can check: they need a network, or are the reader's own.
_OTHER_PROGRAMS = ("accelerate", "aws", "hf", "mkdir", "mpirun", "sbatch", "vllm", ".")


def wrong_programs(page: Page) -> list[str]:
    """Find lines of blocks that start another program on what is not there: extras of pip, targets of make,
    scripts of Python and torchrun, files and folders of pytest; and programs that no page should need.
    """
    own = re.findall(r"^# (\w+\.py)\b", page.text, re.MULTILINE)  # files that the page shows
    wrong = []
    for language, block in _FENCE.findall(page.text):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        if language != "bash" and not any(re.match(r"(trilith|torchrun|srun|pip) ", line) for line in lines):
            continue
        for line in lines:
            for command in shlex.split(line, comments=True) and re.split(r" && ", line):
                if not _is_there(shlex.split(command, comments=True), own):
                    wrong.append(command)
    return wrong


def _is_there(words: list[str], own: list[str]) -> bool:
    """Return whether the first words of a command line are a program that is known, with what is there."""
    match words:
        case ["trilith", *_]:
            return True  # refused_commands
        case ["torchrun" | "srun", *_] if "trilith" in words:
            return True
        case [program, *_] if program in _OTHER_PROGRAMS:
            return True
        case ["pip", "install", *what]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            extras = {name for word in what for name in re.findall(r"[\w]+(?=[,\]])", word)}
            return extras <= {*project["optional-dependencies"]} and not {"trilith"} & {*what}
        case ["make", target, *_]:
            return f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        case ["pytest", *words]:
            return all((ROOT / word).exists() for word in words if word.startswith("tests"))
        case ["python" | "python3", "-c" | "-m", *_]:
            return True
        case ["python" | "torchrun" | "srun", *words]:
            scripts = [word for word in words if word.endswith(".py")]
            return len(scripts) == 1 and (scripts[0] in own or (ROOT / scripts[0]).is_file())
    return False


def inner_imports(page: Page) -> list[str]:
    """Find imports in blocks of Python that go past a room's door, which is what stays when files move."""
    code = "".join(page.blocks("python")) if page.has("python") else ""
    return re.findall(r"(?:from|import) (trilith\.\w+\.[\w.]+)", code)
