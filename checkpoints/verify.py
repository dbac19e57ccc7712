"""Read every byte of a checkpoint once: compare checksums with the manifest, and replicas with their
owners.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..parallel_state import BadCheckpoint, Box
from ..storage.crc import Checksum, combine
from ..storage.records import StoredFile
from ..storage.safe_open import contained, open_regular
from ..storage.safetensors_reader import TensorFile
from ..storage.strict_json import shown
from .damage import damaged
from .manifest import Manifest
from .part_table import CheckpointFiles


def verify(
    directory: Path | str,
    manifest: Manifest,
    *,
    threads: int = 2,
    progress: Callable[[int], None] = lambda read: None,
) -> list[str]:
    """Refuse the checkpoint unless every file is, byte for byte, the one that was written; return the SHA-256
    (hex) of each, in the manifest's order.

    Every byte is read once. ``progress`` is called with the number of bytes read since its last call, from
    any of ``threads``. An error names an older checkpoint of the run (see ``damage``).
    """
    directory = Path(directory)
    files, digests = CheckpointFiles(directory, manifest), [hashlib.sha256() for _ in manifest.files]

    def check(number: int) -> dict[str, int]:
        file = files.open(number)
        return verify_file(file, manifest.files[number], checksum_of(file), progress, digests[number].update)

    _verify_all(directory, manifest, check, threads)
    return [digest.hexdigest() for digest in digests]


def verify_rest(
    directory: Path | str,
    manifest: Manifest,
    files: Sequence[TensorFile],
    seen: Sequence[Checksum],
    *,
    threads: int = 2,
) -> None:
    """Verify as ``verify`` does, but skip bytes whose sums are in ``seen`` (one checksum for each file)."""

    def check(number: int) -> dict[str, int]:
        return verify_file(files[number], manifest.files[number], seen[number])

    _verify_all(Path(directory), manifest, check, threads)


def _verify_all(
    directory: Path, manifest: Manifest, check: Callable[[int], dict[str, int]], threads: int
) -> None:
    """Check each file with ``check``, which returns the sums of its tensors, then companions and replicas."""
    listed = {name for name, tensor in manifest.tensors.items() if tensor.parts}

    def sums_of(number: int) -> dict[str, int]:
        return {name: crc for name, crc in check(number).items() if name in listed}

    with ThreadPoolExecutor(threads) as pool:
        sums = list(pool.map(sums_of, range(len(manifest.files))))
    verify_companions(directory, manifest)
    for name in listed:
        first: dict[Box, int] = {}
        for part in sorted(manifest.tensors[name].parts, key=lambda part: part.role):
            owner = first.setdefault(part.box, part.file)
            if sums[owner][name] != sums[part.file][name]:
                names = f"{manifest.files[owner].name} and {manifest.files[part.file].name}"
                raise damaged(
                    directory, shown(name), expected="equal replicas", found=f"a difference: {names}"
                )


def verify_files(directory: Path | str, manifest: Manifest, numbers: Iterable[int]) -> None:
    """Refuse the checkpoint if a byte of these files is not the byte that was written."""
    files = CheckpointFiles(Path(directory), manifest)
    for number in numbers:
        file = files.open(number)
        verify_file(file, manifest.files[number], checksum_of(file))


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
    file: TensorFile,
    stored: StoredFile,
    seen: Checksum,
    progress: Callable[[int], None] = lambda read: None,
    also: Callable[[memoryview], None] = lambda data: None,
) -> dict[str, int]:
    """Check the CRC-32 of the whole file, then return that of each tensor's bytes.

    ``also`` is given the bytes that are read, in order: all of the file if nothing of it is in ``seen``.
    """
    entries = sorted(file.tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    stretches = [(0, file.data_begin), *((entry.begin, entry.end) for _, entry in entries)]
    with open_regular(file.path, kind=BadCheckpoint) as (fd, _):
        seen.fill_gaps(fd, stretches, progress, also)
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
        raise damaged(path, "CRC-32", expected=f"{stored.crc32:08x}", found=f"{crc:08x}", todo=todo)
