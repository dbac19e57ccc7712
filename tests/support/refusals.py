"""Check that bad input is refused: a row for each input, and every row is held to the whole promise.

The promise: one printable line of bounded length that names the place, the exit code of the command, nothing
written or changed, and an answer within seconds whatever the input.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from trilith.parallel_state import BadInput

#: Characters of a message without the paths in it, and seconds of processor time until it is there.
MOST_CHARACTERS, MOST_SECONDS = 1200, 5.0
RowT = TypeVar("RowT")
#: Values that no recipe, file or command line spells so.
_PYTHON = re.compile(r"(expected|found) (None|True|False|\(.*,\))(?!\w)|<class|PosixPath|torch\.Size")
#: Bytes above which a file is not read to see whether it has changed.
LARGE = 1 << 26


@dataclass(frozen=True)
class Refused:
    """State an input and how it is refused.

    ``given`` writes the input into a folder of the row's own, and ``call`` does with that folder what must be
    refused. ``says`` is a pattern that is searched in the message, from which the folder's path is removed.
    ``why`` is the test's id, beginning with the number of the listed bad input if it is one.
    """

    why: str
    call: Callable[[Path], object]
    says: str
    code: int = 2
    given: Callable[[Path], object] = lambda folder: None


def refusal_of(call: Callable[[], object]) -> str:
    """Return in what words a call is refused."""
    with pytest.raises(BadInput) as caught:
        call()
    return str(caught.value)


def files_under(folder: Path) -> dict[str, tuple[object, ...]]:
    """Return each path under a folder with its mode and its bytes, or the target of a link.

    Of a large file, which may be all holes, the size and the time of its last change stand for the bytes.
    """
    files: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content: object = None
        if path.is_symlink():
            content = path.readlink()
        elif path.is_file():
            large = status.st_size > LARGE
            content = (status.st_size, status.st_mtime_ns) if large else path.read_bytes()
        files[str(path.relative_to(folder))] = status.st_mode, content
    return files


def check_refusal(row: Refused, folder: Path) -> None:
    """Make the row's input, see it refused, and list everything of the promise that does not hold."""
    row.given(folder)
    before, start = files_under(folder), time.process_time()
    with pytest.raises(BadInput) as caught:
        row.call(folder)
    seconds = time.process_time() - start
    error = caught.value
    message = str(error).replace(f"{folder}/", "").replace(str(folder), "")
    after = files_under(folder)
    if "new" not in before and (folder / "new").is_dir():
        del after["new"]  # the folder around an output stays; what is in it is listed by itself
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    broken = {
        f"no match for {row.says!r}": not re.search(row.says, message),
        "not one printable line": not str(error).isprintable(),
        f"{len(message)} characters, expected at most {MOST_CHARACTERS}": len(message) > MOST_CHARACTERS,
        f"exit code {error.exit_code}, expected {row.code}": error.exit_code != row.code,
        "it names no place": not str(error.where),
        "neither what was expected nor what was found": error.expected is None and error.found is None,
        "a value as Python writes it": _PYTHON.search(message) is not None,
        f"it took {seconds:.1f} s": seconds > MOST_SECONDS,
        f"left behind or changed: {changed}": bool(changed),
    }
    assert not any(broken.values()), f"{[what for what, fails in broken.items() if fails]}: {message}"


def rows_of(table: Iterable[RowT | Iterable[RowT]]) -> list[RowT]:
    """Return the rows of a harness's table, in which they stand one by one or several at once."""
    return [row for entry in table for row in (entry if isinstance(entry, Iterable) else [entry])]


def cases(table: Iterable[Any]) -> list[Any]:
    """Return the cases of such a table, named by what each row's ``why`` says; some rows are ``slow``."""
    rows = rows_of(table)
    assert len({row.why for row in rows}) == len(rows), "two rows have the same name"
    slow = [pytest.mark.slow]
    return [pytest.param(row, id=row.why, marks=slow * getattr(row, "slow", False)) for row in rows]


def refusals(*table: Refused | Iterable[Refused]) -> Any:
    """Return one test with a case for each row, for a test module to bind to a name."""

    @pytest.mark.parametrize("row", cases(table))
    def test(row: Refused, tmp_path: Path) -> None:
        check_refusal(row, tmp_path)

    return test
