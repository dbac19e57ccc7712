"""Make an output for a URL on this host first, in the user's cache, then copy it to the URL."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..parallel_state import BadInput
from .disk import Disk, writing
from .fetched import CACHE_GB, as_url, cache_folder, most_bytes
from .lock import FileLock
from .remote_folder import RemoteFolder
from .remote_output import check_free, copy_to

_HOME, _LOCK = "outgoing", ".lock"


def export(output: str | Path, identity: str, need: int, make: Callable[[Path], object]) -> None:
    """Let ``make`` write an output of ``need`` bytes at the path that it is given.

    The path is ``output`` itself or, if that is a URL, one in the cache, which is then copied to the URL. The
    place there must have no files, except those of an export that was killed. If this process is killed, the
    same call (the same ``output`` and ``identity``) goes on with what ``make`` has left; the copy begins
    anew. Readers take the place for whole or refuse it, wherever the process is killed. Raises ``BadInput``
    for a place that is taken, or if the cache may not be so large, and ``RemoteFailed``; what was made then
    stays.
    """
    if (url := as_url(output)) is None:
        make(Path(output))
        return
    folder = RemoteFolder(url)
    check_free(folder)
    if need > (most := most_bytes()):
        found = f"{need / 1e9:.3g} GB, which are made on this host first"
        raise BadInput(url, expected=f"at most {most / 1e9:g} GB, as {CACHE_GB} says", found=found)
    with _outgoing(url, identity) as place:
        if not place.exists():
            make(place)
        copy_to(folder, place)


@contextmanager
def _outgoing(url: str, identity: str) -> Iterator[Path]:
    """Yield the path at which to make an output for ``url``, and remove it when the block has succeeded.

    After an error it stays for the same call. What killed exports to other places left is removed.
    """
    home = cache_folder() / _HOME
    digest = hashlib.sha256(repr((url, identity)).encode()).hexdigest()[:32]
    with writing(home):
        home.mkdir(parents=True, exist_ok=True)
        lock = FileLock.take(home / f"{digest}{_LOCK}")
    if lock is None:
        found, todo = "another process of this host writing it", "Wait for it, or choose another output"
        raise BadInput(url, expected="an output of our own", found=found, todo=todo)
    made = home / digest
    try:
        _remove_others(home, lock)
        yield made / url.rpartition("/")[2]
        Disk().remove_tree(made)
    finally:
        if not made.exists():
            lock.remove()
        lock.release()


def _remove_others(home: Path, mine: FileLock) -> None:
    for path in home.glob(f"*{_LOCK}"):
        if path != mine.path and (lock := FileLock.take(path)) is not None:
            Disk().remove_tree(path.with_suffix(""))
            lock.remove()
