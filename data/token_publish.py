"""Put a token file in place: document starts, checksums and, last of all, the sealed index."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..parallel_state import BadInput
from ..storage.disk import Disk, writing
from ..storage.file_names import leftovers
from ..storage.leftovers import clear_leftovers
from ..storage.staging import Staging
from .token_file import TokenFile
from .token_index import VERSION, TokenIndex, TokenPaths
from .token_sums import FileHashes


def publish_tokens(
    staging: Staging,
    paths: TokenPaths,
    offsets: NDArray[np.int64],
    hashes: Sequence[FileHashes],
    others: Mapping[str, Path],
    **facts: Any,
) -> TokenFile:
    """Write what describes the tokens, give every file its name, and open the token file.

    ``hashes``: of the tokens, and of the targets if there are any. ``others`` has the places of files that
    are in the staging folder already, on the disk. ``facts``: what else the index states.
    """
    made = staging.directory
    with new_file(made / "documents") as file:
        np.save(file, offsets, allow_pickle=False)
        file.flush()
        file.seek(0)
        documents_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    checksums = b"".join(each.sums().tobytes() for each in hashes)
    Disk().write_file(made / "sums", checksums)
    index = TokenIndex(
        version=VERSION,
        tokens=int(offsets[-1]),
        documents=len(offsets) - 1,
        sha256=hashes[0].sha256.hexdigest(),
        documents_sha256=documents_sha256,
        sums_sha256=hashlib.sha256(checksums).hexdigest(),
        **facts,
    )
    content = json.dumps(index.sealed().model_dump(exclude_defaults=True), indent=2)
    Disk().write_file(made / "index", f"{content}\n".encode())
    described = {"documents": paths.documents, "sums": paths.sums, "index": paths.index}
    staging.publish_files({**others, **described})
    return TokenFile.open(paths.name)


def refuse_taken(name: Path, index: Path, others: Sequence[Path]) -> None:
    """Refuse a name that has an index already or, with nothing unfinished beside it, any of ``others``."""
    # A writer may have been killed after some of its files were in place: these are overwritten.
    for path in [index, *([] if leftovers(name) else others)]:
        if path.exists() or path.is_symlink():
            clear_leftovers(name)
            raise BadInput(
                path, expected="a new name", found="an existing file", todo="Remove it or choose another"
            )


@contextmanager
def new_file(path: Path) -> Iterator[BufferedRandom]:
    """Yield a new file; it is on the disk when the block ends. ``DiskFailed`` names it."""
    with writing(path), path.open("wb+") as file:
        yield file
        sync(file)


def sync(file: BinaryIO) -> None:
    """Make what was written to the file survive a power cut."""
    with writing(Path(file.name)):
        file.flush()
        Disk().sync(file.fileno())
