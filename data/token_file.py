"""Read a token file: the ids of a corpus end to end, memory-mapped, with what is needed to trust them.
Put a new one in place.

``<name>.bin``        little-endian uint16 (vocabulary up to 65,536) or uint32, nothing else
``<name>.docs.npy``   int64, where each document starts, and the number of tokens at the end
``<name>.targets``    of a chat set, whose documents are conversations: a byte for each token, 1 where it is
                      to be learnt (the assistant's words), else 0
``<name>.sums``       a checksum for each 64 KiB of the tokens and of the targets: see ``token_sums``
``<name>.json``       the index: version, type, counts, vocabulary, hashes, and a seal over all of these.
                      Written last: no index, no file
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from ..parallel_state import BadInput
from ..storage.disk import Disk, writing
from ..storage.file_names import leftovers
from ..storage.output_places import clear_leftovers
from ..storage.remote_folder import RemoteFolder, fetched
from ..storage.staging import Staging
from ..system.addresses import as_url
from .token_index import VERSION, TokenIndex, TokenPaths, little_endian, read_documents, read_index, read_sums
from .token_sums import CheckedFile, FileHashes


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Read a token file: memory-mapped ``tokens``, and ``documents``, where each document starts, and the
    end.

    ``targets``, also memory-mapped, is there for chat data. ``ids`` and ``learnt`` read these arrays with all
    checks; the arrays themselves have none.
    """

    path: Path
    index: TokenIndex
    tokens: NDArray[Any]
    documents: NDArray[np.int64]
    targets: NDArray[np.uint8] | None
    _checked_tokens: CheckedFile
    _checked_targets: CheckedFile | None

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a token file by its name, its URL, or any of its files.

        The files at a URL are copied to this host first (see ``storage.remote_folder``).

        Checks the seal of the index, sizes, offsets, the hashes of offsets and checksums, and the first and
        last block of the tokens. Raises ``BadInput`` for files that are missing, empty, cut short, of another
        data set, or that contradict the index.
        """
        paths = _local(path)
        index = read_index(paths.index)
        sums, target_sums = read_sums(paths, index)
        documents = read_documents(paths.documents, index)
        below, learnt = f"below {index.vocab_size}", None
        tokens = CheckedFile(paths.tokens, little_endian(index.dtype), sums, index.vocab_size, below)
        if index.targets:
            learnt = CheckedFile(paths.targets, np.dtype(np.uint8), target_sums, 2, "0 or 1")
        targets = None if learnt is None else learnt.items
        return cls(paths.name, index, tokens.items, documents, targets, tokens, learnt)

    def ids(self, begin: int, end: int) -> NDArray[Any]:
        """Return these tokens. Raises ``BadInput`` if they are not what was written, or if one is not
        below ``vocab_size``.
        """
        return self._checked_tokens.read(begin, end)

    def learnt(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return 1 for each of these tokens of chat data that is learnt, and 0 for the others; may raise
        ``BadInput``.
        """
        assert self._checked_targets is not None
        return self._checked_targets.read(begin, end)

    @property
    def paths(self) -> TokenPaths:
        return TokenPaths.named(self.path)

    @property
    def vocab_size(self) -> int:
        """Return the number that every id is below; ``ids`` and ``verify`` check this."""
        return self.index.vocab_size

    @property
    def fingerprint(self) -> str:
        """Return size in bytes and SHA-256 of the tokens and of the targets, as a training manifest stores
        them.
        """
        tokens = f"{self.index.tokens * little_endian(self.index.dtype).itemsize}-{self.index.sha256}"
        return f"{tokens}-{self.index.targets.sha256}" if self.index.targets else tokens

    def verify(self, progress: Callable[[int], None] = lambda read: None) -> None:
        """Read every token and target, and compare checksums, SHA-256, largest id and count with the index.

        ``progress`` is called with the number of bytes read since its last call.
        """
        self._checked_tokens.verify(self.index.sha256, progress)
        learnt, described = self._checked_targets, self.index.targets
        if learnt is not None and described is not None:
            learnt.verify(described.sha256, progress)
            if (count := int(np.count_nonzero(learnt.items))) != described.tokens:
                raise BadInput(learnt.path, "tokens to learn", expected=described.tokens, found=count)


def names_tokens(path: str | Path) -> bool:
    """Return whether a path or a URL names a token file, by its name without an ending or by one of its
    files.
    """
    paths = TokenPaths.of(path)
    if (url := as_url(path)) is None:
        return not Path(path).is_dir() and (Path(path) in paths.all or paths.index.is_file())
    if Path(path) in paths.all:
        return True
    return not RemoteFolder(url).sizes() and paths.index.name in RemoteFolder(url.rpartition("/")[0]).sizes()


def _local(path: str | Path) -> TokenPaths:
    """Name a token file's files on this host."""
    if (url := as_url(path)) is None:
        return TokenPaths.of(path)
    folder, _, name = url.rpartition("/")
    named = TokenPaths.of(name)
    names = {file.name for file in named.all}
    return TokenPaths.named(fetched(folder, lambda file: file in names) / named.name)


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
    folder = staging.directory
    with new_file(folder / "documents") as file:
        np.save(file, offsets, allow_pickle=False)
        file.flush()
        file.seek(0)
        documents_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    checksums = b"".join(file_hashes.sums().tobytes() for file_hashes in hashes)
    with new_file(folder / "sums") as file:
        file.write(checksums)
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
    with new_file(folder / "index") as file:
        file.write(f"{content}\n".encode())
    described = {"documents": paths.documents, "sums": paths.sums, "index": paths.index}
    staging.publish_files({**others, **described})
    return TokenFile.open(paths.name)


def refuse_taken(name: Path, index: Path, others: Sequence[Path]) -> None:
    """Refuse a name that has an index already or, with nothing unfinished beside it, any of ``others``."""
    # A writer may have been killed after some of its files were in place: these are overwritten.
    for path in [index, *([] if leftovers(name) else others)]:
        if path.exists() or path.is_symlink():
            clear_leftovers(name)
            todo = "Remove it or choose another"
            raise BadInput(path, expected="a new name", found="an existing file", todo=todo)


@contextmanager
def new_file(path: Path) -> Iterator[BufferedRandom]:
    """Yield an empty file, new or in the place of one that a killed process left; it is on the disk when the
    block ends. ``DiskFailed`` names it.
    """
    with writing(path), path.open("wb+") as file:
        yield file
        sync(file)


def sync(file: BinaryIO) -> None:
    """Make what was written to the file survive a power cut."""
    with writing(Path(file.name)):
        file.flush()
        Disk().sync(file.fileno())
