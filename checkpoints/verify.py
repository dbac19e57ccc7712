"""Reading every byte of a checkpoint once: checksums against the manifest, replicas against their owners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

from pydantic import ValidationError

from ..parallel_state import BadCheckpoint, BadInput, Box
from .crc import Checksum, combine
from .manifest import MANIFEST, Manifest, StoredFile
from .plain_files import contained, open_regular
from .source import Source
from .strict_json import shown
from .tensor_file import TensorFile


def verify(
    directory: Path | str,
    manifest: Manifest,
    *,
    threads: int = 2,
    progress: Callable[[int], None] = lambda read: None,
) -> None:
    """Refuse the checkpoint unless every file is, byte for byte, the one that was written.

    ``progress`` is called with the number of bytes read since the last call, from any of ``threads``.
    """
    files = list(manifest.open_files(Path(directory)))
    verify_rest(
        directory, manifest, files, [checksum_of(file) for file in files], threads=threads, progress=progress
    )


def verify_rest(
    directory: Path | str,
    manifest: Manifest,
    files: Sequence[TensorFile],
    seen: Sequence[Checksum],
    *,
    threads: int = 2,
    progress: Callable[[int], None] = lambda read: None,
) -> None:
    """As ``verify``, but bytes whose sums are in ``seen`` (one a file) are not read again."""
    directory = Path(directory)
    with ThreadPoolExecutor(threads) as pool:
        sums = list(pool.map(verify_file, files, manifest.files, seen, repeat(progress)))
        list(pool.map(lambda companion: _verify_companion(directory, companion), manifest.companions))
    for name, tensor in manifest.tensors.items():
        first: dict[Box, int] = {}
        for part in sorted(tensor.parts, key=lambda part: part.role):
            owner = first.setdefault(part.box, part.file)
            if sums[owner][name] != sums[part.file][name]:
                names = f"{manifest.files[owner].name} and {manifest.files[part.file].name}"
                raise BadCheckpoint(
                    directory, shown(name), expected="equal replicas", found=f"a difference: {names}"
                )


def check_model(source: Source) -> None:
    """Refuse a checkpoint whose manifest states a model that there is not, that its layout cannot hold, or
    that has other tensors than the checkpoint.
    """
    manifest, where = source.manifest, source.path / MANIFEST
    assert manifest is not None, source.path
    stated_split = manifest.state.get("split")
    split = [n for n in stated_split if isinstance(n, int)] if isinstance(stated_split, list) else None
    try:
        family, config = source.family, source.model_config
        (stated,) = family.declarations(config)
        if manifest.module is None:  # a module states its own layout and no other
            family.declarations(config, manifest.layout, split=split)
    except BadInput as bad:
        raise BadCheckpoint(where, bad.key, expected=bad.expected, found=bad.found, todo=bad.todo) from None
    except ValidationError as bad:
        first = bad.errors(include_url=False)[0]
        key = ".".join(["adapter.lora", *map(str, first["loc"])])
        raise BadCheckpoint(where, key, expected=first["msg"], found=shown(first["input"])) from None
    wanted = {name: declaration.shape for name, declaration in stated.items()}
    found = {n: whole.shape for n, whole in source.catalog.items() if not n.startswith("optimizer.")}
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            expected, there = (
                "no such tensor" if one is None else list(one) for one in (wanted.get(name), found.get(name))
            )
            raise BadCheckpoint(where, shown(name), expected=expected, found=there)


def verify_files(directory: Path | str, manifest: Manifest, numbers: Iterable[int]) -> None:
    """Refuse the checkpoint unless these of its files are, byte for byte, those that were written."""
    files = list(manifest.open_files(Path(directory)))
    for number in numbers:
        verify_file(files[number], manifest.files[number], checksum_of(files[number]))


def checksum_of(file: TensorFile) -> Checksum:
    """To collect the sums of a file's tensors, each by itself."""
    return Checksum(entry.begin for entry in file.tensors.values())


def verify_file(
    file: TensorFile, stored: StoredFile, seen: Checksum, progress: Callable[[int], None] = lambda read: None
) -> dict[str, int]:
    """The CRC-32 of each tensor's bytes, once that of the whole file is right."""
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


def _verify_companion(directory: Path, stored: StoredFile) -> None:
    path, seen = contained(directory, stored.name, kind=BadCheckpoint), Checksum()
    with open_regular(path, kind=BadCheckpoint) as (fd, _):
        seen.fill_gaps(fd, [(0, stored.size)])
    _check(path, stored, seen.of([(0, stored.size)])[0])


def _check(path: Path, stored: StoredFile, crc: int) -> None:
    if crc != stored.crc32:
        todo = "The file was altered or damaged since it was written"
        raise BadCheckpoint(path, "CRC-32", expected=f"{stored.crc32:08x}", found=f"{crc:08x}", todo=todo)
