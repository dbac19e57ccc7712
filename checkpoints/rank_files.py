"""Write each rank's file of a run's checkpoint, and describe its tensors for the manifest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ..parallel_state import Box, Declaration, Layout, buffer_names, fault
from ..storage.dtypes import BUFFER, name_of
from ..storage.file_names import rank_file_name
from ..storage.records import StoredFile
from ..storage.safetensors_writer import TensorWriter
from .grid import Grid
from .optimizer_state import moment_name
from .stored_tensor import StoredTensor


def stored_tensors(
    stages: Sequence[Mapping[str, Declaration]],
    layout: Layout,
    dtype: str,
    *,
    frozen: frozenset[str],
    moments: Mapping[str, Collection[str]],
) -> dict[str, StoredTensor]:
    """Return the manifest's entry of every tensor, computed from declarations and layout alone.

    All tensors have one ``dtype``, except buffers, which have their own. Moments lie where their parameters
    lie; ``frozen`` parameters and buffers have none, nor has what ``moments`` names beside a moment.
    """
    tensors = {
        name: StoredTensor(
            dtype=BUFFER if stated.buffer else dtype,
            shape=stated.shape,
            grid=Grid.of(stated, layout, pipeline),
        )
        for pipeline, stage in enumerate(stages)
        for name, stated in stage.items()
        if not (stated.ends and pipeline)
    }
    still = frozen.union(*map(buffer_names, stages))
    trained = [name for name in tensors if name not in still]
    return tensors | {
        moment_name(moment, name): tensors[name]
        for moment, without in moments.items()
        for name in trained
        if name not in without
    }


def files_to_come(tensors: Mapping[str, StoredTensor], world: int) -> list[StoredFile]:
    """Return the files that the ranks will write; their sizes and checksums are not known yet."""
    kinds = {(tensor.grid, tensor.shape) for tensor in tensors.values()}
    ranks = {rank for grid, shape in kinds if grid is not None for rank, _ in grid.parts(shape)}
    return [StoredFile(name=rank_file_name(rank, world), size=0, crc32=0) for rank in sorted(ranks)]


def write_file(
    directory: Path, rank: int, world: int, step: int, tensors: Mapping[str, Tensor], fixed: frozenset[str]
) -> tuple[StoredFile, str] | None:
    """Write this rank's file; return it and the dtype of its tensors (``fixed`` ones aside), or ``None``.

    A rank that owns nothing writes no file.
    """
    if not tensors:
        return None
    file = rank_file_name(rank, world)
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
