"""Read every byte once: compare those of a checkpoint with its sums, and look at the numbers of others."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from ..parallel_state import BadCheckpoint, BadInput, Box, ParallelState, require
from ..parallel_state.collective_errors import together
from ..storage.catalog import AT_ONCE, Seen
from ..storage.crc import Checksum, crc32, crc32_combine
from ..storage.safe_open import contained, open_regular, read_small
from ..storage.safetensors_reader import TensorFile
from ..storage.strict_json import StoredFile, shown
from ..storage.strides import blocks
from .find import damaged
from .hugging_face.packed import PackedFile
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
) -> None:
    """Refuse the checkpoint unless every file is, byte for byte, the one that was written.

    Every byte is read once, but those whose sums are in ``seen``. ``files``: a source's, of whoever reads on:
    no header is read again; without them none is kept. ``progress`` is called with the number of bytes read
    since its last call, from any of ``threads``. An error names an older checkpoint (``damaged``).
    """
    directory = Path(directory)
    unopened = checkpoint_files(directory, manifest) if files is None else []
    listed = {name for name, tensor in manifest.tensors.items() if tensor.parts}

    def sums_of(number: int) -> dict[str, int]:
        file = unopened[number].open_anew() if files is None else files[number]
        summed = checksum_of(file) if seen is None else seen[file]
        sums = verify_file(file, manifest.files[number], summed, progress)
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


@contextmanager
def verifying(source: Source, *, threads: int = 2) -> Iterator[Seen]:
    """Yield the checksums of a source's files, for what the block reads; then read what it left out, and
    refuse the source unless each file is the one that was written, as far as anything states its sums.

    A file that the block refuses is compared at once: damage may look like numbers that are not finite.
    """
    manifest = source.manifest
    checksums = {file: checksum_of(file) for file in source.files if manifest is not None or file.sums}
    try:
        yield checksums
    except BadInput as error:
        for number, file in enumerate(source.files):
            if file.path == error.where:
                verify_sums(file, checksum_of(file))
                if manifest is not None:
                    verify_files(manifest, source.files, [number])
        raise
    for file, checksum in checksums.items():
        verify_sums(file, checksum)
    if manifest is not None:
        verify(source.path, manifest, files=source.files, seen=checksums, threads=threads)


def verify_weights(source: Source, *, progress: Callable[[int], None] = lambda read: None) -> None:
    """Refuse a Hugging Face folder, or a checkpoint of another project, unless its numbers are finite, what
    it holds twice is equal, and its files have the sums that they state.

    Of packed weights a tensor at a time is in memory.
    """
    twice = [tensor for pair in source.repeated for tensor in (pair.first, pair.again)]
    digests = {tensor.name: hashlib.sha256() for tensor in twice}
    with verifying(source) as seen:
        for name, tensor in {tensor.name: tensor for tensor in (*source.catalog.values(), *twice)}.items():
            packed = any(isinstance(piece.stored.file, PackedFile) for piece in tensor.near(tensor.box))
            for box in [tensor.box] if packed else blocks(tensor.box, AT_ONCE):
                numbers = tensor.read(box, seen=seen)
                progress(numbers.nbytes)
                if name in digests:
                    digests[name].update(numbers.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for pair in source.repeated:
        pair.check(source.path, lambda tensor: digests[tensor.name].hexdigest())


def verify_files(manifest: Manifest, files: Sequence[TensorFile], numbers: Iterable[int]) -> None:
    """Refuse the checkpoint if a byte of these of its ``files`` is not the byte that was written."""
    for number in numbers:
        verify_file(files[number], manifest.files[number], checksum_of(files[number]))


def checksum_of(file: TensorFile) -> Checksum:
    """Return an empty checksum with a sum for each that the file states itself, or else for each tensor."""
    return Checksum([begin for begin, *_ in file.sums] or (entry.begin for entry in file.tensors.values()))


def verify_sums(file: TensorFile, read_sums: Checksum) -> None:
    """Refuse a file unless its bytes have the CRC-32s that it states; only those not read yet are read."""
    if not file.sums:
        return
    with open_regular(file.path, kind=BadCheckpoint) as (fd, _):
        for _ in read_sums.read_gaps(fd, *((begin, end) for begin, end, _ in file.sums)):
            pass
    for begin, end, checksum in file.sums:
        if (crc := read_sums.of(begin, end)) != checksum:
            key, todo = f"CRC-32 of bytes {begin:,} to {end:,}", _ALTERED
            raise BadCheckpoint(file.path, key, expected=f"{checksum:08x}", found=f"{crc:08x}", todo=todo)


def verify_file(
    file: TensorFile,
    stored: StoredFile,
    read_sums: Checksum,
    progress: Callable[[int], None] = lambda read: None,
) -> dict[str, int]:
    """Check the CRC-32 of the whole file, then return that of each tensor's bytes."""
    entries = sorted(file.tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    stretches = [(0, file.data_begin), *((entry.begin, entry.end) for _, entry in entries)]
    with open_regular(file.path, kind=BadCheckpoint) as (fd, _):
        for _, data in read_sums.read_gaps(fd, *stretches):
            progress(len(data))
    sums, whole = [read_sums.of(*stretch) for stretch in stretches], 0
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
        contents = repr((manifest.step, manifest.files))  # grows with the ranks, so not sent as it is
        return source.path.name, hashlib.sha256(contents.encode()).hexdigest()

    opened = together(check, state)
    names = " and ".join(sorted({name for name, _ in opened}))
    expected = "the same checkpoint on every rank"
    todo = "A run saved meanwhile: name one of its checkpoints, or try again"
    require(len(set(opened)) <= 1, source.path.parent, None, expected, names, todo, kind=BadCheckpoint)
