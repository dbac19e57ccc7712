"""Read the token files of datatrove, on which nanotron trains: ``.ds``, and its ``.ds.index`` of documents.

``NAME.ds`` holds uint16 or uint32 ids end to end, ``NAME.ds.index`` where each document ends (uint64), and
``NAME.ds.metadata`` the name of the tokenizer with the bytes of an id, and the number of ids.
"""

from pathlib import Path
from typing import Literal

import numpy as np

from ..parallel_state import BadInput
from ..storage.safe_open import stat_regular
from ..storage.small_files import read_text
from .foreign_tokens import ForeignTokens, offsets_of_ends


def datatrove_files(path: Path) -> list[Path]:
    """Return the ``.ds`` files of a folder, in the order of their names; a file stands for itself."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.ds"))
    if not files:
        raise BadInput(path, expected="a folder with .ds files", found="none in it")
    return files


def read_datatrove(path: Path) -> ForeignTokens:
    """Describe the ids of a ``.ds`` file by the files beside it.

    Raises ``BadInput`` if these do not fit each other, and for a loss mask, which is not read.
    """
    index, metadata, loss = (path.with_name(path.name + end) for end in (".index", ".metadata", ".loss"))
    size = stat_regular(path).st_size
    ends_size = stat_regular(index, todo="Tokenize with save_index=True").st_size
    if loss.exists():
        expected, todo = (
            "no mask of the loss: every token is learnt here",
            "trilith tokenize --chat makes one",
        )
        raise BadInput(loss, expected=expected, found="one", todo=todo)
    if not ends_size or ends_size % 8:
        raise BadInput(index, "size", expected="8 bytes for each document", found=ends_size)
    offsets = offsets_of_ends(np.fromfile(index, dtype="<i8"), index)
    count = int(offsets[-1])
    dtype: Literal["uint16", "uint32"] = "uint16" if size == 2 * count else "uint32"
    if size not in (2 * count, 4 * count):
        expected = f"2 or 4 bytes for each of {count} ids, as {index.name} says"
        raise BadInput(path, "size", expected=expected, found=size, todo="Copy it again")
    if metadata.exists():
        _check_metadata(read_text(metadata).splitlines(), size // count, count, metadata)
    return ForeignTokens(path, dtype, offsets)


def _check_metadata(lines: list[str], itemsize: int, count: int, where: Path) -> None:
    """Compare the lines ``tokenizer|bytes of an id`` (once without bytes) and the number of ids."""
    _, bar, bytes_said = lines[0].rpartition("|") if lines else ("", "", "")
    for key, expected, stored in (
        ("bytes of an id", itemsize, bytes_said if bar else str(itemsize)),
        ("ids", count, lines[1] if len(lines) > 1 else "nothing"),
    ):
        if stored != str(expected):
            raise BadInput(where, key, expected=f"{expected}, as the other files say", found=stored)
