"""Find the folder that a name stands for, and the newest whole checkpoint of a run, here or at an address.

There is no pointer file: the folders are looked at.
"""

import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from ..parallel_state import BadCheckpoint, ParallelState, require
from ..parallel_state.collective_errors import together
from ..storage.disk import Hold, hold
from ..storage.file_names import CHECKPOINTS, MANIFEST, STEP_NAME, finished_name, holds_steps, set_aside_name
from ..storage.remote_folder import RemoteFolder, fetched
from ..storage.safe_open import is_there
from ..system.addresses import as_url
from .foreign.formats import EXPECTED
from .hugging_face.folder import FILES, from_hub
from .manifest import Manifest

#: Whether a newest checkpoint that is not whole is refused (``--strict``) instead of passed over.
STRICT: ContextVar[bool] = ContextVar("strict", default=False)
#: A run that saves meanwhile deletes what was just found; each time there is a newer one.
_TRIES = 100
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """Hold a complete checkpoint, and a line for the user about each newer one that is not complete.

    Retention does not delete the checkpoint as long as ``hold`` lives.
    """

    directory: Path
    manifest: Manifest
    passed_over: tuple[str, ...]
    hold: Hold


def warn_of(passed_over: Iterable[str]) -> None:
    """Issue a warning for each of these lines; every reader of a run's newest checkpoint does so."""
    for line in passed_over:
        warnings.warn(line, stacklevel=2)  # the next frame may be Python's own, of a decorator


def step_directory(root: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint in the directory of its run."""
    return root / f"step-{step:08d}"


def step_of(directory: Path | str) -> int:
    """Return the step of a run's checkpoint, from its directory's name."""
    return int(Path(directory).name.removeprefix("step-"))


def complete_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints in ``root`` that have a manifest, by step; unfinished ones have none."""
    names = (path for path in (root.iterdir() if root.is_dir() else ()) if STEP_NAME.fullmatch(path.name))
    return sorted((path for path in names if (path / MANIFEST).exists()), key=step_of)


def good_manifests(root: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield the checkpoints in ``root`` whose manifest is good, with it, the newest first.

    No other file is looked at: this is done at each save, and a checkpoint has a file of each rank.
    """
    for path in reversed(complete_checkpoints(root)):
        with suppress(BadCheckpoint):
            yield path, Manifest.load(path, whole=False)


def first_whole(names: Iterable[str], attempt: Callable[[str], T | None]) -> tuple[str, T | None, list[str]]:
    """Return the first of these checkpoints that is whole, what ``attempt`` gives for it (``None`` passes it
    over in silence), and a line about each before it that is not, which ``STRICT`` refuses.
    """
    passed_over: list[str] = []
    for name in names:
        try:
            opened = attempt(name)
        except BadCheckpoint as error:
            if STRICT.get():
                raise
            passed_over.append(f"passed over: {error}")
            continue
        if opened is not None:
            return name, opened, [f"{line}; using {name}" for line in passed_over]
    return "", None, passed_over


def open_checkpoint(directory: Path | str, *, whole: bool = True) -> Found:
    """Open the complete checkpoint in a directory and hold it; ``BadCheckpoint`` says what is wrong.

    ``whole``: as for ``Manifest.load``.
    """
    directory = Path(directory)
    lock = hold(directory)
    return Found(directory, Manifest.load(directory, whole=whole), (), lock)


def newest_checkpoint(root: Path | str, *, whole: bool = True) -> Found:
    """Return the complete checkpoint of the highest step, held against deletion.

    ``root``: a run's folder, or that of its checkpoints. A newer one that is not complete is passed over, and
    ``Found.passed_over`` says why; it is refused with ``STRICT``. Without ``whole`` a manifest is enough, for
    ranks that rank 0 tells which one is taken. ``BadCheckpoint`` if there is none says what there is instead.
    """
    root = folder_of_steps(Path(root))
    expected = "a directory of checkpoints"
    actual = "a file" if is_there(root, expected=expected, kind=BadCheckpoint) else "no such directory"
    require(root.is_dir(), root, None, expected, actual, kind=BadCheckpoint)
    tries = _TRIES
    while True:
        listed = {path.name for path in root.iterdir()}
        try:
            return _newest(root, whole)
        except BadCheckpoint:
            tries -= 1
            if not tries or listed == {path.name for path in root.iterdir()}:
                raise


def folder_of_steps(folder: Path) -> Path:
    """Return where the checkpoints of a run's folder are, or else the folder itself."""
    checkpoints = folder / CHECKPOINTS
    return checkpoints if holds_steps(checkpoints) and not holds_steps(folder) else folder


def _newest(root: Path, whole: bool) -> Found:
    names = [path.name for path in root.iterdir() if path.is_dir()]
    steps = sorted(
        (name for name in names if STEP_NAME.fullmatch(name)), key=lambda name: (step_of(name), name)
    )
    for name, other in pairwise(steps):
        if step_of(name) == step_of(other):  # as step-00000005 and step-5: nobody knows which is meant
            expected, todo = "one directory", "Move all but one of them to another place"
            key = f"step {step_of(name)}"
            raise BadCheckpoint(root, key, expected=expected, found=f"{name}, {other}", todo=todo)

    def attempt(name: str) -> Found | None:
        try:
            return open_checkpoint(root / name, whole=whole)
        except BadCheckpoint:
            if (root / name).is_dir():
                raise
            return None  # a run deleted it meanwhile

    _, checkpoint, passed_over = first_whole(reversed(steps), attempt)
    if checkpoint is not None:
        return replace(checkpoint, passed_over=tuple(passed_over))
    unfinished = sorted(name for name in names if finished_name(name) is not None)
    candidates = [*passed_over, *(f"unfinished: {name}" for name in unfinished)]
    raise BadCheckpoint(root, expected="a complete checkpoint", found="; ".join(candidates) or "none")


def steps_at(folder: RemoteFolder) -> list[str]:
    """Return the names of the checkpoints in a folder at an address, the newest first."""
    names = (name for name, size in folder.sizes().items() if size is None and STEP_NAME.fullmatch(name))
    return sorted(names, key=step_of, reverse=True)


def whole_copy(folder: RemoteFolder, name: str) -> Manifest:
    """Return the manifest of a checkpoint in a folder at an address; ``BadCheckpoint`` if it is damaged, or
    if a file is missing or has not its size.
    """
    where, sizes = f"{folder.url}/{name}", folder.sizes(name)
    if (raw := folder.read(f"{name}/{MANIFEST}")) is None:
        raise BadCheckpoint(where, expected=MANIFEST, found="none: the copy has not ended")
    manifest = Manifest.parse(raw, f"{where}/{MANIFEST}")
    for file in (*manifest.files, *manifest.companions):
        if sizes.get(file.name) != file.size:
            actual = "no such file" if file.name not in sizes else f"{sizes[file.name]} bytes"
            raise BadCheckpoint(f"{where}/{file.name}", expected=f"{file.size} bytes", found=actual)
    return manifest


def newest_at(url: str) -> tuple[str, list[str]]:
    """Return the URL of the newest whole checkpoint of a run at a URL, and a line about each newer one, which
    ``STRICT`` refuses; other URLs as they are.
    """
    for place in (url, f"{url.rstrip('/')}/{CHECKPOINTS}"):
        folder = RemoteFolder(place)
        name, _, passed_over = first_whole(steps_at(folder), partial(whole_copy, folder))
        if name:
            return f"{folder.url}/{name}", passed_over
        if passed_over:
            raise BadCheckpoint(url, expected="a complete checkpoint", found="; ".join(passed_over))
    return url, []


def local_folder(name: str | Path) -> Path:
    """Return the folder ``name``, a copy of the folder at a URL that fsspec knows (see ``fetched``), or the
    snapshot of a hub's model (see ``from_hub``). A folder of that name comes first.

    A run's folder or a folder of checkpoints at a URL stands for its newest whole checkpoint, with a warning
    about each newer one. Raises ``BadInput`` if it is neither here nor there.
    """
    if (url := as_url(name)) is None:
        path = Path(name)
        return path if is_there(path, expected=EXPECTED) else from_hub(name) or path
    url, passed_over = newest_at(url)
    warn_of(passed_over)
    return fetched(url, lambda file: any(fnmatch(file, pattern) for pattern in FILES))


def newest_of_run(
    root: str | Path, state: ParallelState, *, say: Callable[[str], None] = lambda text: None
) -> Path | None:
    """Return the newest complete checkpoint in a run's folder, or ``None``; the same on every rank.

    Collective: rank 0 looks and tells the others. For each incomplete one that it skips, ``say`` gets why.
    """
    root = Path(root)

    def look() -> tuple[str | None, tuple[str, ...]]:
        names = [] if state.rank or not root.is_dir() else sorted(path.name for path in root.iterdir())
        if not any(map(STEP_NAME.fullmatch, names)):
            why = f"no checkpoint was ever completed ({', '.join(names)}): from the beginning"
            return None, (why,) if names else ()
        newest = newest_checkpoint(root)
        return str(newest.directory), newest.passed_over

    path, passed_over = together(look, state)[0]
    for line in passed_over:
        say(line)
    return None if path is None else Path(path)


@contextmanager
def newest_in(path: str | Path, state: ParallelState, opened: Path | None = None) -> Iterator[str]:
    """Yield the newest complete checkpoint of a run's folder or a folder of checkpoints, here or at an
    address, or else ``path``; the same on every rank.

    Collective. Only rank 0 looks, because a run may save meanwhile, and then ranks could find different
    checkpoints; it warns of each newer one that it passes over. If it has ``opened`` the newest before, that
    is the one. Rank 0 holds the checkpoint during the block, which must end with a collective.
    """
    checkpoints: list[Found] = []

    def look() -> str:
        chosen, passed_over = str(path), list[str]()
        if state.rank:
            return chosen
        if (url := as_url(path)) is not None:
            chosen, passed_over = newest_at(url)
        elif holds_steps(folder := folder_of_steps(Path(path))):
            if opened is not None:
                return str(opened)  # warned of when it was opened
            checkpoints.append(newest_checkpoint(folder))
            chosen, passed_over = str(checkpoints[0].directory), [*checkpoints[0].passed_over]
        warn_of(passed_over)
        return chosen

    yield together(look, state)[0]
    checkpoints.clear()


def damaged(
    where: object, key: object = None, *, expected: object, found: object, todo: str = ""
) -> BadCheckpoint:
    """Return the error about a byte of ``where``, a checkpoint or a file of it, that is not the one written.

    It names the newest complete checkpoint of the run with fewer steps, and how to go on from it. Nothing but
    the manifest of that one is read: it is verified when it is used.
    """
    place = Path(str(where))
    checkpoint = place if place.is_dir() else place.parent
    if STEP_NAME.fullmatch(checkpoint.name):
        steps = (path for path, _ in good_manifests(checkpoint.parent) if step_of(path) < step_of(checkpoint))
        if (older := next(steps, None)) is not None:
            move = shlex.join(["mv", "--", str(checkpoint), str(set_aside_name(checkpoint))])
            complete = f"The newest complete checkpoint before it is {older}"
            todo = f"{todo}. {complete}: after `{move}` the same command goes on from it".lstrip(". ")
    return BadCheckpoint(where, key, expected=expected, found=found, todo=todo)
