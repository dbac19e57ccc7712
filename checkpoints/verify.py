"""Read every byte of a checkpoint once: compare checksums with the manifest, and replicas with their
owners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

from ..parallel_state import BadCheckpoint, Box
from ..storage.crc import Checksum, combine
from ..storage.records import StoredFile
from ..storage.safe_open import contained, open_regular
from ..storage.safetensors_reader import TensorFile
from ..storage.strict_json import shown
from .damage import naming_an_older_one
from .find import open_checkpoint
from .manifest import Damaged, Manifest
from .part_table import CheckpointFiles


def verify(
    directory: Path | str,
    manifest: Manifest,
    *,
    threads: int = 2,
    progress: Callable[[int], None] = lambda read: None,
) -> None:
    """Refuse the checkpoint unless every file is, byte for byte, the one that was written.

    ``progress`` is called with the number of bytes read since its last call, from any of ``threads``.
    """
    with naming_an_older_one(check_all):
        _verify(Path(directory), manifest, threads=threads, progress=progress)


def check_all(directory: Path) -> None:
    """Read every byte of this checkpoint, but do not look for an older one if it is damaged."""
    found = open_checkpoint(directory)
    _verify(directory, found.manifest)


def _verify(
    directory: Path,
    manifest: Manifest,
    *,
    threads: int = 2,
    progress: Callable[[int], None] = lambda read: None,
) -> None:
    files = CheckpointFiles(directory, manifest)
    seen = [checksum_of(file) for file in files]
    _verify_rest(directory, manifest, files, seen, threads=threads, progress=progress)


def verify_rest(
    directory: Path | str,
    manifest: Manifest,
    files: Sequence[TensorFile],
    seen: Sequence[Checksum],
    *,
    threads: int = 2,
    progress: Callable[[int], None] = lambda read: None,
) -> None:
    """Verify as ``verify`` does, but skip bytes whose sums are in ``seen`` (one checksum for each file)."""
    with naming_an_older_one(check_all):
        _verify_rest(Path(directory), manifest, files, seen, threads=threads, progress=progress)


def _verify_rest(
    directory: Path,
    manifest: Manifest,
    files: Sequence[TensorFile],
    seen: Sequence[Checksum],
    *,
    threads: int,
    progress: Callable[[int], None],
) -> None:
    with ThreadPoolExecutor(threads) as pool:
        sums = list(pool.map(verify_file, files, manifest.files, seen, repeat(progress)))
    verify_companions(directory, manifest)
    for name, tensor in manifest.tensors.items():
        first: dict[Box, int] = {}
        for part in sorted(tensor.parts, key=lambda part: part.role):
            owner = first.setdefault(part.box, part.file)
            if sums[owner][name] != sums[part.file][name]:
                names = f"{manifest.files[owner].name} and {manifest.files[part.file].name}"
                raise Damaged(
                    directory, shown(name), expected="equal replicas", found=f"a difference: {names}"
                )


def verify_files(directory: Path | str, manifest: Manifest, numbers: Iterable[int]) -> None:
    """Refuse the checkpoint if a byte of these files is not the byte that was written."""
    files = CheckpointFiles(Path(directory), manifest)
    for number in numbers:
        verify_file(files[number], manifest.files[number], checksum_of(files[number]))


def checksum_of(file: TensorFile) -> Checksum:
    """Return an empty checksum for a file that computes separate sums: one for each sum that the file states
    itself, or else one for each tensor.
    """
    return Checksum([begin for begin, *_ in file.sums] or (entry.begin for entry in file.tensors.values()))


def verify_sums(
    file: TensorFile, seen: Checksum, progress: Callable[[int], None] = lambda read: None
) -> None:
    """Refuse a file of another project if the bytes of its tensors do not have the CRC-32 that the file
    states.

    Bytes whose sums are in ``seen`` are not read again.
    """
    stretches = [(begin, end) for begin, end, _ in file.sums]
    if not stretches:
        return
    with open_regular(file.path, kind=BadCheckpoint) as (fd, _):
        seen.fill_gaps(fd, stretches, progress)
    for (begin, end, stated), found in zip(file.sums, seen.of(stretches), strict=True):
        if found != stated:
            todo = "The file was altered or damaged since it was written"
            raise BadCheckpoint(
                file.path, f"CRC-32 of bytes {begin:,} to {end:,}", expected=f"{stated:08x}",
                found=f"{found:08x}", todo=todo,
            )  # fmt: skip


def verify_file(
    file: TensorFile, stored: StoredFile, seen: Checksum, progress: Callable[[int], None] = lambda read: None
) -> dict[str, int]:
    """Check the CRC-32 of the whole file, then return that of each tensor's bytes."""
    entries = sorted(file.tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    stretches = [(0, file.data_begin), *((entry.begin, entry.end) for _, entry in entries)]
    with open_regular(file.path, kind=BadCheckpoint) as (fd, _):
        seen.fill_gaps(fd, stretches, progress)
    sums = seen.of(stretches)
    whole = 0
    for crc, (begin, end) in zip(sums, stretches, strict=True):
        whole = combine(whole, crc, end - begin)
    _check(file.path, stored, whole)
    return {name: crc for (name, _), crc in zip(entries, sums[1:], strict=True)}


def verify_companions(directory: Path, manifest: Manifest) -> None:
    """Refuse the checkpoint if a byte of its companions (tokenizer files and the like) has changed."""
    for stored in manifest.companions:
        path, seen = contained(directory, stored.name, kind=BadCheckpoint), Checksum()
        with open_regular(path, kind=BadCheckpoint) as (fd, _):
            seen.fill_gaps(fd, [(0, stored.size)])
        _check(path, stored, seen.of([(0, stored.size)])[0])


def _check(path: Path, stored: StoredFile, crc: int) -> None:
    if crc != stored.crc32:
        todo = "The file was altered or damaged since it was written"
        raise Damaged(path, "CRC-32", expected=f"{stored.crc32:08x}", found=f"{crc:08x}", todo=todo)
