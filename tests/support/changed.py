"""Run the tests that a change can reach: ``make changed``, ``make changed BASE=main``.

A changed file of a room reaches the tests of that room and of every room that imports it, directly or
through others. For test folders that are no room, their own imports say so. A changed page reaches the tests
of pages.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from support.lanes import LANES

#: Files and folders of tests beyond which lanes are quicker than one process.
FEW = 3
ROOT = Path(__file__).resolve().parents[2]
#: Files that can change any test.
ALL = re.compile(r"pyproject\.toml|tests/conftest\.py|tests/support/__init__\.py")
PAGES = re.compile(r"docs/|examples/|[^/]*\.md$|Containerfile")


def changed_files(base: str) -> list[str]:
    """Return the files that differ from ``base`` in the work tree, untracked ones too."""
    commands = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    outputs = [
        subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
        for words in commands
    ]
    return sorted({line for output in outputs for line in output.stdout.splitlines()})


def rooms() -> dict[str, set[str]]:
    """Return each room with the rooms that its files import."""
    names = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    return {room: (_imported((ROOT / room).rglob("*.py")) & names) - {room} for room in names}


def _imported(files: Iterable[Path]) -> set[str]:
    """Return the first folder of each import of the package: relative in rooms, absolute in tests."""
    found: set[str] = set()
    for file in files:
        dots = len(file.relative_to(ROOT).parts)
        pattern = rf"from (?:\.{{{dots}}}|trilith\.)([a-z_]+)[. ]"
        found |= {*re.findall(pattern, file.read_text())}
    return found


def reached(changed: Iterable[str], imports: Mapping[str, set[str]]) -> dict[str, str]:
    """Return the rooms that a change of ``changed`` rooms can reach, each with the reason."""
    reasons = {room: "changed" for room in changed}
    queue = list(reasons)
    while queue:
        room = queue.pop(0)
        above = sorted(other for other, below in imports.items() if room in below and other not in reasons)
        reasons |= {other: f"imports {room}" for other in above}
        queue += above
    return reasons


def tests_of(files: Iterable[str]) -> dict[str, str]:
    """Return the folders and files of tests that changed files reach, each with the reason."""
    files, imports, chosen = list(files), rooms(), {"tests/test_house.py": "holds rules for every file"}
    for file in files:
        if ALL.fullmatch(file):
            return {"tests": f"{file} can change any test"}
        if PAGES.match(file) or file.startswith("cli/"):
            chosen["tests/test_*.py"] = f"pages and their commands: {file}"
        if file.startswith("tests/support/"):
            users = _importers(Path(file).relative_to("tests/support").parts[0].removesuffix(".py"))
            chosen |= dict.fromkeys(users, f"imports {file}")
        elif file.startswith("tests/") and file.endswith(".py"):
            chosen[file] = "changed"
    reasons = reached({file.split("/")[0] for file in files} & imports.keys(), imports)
    for folder in sorted(
        path for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("test_*.py"))
    ):
        own = folder.name if folder.name in imports else None
        below = {own} if own else _imported(folder.rglob("*.py"))
        if why := next((f"{room} {reasons[room]}" for room in sorted(below) if room in reasons), None):
            chosen[f"tests/{folder.name}"] = why
    return {path: why for path, why in chosen.items() if "*" in path or (ROOT / path).exists()}


def _importers(name: str) -> list[str]:
    """Return the test files that import a file of ``tests/support``, directly or through another of them."""
    names, size = {name}, 0
    tests = {file: file.read_text() for file in (ROOT / "tests").rglob("*.py")}
    while len(names) > size:
        size = len(names)
        pattern = re.compile(rf"support(\.| import .*)({'|'.join(names)})\b")
        users = [file for file, text in tests.items() if pattern.search(text)]
        names |= {file.stem for file in users if file.parent.name == "support"}
    return [str(file.relative_to(ROOT)) for file in users if file.name.startswith("test_")]


def main(base: str) -> int:
    chosen = tests_of(changed_files(base))
    for path, why in chosen.items():
        print(f"{path}: {why}", flush=True)
    if "tests" in chosen:
        return subprocess.call([sys.executable, "-m", "pytest"], cwd=ROOT)
    paths = [str(file) for path in chosen for file in sorted(ROOT.glob(path))]
    folders = {path for path in paths if Path(path).is_dir()}
    paths = [path for path in paths if str(Path(path).parent) not in folders]
    options = ["-n", str(LANES), "--dist", "loadfile"] if len(paths) > FEW else []
    return subprocess.call([sys.executable, "-m", "pytest", "-q", *options, *paths], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "HEAD"))
