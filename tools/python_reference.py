"""Write docs/python, the public names of every room with signature and docstring: ``make docs``.

Reads the sources with ``ast`` and imports neither torch nor this library.
"""

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "python"
#: Methods of Python and torch that a class has anyway.
_SHOWN_DUNDERS = {"__call__"}


@dataclass(frozen=True)
class Entry:
    """Hold a public name: its file, and the statement that defines it."""

    name: str
    file: Path
    node: ast.stmt


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def rooms() -> list[str]:
    """Return the rooms whose door lists public names."""
    return [path.parent.name for path in sorted(ROOT.glob("*/__init__.py")) if public_names(path)]


def public_names(file: Path) -> list[str]:
    """Return the names that a door lists in ``__all__``, or imports ``as`` what they are, in its order; of a
    door that is nothing but imports all that it imports.
    """
    nodes = _tree(file).body
    for node in nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    offers_all = all(isinstance(node, ast.ImportFrom | ast.Expr) for node in nodes)
    aliases = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    return [alias.name for alias in aliases if alias.asname == alias.name or offers_all]


def _file_of(module: list[str]) -> Path:
    folder = ROOT.joinpath(*module)
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def find(file: Path, name: str) -> Entry:
    """Follow imports from a file to the statement that defines a name."""
    imports = []
    for node in _tree(file).body:
        if isinstance(node, ast.If):  # TYPE_CHECKING
            imports += node.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return Entry(name, file, node)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == name:
                return Entry(name, file, node)
        imports.append(node)
    for node in imports:
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    parents = file.parent.relative_to(ROOT).parts
                    base = list(parents[: len(parents) + 1 - node.level])
                    module = base + (node.module.split(".") if node.module else [])
                    return find(_file_of(module), alias.name)
    raise LookupError(f"{file}: {name} is neither defined nor imported")


def _decorators(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    return {ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list}


def _arguments(node: ast.FunctionDef, *, method: bool) -> list[str]:
    """Return the arguments as written, without a method's own first."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    pieces = [_piece(argument, default) for argument, default in zip(plain, defaults, strict=True)]
    if method and "staticmethod" not in _decorators(node):
        pieces = pieces[1:]
    if arguments.vararg:
        pieces.append("*" + _piece(arguments.vararg, None))
    elif arguments.kwonlyargs:
        pieces.append("*")
    pieces += [_piece(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return pieces + (["**" + _piece(arguments.kwarg, None)] if arguments.kwarg else [])


def _piece(argument: ast.arg, default: ast.expr | None) -> str:
    text = ast.unparse(argument)
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _fields(node: ast.ClassDef) -> list[str]:
    """Return the fields of a record, which are the arguments of its constructor."""
    return [
        re.sub(r" = (field|Field)\(.*", " = ...", ast.unparse(line), flags=re.DOTALL)
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and not ast.unparse(line.target).startswith("_")
        and "ClassVar" not in ast.unparse(line.annotation)
    ]


def _constructor(entry: Entry, node: ast.ClassDef) -> list[str]:
    """Return the arguments of a class's constructor, its own or that of the class that it extends."""
    makers = [line for line in node.body if isinstance(line, ast.FunctionDef) and line.name == "__init__"]
    pieces = _arguments(makers[0], method=True) if makers else _fields(node)
    for base in () if makers or pieces else node.bases:
        with suppress(LookupError):  # it is not ours
            extended = find(entry.file, ast.unparse(base))
            return _constructor(extended, extended.node) if isinstance(extended.node, ast.ClassDef) else []
    return pieces


def _head(entry: Entry) -> str:
    node = entry.node
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return _call(f"def {node.name}", _arguments(node, method=False), returns)
    if isinstance(node, ast.ClassDef):
        return _call(f"class {node.name}", _constructor(entry, node), "")
    text = ast.unparse(node)
    return text if len(text) < 200 else f"{entry.name} = ..."


def _call(head: str, pieces: list[str], returns: str) -> str:
    line = f"{head}({', '.join(pieces)}){returns}"
    if len(line) <= 100:
        return line
    return f"{head}(\n" + "".join(f"    {piece},\n" for piece in pieces) + f"){returns}"


def docstring(entry: Entry) -> str:
    """Return what the source says about a name: its docstring, or the comment ``#:`` above it."""
    node = entry.node
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return ast.get_docstring(node) or ""
    lines, above = entry.file.read_text(encoding="utf-8").splitlines(), []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.startswith("#:"):
            break
        above.append(line.removeprefix("#:").strip())
    return "\n".join(reversed(above))


def methods(entry: Entry) -> Iterator[ast.FunctionDef]:
    """Yield the public methods and properties that say what they do."""
    if isinstance(entry.node, ast.ClassDef):
        for line in entry.node.body:
            if not isinstance(line, ast.FunctionDef) or not ast.get_docstring(line):
                continue
            if not line.name.startswith("_") or line.name in _SHOWN_DUNDERS:
                yield line


def _markdown(text: str) -> str:
    """Return a docstring as Markdown: single backticks; indented lines are code."""
    parts = []
    for block in re.split(r"\n\s*\n", text.strip()):
        if block and all(line.startswith("    ") for line in block.splitlines()):
            parts.append("```text\n" + "\n".join(line[4:] for line in block.splitlines()) + "\n```")
            continue
        quoted = re.split(r"(``.+?``)", block, flags=re.DOTALL)
        quoted[::2] = [plain.replace("<", "&lt;").replace("*", "\\*") for plain in quoted[::2]]
        parts.append("".join(quoted).replace("``", "`"))
    return "\n\n".join(parts)


def _section(entry: Entry) -> str:
    lines = [f"## `{entry.name}`\n", f"```python\n{_head(entry)}\n```\n", _markdown(docstring(entry)), ""]
    rows = []
    for method in methods(entry):
        names = ", ".join(re.split("[: =]", argument)[0] for argument in _arguments(method, method=True))
        call = "" if _decorators(method) & {"property", "cached_property"} else f"({names})"
        first = _markdown(ast.get_docstring(method) or "").split("\n\n")[0]
        rows.append(f"- `{method.name}{call}`: {' '.join(first.split())}")
    return "\n".join([*lines, *rows, ""] if rows else lines)


def _first_line(entry: Entry) -> str:
    text = " ".join(docstring(entry).split("\n\n")[0].split())
    first = re.split(r"(?<=[.!?]) (?=[A-Z`])", text)[0]
    return _markdown(first).replace("|", "\\|").replace("\n", " ")


def _anchor(name: str) -> str:
    return re.sub(r"[^\w\- ]", "", name.lower())


def page(room: str) -> str:
    """Return the page of a room."""
    door = ROOT / room / "__init__.py"
    names = sorted(public_names(door), key=str.lower)
    entries = [replace(find(door, name), name=name) for name in names]
    text = re.sub(r"^Floor \d+: ", "", ast.get_docstring(_tree(door)) or "")
    rows = [f"| [`{entry.name}`](#{_anchor(entry.name)}) | {_first_line(entry)} |" for entry in entries]
    return "\n".join(
        [
            f"# `trilith.{room}`\n",
            f"Look here for the names that `from trilith.{room} import ...` offers. "
            "`make docs` writes this page from the docstrings.\n",
            _markdown(text[:1].upper() + text[1:]),
            "",
            "| name | in one line |",
            "|---|---|",
            *rows,
            "",
            *map(_section, entries),
        ]
    )


def front_page() -> str:
    """Return the page of the names that ``trilith`` itself offers, and of the rooms."""
    door = ROOT / "__init__.py"
    rows = []
    for name in public_names(door):
        entry = find(door, name)
        room = entry.file.relative_to(ROOT).parts[0]
        room = next(each for each in (room, *rooms()) if name in public_names(ROOT / each / "__init__.py"))
        rows.append(f"| [`{name}`]({room}.md#{_anchor(name)}) | {_first_line(entry)} |")
    listed = []
    for room in rooms():
        text = ast.get_docstring(_tree(ROOT / room / "__init__.py")) or ""
        first = re.sub(r"^Floor \d+: ", "", text.split("\n")[0]).rstrip(".")
        listed.append(f"| [`trilith.{room}`]({room}.md) | {_markdown(first)} |")
    return "\n".join(
        [
            "# Python names\n",
            "Look here when you write Python: every public name with its signature, shapes and errors. "
            "`make docs` writes these pages from the docstrings.\n",
            "`import trilith as tl` offers these; each is also a name of its room, which is imported "
            "when one of its names is first used.\n",
            "| name | in one line |",
            "|---|---|",
            *rows,
            "\n## Rooms\n",
            "| import from | what it has |",
            "|---|---|",
            *listed,
            "",
        ]
    )


def finished(text: str) -> str:
    """Return a page with single blank lines and one end of line."""
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def main() -> None:
    """Write all pages anew."""
    PAGES.mkdir(exist_ok=True)
    for old in PAGES.glob("*.md"):
        old.unlink()
    texts = {"index": front_page()} | {room: page(room) for room in rooms()}
    for name, text in texts.items():
        (PAGES / f"{name}.md").write_text(finished(text), encoding="utf-8")


if __name__ == "__main__":
    main()
