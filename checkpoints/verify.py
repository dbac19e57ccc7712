"""Read every byte once: compare those of a checkpoint with its sums, and look at the numbers of others."""

import hashlib
import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..parallel_state import BadCheckpoint, BadInput, Box, ParallelState, require
from ..parallel_state.collective_errors import together
from ..storage.catalog import Key, Seen
from ..storage.crc import Checksum, crc32, crc32_combine
from ..storage.dtypes import TORCH, look_at
from ..storage.safe_open import contained, open_regular, read_small
from ..storage.safetensors_reader import TensorFile
from ..storage.strict_json import StoredFile, shown
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
    seen: Seen | None = None,
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


@contextmanager
def verifying(source: Source, *, threads: int = 2) -> Iterator[Seen]:
    """Yield the checksums of a source's files, for what the block reads; then read what it left out, and
    refuse the source unless each file is the one that was written, as far as anything states its sums.

    A file that the block refuses is compared at once: damage may look like numbers that are not finite.
    """
    manifest = source.manifest
    seen = {file: checksum_of(file) for file in source.files if manifest is not None or file.sums}
    try:
        yield seen
    except BadInput as error:
        for number, file in enumerate(source.files):
            if file.path == error.where:
                verify_sums(file, checksum_of(file))
                if manifest is not None:
                    verify_files(manifest, source.files, [number])
        raise
    for file, checksum in seen.items():
        verify_sums(file, checksum)
    if manifest is not None:
        verify(source.path, manifest, files=source.files, seen=seen, threads=threads)


def verify_weights(source: Source, *, progress: Callable[[int], None] = lambda read: None) -> dict[Path, str]:
    """Refuse a Hugging Face folder, or a checkpoint of another project, unless its numbers are finite, what
    it holds twice is equal, and its files have the sums that they state; return the SHA-256 (hex) of each.

    Every byte is read once. Of packed weights a tensor at a time is in memory.
    """
    tensors = _Tensors(source)
    digests: dict[Path, str] = {}
    for file in source.stored_files:
        try:
            digests[file.path], seen = tensors.read_whole(file, progress)
        except BadInput:  # damage may look like numbers that are not finite
            verify_sums(file, checksum_of(file))
            raise
        verify_sums(file, seen)
    for pair in source.repeated:
        pair.check(source.path, lambda tensor: tensors.digests[tensor.name].hexdigest())
    return digests


class _Tensors:
    """Look at the tensors of a source while the files are read that they are stored in."""

    def __init__(self, source: Source) -> None:
        self._source = source
        twice = [tensor for pair in source.repeated for tensor in (pair.first, pair.again)]
        self.digests = {tensor.name: hashlib.sha256() for tensor in twice}
        names = {
            piece.stored: tensor.name
            for tensor in (*twice, *source.catalog.values())
            for piece in tensor.near(tensor.box)
        }
        #: For each tensor in a file on the disk: the one that is made of it, and its name for the user.
        self.wanted = {
            Key(*stored): (key, name) for key, name in names.items() for stored in key.file.made_of(key.key)
        }
        self._parts: dict[Key, Tensor] = {}

    def read_whole(self, file: TensorFile, progress: Callable[[int], None]) -> tuple[str, Checksum]:
        """Look at the tensors of a file; return its SHA-256 (hex) and the sums of the stretches whose sums it
        states.

        Memory is bounded, but for packed tensors, and those that lie in the file otherwise than row by row.
        Raises ``BadCheckpoint`` if the file changes meanwhile.
        """
        keys = {stored.key: stored for stored in self.wanted if stored.file is file}
        unpacked = (name for name, stored in keys.items() if self.wanted[stored][0] == stored)
        plain = {name for name in unpacked if file.tensors[name].steps is None}
        regions, digest, region, done = _regions(file, keys), hashlib.sha256(), bytearray(), 0
        end, names = 0, list[str]()
        with file.opened() as fd:
            size = os.fstat(fd).st_size
            bounds = chain(
                ((begin, end) for begin, (end, _) in regions.items()), (sums[:2] for sums in file.sums)
            )
            seen = Checksum({0, size}.union(*bounds))
            for at, data in seen.read_gaps(fd, *pairwise(sorted(seen.apart))):
                progress(len(data))
                digest.update(data)
                done += len(data)
                end, names = regions.get(at, (end, names))
                if at >= end:
                    continue
                if len(names) == 1 and names[0] in plain:
                    dtype = TORCH[file.tensors[names[0]].dtype]
                    self._take(keys[names[0]], torch.frombuffer(data, dtype=dtype))
                    continue
                region += data
                if done == end:
                    for name in names:
                        self._take(keys[name], _tensor(file, name, region, end - len(region)))
                    region = bytearray()
        expected, todo = f"{size:,} bytes in the file", "The file shrank while it was read"
        require(done >= size, file.path, None, expected, f"only {done:,}", todo, kind=BadCheckpoint)
        return digest.hexdigest(), seen

    def _take(self, stored: Key, numbers: Tensor) -> None:
        """Look at numbers of a stored tensor, as they come: pieces of one dim, or all of it."""
        key, name = self.wanted[stored]
        if key != stored:  # it is packed, and comes whole
            self._parts[stored] = numbers
            parts = [Key(*part) for part in key.file.made_of(key.key)]
            if not all(part in self._parts for part in parts):
                return
            numbers = key.file.made_from(key.key, [self._parts.pop(part) for part in parts])
        numbers = numbers.contiguous()
        require(look_at(numbers).finite, self._source.path, name, "finite numbers", "a NaN or an infinity")
        if (digest := self.digests.get(name)) is not None:
            digest.update(numbers.view(torch.uint8).numpy().data)


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
    check_crc(file.path, stored, whole)
    return {name: crc for (name, _), crc in zip(entries, sums[1:], strict=True)}


def verify_companions(directory: Path, manifest: Manifest) -> None:
    """Refuse the checkpoint if a byte of its companions (tokenizer files and the like) has changed."""
    for stored in manifest.companions:
        path = contained(directory, stored.name, kind=BadCheckpoint)
        check_crc(path, stored, crc32(read_small(path, stored.size, kind=BadCheckpoint)))


def check_crc(path: Path, stored: StoredFile, crc: int) -> None:
    """Refuse a file of a checkpoint that has another sum than the manifest says."""
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
    names = " and ".join(sorted({name for name, _ in opened}))
    expected = "the same checkpoint on every rank"
    todo = "A run saved meanwhile: name one of its checkpoints, or try again"
    require(len(set(opened)) <= 1, source.path.parent, None, expected, names, todo, kind=BadCheckpoint)


def _regions(file: TensorFile, keys: Container[str]) -> dict[int, tuple[int, list[str]]]:
    """Return, by the first byte of a region, its end and the tensors in it: several if they share bytes."""
    regions: dict[int, tuple[int, list[str]]] = {}
    begin, end = 0, 0
    extents = ((view.begin, view.end, key) for key, view in file.tensors.items() if key in keys)
    for first, last, key in sorted(extents):
        if first < last:
            begin, end = (first, last) if first >= end else (begin, max(end, last))
            regions[begin] = end, [*regions.get(begin, (0, []))[1], key]
    return regions


def _tensor(file: TensorFile, key: str, region: bytearray, begin: int) -> Tensor:
    """Return a tensor of the bytes of its region, which begins at byte ``begin`` of the file."""
    view = file.tensors[key]
    data = memoryview(region)[view.begin - begin : view.end - begin]
    if (view.begin - begin) % view.itemsize:  # of another dtype than what lies before it
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=TORCH[view.dtype]).as_strided(view.shape, view.strides)
