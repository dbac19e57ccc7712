"""Read every byte once: compare those of a checkpoint with its sums, and look at the numbers of others."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..parallel_state import BadCheckpoint, BadInput, Box, ParallelState
from ..parallel_state.collective_errors import together
from ..storage.catalog import Key, LazyTensor
from ..storage.crc import Checksum, crc32, crc32_combine
from ..storage.dtypes import TORCH, look_at
from ..storage.safe_open import contained, open_regular, read_small
from ..storage.safetensors_reader import TensorFile
from ..storage.strict_json import StoredFile, shown
from ..storage.strides import View
from .find import damaged
from .manifest import Manifest
from .rank_files import checkpoint_files
from .source import Source

_ALTERED = "The file was altered or damaged since it was written"


def verify(
    directory: Path | str,
    manifest: Manifest,
    *,
    files: Sequence[TensorFile] | None = None,
    seen: Mapping[TensorFile, Checksum] | None = None,
    threads: int = 2,
    progress: Callable[[int], None] = lambda read: None,
) -> list[str]:
    """Refuse the checkpoint unless every file is, byte for byte, the one that was written; return the SHA-256
    (hex) of the bytes that were read of each, in the manifest's order.

    Every byte is read once, but those whose sums are in ``seen``. ``files``: a source's, of whoever reads on:
    no header is read again; without them none is kept. ``progress`` is called with the number of bytes read
    since its last call, from any of ``threads``. An error names an older checkpoint (``damaged``).
    """
    directory = Path(directory)
    unopened = checkpoint_files(directory, manifest) if files is None else []
    digests = [hashlib.sha256() for _ in manifest.files]
    listed = {name for name, tensor in manifest.tensors.items() if tensor.parts}

    def sums_of(number: int) -> dict[str, int]:
        file = unopened[number].open_anew() if files is None else files[number]
        summed = checksum_of(file) if seen is None else seen[file]
        sums = verify_file(file, manifest.files[number], summed, progress, digests[number].update)
        return {name: crc for name, crc in sums.items() if name in listed}

    with ThreadPoolExecutor(threads) as pool:
        sums = list(pool.map(sums_of, range(len(manifest.files))))
    verify_companions(directory, manifest)
    for name in listed:
        first: dict[Box, int] = {}
        for part in sorted(manifest.tensors[name].parts, key=lambda part: part.role):
            owner = first.setdefault(part.box, part.file)
            if sums[owner][name] != sums[part.file][name]:
                both = f"a difference: {manifest.files[owner].name} and {manifest.files[part.file].name}"
                raise damaged(directory, shown(name), expected="equal replicas", found=both)
    return [digest.hexdigest() for digest in digests]


def verify_weights(source: Source, *, progress: Callable[[int], None] = lambda read: None) -> dict[Path, str]:
    """Refuse a Hugging Face folder, or a checkpoint of another project, unless its numbers are finite, what
    it holds twice is equal, and its files have the sums that they state; return the SHA-256 (hex) of each.

    Every byte is read once. Tensors that are packed, share bytes or do not lie row by row are then read for
    their numbers when their file has been read, so from memory where there is room for a file. Raises
    ``BadCheckpoint`` if a file changes meanwhile.
    """
    again = [pair.again for pair in source.repeated]
    sums = {tensor.name: hashlib.sha256() for tensor in (*again, *(pair.first for pair in source.repeated))}
    in_file: dict[TensorFile, dict[Key, LazyTensor]] = defaultdict(dict)
    for tensor in (*source.catalog.values(), *again):
        for piece in tensor.near(tensor.box):
            in_file[piece.stored.file.made_of(piece.stored.key)[0][0]][piece.stored] = tensor
    digests: dict[Path, str] = {}

    def look(name: str, numbers: Tensor) -> None:
        if not look_at(numbers).finite:
            raise BadInput(source.path, name, expected="finite numbers", found="a NaN or an infinity")
        if name in sums:
            sums[name].update(numbers.reshape(-1).view(torch.uint8).numpy().data)

    for file in source.stored_files:
        left, plain = in_file[file], dict[int, tuple[View, str]]()
        for key, view in _row_by_row(file):
            if Key(file, key) in left:
                plain[view.begin] = view, left.pop(Key(file, key)).name
        bounds = [
            *((view.begin, view.end) for view, _ in plain.values()),
            *(stated[:2] for stated in file.sums),
        ]
        digest, done, seen = hashlib.sha256(), 0, Checksum({0, file.size}.union(*bounds))
        with file.opened() as fd:
            view, name = View.row_major("U8", (0,), 0), ""
            for at, data in seen.read_gaps(fd, *pairwise(sorted(seen.apart))):
                progress(len(data))
                digest.update(data)
                done += len(data)
                view, name = plain.get(at, (view, name))
                if at < view.end:
                    look(name, torch.frombuffer(data, dtype=TORCH[view.dtype]))
        if done < file.size:
            expected, todo = f"{file.size:,} bytes in the file", "The file shrank while it was read"
            raise BadCheckpoint(file.path, expected=expected, found=f"only {done:,}", todo=todo)
        verify_sums(file, seen)
        digests[file.path] = digest.hexdigest()
        for packed in {tensor.name: tensor for tensor in left.values()}.values():
            for numbers in packed.in_blocks():
                look(packed.name, numbers)
    for pair in source.repeated:
        pair.check(source.path, lambda tensor: sums[tensor.name].hexdigest())
    return digests


def _row_by_row(file: TensorFile) -> Iterator[tuple[str, View]]:
    """Yield tensors of a file, one after the other, that lie there row by row and share no byte."""
    end = 0
    for key, view in sorted(file.tensors.items(), key=lambda entry: (entry[1].begin, entry[1].end)):
        if view.steps is None and end <= view.begin < view.end:
            end = view.end
            yield key, view


def verify_files(manifest: Manifest, files: Sequence[TensorFile], numbers: Iterable[int]) -> None:
    """Refuse the checkpoint if a byte of these of its ``files`` is not the byte that was written."""
    for number in numbers:
        verify_file(files[number], manifest.files[number], checksum_of(files[number]))


def checksum_of(file: TensorFile) -> Checksum:
    """Return an empty checksum with a sum for each that the file states itself, or else for each tensor."""
    return Checksum([begin for begin, *_ in file.sums] or (entry.begin for entry in file.tensors.values()))


def verify_sums(file: TensorFile, seen: Checksum) -> None:
    """Refuse a file of another project if its tensors' bytes have not the CRC-32 that it states.

    Bytes whose sums are in ``seen`` are not read again.
    """
    if not file.sums:
        return
    with open_regular(file.path, kind=BadCheckpoint) as (fd, _):
        for _ in seen.read_gaps(fd, *((begin, end) for begin, end, _ in file.sums)):
            pass
    for begin, end, stated in file.sums:
        if (crc := seen.of(begin, end)) != stated:
            key, todo = f"CRC-32 of bytes {begin:,} to {end:,}", _ALTERED
            raise BadCheckpoint(file.path, key, expected=f"{stated:08x}", found=f"{crc:08x}", todo=todo)


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
        for _, data in seen.read_gaps(fd, *stretches):
            progress(len(data))
            also(data)
    sums, whole = [seen.of(*stretch) for stretch in stretches], 0
    for crc, (begin, end) in zip(sums, stretches, strict=True):
        whole = crc32_combine(whole, crc, end - begin)
    _check(file.path, stored, whole)
    return {name: crc for (name, _), crc in zip(entries, sums[1:], strict=True)}


def verify_companions(directory: Path, manifest: Manifest) -> None:
    """Refuse the checkpoint if a byte of its companions (tokenizer files and the like) has changed."""
    for stored in manifest.companions:
        path = contained(directory, stored.name, kind=BadCheckpoint)
        _check(path, stored, crc32(read_small(path, stored.size, kind=BadCheckpoint)))


def _check(path: Path, stored: StoredFile, crc: int) -> None:
    if crc != stored.crc32:
        raise damaged(path, "CRC-32", expected=f"{stored.crc32:08x}", found=f"{crc:08x}", todo=_ALTERED)


def check_bytes(source: Source, state: ParallelState) -> None:
    """Refuse a checkpoint if one of its bytes has changed; a Hugging Face folder has no checksums to compare.

    Collective: each rank reads a share of the files. The error is the same on every rank and names the newest
    older checkpoint that is good. It is also an error if ranks opened different checkpoints, as a run saves.
    """
    manifest = source.manifest
    if manifest is None:
        return

    # A stand-in without groups works by itself.
    rank, world = (0, 1) if state.file_group is None else (state.rank, state.layout.world)

    def check() -> tuple[str, str]:
        if rank == 0:
            verify_companions(source.path, manifest)
        verify_files(manifest, source.files, range(rank, len(manifest.files), world))
        stated = repr((manifest.step, manifest.files))  # grows with the ranks, so not sent as it is
        return source.path.name, hashlib.sha256(stated.encode()).hexdigest()

    opened = together(check, state)
    if len(set(opened)) > 1:
        names = " and ".join(sorted({name for name, _ in opened}))
        expected = "the same checkpoint on every rank"
        todo = "A run saved meanwhile: name one of its checkpoints, or try again"
        raise BadCheckpoint(source.path.parent, expected=expected, found=names, todo=todo)
