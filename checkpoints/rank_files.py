"""Write each rank's file of a run's checkpoint, and describe its tensors for the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..parallel_state import Box, Holding, Layout, fault, holdings
from ..storage.dtypes import BUFFER, name_of
from ..storage.records import StoredFile
from ..storage.safetensors_writer import TensorWriter
from .manifest import Part, StoredTensor
from .moments import moment_name


def file_name(rank: int, world: int) -> str:
    """Return a name such as ``rank-00003-of-00008.safetensors``."""
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def results_to_come(
    table: Mapping[str, Sequence[Holding]], world: int
) -> list[tuple[StoredFile, str] | None]:
    """Predict the results of ``write_file`` on every rank; sizes, checksums and dtype are not known yet."""
    writers = {one.rank for held in table.values() for one in held}
    return [
        (StoredFile(name=file_name(rank, world), size=0, crc32=0), "F32") if rank in writers else None
        for rank in range(world)
    ]


def who_writes(
    stages: Sequence[Mapping[str, Any]], layout: Layout, frozen: frozenset[str], moments: Sequence[str]
) -> dict[str, list[Holding]]:
    """Return the ranks that write each tensor, and their boxes. Moments lie where their parameters lie."""
    weights = holdings(stages, layout)
    trained = {name: held for name, held in weights.items() if name not in frozen}
    theirs = {moment_name(moment, name): held for moment in moments for name, held in trained.items()}
    return weights | theirs


def stored_tensors(
    table: Mapping[str, list[Holding]],
    results: Sequence[tuple[StoredFile, str] | None],
    fixed: frozenset[str],
) -> dict[str, StoredTensor]:
    """Describe each tensor as the manifest does; files are numbered in the order of the ranks that write one.

    All tensors have one dtype, except the ``fixed`` ones, which have that of buffers.
    """
    writers = [rank for rank, result in enumerate(results) if result is not None]
    numbers = {rank: number for number, rank in enumerate(writers)}
    dtype = next((result[1] for result in results if result is not None and result[1]), BUFFER)
    return {
        name: StoredTensor(
            dtype=BUFFER if name in fixed else dtype,
            shape=tuple(max(stops) for stops in zip(*(one.box.stop for one in held), strict=True)),
            parts=tuple(Part(file=numbers[one.rank], start=one.box.start, stop=one.box.stop) for one in held),
        )
        for name, held in table.items()
    }


def write_file(
    directory: Path, rank: int, world: int, step: int, tensors: Mapping[str, Tensor], fixed: frozenset[str]
) -> tuple[StoredFile, str] | None:
    """Write this rank's file; return it and the dtype of its tensors (``fixed`` ones aside), or ``None``.

    A rank that owns nothing writes no file.
    """
    if not tensors:
        return None
    file = file_name(rank, world)
    spec = {name: (name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = TensorWriter(directory / file, spec, overlap=True)
    try:
        for number, (name, tensor) in enumerate(tensors.items()):
            if number == len(tensors) // 2:
                fault("checkpoint.amid_data", rank=rank, step=step)
            writer.write(name, Box.whole(tuple(tensor.shape)), tensor.cpu().contiguous())
        written = writer.close()
    finally:
        writer.abandon()
    dtypes = {dtype for name, (dtype, _) in spec.items() if name not in fixed}
    assert len(dtypes) < 2, dtypes
    return StoredFile(name=file, size=written.size, crc32=written.crc), "".join(dtypes)
